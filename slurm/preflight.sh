#!/usr/bin/env bash
#
# Checks one node of a job: lib.sh calls it on all of them at once, before anything is loaded. Writes ATTEMPT/preflight/NODE.txt, whose last
# line is PASS when the node is good; lines that begin with FAIL say what is wrong. Beside it NODE.packages, the list of packages.

# shellcheck disable=SC2034,SC2154
set -euo pipefail

main() {
    NODE_RANK=${NODE_RANK:-${SLURM_PROCID:?NODE_RANK is not set}}
    : "${ATTEMPT:?}" "${NUM_NODES:?}" "${MEET_ADDR:?}" "${MEET_PORT:?}" "${RUN:?}" "${GPUS_PER_NODE:?}"
    exec >"$ATTEMPT/preflight/${SLURMD_NODENAME:-$(hostname -s)}.txt" 2>&1
    local good=1 path options
    while IFS= read -r path; do
        if [ -n "$path" ] && [ ! -r "$path" ]; then
            echo "FAIL  $path cannot be read on this node"
            good=0
        fi
    done <<<"${CHECK_PATHS:-}"
    # shellcheck disable=SC1091
    source slurm/node_env.sh train
    options=(--path "$RUN" --path "$LOCAL_DIR")
    if [ "$GPUS_PER_NODE" -gt 0 ]; then options+=(--gpus "$GPUS_PER_NODE"); else options+=(--no_processes); fi
    local rollout=()
    if [ "${SERVER_NODES:-0}" != 0 ]; then
        rollout=(--rollout "${python%/train/bin/python}/rollout")
        if [ ! -x "${rollout[1]}/bin/python" ]; then
            echo "FAIL  no Python in ${rollout[1]}: bash env/setup.sh rollout"
            good=0
        fi
    fi
    "$python" env/check.py "${options[@]}" || good=0
    "$python" slurm/check_nodes.py --meet "$MEET_ADDR:$MEET_PORT" --nodes "$NUM_NODES" --node "$NODE_RANK" --gpus "$GPUS_PER_NODE" \
        --share "$ATTEMPT/preflight" --packages "$ATTEMPT/preflight/$HOST.packages" --ports "${CHECK_PORTS:-}" --good "$good" \
        ${rollout[@]+"${rollout[@]}"} || good=0
    [ $good = 0 ] || echo PASS
    exit $((1 - good))
}

main "$@"
