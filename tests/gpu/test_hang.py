"""A real hang over NCCL: one of two GPUs' ranks never calls a collective, NCCL's flight recorder is dumped at the limit, and names it.

    python -m pytest -v -rs tests/gpu/test_hang.py

Two CUDA GPUs, a minute. tests/test_hang.py does the same over gloo, and reads dumps in NCCL's format that it writes itself.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

RANK = """
import sys, time
from pathlib import Path
import torch
from common import dist

dist.init()
for number in range(1, 4):
    dist.all_sum(torch.ones(number, device=dist.device())).cpu()
dist.set_timeout(0.25)
dist.watch_stacks(dist.evidence_folder(Path(sys.argv[1])), seconds=5)
if dist.rank() == 1:
    time.sleep(120)
dist.all_sum(torch.ones(11, device=dist.device())).cpu()
"""


def test_the_flight_recorder_names_the_rank(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(tmp_path)]
    hung = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert hung.returncode != 0
    (folder,) = (tmp_path / "stacks").iterdir()
    dumps = sorted(file.name for file in folder.glob("nccl-*"))
    assert dumps == ["nccl-0", "nccl-1"], hung.stderr[-3000:]
    done = subprocess.run([sys.executable, "-m", "common.hang", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    (odd,) = [line for line in done.stdout.splitlines() if line.startswith("ODD")]
    assert odd.startswith("ODD: rank 1 on ")
    assert "never called all_reduce of [11] Float (number 4 of group 0" in odd
    assert "its last one there is number 3" in odd
