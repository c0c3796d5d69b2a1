"""Shared fixtures: tiny checkpoints, functions run on several gloo ranks, the command line as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    """tiny_dir("qwen3_moe", experts="fused", num_hidden_layers=2) -> folder of a tiny checkpoint, made once a session."""
    from common import tiny

    made: dict[str, Path] = {}

    def make(family: str, **options) -> Path:
        key = json.dumps([family, options], sort_keys=True)
        if key not in made:
            made[key] = tiny.make(family, tmp_path_factory.mktemp(family) / "model", **options)
        return made[key]

    return make


def _worker(rank: int, world_size: int, ranks_per_node: int, port: int, function, args, results: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    from common import dist

    dist.init(setup_timeout_minutes=3)
    result = function(*args)
    torch.save(result, f"{results}/{rank}.pt")
    dist.shutdown()


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory):
    """run_ranks(2, function, *args, ranks_per_node=2) -> [what function(*args) returned on each rank].

    `function` is a module-level function; it runs inside an initialised process group, in processes of its own.
    """
    from torch.distributed.elastic.utils.distributed import get_free_port

    def run(world_size: int, function, *args, ranks_per_node: int | None = None) -> list:
        results = tmp_path_factory.mktemp("results")
        torch.multiprocessing.spawn(
            _worker, (world_size, ranks_per_node or world_size, get_free_port(), function, args, str(results)), nprocs=world_size
        )
        return [torch.load(results / f"{rank}.pt", weights_only=False) for rank in range(world_size)]

    return run


@pytest.fixture
def launch():
    """launch("sft.train", "--max_steps", 3, ranks=2) -> CompletedProcess of torchrun, as a user calls it; fails on a non-zero exit."""

    def run(module: str, *args, ranks: int = 1, check: bool = True, timeout: float = 300, env: dict | None = None):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", module]
        done = subprocess.run(
            [*command, *map(str, args)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode != 0:
            pytest.fail(f"{module} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
        return done

    return run


def read_metrics(output_dir: Path, keep_perf: bool = False) -> list[dict]:
    """Lines of metrics.jsonl, without the wall-clock figures, which differ from run to run."""
    lines = [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if keep_perf or not k.startswith("perf/")} for line in lines]


@pytest.fixture(autouse=True)
def _no_state_left_by_a_test():
    """A test that switches gradients off for the whole process breaks those after it: name it."""
    yield
    assert torch.is_grad_enabled(), "this test left gradients switched off"
    assert torch.get_default_dtype() == torch.float32, "this test left another default dtype"


@pytest.fixture(scope="module", autouse=True)
def _no_group_left_by_a_file():
    """Files may share one process group over their tests; it must be gone when the next file starts."""
    yield
    assert not torch.distributed.is_initialized(), "this file left a process group behind"
