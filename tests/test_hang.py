"""The odd rank of a hang is named from real stacks and dumps, and from dumps as NCCL writes them."""

import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from common import dist, hang

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run_hang(capsys, monkeypatch):
    """run_hang(RUN, ...) -> (exit status, what was printed)."""

    def run(*arguments) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["hang", *map(str, arguments)])
        code = hang.main()
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


# --- Real evidence: two gloo ranks, one asleep


def _odd_sleep():
    time.sleep(9)


def _dump(file: Path):
    """What NCCL's watchdog does on GPUs; gloo records since torch 2.13, and nobody dumps it."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    if dump is not None:
        file.write_bytes(dump())


def _hang(output_dir: str):
    dist.set_timeout(0.1)
    folder = dist.evidence_folder(Path(output_dir))
    dist.watch_stacks(folder, seconds=1)
    dist.all_sum(torch.ones(3))
    watchdog = threading.Timer(2, _dump, [folder / f"nccl-{dist.rank()}"])
    watchdog.start()
    if dist.rank() == 1:
        _odd_sleep()
    else:
        with pytest.raises(Exception, match="imed out"):
            dist.all_sum(torch.ones(5))
    watchdog.join()
    return str(folder)


@pytest.fixture(scope="module")
def hung_run(run_ranks, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("hung")
    os.environ["TORCHELASTIC_RUN_ID"] = "4711"
    try:
        folder = Path(run_ranks(2, _hang, str(output_dir), ranks_per_node=1)[0])
    finally:
        del os.environ["TORCHELASTIC_RUN_ID"]
    assert folder == output_dir / "stacks" / "4711.0"
    return output_dir


def test_a_rank_that_sleeps_is_named_with_the_collective_of_the_other(hung_run):
    done = subprocess.run([sys.executable, "-m", "common.hang", hung_run], cwd=ROOT, capture_output=True, text=True)
    text = done.stdout
    assert done.returncode == 1, text + done.stderr
    (odd,) = [line for line in text.splitlines() if line.startswith("ODD")]
    assert odd.startswith("ODD: rank 1 on ")
    assert "all_reduce" in odd
    assert "rank 1 in no collective: _odd_sleep (tests/test_hang.py" in text
    assert "rank 0 in all_reduce: all_reduce (distributed/distributed_c10d.py" in text
    assert "attempt 4711.0 (of 1)" in text


def test_the_recorder_of_torch_is_read(hung_run):
    dumps = {rank: hung_run / "stacks" / "4711.0" / f"nccl-{rank}" for rank in (0, 1)}
    if not dumps[0].exists():
        pytest.skip("this torch records collectives on GPUs only")
    verdict = hang.judge_flight({rank: hang.read_flight(file) for rank, file in dumps.items()}, 2)
    assert list(verdict.odd) == [1]
    assert "never called all_reduce of [5] Float (number 2" in verdict.odd[1]
    assert "its last one there is number 1" in verdict.odd[1]


def test_a_rank_stuck_before_the_loop_leaves_stacks(tmp_path, run_hang):
    code = """
import sys, time
from pathlib import Path
from common import dist, run
from common.config import TrainArguments

def load_for_ever():
    time.sleep(3)

run.start(Path(sys.argv[1]), TrainArguments(sys.argv[1], setup_timeout_minutes=0.02))
load_for_ever()
dist.shutdown()
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    status, text = run_hang(tmp_path)
    assert (status, "stacks: 1 of 1 ranks wrote them" in text, "load_for_ever" in text) == (0, True, True), text


# --- Stacks, as faulthandler writes them

COLLECTIVE = [("torch/distributed/distributed_c10d.py", 3245, "all_reduce"), ("torch/distributed/c10d_logger.py", 83, "wrapper")]
LOOP = [("common/dist.py", 150, "all_sum"), ("sft/train.py", 140, "main"), ("sft/train.py", 200, "<module>")]
ELSEWHERE = [("common/data.py", 12, "collate"), ("sft/train.py", 131, "main"), ("sft/train.py", 200, "<module>")]


def write_stacks(folder: Path, rank: int, world_size: int, main: list | None, written: float = 0.0, host: str | None = None) -> None:
    """`written`: seconds from now, for the file's time. main None: the rank only started."""
    folder.mkdir(parents=True, exist_ok=True)
    text = f"rank {rank} of {world_size} on {host or f'node{rank // 2}'}, process 77, 2026-01-02 03:04:05\n"
    if main is not None:
        other = 'Thread 0x00007f01 (most recent call first):\n  File "/usr/lib/threading.py", line 320 in wait\n\n'
        frames = "".join(f'  File "/home/u/{file}", line {line} in {name}\n' for file, line, name in main)
        text += f"Timeout (0:04:00)!\n{other}Thread 0x00007f02 (most recent call first):\n{frames}"
    file = folder / f"rank-{rank:05d}.txt"
    file.write_text(text)
    os.utime(file, (time.time() + written,) * 2)


def judge(folder: Path) -> hang.Verdict:
    return hang.examine(folder)[0]


def test_the_rank_outside_of_the_others_place_is_odd(tmp_path):
    for rank in range(8):
        write_stacks(tmp_path, rank, 8, ELSEWHERE if rank == 5 else COLLECTIVE + LOOP)
    verdict, hosts = hang.examine(tmp_path)
    assert list(verdict.odd) == [5]
    assert verdict.odd[5].startswith("is not in the all_reduce that 7 ranks (0-4, 6-7) wait in, but at collate (common/data.py:12)")
    assert hosts[5] == "node2"


def test_a_majority_outside_of_collectives_counts_too(tmp_path):
    """One rank waits in a collective that nobody else calls: it is the odd one."""
    for rank in range(4):
        write_stacks(tmp_path, rank, 4, COLLECTIVE + LOOP if rank == 3 else ELSEWHERE)
    assert list(judge(tmp_path).odd) == [3]


def test_ranks_in_two_collectives(tmp_path):
    other = [("torch/distributed/distributed_c10d.py", 5000, "barrier"), *LOOP]
    for rank in range(4):
        write_stacks(tmp_path, rank, 4, other if rank == 2 else COLLECTIVE + LOOP)
    assert list(judge(tmp_path).odd) == [2]
    write_stacks(tmp_path, 0, 4, other)
    verdict = judge(tmp_path)
    assert verdict.undecided and not verdict.odd
    assert any("2 ranks (0, 2) in barrier" in line for line in verdict.lines)


def test_a_dead_node_is_named(tmp_path, run_hang):
    """Its ranks started and wrote no stacks, one of them long ago for a slow step."""
    run = tmp_path / "run"
    folder = run / "stacks" / "1.0"
    for rank in range(8):
        write_stacks(folder, rank, 8, None if rank == 2 else COLLECTIVE + LOOP, written=-7200 if rank == 3 else -5, host=f"node{rank // 2}")
    code, text = run_hang(run)
    assert code == 1
    odd = [line for line in text.splitlines() if line.startswith("ODD")]
    assert [line.split()[2:5] for line in odd] == [["2", "on", "node1"], ["3", "on", "node1"]]
    assert all("wrote no stacks while others did" in line for line in odd)
    (folder / "rank-00002.txt").unlink()  # not even started
    assert list(judge(folder).odd) == [2, 3]


def test_nothing_is_odd(tmp_path, run_hang):
    run = tmp_path / "run"
    for rank in range(4):
        write_stacks(run / "stacks" / "1.0", rank, 4, None)
    code, text = run_hang(run)
    assert (code, "no rank waited longer than its limit" in text) == (0, True)
    for rank in range(4):
        write_stacks(run / "stacks" / "1.0", rank, 4, COLLECTIVE + LOOP)
    code, text = run_hang(run)
    assert (code, "4 ranks (0-3) in all_reduce" in text) == (0, True)


def test_a_slow_step_is_no_hang(tmp_path, run_hang):
    for rank in range(3):
        write_stacks(tmp_path / "stacks" / "1.0", rank, 3, ELSEWHERE if rank == 1 else COLLECTIVE + LOOP, written=-60)
    assert run_hang(tmp_path)[0] == 1
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    code, text = run_hang(tmp_path)
    assert (code, "the run went on afterwards" in text) == (0, True)


def test_the_newest_attempt_with_evidence_is_taken(tmp_path, run_hang):
    for attempt, odd in (("1.0", 0), ("1.1", 2), ("2.0", None)):
        for rank in range(3):
            stacks = None if odd is None else ELSEWHERE if rank == odd else COLLECTIVE + LOOP
            write_stacks(tmp_path / "stacks" / attempt, rank, 3, stacks)
        age = {"1.0": 30, "1.1": 20, "2.0": 10}[attempt]
        os.utime(tmp_path / "stacks" / attempt, (time.time() - age,) * 2)
    code, text = run_hang(tmp_path)
    assert (code, "attempt 1.1 (of 3)" in text, "ODD: rank 2" in text) == (1, True, True)
    code, text = run_hang(tmp_path, "--attempt", "1.0")
    assert (code, "ODD: rank 0" in text) == (1, True)
    assert run_hang(tmp_path, "--attempt", "2.0")[0] == 0


def test_wrong_use_is_one_line(tmp_path, run_hang):
    code, text = run_hang(tmp_path)
    assert (code, text.count("\n"), "has no stacks/ATTEMPT" in text) == (2, 1, True)
    write_stacks(tmp_path / "stacks" / "1.0", 0, 1, None)
    code, text = run_hang(tmp_path, "--attempt", "9.9")
    assert (code, text.count("\n"), "has no attempt 9.9, but 1.0" in text) == (2, 1, True)


# --- The flight recorder: dumps in the format that torch writes (version 2.10), for NCCL


def entry(number, name="all_reduce", group=("0", "default_pg"), state="completed", size=(7,), line=150, created=None) -> dict:
    frames = [
        {"filename": "/x/torch/distributed/distributed_c10d.py", "line": 3245, "name": name},
        {"filename": "/x/torch/distributed/c10d_logger.py", "line": 83, "name": "wrapper"},
        {"filename": "/x/common/dist.py", "line": line, "name": "all_sum"},
        {"filename": "/x/sft/train.py", "line": 140, "name": "main"},
    ]
    return {
        "record_id": number, "pg_id": int(group[0]), "process_group": group, "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number,
        "profiling_name": f"nccl:{name}", "time_created_ns": created or 10**18 + number, "duration_ms": None,
        "input_sizes": [list(size)], "input_dtypes": ["Float"], "output_sizes": [list(size)], "output_dtypes": ["Float"],
        "state": state, "time_discovered_started_ns": None, "time_discovered_completed_ns": None, "retired": state == "completed",
        "timeout_ms": 300000, "is_p2p": False, "thread_id": "1", "thread_name": "pt_main", "frames": frames,
    }  # fmt: skip


def write_dumps(folder: Path, entries: dict[int, list[dict]], groups: dict[str, tuple[str, list[int]]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, of_rank in entries.items():
        dump = {
            "version": "2.10",
            "comm_lib_version": "2.28.3",
            "pg_config": {name: {"name": name, "desc": desc, "ranks": str(ranks)} for name, (desc, ranks) in groups.items()},
            "pg_status": {},
            "entries": of_rank,
        }
        (folder / f"nccl-{rank}").write_bytes(pickle.dumps(dump, protocol=2))


WORLD = {"0": ("default_pg", [0, 1, 2, 3])}


def test_the_rank_that_skipped_a_collective(tmp_path):
    """It runs on to the next ones, of which only the waiting side knows."""
    done = [entry(n) for n in range(1, 5)]
    full = [*done, entry(5, size=(11,), state="started"), entry(6, state="scheduled")]
    write_dumps(tmp_path, {0: full, 1: full, 2: done, 3: full[:-1]}, WORLD)
    verdict = judge(tmp_path)
    assert list(verdict.odd) == [2]
    assert (
        "never called all_reduce of [11] Float (number 5 of group 0 (default_pg, ranks 0-3)); its last one there is number 4"
        in verdict.odd[2]
    )
    assert any("called at all_sum (common/dist.py:150) < main (sft/train.py:140)" in line for line in verdict.lines)


def test_the_rank_with_other_sizes_or_another_operation(tmp_path):
    done = [entry(n) for n in range(1, 3)]
    usual = [*done, entry(3, state="started")]
    for name, size in (("all_reduce", (9,)), ("broadcast", (7,))):
        write_dumps(tmp_path, {0: usual, 1: [*done, entry(3, name=name, size=size, state="started", line=99)], 2: usual, 3: usual}, WORLD)
        verdict = judge(tmp_path)
        assert list(verdict.odd) == [1]
        assert f"called {name} of [{size[0]}] Float where 3 ranks called all_reduce of [7] Float (number 3" in verdict.odd[1]
        assert "at all_sum (common/dist.py:99)" in verdict.odd[1]
    # scatter's and gather's sizes differ on the root by nature
    write_dumps(tmp_path, {r: [*done, entry(3, name="gather", size=(r + 1,), state="started")] for r in range(4)}, WORLD)
    assert not judge(tmp_path).odd


def test_two_against_two_is_not_decided(tmp_path):
    write_dumps(tmp_path, {r: [entry(1, size=(r // 2 + 3,), state="started")] for r in range(4)}, WORLD)
    verdict = judge(tmp_path)
    assert verdict.undecided and not verdict.odd
    assert any("2 ranks (2-3): all_reduce of [4] Float" in line for line in verdict.lines)


def test_a_gpu_that_never_started_the_collective(tmp_path):
    ranks = {r: [entry(1), entry(2, state="scheduled" if r == 3 else "started")] for r in range(4)}
    write_dumps(tmp_path, ranks, WORLD)
    verdict = judge(tmp_path)
    assert list(verdict.odd) == [3]
    assert "its GPU never started it" in verdict.odd[3]


def test_all_joined_and_nothing_moves(tmp_path):
    write_dumps(tmp_path, {r: [entry(1), entry(2, state="started")] for r in range(4)}, WORLD)
    verdict = judge(tmp_path)
    assert not verdict.odd and not verdict.undecided
    assert any("the network or a GPU failed, not the code" in line for line in verdict.lines)


def test_a_rank_without_a_dump_and_a_broken_dump(tmp_path):
    usual = [entry(1), entry(2, state="started")]
    write_dumps(tmp_path, {0: usual, 2: usual, 3: usual}, WORLD)
    verdict = judge(tmp_path)
    assert list(verdict.odd) == [1]
    assert "left no dump" in verdict.odd[1] and "3 ranks (0, 2-3) wait in all_reduce" in verdict.odd[1]
    (tmp_path / "nccl-1").write_bytes((tmp_path / "nccl-0").read_bytes()[:200])
    verdict = judge(tmp_path)
    assert list(verdict.odd) == [1]
    assert any("nccl-1 cannot be read" in line for line in verdict.lines)


def test_the_group_that_stopped_first_decides(tmp_path):
    """Ranks 0 and 1 wait in their node's group for rank 1; the world's collective, which all but they have called, only follows."""
    groups = WORLD | {"1": ("node", [0, 1]), "2": ("node", [2, 3])}
    world = entry(9, state="started", created=10**18 + 10**9)
    entries = {
        0: [entry(4, name="_all_gather_base", group=("1", "node"), state="started", size=(64,), created=10**18)],
        1: [entry(8)],
        2: [entry(8), world],
        3: [entry(8), world],
    }
    write_dumps(tmp_path, entries, groups)
    verdict = judge(tmp_path)
    assert list(verdict.odd) == [1]
    assert "never called _all_gather_base of [64] Float (number 4 of group 1 (node, ranks 0-1))" in verdict.odd[1]


def test_the_recorder_outvotes_stacks(tmp_path):
    """CPU threads run ahead of GPUs: rank 2's differs, but the collective that rank 1 skipped is the fault."""
    for rank in range(4):
        write_stacks(tmp_path, rank, 4, ELSEWHERE if rank == 2 else COLLECTIVE + LOOP)
    usual = [entry(1), entry(2, state="started")]
    write_dumps(tmp_path, {0: usual, 1: usual[:1], 2: usual, 3: usual}, WORLD)
    assert list(judge(tmp_path).odd) == [1]


def test_a_dump_makes_nothing_but_plain_values(tmp_path):
    (tmp_path / "nccl-0").write_bytes(pickle.dumps({"entries": [Path("x")]}))
    with pytest.raises(ValueError, match="has no place in a dump"):
        hang.read_flight(tmp_path / "nccl-0")


def test_dumps_of_an_earlier_wait_are_left_out(tmp_path):
    usual = [entry(1), entry(2, state="started")]
    write_dumps(tmp_path, {0: usual, 1: usual, 2: usual, 3: usual}, WORLD)
    os.utime(tmp_path / "nccl-1", (time.time() - 3600,) * 2)
    assert list(judge(tmp_path).odd) == [1]
