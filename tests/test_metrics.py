"""What a run logs besides metrics.jsonl, which the tests of each method read."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from common.metrics import MetricsLog
from tests.conftest import ROOT

ATTEMPT = """
import sys
from pathlib import Path
from common.metrics import MetricsLog
first = int(sys.argv[2])
log = MetricsLog(Path(sys.argv[1]), "wandb", "a name", {"learning_rate": 0.125}, first)
for step in (first + 1, first + 2):
    log.log(step, {"grpo/reward": step + 0.25, "grpo/kl": None})
log.close()
"""


@pytest.mark.skipif(find_spec("wandb") is None, reason="no wandb: bash env/setup.sh train --with wandb")
def test_wandb_without_network_and_a_resumed_run_continues_its_curve(tmp_path):
    for first in ("0", "2"):
        environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        subprocess.run([sys.executable, "-c", ATTEMPT, tmp_path, first], cwd=ROOT, env=environment, check=True)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2 and {file.stem for file in files} == {f"run-{(tmp_path / 'wandb_id').read_text()}"}
    for file, steps in zip(files, ((1, 2), (3, 4)), strict=True):
        content = file.read_bytes()
        assert b"a name" in content and b"learning_rate" in content and b"grpo/reward" in content and b"grpo/kl" not in content
        assert all(f"{step}.25".encode() in content for step in steps)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, "grpo/reward": step + 0.25} for step in (1, 2, 3, 4)]


def test_missing_wandb_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="bash env/setup.sh train --with wandb"):
        MetricsLog(tmp_path, "wandb", "", {}, 0)
