# What differs from cluster to cluster. Copy to env/site.sh (git ignores it) and edit. Source it before sbatch; the jobs read it again on their
# first node, and hand what is exported to the others.
# shellcheck shell=bash disable=SC2034
#
# Secrets do not belong here: W&B and the hub read theirs from files in your home (wandb login, hf auth login).

# --- Slurm. sbatch itself reads these; they win over the #SBATCH lines of a script, so that scripts need no edits
export SBATCH_ACCOUNT=my-account
export SBATCH_PARTITION=h100
# export SBATCH_QOS=normal
# A cluster with 4 GPUs a node; give twice the nodes as well: sbatch --nodes=24 ... (slurm/README.md)
# export SBATCH_GPUS_PER_NODE=4
GPUS_PER_NODE=8 # what every node of a job must have; the preflight counts
# Nodes to avoid, by Slurm's names. sbatch has no variable for it: sbatch --exclude=$EXCLUDE ... A job that gets one nevertheless submits itself again
EXCLUDE= # node013,node207

# --- Folders on a file system that every node sees
SCRATCH_DIR=/scratch/$USER
MODEL_DIR=$SCRATCH_DIR/models # Hugging Face folders of base checkpoints
DATA_DIR=$SCRATCH_DIR/data
RUN_DIR=$SCRATCH_DIR/runs # checkpoints, logs, metrics

# --- The environments, when they are not in the repository's .venv (homes often have small quotas)
# export ENV_DIR=$SCRATCH_DIR/plain-fsdp-env
# ... or packed into one file, which each node unpacks to its own disk once: slurm/README.md
# export ENV_ARCHIVE=$SCRATCH_DIR/plain-fsdp-env.tar.zst
# Modules that Python needs on the nodes:
# module load cuda/13.0

# --- The node's own disk: unpacked environments and compiled kernels, kept between jobs
export LOCAL_DIR=/tmp/$USER
# Kernels of finished jobs, for nodes that have none yet. Without it each node compiles for itself, once
export CACHE_STORE=$SCRATCH_DIR/kernel-caches

# --- Network. Names of the interfaces that carry traffic between nodes: ip -brief address; ibstat
export NCCL_SOCKET_IFNAME=ib0 # which addresses NCCL exchanges at start
export GLOO_SOCKET_IFNAME=ib0 # gloo otherwise takes what the host name resolves to, sometimes 127.0.1.1
# export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3 # when a node also has adapters for storage

# --- Compute nodes mostly have no way out: a wrong model path should fail at once, not after minutes of retries
export HF_HUB_OFFLINE=1
# export WANDB_MODE=online # where compute nodes reach W&B; offline otherwise, uploaded later: slurm/README.md
