#!/usr/bin/env bash
#
# Makes the training environment when it is missing or behind its requirement files, and runs the tests.
#
#   bash tests/run.sh                 all tests, 36 minutes on two cores; those whose program is not installed are skipped and say so
#   bash tests/run.sh --core          without vLLM and Slurm: about 22 minutes on two cores
#   bash tests/run.sh --core -x tests/test_data.py -k order        everything else goes to pytest
#
# ENV_DIR, PYTHON, TORCH_INDEX_URL: see env/setup.sh. Exit status: pytest's (0 all passed), or that of the set-up.

set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '3,/^$/p' tests/run.sh | sed 's/^# \{0,1\}//'
    exit 0
fi

arguments=()
for argument in "$@"; do
    if [ "$argument" = --core ]; then
        arguments+=(-m "not vllm and not slurm")
    else
        arguments+=("$argument")
    fi
done

bash env/setup.sh train

# Tests start several processes each: more threads than cores would only make them wait for one another.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Nothing that a test loads comes from a network; without this a wrong path would be looked up on the hub, with retries.
export HF_HUB_OFFLINE=1

exec "${ENV_DIR:-$PWD/.venv}/train/bin/python" -m pytest ${arguments[@]+"${arguments[@]}"}
