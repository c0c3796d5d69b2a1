"""Compares the nodes of a job and tests the connections between them. slurm/preflight.sh runs it on every node at once.

    python slurm/check_nodes.py --meet node001:20001 --nodes 12 --node 3 --gpus 8 --share /scratch/me/check

Every node says what it has over one store on the first node: packages, files of this repository, driver, clock. Each then finds out by itself
whether it is the odd one: most of the others agree on something else. A sum over all GPUs follows; where it fails, neighbours test each other
in pairs, and a node that can talk to neither is the bad one. Prints lines of ok, note and FAIL like env/check.py, all about this node.
Exit status: 0 this node is good, 1 it is not, 2 wrong use.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

ROOT = Path(__file__).resolve().parent.parent
MEET_SECONDS = 240.0  # nodes start Python from a cold file system at very different speeds
SUM_SECONDS = 60.0
CLOCK_SECONDS = 5.0  # file times of different nodes are compared by file systems and caches
SHARE_SECONDS = 30.0  # how long a file system may take to show a file of another node


def packages() -> list[str]:
    return sorted({f"{package.metadata['Name']}=={package.version}" for package in importlib.metadata.distributions()})


def own_code() -> str:
    """One hash of all Python files and scripts of the repository."""
    total = hashlib.sha256()
    for folder in ("common", "sft", "dpo", "grpo", "slurm"):
        for path in sorted((ROOT / folder).rglob("*.py")) + sorted((ROOT / folder).rglob("*.sh")):
            total.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]


def facts(rollout: str | None = None) -> dict[str, str]:
    """What must be equal on all nodes. rollout: the folder of vLLM's environment, where that is used."""
    found = {
        "Python": sys.version.split()[0],
        "packages": _short_hash(packages()),
        "code": own_code(),
        "torch": torch.__version__,
    }
    if rollout:
        found["vLLM's packages"] = _short_hash(sorted(path.name for path in Path(rollout).glob("lib/python3*/site-packages/*.dist-info")))
    if torch.cuda.is_available():
        query = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
        found["driver"] = query.stdout.split("\n")[0].strip()
        found["GPU"] = torch.cuda.get_device_name(0)
    return found


def _short_hash(names: list[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]


class Meeting:
    """The nodes of one job at one store. Every wait has a deadline; who does not come is known by its number."""

    def __init__(self, address: str, port: int, nodes: int, node: int):
        self.nodes, self.node = nodes, node
        self.store = TCPStore(address, port, nodes, is_master=node == 0, wait_for_workers=False, timeout=timedelta(seconds=MEET_SECONDS))

    def exchange(self, topic: str, value, members: list[int], seconds: float) -> dict[int, object]:
        """What each of `members` says about `topic`, {node: value}; those that say nothing in time are missing."""
        self.store.set(f"{topic}/{self.node}", json.dumps(value))
        deadline = time.monotonic() + seconds
        waiting = set(members)
        while waiting and time.monotonic() < deadline:
            waiting = {node for node in waiting if not self.store.check([f"{topic}/{node}"])}
            if waiting:
                time.sleep(0.02)
        return {node: json.loads(self.store.get(f"{topic}/{node}")) for node in members if node not in waiting}


def odd_facts(node: int, said: dict[int, dict[str, str]]) -> list[str]:
    """What differs on `node` from what most nodes have. Of two halves neither is right: both are told."""
    lines = []
    for what, mine in said[node].items():
        counts = Counter(other.get(what, "nothing") for other in said.values())
        usual, count = counts.most_common(1)[0]
        if mine != usual and counts[mine] <= count:
            lines.append(f"{what} is {mine} here and {usual} on {count} of {len(said)} nodes")
        elif mine == usual and any(other != mine and number == count for other, number in counts.items()):
            lines.append(f"{what} is {mine} here, and {count} nodes have another one")
    return lines


def clock_offset(meeting: Meeting, members: list[int]) -> float | None:
    """Seconds that this node's clock is ahead of the median of all, to a fraction of a second; None when nobody answered."""
    meeting.exchange("clock ready", True, members, MEET_SECONDS)
    clocks = meeting.exchange("clock", time.time(), members, SUM_SECONDS)
    return clocks[meeting.node] - sorted(clocks.values())[len(clocks) // 2] if len(clocks) > 1 else None


def unseen_files(meeting: Meeting, members: list[int], folder: Path) -> list[int]:
    """Nodes whose file in the shared `folder` this node does not see."""
    token = f"{meeting.node} {time.time()}"
    (folder / f"shared-{meeting.node}").write_text(token)
    tokens = meeting.exchange("shared", token, members, MEET_SECONDS)
    deadline = time.monotonic() + SHARE_SECONDS
    unseen = set(tokens)
    while unseen and time.monotonic() < deadline:
        unseen = {node for node in unseen if not _holds(folder / f"shared-{node}", tokens[node])}
        if unseen:
            time.sleep(0.2)
    return sorted(unseen)


def _holds(path: Path, token: str) -> bool:
    try:
        return path.read_text() == token
    except OSError:
        return False


def _sum(local: int, address: str, port: int, prefix: str, position: int, size: int, gpus: int, results: str) -> None:
    """One process of `all_reduce`: sums over `size` nodes of max(gpus, 1) processes each; writes GB/s into `results`."""
    each = max(gpus, 1)
    rank, world = position * each + local, size * each
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    store = PrefixStore(prefix, TCPStore(address, port, is_master=False, timeout=timedelta(seconds=SUM_SECONDS)))
    backend = "nccl" if gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=SUM_SECONDS))
    value = torch.full((1,), float(rank), device=device)
    dist.all_reduce(value)
    if value.item() != world * (world - 1) / 2:
        raise RuntimeError(f"the sum over {world} processes is {value.item()}, not {world * (world - 1) / 2}")
    buffer = torch.ones((256 if gpus else 4) * 2**20 // 4, device=device)
    for _ in range(3):  # the first calls set up connections
        dist.all_reduce(buffer)
        buffer[0].item()
    start = time.perf_counter()
    for _ in range(5):
        dist.all_reduce(buffer)
    buffer[0].item()  # waits for the GPU
    seconds = (time.perf_counter() - start) / 5
    if local == 0:
        # what a ring moves over each link: 2 (n - 1) / n of the buffer
        Path(results).write_text(str(2 * (world - 1) / max(world, 1) * buffer.nbytes / seconds / 1e9))
    dist.destroy_process_group()


def all_reduce(address: str, port: int, prefix: str, members: list[int], node: int, gpus: int, results: Path) -> str | float:
    """GB/s of a sum over all processes of `members`, or why it failed."""
    arguments = (address, port, prefix, members.index(node), len(members), gpus, str(results))
    context = torch.multiprocessing.spawn(_sum, arguments, nprocs=max(gpus, 1), join=False)
    deadline = time.monotonic() + 2 * SUM_SECONDS
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                return f"no answer within {2 * SUM_SECONDS:.0f} s"
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
        return str(error).strip().splitlines()[-1]
    finally:
        for process in context.processes:
            process.kill()
    return float(results.read_text())


def pairs(members: list[int]) -> list[list[list[int]]]:
    """Two rounds in which each node meets one neighbour, then the other. An odd count closes the ring with a pair of its own."""
    rounds = [[members[start : start + 2] for start in range(first, len(members) - 1, 2)] for first in (0, 1)]
    if len(members) > 2:
        rounds.append([[members[-1], members[0]]])
    return rounds


def check_sums(meeting: Meeting, members: list[int], args: argparse.Namespace, address: str, port: int) -> tuple[bool, str]:
    """(this node is good, a line about it)."""
    results = Path(args.share) / f"speed-{args.node}"
    each = max(args.gpus, 1)
    answer = all_reduce(address, port, "all", members, args.node, args.gpus, results)
    worked = meeting.exchange("sum of all", isinstance(answer, float), members, 4 * SUM_SECONDS)
    if len(worked) == len(members) and all(worked.values()):
        return True, f"all-reduce over {len(members)} nodes x {each}: {answer:.1f} GB/s"
    if len(members) <= 2:
        return False, f"all-reduce with the other node failed: {answer}. Run again with NCCL_DEBUG=INFO; is NCCL_SOCKET_IFNAME right?"
    good = False
    for number, together in enumerate(pairs(members)):
        mine = next((pair for pair in together if args.node in pair), None)
        if mine:
            result = all_reduce(address, port, f"pair {number} {mine[0]}", mine, args.node, args.gpus, results)
            good |= isinstance(result, float)
        meeting.exchange(f"pairs {number}", True, members, 4 * SUM_SECONDS)
    if good:
        return True, f"note: the all-reduce over all nodes failed ({answer}), the one with a neighbour works: another node is at fault"
    return False, f"all-reduce with either neighbour failed: {answer}"


def check(args: argparse.Namespace) -> bool:
    good = bool(args.good)

    def say(status: str, text: str) -> None:
        nonlocal good
        good &= status != "FAIL"
        print(f"{status:4s}  {text}", flush=True)

    if args.packages:
        Path(args.packages).write_text("\n".join(packages()) + "\n")
    address, port = args.meet.rsplit(":", 1)
    for number in args.ports.split():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", int(number)))
            except OSError as error:
                say("FAIL", f"port {number} is not free: {error.strerror}. Another job on this node? Set MASTER_PORT to another one.")
    try:
        meeting = Meeting(address, int(port), args.nodes, args.node)
    except (RuntimeError, OSError) as error:  # torch's DistNetworkError is a RuntimeError
        say("FAIL", f"cannot reach the first node at {args.meet}: {str(error).splitlines()[0]}")
        return False
    everyone = list(range(args.nodes))
    said = meeting.exchange("facts", facts(args.rollout), everyone, MEET_SECONDS)
    for line in odd_facts(args.node, said):
        say("FAIL", line)
    if missing := [node for node in everyone if node not in said]:
        say("note", f"nodes without an answer, by number: {missing}")
    offset = clock_offset(meeting, sorted(said))
    if offset is not None and abs(offset) > CLOCK_SECONDS:
        say("FAIL", f"the clock is {offset:+.1f} s off the other nodes'")
    unseen = unseen_files(meeting, sorted(said), Path(args.share))
    views = meeting.exchange("unseen", unseen, sorted(said), MEET_SECONDS)
    hidden_from = sum(args.node in view for view in views.values())
    if 2 * len(unseen) > len(said) or 2 * hidden_from > len(views):
        say(
            "FAIL",
            f"{args.share} is not shared with the other nodes: of {len(said)}, {len(unseen)} files are not seen here, {hidden_from} do not see ours",
        )
    elif unseen:
        say("note", f"files of nodes {unseen} do not appear in {args.share}")
    # Nodes that failed already take no part in the sum: their fault would be everybody's.
    able = meeting.exchange("good", good, sorted(said), MEET_SECONDS)
    members = sorted(node for node, able_to in able.items() if able_to)
    if good and len(members) * max(args.gpus, 1) > 1:
        worked, line = check_sums(meeting, members, args, address, int(port))
        say("ok" if worked else "FAIL", line)
    elif good:
        say("ok", "all-reduce: one process only, nothing to sum")
    # The first node holds the store: it stays until the others have read all.
    meeting.exchange("end", True, sorted(said), 6 * SUM_SECONDS if args.node == 0 else 0.0)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--meet", required=True, help="address:port on the first node")
    parser.add_argument("--nodes", required=True, type=int)
    parser.add_argument("--node", required=True, type=int, help="number of this node, from 0")
    parser.add_argument("--gpus", required=True, type=int, help="of each node; 0: the sum runs on the CPU")
    parser.add_argument("--share", required=True, help="a folder that all nodes must see")
    parser.add_argument("--packages", help="write the list of installed packages there")
    parser.add_argument("--rollout", help="folder of vLLM's environment, to be compared as well")
    parser.add_argument("--ports", default="", help="ports that must be free on the first node, separated by blanks")
    parser.add_argument("--good", type=int, default=1, help="0: this node has failed another check and takes no part in the sum")
    args = parser.parse_args()
    if not 0 <= args.node < args.nodes or ":" not in args.meet:
        parser.error("--node must be below --nodes, and --meet address:port")
    if args.node > 0:
        args.ports = ""
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")  # a failed sum is reported by its line, not by traces
    return 0 if check(args) else 1


if __name__ == "__main__":
    sys.exit(main())
