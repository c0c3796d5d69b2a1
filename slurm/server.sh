#!/usr/bin/env bash
#
# Runs one vLLM server, or the part of it that is on this node. Called once on each of its nodes, from the repository's root, with
#
#   MODEL=BASE TENSOR_PARALLEL=8 NODES_PER_SERVER=1 NODE_RANK=0 SERVER_INDEX=0 SERVER_PORT=20002 SERVER_INNER_PORT=20003 \
#       SERVER_ADDRESSES="node013" ATTEMPT=/scratch/me/runs/a/attempts/01 slurm/server.sh --max-model-len 8192
#
# SERVER_ADDRESSES: of its nodes, in order; clients go to the first one. SERVER_INNER_PORT: between its nodes. Arguments go to vLLM.
# Everything is logged in ATTEMPT/server-INDEX-NODE.log. Exit status: vLLM's.

# shellcheck disable=SC2034,SC2154
set -euo pipefail

# A function, because bash reads a script while it runs: an edit of this file must not reach a running job.
main() {
    NODE_RANK=${NODE_RANK:-${SLURM_PROCID:?NODE_RANK is not set}}
    : "${MODEL:?}" "${TENSOR_PARALLEL:?}" "${NODES_PER_SERVER:?}" "${SERVER_INDEX:?}" "${SERVER_PORT:?}" "${SERVER_ADDRESSES:?}" "${ATTEMPT:?}"
    PROCS_PER_NODE=$((TENSOR_PARALLEL / NODES_PER_SERVER))
    # shellcheck disable=SC1091
    source slurm/node_env.sh rollout
    local addresses command site
    read -r -a addresses <<<"$SERVER_ADDRESSES"

    export VLLM_SERVER_DEV_MODE=1               # the routes that take new weights exist only with it
    export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 # nothing is sent anywhere
    export VLLM_HOST_IP=${addresses[NODE_RANK]} # where the server's own nodes reach each other; its guess may be another network's address
    unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT # of the trainer: would be taken for the server's own

    if [ "$NODE_RANK" = 0 ]; then
        # Its control routes have no password: bound to the address inside the cluster, not to all.
        command=("$python" -m vllm.entrypoints.openai.api_server --model "$MODEL" --host "${addresses[0]}" --port "$SERVER_PORT")
    else
        command=("$python" -m vllm.entrypoints.cli.main serve "$MODEL" --headless) # only this form of the command knows --headless
    fi
    command+=(--tensor-parallel-size "$TENSOR_PARALLEL" --weight-transfer-config '{"backend": "c10d"}'
        --worker-extension-cls common.vllm_worker.WorkerExtension --logprobs-mode processed_logprobs)
    # The route that takes ids and tells the weights' version of every token; a vLLM without it refuses the option.
    site=("${python%/bin/python}"/lib/python3*/site-packages/vllm/entrypoints)
    if grep -rqs --include='*.py' enable_scale_out "${site[0]}"; then command+=(--enable-scale-out); fi
    if [ "$NODES_PER_SERVER" -gt 1 ]; then
        command+=(--nnodes "$NODES_PER_SERVER" --node-rank "$NODE_RANK" --master-addr "${addresses[0]}" --master-port "${SERVER_INNER_PORT:?}")
    fi
    exec "${command[@]}" "$@" >>"$ATTEMPT/server-$SERVER_INDEX-$HOST.log" 2>&1
}

main "$@"
