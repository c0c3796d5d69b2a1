# vLLM servers inside a job: started as steps beside the trainer, watched, started again, ended. Sourced by lib.sh.
# shellcheck shell=bash disable=SC2034,SC2086,SC2154
set -euo pipefail

check_server_inputs() {
    NODES_PER_SERVER=${NODES_PER_SERVER:-1}
    SERVER_RESTARTS=${SERVER_RESTARTS:-3} # of each server, over the whole job
    SERVER_MINUTES=${SERVER_MINUTES:-60}  # from its start until it answers
    [ $((SERVER_NODES % NODES_PER_SERVER)) = 0 ] || wrong "SERVER_NODES=$SERVER_NODES is no multiple of NODES_PER_SERVER=$NODES_PER_SERVER"
    # all GPUs of a server's nodes; a CPU counts as one
    TENSOR_PARALLEL=${TENSOR_PARALLEL:-$((NODES_PER_SERVER * (GPUS_PER_NODE > 0 ? GPUS_PER_NODE : 1)))}
    check_environment rollout
}

# start_servers FIRST: on the SERVER_NODES nodes from number FIRST. Sets VLLM_SERVERS, the addresses of all of them.
start_servers() {
    local index first address port
    VLLM_SERVERS="" server_pids=()
    export -n VLLM_SERVERS # a job that follows this one has servers of its own
    export MODEL NODES_PER_SERVER TENSOR_PARALLEL
    for ((index = 0; index < SERVER_NODES / NODES_PER_SERVER; index++)); do
        first=$(($1 + index * NODES_PER_SERVER))
        address=$(address_of "${NODES[first]}") port=$(port $((2 + 2 * index)))
        VLLM_SERVERS+="${VLLM_SERVERS:+ }http://$address:$port"
        keep_server "$index" "$first" "$address" "$port" "$(port $((3 + 2 * index)))" &
        server_pids+=($!)
    done
    say "$index vLLM servers on nodes ${NODES[*]:$1:SERVER_NODES}: $VLLM_SERVERS"
}

# keep_server INDEX FIRST ADDRESS PORT INNER_PORT: runs one server until stop_servers; started again when it ends by itself, all of its nodes
# together, because a half of one is of no use.
keep_server() {
    local index=$1 first=$2 restarts=0 status node addresses=()
    for ((node = first; node < first + NODES_PER_SERVER; node++)); do addresses+=("$(address_of "${NODES[node]}")"); done
    export SERVER_INDEX=$index SERVER_ADDRESSES="${addresses[*]}" SERVER_PORT=$4 SERVER_INNER_PORT=$5
    trap 'kill "$step_pid" 2>/dev/null || true' TERM
    trap '' USR1
    while true; do
        step "$first" "$NODES_PER_SERVER" --kill-on-bad-exit=1 --wait=10 slurm/server.sh ${VLLM_ARGS[@]+"${VLLM_ARGS[@]}"}
        status=0
        wait "$step_pid" || status=$?
        while kill -0 "$step_pid" 2>/dev/null; do wait "$step_pid" || status=$?; done # a signal had ended the wait
        [ ! -e "$ATTEMPT/servers.end" ] || return 0
        if [ "$restarts" -ge "$SERVER_RESTARTS" ]; then
            say "server $index ended with exit code $status for the last time; its log: $ATTEMPT/server-$index-*.log"
            touch "$ATTEMPT/server-$index.lost"
            return 0
        fi
        restarts=$((restarts + 1))
        say "server $index ended with exit code $status; restart $restarts of $SERVER_RESTARTS; its log: $ATTEMPT/server-$index-*.log"
        sleep "${POLL_SECONDS:-2}"
        [ ! -e "$ATTEMPT/servers.end" ] || return 0
    done
}

# healthy URL: whether the server answers. No proxy: cluster environments often name one for the outside.
healthy() { curl --silent --fail --noproxy '*' --max-time 5 --output /dev/null "$1/health"; }

# await_servers: until all answer. Fails when one is lost or the time is over.
await_servers() {
    local deadline=$((SECONDS + SERVER_MINUTES * 60)) url index=0 lost
    for url in $VLLM_SERVERS; do
        until healthy "$url"; do
            [ "$stopping$terminated" = 00 ] || return 0
            lost=$ATTEMPT/server-$index.lost
            if [ -e "$lost" ] || [ $SECONDS -ge $deadline ]; then
                say "server $index ($url) $([ -e "$lost" ] && echo "ended" || echo "does not answer after $SERVER_MINUTES minutes"). The end of its log:"
                tail -n 30 "$ATTEMPT/server-$index-"*.log | sed "s/^/    /" || true
                return 1
            fi
            sleep "${POLL_SECONDS:-2}" &
            wait $! || true
        done
        say "server $index answers: $url"
        index=$((index + 1))
    done
}

# check_servers: when the last one is lost, the trainer is asked to save: it could only wait.
check_servers() {
    local lost
    if [ ${#server_pids[@]} -eq 0 ] || [ $servers_lost = 1 ]; then return 0; fi
    lost=$(find "$ATTEMPT" -maxdepth 1 -name 'server-*.lost' | wc -l)
    if [ "$lost" -ge ${#server_pids[@]} ]; then
        say "no server is left: saving and stopping"
        servers_lost=1
        touch "$RUN/STOP"
    fi
}

stop_servers() {
    [ ${#server_pids[@]} -gt 0 ] || return 0
    touch "$ATTEMPT/servers.end"
    local pid deadline=$((SECONDS + (terminated ? 5 : 45))) # after TERM Slurm itself leaves half a minute
    for pid in "${server_pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    for pid in "${server_pids[@]}"; do
        while kill -0 "$pid" 2>/dev/null && [ $SECONDS -lt $deadline ]; do sleep 1; done
        # what has not ended by now is ended with the job
        kill -0 "$pid" 2>/dev/null || wait "$pid" || true
    done
    server_pids=()
}

# run_servers: the whole of servers.sbatch after its EDIT block: servers without a trainer, for other jobs.
run_servers() {
    defaults
    SERVER_NODES=${#NODES[@]}
    [ -f "$MODEL/config.json" ] || wrong "MODEL=$MODEL: no folder with a config.json. Edit MODEL in the script that you submitted."
    check_server_inputs
    check_run_folder
    begin_attempt
    trap on_usr1 USR1
    trap on_term TERM
    preflight
    rm -f "$RUN/urls" "$RUN/attempts/idle"
    start_servers 0
    if await_servers; then
        echo "$VLLM_SERVERS" >"$RUN/urls"
        say "trainer jobs: VLLM_SERVERS=\"\$(cat $RUN/urls)\" sbatch ..."
    else
        code=1
    fi
    # The addresses change with the job: it is not requeued, and ends when its time is over, by scancel, or when no server is left.
    while [ "$code$stopping$terminated$servers_lost" = 0000 ]; do
        check_servers
        sleep "${POLL_SECONDS:-2}" &
        wait $! || true
    done
    rm -f "$RUN/urls" "$RUN/STOP"
    [ $servers_lost = 0 ] || code=1
    stop_servers
    printf '%s\n' "$code" >"$ATTEMPT/exit_code"
    exit "$code"
}
