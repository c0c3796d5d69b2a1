# What every batch script shares: checks, attempts, preflight, the run itself, stop and requeue. Sourced by slurm/*.sbatch on the first
# node of the job, from the repository's root; slurm/README.md explains the variables. What runs on each node is node.sh.
# shellcheck shell=bash disable=SC1090,SC1091,SC2034,SC2086,SC2154
set -euo pipefail

ROOT=$PWD
JOB=${SLURM_JOB_ID:-0}
ARGS=() EVAL_FILES=() INPUT_FILES=() TRAIN_FILES=() VLLM_ARGS=()
JOB_ARGUMENTS=()
stopping=0 terminated=0 servers_lost=0 code=0
train_pid="" step_pid="" server_pids=()

say() { printf '[slurm %(%F %T)T] %s\n' -1 "$*"; }
wrong() { # wrong use: nothing has been started
    printf '[slurm] error: %s\n' "$*" >&2
    exit 2
}

[ -e "$ROOT/slurm/node.sh" ] || wrong "$ROOT is not the repository's root: cd there, then sbatch slurm/..."
SITE=${SITE:-env/site.sh} # another file for another cluster
[ -r "$SITE" ] || wrong "$SITE is missing: cp env/site.example.sh env/site.sh, and edit it"
source "$SITE"
source "$ROOT/slurm/servers.sh"

# ---------------------------------------------------------------------------------------------------------------------------------
# Ports and addresses

# port OFFSET: of this job. Every job has a block of 20 ports of its own (job ids 500 apart share one, but not a node), outside the range from
# which the kernel hands out ports to outgoing connections: one of those would take it away by chance.
port() {
    local low high base=20000
    read -r low high <"${PORT_RANGE_FILE:-/proc/sys/net/ipv4/ip_local_port_range}"
    if [ "$low" -lt 30000 ] && [ "$high" -ge 20000 ]; then
        base=10000
        if [ "$low" -lt 20000 ]; then
            [ "$high" -lt 55000 ] || wrong "this machine gives ports $low-$high to outgoing connections: no range is left; set MASTER_PORT"
            base=55000
        fi
    fi
    echo $((base + JOB % 500 * 20 + $1))
}

# address_of NODE: under which the others reach it. Slurm's own record, because a name of Slurm need not be one of the network; a node that
# resolves its own name to a loopback address (Debian's 127.0.1.1) would tell the others to talk to themselves.
address_of() {
    local address
    address=$(scontrol show node "$1" | grep -oE 'NodeAddr=[^ ]+' | head -n 1 | cut -d= -f2) || true
    address=${address:-$1}
    case $(getent ahostsv4 "$address" | awk 'NR == 1 { print $1 }') in
    127.0.1.*) address=$(hostname -I | cut -d' ' -f1) ;;
    esac
    echo "$address"
}

# ---------------------------------------------------------------------------------------------------------------------------------
# Before anything runs

defaults() {
    [ -n "${SLURM_JOB_NODELIST:-}" ] || wrong "not inside a Slurm job: sbatch $0"
    local names
    names=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || wrong "scontrol cannot expand the node list $SLURM_JOB_NODELIST"
    mapfile -t NODES <<<"$names"
    GPUS_PER_NODE=${GPUS_PER_NODE:-8}
    PROCS_PER_NODE=${PROCS_PER_NODE:-$((GPUS_PER_NODE > 0 ? GPUS_PER_NODE : 1))} # ranks of a node: one for each GPU
    ENV_DIR=${ENV_DIR:-$ROOT/.venv}
    MAX_IDLE=${MAX_IDLE:-3}    # attempts in a row that end without a new checkpoint before the job is left alone
    RESTARTS=${RESTARTS:-0}    # failed attempts in a row, without a new checkpoint between them, that are started again
    PREFLIGHT=${PREFLIGHT:-1}  # 0: start without checking the nodes
    PREFLIGHT_SECONDS=${PREFLIGHT_SECONDS:-600}
    SERVER_NODES=${SERVER_NODES:-0}
    [ -z "${VLLM_SERVERS:-}" ] || SERVER_NODES=0 # servers of another job are used
    TRAIN_NODES=$((${#NODES[@]} - SERVER_NODES))
    RUN=$(realpath -m "${RUN:?set RUN in the EDIT block}")
    # Where the script says nothing about a signal, Slurm sends none. The run compares this with what a save takes.
    local signal
    signal=${SBATCH_SIGNAL:-$(grep -oE '^#SBATCH +--signal=[^ ]+' "$0" | tail -n 1 || true)}
    STOP_LEAD_SECONDS=$(grep -oE 'USR1@[0-9]+' <<<"$signal" | cut -d@ -f2 || true)
    given_port=${MASTER_PORT:-}
    # The nodes get what is exported; env/site.sh may have set these without it.
    export RUN GPUS_PER_NODE PROCS_PER_NODE ENV_DIR STOP_LEAD_SECONDS ENV_ARCHIVE=${ENV_ARCHIVE:-} CACHE_STORE=${CACHE_STORE:-}
    [ -z "${LOCAL_DIR:-}" ] || export LOCAL_DIR
    # One cause of a slow job that nobody sees: since Slurm 22.05 srun ignores --cpus-per-task of sbatch, and all ranks share one core.
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
}

check_inputs() {
    local file
    [ -f "$CONFIG" ] || wrong "CONFIG=$CONFIG: no such file"
    [ -f "$MODEL/config.json" ] || wrong "MODEL=$MODEL: no folder with a config.json. Edit MODEL in the script that you submitted."
    [ ${#TRAIN_FILES[@]} -gt 0 ] || wrong "TRAIN_FILES is empty. Edit it in the script that you submitted."
    for file in "${TRAIN_FILES[@]}" ${EVAL_FILES[@]+"${EVAL_FILES[@]}"} ${INPUT_FILES[@]+"${INPUT_FILES[@]}"}; do
        [ -f "$file" ] || wrong "$file: no such file. Edit the EDIT block of the script that you submitted."
    done
    check_environment train
    [ "$TRAIN_NODES" -ge "${MIN_TRAIN_NODES:-1}" ] ||
        wrong "${#NODES[@]} nodes, $SERVER_NODES of them for vLLM, leave $TRAIN_NODES for training; this model needs ${MIN_TRAIN_NODES:-1}: sbatch --nodes=..."
    check_run_folder
    local free
    free=$(($(df -Pk "$RUN" | awk 'NR == 2 { print $4 }') / 1000000))
    [ "$free" -ge "${DISK_GB:-1}" ] ||
        wrong "$RUN has $free GB free, and checkpoints and the final model of this run need about ${DISK_GB:-1} GB (DISK_GB in the script says how)"
    [ -n "$STOP_LEAD_SECONDS" ] || say "warning: no #SBATCH --signal=B:USR1@SECONDS: at the time limit everything since the last checkpoint is lost"
}

check_run_folder() {
    if ! mkdir -p "$RUN" 2>/dev/null || [ ! -w "$RUN" ]; then
        wrong "RUN=$RUN cannot be written. Edit RUN_DIR in $SITE or RUN in the script."
    fi
}

# check_environment NAME: train or rollout
check_environment() {
    if [ -n "${ENV_ARCHIVE:-}" ]; then
        [ -f "$ENV_ARCHIVE" ] || wrong "ENV_ARCHIVE=$ENV_ARCHIVE: no such file (slurm/README.md tells how to pack it)"
    else
        [ -x "$ENV_DIR/$1/bin/python" ] || wrong "$ENV_DIR/$1 has no Python. Run: ENV_DIR=$ENV_DIR bash env/setup.sh $1"
    fi
}

newest_checkpoint() {
    local folder newest=none
    for folder in "$RUN"/checkpoint-*; do
        # one of step 0 is no progress: a run that was stopped before its first step
        [ ! -e "$folder/COMPLETE" ] || [ "$((10#${folder##*-}))" -eq 0 ] || newest=${folder##*/}
    done
    echo "$newest"
}

# begin_attempt [FILE...]: RUN/attempts/NN with all that is needed to know later what was run; FILEs are copied into it.
begin_attempt() {
    local number=1
    mkdir -p "$RUN/attempts"
    until mkdir "$RUN/attempts/$(printf %02d $number)" 2>/dev/null; do
        number=$((number + 1))
        [ $number -lt 1000 ] || wrong "$RUN/attempts cannot be written, or is full"
    done
    ATTEMPT=$RUN/attempts/$(printf %02d $number)
    export ATTEMPT
    checkpoint_before=$(newest_checkpoint)
    cp "$0" "$ATTEMPT/job.sbatch"
    [ $# -eq 0 ] || cp "$@" "$ATTEMPT/"
    printf '%s\n' "${NODES[@]}" >"$ATTEMPT/nodes.txt"
    scontrol show job "$JOB" >"$ATTEMPT/job.txt" 2>&1 || true # tells only what Slurm itself knows: no reason to fail
    {
        git rev-parse HEAD && git status --short && git diff HEAD
    } >"$ATTEMPT/commit.txt" 2>&1 || echo "no git here" >>"$ATTEMPT/commit.txt"
    mkdir "$ATTEMPT/preflight"
    # Where the run leaves the stacks of stuck ranks and NCCL's traces (common/dist.py); there once there are some.
    EVIDENCE=$JOB.${SLURM_RESTART_COUNT:-0}
    ln -s "../../stacks/$EVIDENCE" "$ATTEMPT/stacks"
    say "job $JOB, restart ${SLURM_RESTART_COUNT:-0}, attempt ${ATTEMPT##*/} of $RUN on ${#NODES[@]} nodes, newest checkpoint: $checkpoint_before"
    say "logs of the nodes: $ATTEMPT"
}

# ---------------------------------------------------------------------------------------------------------------------------------
# Signals. A foreground command would delay them until it ends: every step runs in the background and is waited for in small pieces.

on_usr1() {
    say "USR1: the time limit is near. Saving and stopping."
    stopping=1
    touch "$RUN/STOP" || say "error: $RUN/STOP cannot be made" # a full disk must not end this script
}

on_term() {
    say "TERM: cancelled, or at the time limit"
    terminated=1
    [ -z "$train_pid" ] || kill "$train_pid" 2>/dev/null || true
}

# await PID: its exit status in `code`.
await() {
    while kill -0 "$1" 2>/dev/null; do
        # A run that is just starting removes the STOP of the attempt before it: said again until it has ended.
        [ $stopping = 0 ] || [ -e "$RUN/STOP" ] || touch "$RUN/STOP" || true
        check_servers
        sleep "${POLL_SECONDS:-2}" &
        wait $! || true # a signal ends the wait
    done
    code=0
    wait "$1" || code=$?
}

# step FIRST COUNT OPTION... COMMAND...: one task on each of COUNT nodes from number FIRST, in the background; its process in `step_pid`.
step() {
    local first=$1 count=$2 list
    shift 2
    list=$(IFS=, && echo "${NODES[*]:first:count}")
    # --export=ALL: also in a job that was submitted with --export=NONE. --cpu-bind=none: one task a node starts many processes, which must not all be pinned to its first core
    srun --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --nodelist="$list" --export=ALL --cpu-bind=none "$@" &
    step_pid=$!
}

# ---------------------------------------------------------------------------------------------------------------------------------
# Preflight: every node checks itself and its connections, and leaves a file whose last line is PASS; a node without is bad.

preflight() {
    [ "$PREFLIGHT" != 0 ] || return 0
    local node bad=() log
    say "preflight on ${#NODES[@]} nodes"
    # newline-separated: paths may hold blanks
    CHECK_PATHS=$(printf '%s\n' "$MODEL/config.json" ${TRAIN_FILES[@]+"${TRAIN_FILES[@]}"} ${EVAL_FILES[@]+"${EVAL_FILES[@]}"} \
        ${INPUT_FILES[@]+"${INPUT_FILES[@]}"})
    MEET_ADDR=$(address_of "${NODES[0]}") MEET_PORT=$(port 1)
    CHECK_PORTS=${given_port:-$(port 0)}
    export CHECK_PATHS CHECK_PORTS MEET_ADDR MEET_PORT NUM_NODES=${#NODES[@]} SERVER_NODES
    step 0 ${#NODES[@]} --kill-on-bad-exit=0 --wait=0 --output="$ATTEMPT/preflight/srun.log" --time=$((PREFLIGHT_SECONDS / 60 + 1)) slurm/preflight.sh
    train_pid=$step_pid
    await "$step_pid"
    train_pid=""
    [ $terminated = 0 ] || end_attempt 143
    local excluded listed=0
    excluded=",${EXCLUDE:-},$(paste -sd, "$RUN/bad_nodes" 2>/dev/null || true),"
    for node in "${NODES[@]}"; do
        log=$ATTEMPT/preflight/$node.txt
        if [[ $excluded == *",$node,"* ]]; then
            say "BAD $node: it is in EXCLUDE or $RUN/bad_nodes (remove it there when it has been repaired)"
            listed=$((listed + 1))
        elif [ "$(tail -n 1 "$log" 2>/dev/null)" = PASS ]; then
            continue
        else
            say "BAD $node: $(grep -h '^FAIL' "$log" 2>/dev/null || echo "no report (at most $PREFLIGHT_SECONDS s); see $ATTEMPT/preflight/")"
        fi
        bad+=("$node")
    done
    if [ ${#bad[@]} -eq 0 ]; then
        say "preflight passed: $(grep -h 'all-reduce' "$ATTEMPT/preflight/${NODES[0]}.txt" || true)"
        cp "$ATTEMPT/preflight/${NODES[0]}.packages" "$ATTEMPT/packages.txt"
        return 0
    fi
    local failed=$((${#bad[@]} - listed))
    if [ $failed -gt 0 ] && [ $((2 * failed)) -gt $((${#NODES[@]} - listed)) ]; then
        say "$failed of ${#NODES[@]} nodes: rather the environment, a path or the network than the nodes. Nothing was started."
        end_attempt 1 stay
    fi
    printf '%s\n' "${bad[@]}" >>"$RUN/bad_nodes"
    sort -u -o "$RUN/bad_nodes" "$RUN/bad_nodes"
    end_attempt 1 exclude
}

# ---------------------------------------------------------------------------------------------------------------------------------
# The run

# run_job [OPTION...]: the whole of a batch script after its EDIT block. Options, of sbatch's own command line, go to the trainer.
run_job() {
    JOB_ARGUMENTS=("$@")
    defaults
    check_inputs
    [ "$SERVER_NODES" = 0 ] || check_server_inputs
    COMMAND=("$METHOD.train" --config "$CONFIG" --model_name_or_path "$MODEL" --train_files "${TRAIN_FILES[@]}")
    [ ${#EVAL_FILES[@]} -eq 0 ] || COMMAND+=(--eval_files "${EVAL_FILES[@]}")
    COMMAND+=(--output_dir "$RUN")
    begin_attempt "$CONFIG"
    trap on_usr1 USR1
    trap on_term TERM
    preflight
    if [ "$SERVER_NODES" != 0 ]; then
        start_servers "$TRAIN_NODES"
        await_servers || end_attempt 1
    fi
    local servers
    read -r -a servers <<<"${VLLM_SERVERS:-}"
    [ ${#servers[@]} -eq 0 ] || COMMAND+=(--rollout_backend vllm --vllm_servers "${servers[@]}")
    COMMAND+=(${ARGS[@]+"${ARGS[@]}"} "$@")
    printf '%q ' "${COMMAND[@]}" >"$ATTEMPT/command.txt"
    [ $terminated = 0 ] || end_attempt 143
    [ $stopping = 0 ] || end_attempt 0 # the limit came while the servers started
    export NUM_NODES=$TRAIN_NODES MASTER_ADDR MASTER_PORT
    MASTER_ADDR=$(address_of "${NODES[0]}")
    MASTER_PORT=${given_port:-$(port 0)}
    say "$METHOD on $NUM_NODES nodes of $PROCS_PER_NODE ranks, rendezvous at $MASTER_ADDR:$MASTER_PORT"
    # One dead task ends all of them at once; tasks that outlive the first one's good end by a minute hang.
    step 0 "$TRAIN_NODES" --kill-on-bad-exit=1 --wait=60 slurm/node.sh "${COMMAND[@]}"
    train_pid=$step_pid
    await "$train_pid"
    train_pid=""
    end_attempt "$code"
}

# first_failure: which node ended first by itself with an error, and the end of its log. Those that Slurm ended after it are no causes.
first_failure() {
    local file status when host ended earliest="" first="" number
    for file in "$ATTEMPT"/exit-*; do
        [ -e "$file" ] || continue
        read -r status when host ended <"$file"
        if [ "$status" != 0 ] && [ "$ended" = self ] && { [ -z "$earliest" ] || [ "$when" -lt "$earliest" ]; }; then
            earliest=$when first="${file##*exit-} $host $status"
        fi
    done
    [ -e "$ATTEMPT/python" ] || return 0 # training had not been started
    if [ -z "$first" ]; then
        say "no node reported why it ended (killed, or lost): see the logs in $ATTEMPT, and sacct -j $JOB"
        return 0
    fi
    read -r number host status <<<"$first"
    say "first to fail: node $number, $host, exit code $status. The end of its log:"
    tail -n 30 "$ATTEMPT/node-$number-$host.log" | sed "s/^/    $host: /"
}

# what_hung: reads the stacks and traces of this attempt, if ranks left any. Not of use here: on a node without the environment it says so.
what_hung() {
    [ -d "$RUN/stacks/$EVIDENCE" ] || return 0
    local python
    python=$(cat "$ATTEMPT/python" 2>/dev/null || true)
    "${python:-$ENV_DIR/train/bin/python}" -m common.hang "$RUN" --attempt "$EVIDENCE" || true # its verdict is for the reader; the exit code stays the run's
}

# end_attempt CODE [exclude|stay]: ends the job with CODE; starts it again where that is right. exclude: on other nodes; stay: not at all.
end_attempt() {
    local code=$1 what=${2:-} idle after
    stop_servers
    [ $servers_lost = 0 ] || [ "$code" != 0 ] || code=1
    # cancelled before the run itself was started
    if [ $terminated = 1 ] && [ "$code" = 0 ] && [ ! -e "$RUN/DONE" ] && [ $stopping = 0 ]; then code=143; fi
    after=$(newest_checkpoint)
    printf '%s\n' "$code" >"$ATTEMPT/exit_code"
    say "attempt ${ATTEMPT##*/} ended with exit code $code, newest checkpoint: $after"
    idle=$(cat "$RUN/attempts/idle" 2>/dev/null || echo 0)
    if [ "$after" = "$checkpoint_before" ]; then idle=$((idle + 1)); else idle=0; fi
    echo "$idle" >"$RUN/attempts/idle"
    trap '' USR1 # a second signal must not interrupt what follows

    if [ "$code" = 0 ] && [ -e "$RUN/DONE" ]; then
        rm -f "$RUN/attempts/idle"
        say "done: $RUN"
    elif [ "$what" = stay ]; then
        :
    elif [ "$what" = exclude ]; then
        again_unless_idle "$idle" exclude
    elif [ $terminated = 1 ] && ! { [ $stopping = 1 ] && at_limit; }; then
        say "cancelled: not started again"
    elif [ $stopping = 1 ]; then
        [ "$code" = 0 ] || say "warning: the time limit came before the run had saved; #SBATCH --signal=B:USR1@${STOP_LEAD_SECONDS:-0} is too short"
        again_unless_idle "$idle"
    elif [ "$code" = 0 ]; then
        say "stopped on request ($RUN/STOP). sbatch the same script to go on."
    else
        first_failure
        what_hung
        if [ "$idle" -le "$RESTARTS" ] && [ "$RESTARTS" -gt 0 ]; then
            again
        else
            say "not started again (RESTARTS=$RESTARTS, $idle attempts without a new checkpoint). sbatch the same script to resume."
        fi
    fi
    exit "$code"
}

# at_limit: whether the job's time is over, rather than somebody cancelled it.
at_limit() {
    local end
    end=${SLURM_JOB_END_TIME:-$(date -d "$(squeue -h -j "$JOB" -o %e)" +%s)} || return 1
    [ "$(date +%s)" -ge $((end - 5)) ]
}

# again_unless_idle IDLE [exclude]: a job that never gets as far as a checkpoint must not be started for ever.
again_unless_idle() {
    if [ "$1" -ge "$MAX_IDLE" ]; then
        say "$1 attempts in a row without a new checkpoint (MAX_IDLE=$MAX_IDLE): not started again. A longer --time, or a lower save_steps?"
        [ "$code" != 0 ] || code=1 # nothing is finished: what waits for a good end of this job must not start
        echo "$code" >"$ATTEMPT/exit_code"
    else
        again "${2:-}"
    fi
}

# again [exclude]: requeues this job, or submits its copy to follow it where that is not allowed, or other nodes are wanted.
again() {
    if [ "${1:-}" != exclude ] && scontrol requeue "$JOB"; then
        say "requeued"
        return
    fi
    local exclude options=(--dependency="afterany:$JOB" --nodes="${#NODES[@]}" --job-name="${SLURM_JOB_NAME:-plain-fsdp}")
    exclude=$(cat <(tr ',' '\n' <<<"${EXCLUDE:-}") "$RUN/bad_nodes" 2>/dev/null | sort -u | grep . | paste -sd,) || true
    [ -z "$exclude" ] || options+=(--exclude="$exclude")
    # what was said on the command line of the first sbatch holds for the next one too
    [ -z "${SLURM_JOB_PARTITION:-}" ] || options+=(--partition="$SLURM_JOB_PARTITION")
    [ -z "${SLURM_JOB_ACCOUNT:-}" ] || options+=(--account="$SLURM_JOB_ACCOUNT")
    local limit
    limit=$(squeue -h -j "$JOB" -o %l 2>/dev/null) && [ -n "$limit" ] && options+=(--time="$limit")
    say "submitting $ATTEMPT/job.sbatch to follow this job${exclude:+, without $exclude}"
    (cd "$ROOT" && { [ -n "$given_port" ] || unset MASTER_PORT; } && sbatch "${options[@]}" "$ATTEMPT/job.sbatch" ${JOB_ARGUMENTS[@]+"${JOB_ARGUMENTS[@]}"}) || say "error: sbatch failed; submit the script again by hand${exclude:+: sbatch --exclude=$exclude}"
}
