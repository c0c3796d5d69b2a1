# What differs from cluster to cluster. Copy to env/site.sh (git ignores it) and edit; the Slurm scripts source it on every node.
# shellcheck shell=bash disable=SC2034
#
# Secrets do not belong here: W&B and the hub read theirs from files in your home (wandb login, hf auth login).

# --- Slurm. Read by sbatch itself, so that the scripts need no edits:  source env/site.sh  before sbatch
export SBATCH_ACCOUNT=my-account
export SBATCH_PARTITION=h100
# export SBATCH_QOS=normal
# Nodes to avoid, after slurm/preflight.sh has named them:
# export SBATCH_EXCLUDE=node013,node207

# --- Folders on a file system that every node sees
SCRATCH_DIR=/scratch/$USER
MODEL_DIR=$SCRATCH_DIR/models # Hugging Face folders of base checkpoints
DATA_DIR=$SCRATCH_DIR/data
RUN_DIR=$SCRATCH_DIR/runs # checkpoints, logs, metrics

# --- The environments, when they are not in the repository's .venv (homes often have small quotas)
# export ENV_DIR=$SCRATCH_DIR/plain-fsdp-env
# Modules that the compute nodes need before Python starts:
# module load cuda/13.0

# --- Network. Names of the interfaces that carry traffic between nodes: ip -brief address; ibstat
export NCCL_SOCKET_IFNAME=ib0 # which addresses NCCL exchanges at start
export GLOO_SOCKET_IFNAME=ib0 # gloo otherwise takes what the host name resolves to, sometimes 127.0.1.1
# export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3 # when a node also has adapters for storage

# --- Caches on the node's own disk: on a shared file system many ranks compile into one folder at once, and fail
export TRITON_CACHE_DIR=/tmp/$USER/triton
export TORCHINDUCTOR_CACHE_DIR=/tmp/$USER/inductor

# --- Compute nodes mostly have no way out: a wrong model path should fail at once, not after minutes of retries
export HF_HUB_OFFLINE=1
