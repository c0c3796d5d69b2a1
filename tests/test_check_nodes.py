"""slurm/check_nodes.py: every node of a job finds out by itself whether it is the odd one."""

import argparse
import importlib.util
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def check_nodes():
    spec = importlib.util.spec_from_file_location("check_nodes", ROOT / "slurm" / "check_nodes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_odd_node_finds_itself(check_nodes):
    same, other = {"torch": "2.13", "driver": "580"}, {"torch": "2.12", "driver": "580"}
    said = {0: same, 1: other, 2: same}
    assert check_nodes.odd_facts(0, said) == [] == check_nodes.odd_facts(2, said)
    assert check_nodes.odd_facts(1, said) == ["torch is 2.12 here and 2.13 on 2 of 3 nodes"]
    assert all(len(check_nodes.odd_facts(node, {0: same, 1: other})) == 1 for node in (0, 1))  # of two, neither is right
    assert check_nodes.odd_facts(0, {0: same, 1: {"torch": "2.13"}, 2: {"torch": "2.13"}}) == [
        "driver is 580 here and nothing on 2 of 3 nodes"
    ]


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_pairs_give_every_node_two_neighbours(check_nodes, count):
    members = [10 + number for number in range(count)]
    met = {member: set() for member in members}
    for together in check_nodes.pairs(members):
        assert len({member for pair in together for member in pair}) == 2 * len(together)  # at one time a node is in one pair only
        for one, two in together:
            met[one].add(two)
            met[two].add(one)
    assert all(len(neighbours) == min(2, count - 1) for neighbours in met.values())


def check_on(node: int, nodes: int, port: int, share: Path, *arguments: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "slurm/check_nodes.py",
        "--meet",
        f"127.0.0.1:{port}",
        "--nodes",
        str(nodes),
        "--node",
        str(node),
        "--gpus",
        "0",
    ]
    return subprocess.Popen(
        [*command, "--share", str(share), *arguments],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_nodes_meet_and_sum_without_the_one_that_failed_before(tmp_path):
    from torch.distributed.elastic.utils.distributed import get_free_port

    port = get_free_port()
    nodes = [
        check_on(0, 3, port, tmp_path, "--packages", str(tmp_path / "packages")),
        check_on(1, 3, port, tmp_path),
        check_on(2, 3, port, tmp_path, "--good", "0"),
    ]
    outputs = [node.communicate(timeout=150)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0, 1], outputs
    assert all("all-reduce over 2 nodes x 1" in output for output in outputs[:2]), outputs
    assert "all-reduce" not in outputs[2] and "FAIL" not in "".join(outputs)
    assert any(line.startswith("torch==") for line in (tmp_path / "packages").read_text().splitlines())


def test_port_that_is_taken_is_named(check_nodes, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        number = taken.getsockname()[1]
        free = free_port()
        arguments = argparse.Namespace(
            meet=f"127.0.0.1:{free}", nodes=1, rollout=None, node=0, gpus=0, share=str(tmp_path), packages=None, ports=str(number), good=1
        )
        assert not check_nodes.check(arguments)
    assert f"FAIL  port {number} is not free" in capsys.readouterr().out


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_folder_that_is_not_shared_is_found(check_nodes, tmp_path, monkeypatch):
    """Two meetings in one process: what each writes, the other does not see."""
    monkeypatch.setattr(check_nodes, "SHARE_SECONDS", 0.3)
    port = free_port()
    first, second = (check_nodes.Meeting("127.0.0.1", port, 2, node) for node in (0, 1))
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with ThreadPoolExecutor(2) as threads:
        seen = [
            threads.submit(check_nodes.unseen_files, meeting, [0, 1], tmp_path / folder)
            for meeting, folder in ((first, "one"), (second, "two"))
        ]
        assert [future.result() for future in seen] == [[1], [0]]
    # a node that never comes is waited for so long, and known by its number
    assert first.exchange("late", "here", [0, 1], 0.2) == {0: "here"}


@pytest.mark.parametrize("bad", [0, 1, 4])
def test_bad_connection_is_blamed_on_one_node(check_nodes, tmp_path, monkeypatch, bad):
    """A sum in which `bad` takes part fails on all its nodes; then neighbours test each other in pairs."""
    monkeypatch.setattr(check_nodes, "all_reduce", lambda _, __, ___, members, *rest: "timed out" if bad in members else 10.0)
    port, members = free_port(), [0, 1, 2, 4]  # node 3 has failed another check
    meetings = {node: check_nodes.Meeting("127.0.0.1", port, 5, node) for node in members}

    def check(node: int) -> tuple[bool, str]:
        return check_nodes.check_sums(
            meetings[node], members, argparse.Namespace(node=node, gpus=8, share=str(tmp_path)), "127.0.0.1", port
        )

    with ThreadPoolExecutor(len(members)) as threads:
        results = dict(zip(members, threads.map(check, members), strict=True))
    assert {node: good for node, (good, _) in results.items()} == {node: node != bad for node in members}
    assert "either neighbour failed: timed out" in results[bad][1]
