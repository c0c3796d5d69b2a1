# The environment of every process on a node: limits, unpacked environment, caches, variables, each with its reason. Sourced by node.sh,
# server.sh and preflight.sh; slurm/README.md lists the variables. NAME of the environment (train, rollout) comes first: source node_env.sh train
# shellcheck shell=bash
set -euo pipefail

HOST=${SLURMD_NODENAME:-$(hostname -s)} # Slurm's name for the node, where there is one
LOCAL_DIR=${LOCAL_DIR:-/tmp/${USER:-$(id -un)}}
mkdir -p "$LOCAL_DIR" || {
    echo "$HOST: LOCAL_DIR=$LOCAL_DIR cannot be made: name a folder on the node's own disk in env/site.sh" >&2
    exit 2
}

# --- Limits
ulimit -n "$(ulimit -Hn)" # a checkpoint of 96 ranks and its loader hold thousands of files open; the soft limit is often 1,024
ulimit -c 0               # core dumps of 8 ranks with 100 GB each would fill the file system

# --- An environment packed into one file: thousands of small files, read by every rank of every node, are slow on a shared file system
if [ -n "${ENV_ARCHIVE:-}" ]; then
    unpacked=$LOCAL_DIR/env-$(stat -c '%s-%Y' "$ENV_ARCHIVE")
    (
        flock 9 # server and trainer may start on one node
        if [ ! -e "$unpacked/.unpacked" ]; then
            rm -rf "$unpacked"
            mkdir -p "$unpacked"
            tar -xf "$ENV_ARCHIVE" -C "$unpacked"
            touch "$unpacked/.unpacked"
        fi
    ) 9>"$LOCAL_DIR/env.lock"
    ENV_DIR=$unpacked
fi
python=${ENV_DIR:-$PWD/.venv}/$1/bin/python
[ -x "$python" ] || {
    echo "$HOST: no Python at $python: make the environment where every node sees it (ENV_DIR), or set ENV_ARCHIVE" >&2
    exit 2
}

# --- Caches of compiled kernels, kept between jobs: a first compilation takes up to 40 minutes. On the node's own disk, because 8 ranks that
# compile into one folder of a shared file system fail. A folder for each set of package versions and kind of GPU: an old kernel is never loaded.
versions=$({
    "$python" --version
    printf '%s\n' "${python%/bin/python}"/lib/python3*/site-packages/*.dist-info | sed 's|.*/||'
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo "no GPU"
} | sort -u | cksum | cut -d' ' -f1)
CACHE=$LOCAL_DIR/cache-$1-$versions
export TRITON_CACHE_DIR=$CACHE/triton              # Triton kernels (fla-core, torch.compile, vLLM) and what their tuning found
export TORCHINDUCTOR_CACHE_DIR=$CACHE/inductor     # torch.compile's code
export TORCH_EXTENSIONS_DIR=$CACHE/torch_extensions # C++ that torch builds at run time
export CUDA_CACHE_PATH=$CACHE/cuda                 # the driver's own compilations
export CUDA_CACHE_MAXSIZE=4294967296               # its default of 1 GiB would throw them away again
export VLLM_CACHE_ROOT=$CACHE/vllm                 # vLLM's compiled graphs
export FLASHINFER_WORKSPACE_BASE=$CACHE/flashinfer # its kernels; the default is in the home, which all nodes share
export DG_JIT_CACHE_DIR=$CACHE/deep_gemm           # DeepGEMM's FP8 kernels
export TILELANG_CACHE_DIR=$CACHE/tilelang          # fla-core's kernels where tilelang is installed
# A node that has none takes those of an earlier job, where CACHE_STORE names a shared folder for them.
cache_archive=${CACHE_STORE:+$CACHE_STORE/$1-$versions.tar}
if [ -n "$cache_archive" ] && [ -e "$cache_archive" ] && [ ! -e "$CACHE" ]; then
    mkdir -p "$CACHE.new-$$"
    if tar -xf "$cache_archive" -C "$CACHE.new-$$"; then
        mv -T "$CACHE.new-$$" "$CACHE" 2>/dev/null || rm -rf "$CACHE.new-$$" # another process of this node was faster
    else
        echo "$HOST: warning: $cache_archive cannot be unpacked; kernels are compiled again" >&2
        rm -rf "$CACHE.new-$$"
    fi
fi
mkdir -p "$CACHE"

# store_cache: gives this node's kernels to later jobs, when there are new ones. Within 45 s: srun --wait=60 ends tasks that are late.
store_cache() {
    [ -n "$cache_archive" ] || return 0
    local newer=()
    [ ! -e "$cache_archive" ] || newer=(-newer "$cache_archive")
    [ -n "$(find "$CACHE" -type f ${newer[@]+"${newer[@]}"} -print -quit)" ] || return 0
    if ! mkdir -p "$CACHE_STORE" || ! timeout 45 tar -cf "$cache_archive.new-$HOST" -C "$CACHE" . || ! mv "$cache_archive.new-$HOST" "$cache_archive"; then
        echo "$HOST: warning: the kernel cache could not be kept in $CACHE_STORE" >&2
    fi
}

# --- Variables
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # the repository, also for vLLM's workers
export PYTHONUNBUFFERED=1        # the last lines before a kill must reach the log
export PYTHONFAULTHANDLER=1      # a segmentation fault leaves a stack
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}  # a wrong path fails at once instead of after minutes of retries without network
export TOKENIZERS_PARALLELISM=false # workers are forked; threads of the tokenizer would warn in each
export WANDB_MODE=${WANDB_MODE:-offline} # compute nodes have no way out; upload from the login node (slurm/README.md)
export WANDB_SILENT=true         # its lines are no part of the log
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores / ${PROCS_PER_NODE:-1} > 8 ? 8 : (cores / ${PROCS_PER_NODE:-1} > 0 ? cores / ${PROCS_PER_NODE:-1} : 1)))} # torchrun would set 1, torch alone all cores in every rank
