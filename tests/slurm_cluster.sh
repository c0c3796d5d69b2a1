#!/usr/bin/env bash
#
# A real Slurm on this one host, for tests: munged, slurmctld and three slurmd, each a "node" with 8 GPUs that are empty files.
#
#   bash tests/slurm_cluster.sh up        starts it; export SLURM_CONF as it prints, then sbatch, squeue, scancel work as on a cluster
#   bash tests/slurm_cluster.sh status    nodes and jobs; exit status 1 when it is not up
#   bash tests/slurm_cluster.sh down      cancels its jobs and removes every trace of it
#
# Needs root (a container is enough: no systemd, no cgroups) and Debian's packages (tried with Slurm 22.05 of Debian 12):
#   apt-get install slurm-wlm munge
#
# Partition "test" (the default) has the three nodes. Partition "plan" has 16 of 8 H100s that are never started: for sbatch --test-only.
# SLURM_TEST_DIR says where its files go (/tmp/plain-fsdp-slurm). Nothing of a Slurm or munge that this host may run otherwise is touched.

set -euo pipefail

nodes=(node1 node2 node3)
dir=${SLURM_TEST_DIR:-/tmp/plain-fsdp-slurm}
mark="# a test's Slurm: $dir"
first_port=21800
export SLURM_CONF=$dir/slurm.conf

fail() {
    echo "slurm_cluster.sh: $1" >&2
    exit "${2:-1}"
}

check_needs() {
    local program
    for program in munged slurmctld slurmd sbatch; do
        command -v "$program" >/dev/null || fail "$program is not installed. Debian, Ubuntu: apt-get install slurm-wlm munge"
    done
    [ "$(id -u)" = 0 ] || fail "root is needed: slurmd starts jobs of other users"
}

# Slurm looks up the names of its nodes, and so does MASTER_ADDR. In containers /etc/hosts is a mount: it can be written, not replaced.
add_hosts() {
    local node number=0
    for node in "${nodes[@]}"; do
        number=$((number + 1))
        echo "127.0.0.1$number $node $mark" >>/etc/hosts
    done
}

remove_hosts() {
    local others
    others=$(grep -vF "$mark" /etc/hosts || true)
    printf '%s\n' "$others" >/etc/hosts
}

write_config() {
    local node number=0
    mkdir -p "$dir"/{munge,state,spool,log,gpus}
    chmod 755 "$dir" "$dir/munge"
    head -c 128 /dev/urandom >"$dir/munge/key"
    chmod 600 "$dir/munge/key"
    touch "$dir"/gpus/gpu{0..7}
    cat >"$SLURM_CONF" <<CONF
ClusterName=plainfsdp
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$first_port
SlurmUser=root
# A requeued job may start again once its old credentials have expired, by default after two minutes.
AuthInfo=socket=$dir/munge/socket,cred_expire=10
StateSaveLocation=$dir/state
SlurmctldPidFile=$dir/slurmctld.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdSpoolDir=$dir/spool/%n
SlurmdPidFile=$dir/%n.pid
SlurmdLogFile=$dir/log/%n.log
# Slurm believes the numbers below: this host has neither the processors nor the memory.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=5,bf_interval=5
KillWait=10
ReturnToService=2
JobRequeue=1
GresTypes=gpu
CONF
    for node in "${nodes[@]}"; do
        number=$((number + 1))
        echo "NodeName=$node NodeHostname=$(hostname -s) NodeAddr=127.0.0.1$number Port=$((first_port + number))" \
            "CPUs=128 RealMemory=2000000 Gres=gpu:8 State=UNKNOWN" >>"$SLURM_CONF"
    done
    cat >>"$SLURM_CONF" <<CONF
PartitionName=test Nodes=$(IFS=,; echo "${nodes[*]}") Default=YES MaxTime=INFINITE State=UP
NodeName=plan[1-16] CPUs=128 RealMemory=2000000 Gres=gpu:8 State=CLOUD
PartitionName=plan Nodes=plan[1-16] MaxTime=INFINITE State=UP
# Nodes of state CLOUD count as available without a slurmd; these programs would start and stop them.
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=INFINITE
CONF
    echo "NodeName=$(IFS=,; echo "${nodes[*]}"),plan[1-16] Name=gpu File=$dir/gpus/gpu[0-7]" >"$dir/gres.conf"
}

is_up() {
    [ -e "$SLURM_CONF" ] && scontrol ping 2>/dev/null | grep -q "is UP"
}

# wait_for SECONDS WHAT COMMAND...
wait_for() {
    local seconds=$1 what=$2 tries
    shift 2
    for ((tries = 0; tries < seconds * 4; tries++)); do
        if "$@"; then
            return 0
        fi
        sleep 0.25
    done
    tail -n 5 "$dir"/log/*.log >&2 || true
    fail "$what: not within $seconds s; the logs above are in $dir/log"
}

nodes_idle() {
    [ "$(sinfo --noheader --Node --partition test --format %t 2>/dev/null | grep -cx idle)" = "${#nodes[@]}" ]
}

no_jobs() {
    [ -z "$(squeue --noheader 2>/dev/null)" ]
}

up() {
    check_needs
    if is_up; then
        echo "already up"
    else
        down
        write_config
        add_hosts
        munged --force --key-file "$dir/munge/key" --socket "$dir/munge/socket" --pid-file "$dir/munge/pid" \
            --log-file "$dir/log/munged.log" --seed-file "$dir/munge/seed" --num-threads 2
        slurmctld -c
        wait_for 30 "slurmctld answers" is_up
        local node
        for node in "${nodes[@]}"; do
            slurmd -N "$node"
        done
        wait_for 30 "all nodes are idle" nodes_idle
    fi
    echo "export SLURM_CONF=$SLURM_CONF"
}

# stop PIDFILE NAME: ends the daemon; a pid that was given to another program since is left alone.
stop() {
    local pid
    [ -s "$1" ] || return 0
    pid=$(cat "$1")
    if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$2" ]; then
        kill "$pid"
        for _ in {1..40}; do
            [ -e "/proc/$pid" ] || return 0
            sleep 0.25
        done
        kill -9 "$pid"
    fi
}

down() {
    local node
    if is_up; then
        squeue --noheader --format %A | xargs --no-run-if-empty scancel --quiet || true # it may have ended just now
        wait_for 60 "jobs are gone" no_jobs
    fi
    for node in "${nodes[@]}"; do
        stop "$dir/$node.pid" slurmd
    done
    stop "$dir/slurmctld.pid" slurmctld
    stop "$dir/munge/pid" munged
    grep -qF "$mark" /etc/hosts && remove_hosts
    rm -rf "$dir"
}

status() {
    is_up || fail "not up (bash tests/slurm_cluster.sh up)"
    sinfo --partition test --format "%N %t %G"
    squeue --format "%i %j %T %M %N %r"
}

case "${1:-}" in
up | down | status) "$1" ;;
--help | -h) sed -n '3,/^$/p' "$0" | sed 's/^# \{0,1\}//' ;;
*) fail "up, down or status? ($0 --help)" 2 ;;
esac
