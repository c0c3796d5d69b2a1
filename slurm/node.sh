#!/usr/bin/env bash
#
# Runs the ranks of one node. Knows nothing of the scheduler: call it once on every node, from the repository's root, with
#
#   NUM_NODES=12 NODE_RANK=0 MASTER_ADDR=node001 MASTER_PORT=20000 PROCS_PER_NODE=8 ATTEMPT=/scratch/me/runs/a/attempts/01 \
#       slurm/node.sh sft.train --config sft/configs/qwen3_235b.yaml --model_name_or_path BASE --train_files data.jsonl --output_dir runs/a
#
# NODE_RANK counts from 0; under Slurm it is the task's number. ATTEMPT: a shared folder for this attempt's logs.
# More variables (ENV_DIR, LOCAL_DIR, ...): slurm/README.md. Exit status: torchrun's, 0 when every rank of this node ended well.

# shellcheck disable=SC2034,SC2154
set -euo pipefail

# A function, because bash reads a script while it runs: an edit of this file must not reach a job that lasts days.
main() {
    NODE_RANK=${NODE_RANK:-${SLURM_PROCID:?NODE_RANK is not set}}
    : "${NUM_NODES:?}" "${MASTER_ADDR:?}" "${MASTER_PORT:?}" "${PROCS_PER_NODE:?}" "${ATTEMPT:?}"
    mkdir -p "$ATTEMPT"
    # shellcheck disable=SC1091
    source slurm/node_env.sh train

    export NCCL_DEBUG=${NCCL_DEBUG:-WARN} # why a connection failed; silent otherwise
    # Blocks of memory that grow, instead of a new one for each size: FSDP's gathers of unequal units would leave holes.
    export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

    local number log status=0 ended=self command
    number=$(printf %03d "$NODE_RANK")
    log=$ATTEMPT/node-$number-$HOST.log
    [ "$NODE_RANK" != 0 ] || echo "$python" >"$ATTEMPT/python" # for the batch script's tools
    # Static rendezvous: rank 0 is on the first node, and ranks follow the order of the nodes. No restart in place: it would keep the node that
    # failed; the batch script decides about a new attempt. The id names RUN/stacks/ID.RESTART, where stuck ranks leave their stacks.
    command=("$python" -m torch.distributed.run --nnodes "$NUM_NODES" --node-rank "$NODE_RANK" --nproc-per-node "$PROCS_PER_NODE"
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --max-restarts 0 --rdzv-id "${SLURM_JOB_ID:-${ATTEMPT##*/}}" -m "$@")
    trap 'ended=term; echo "[node $number $HOST] TERM: ended by the scheduler"' TERM # torchrun gets it too; how it ends is recorded below
    if [ "$NODE_RANK" = 0 ]; then
        "${command[@]}" 2>&1 | tee -i -a "$log" || status=$? # rank 0 is seen in the job's own log too
    else
        "${command[@]}" >>"$log" 2>&1 || status=$?
    fi
    echo "$status $(date +%s%N) $HOST $ended" >"$ATTEMPT/exit-$number"
    if [ "$status" = 0 ] && [ "$NODE_RANK" = 0 ]; then store_cache; fi
    exit "$status"
}

main "$@"
