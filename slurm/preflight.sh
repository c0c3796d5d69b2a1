#!/usr/bin/env bash
#
# Checks one node of a job: called by lib.sh on all of them at once, before anything is loaded. Writes ATTEMPT/preflight/NODE.txt, whose last
# line is PASS when the node is good, and NODE.packages. The lines that begin with FAIL say what is wrong.

set -euo pipefail

NODE_RANK=${NODE_RANK:-${SLURM_PROCID:?}}
: "${ATTEMPT:?}" "${NUM_NODES:?}" "${MEET_ADDR:?}" "${MEET_PORT:?}" "${RUN:?}" "${GPUS_PER_NODE:?}"
HOST=${SLURMD_NODENAME:-$(hostname -s)}
exec >"$ATTEMPT/preflight/$HOST.txt" 2>&1

good=1
while IFS= read -r path; do
    [ -z "$path" ] || [ -r "$path" ] || {
        echo "FAIL  $path cannot be read here"
        good=0
    }
done <<<"${CHECK_PATHS:-}"

# shellcheck source=slurm/node_env.sh
source slurm/node_env.sh train
options=(--path "$RUN" --path "$LOCAL_DIR")
if [ "$GPUS_PER_NODE" -gt 0 ]; then options+=(--gpus "$GPUS_PER_NODE"); else options+=(--no_processes); fi
"$python" env/check.py "${options[@]}" || good=0
"$python" slurm/check_nodes.py --meet "$MEET_ADDR:$MEET_PORT" --nodes "$NUM_NODES" --node "$NODE_RANK" --name "$HOST" --gpus "$GPUS_PER_NODE" \
    --share "$ATTEMPT/preflight" --packages "$ATTEMPT/preflight/$HOST.packages" --ports "${CHECK_PORTS:-}" --good "$good" || good=0
[ $good = 0 ] || echo PASS
exit $((1 - good))
