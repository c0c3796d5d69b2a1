"""Ranks agree, a failure of rank 0 reaches all, a stuck rank leaves its stack."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common import dist


def _agreement():
    total = dist.all_sum(torch.tensor([dist.rank() + 1.0])).item()
    objects = dist.gather_objects({"rank": dist.rank()})
    return total, [o["rank"] for o in objects], dist.broadcast_object(f"from {dist.rank()}", src=1), (dist.node(), dist.num_nodes())


def test_sums_objects_and_nodes(run_ranks):
    results = run_ranks(2, _agreement, ranks_per_node=1)
    assert [r[:3] for r in results] == [(3.0, [0, 1], "from 1")] * 2
    assert [r[3] for r in results] == [(0, 2), (1, 2)]


def _main_rank_fails():
    try:
        with dist.main_rank_first() as mine:
            if mine:
                raise ValueError("row 7 is empty")
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return None


def test_a_failure_of_rank_0_is_raised_everywhere(run_ranks):
    first, second = run_ranks(2, _main_rank_fails)
    assert first == ("ValueError", "row 7 is empty")
    assert second == ("RuntimeError", "rank 0 failed: ValueError: row 7 is empty")


def _one_rank_is_stuck(folder: str):
    dist.set_timeout(0.05)
    dist.watch_stacks(Path(folder), seconds=1)
    started = time.monotonic()
    if dist.rank() == 1:
        time.sleep(6)
        return "slept"
    try:
        dist.all_sum(torch.ones(1))
    except Exception as error:
        return time.monotonic() - started, str(error)
    return None


def test_a_stuck_rank_ends_the_wait_and_leaves_stacks(run_ranks, tmp_path):
    waiting, stuck = run_ranks(2, _one_rank_is_stuck, str(tmp_path / "stacks"))
    assert stuck == "slept"
    seconds, message = waiting
    assert seconds < 5, "the collective did not stop at its timeout of three seconds"
    assert "imed out" in message
    assert "all_sum" in (tmp_path / "stacks" / "rank-00000.txt").read_text()
    odd_one = (tmp_path / "stacks" / "rank-00001.txt").read_text()
    assert "_one_rank_is_stuck" in odd_one
    assert "all_sum" not in odd_one


def test_a_terminal_that_is_not_utf8_does_not_end_the_run(tmp_path):
    code = r"from common import dist; import logging; dist.setup_logging(); t='\u6771\u4eac'; logging.getLogger('x').warning(t); print(t)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "\\u6771\\u4eac" in done.stdout
    assert "\\u6771\\u4eac" in done.stderr


def test_progress_goes_to_a_file_as_lines(capfd):
    bar = dist.progress(2, "loading", "unit")
    bar.update(2)
    bar.close()
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].startswith("loading: 100%")
    assert not any("\r" in line for line in lines)


@pytest.fixture(autouse=True)
def _keep_logging():
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:], logging.root.level = handlers, level
