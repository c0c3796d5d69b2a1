"""Names the rank that is odd in a run that hung, and the collective that the others wait for.

    python -m common.hang RUN                       RUN: the run's output_dir; its newest attempt that left evidence
    python -m common.hang RUN --attempt 4711.0

Two kinds of evidence lie in RUN/stacks/ATTEMPT (common/dist.py, `evidence_folder`):
- rank-00012.txt: the stacks of a rank that waited too long, after a line that says where it runs. The place of most ranks is where all should
  be; a rank elsewhere is odd, and so is one that wrote no stacks while others did: it is dead, or stopped.
- nccl-12: NCCL's flight recorder (GPUs only), the last collectives of a rank with their sequence numbers. It decides where stacks cannot: CPU
  threads run ahead of GPUs, so the place where Python waits may lie behind the collective that is stuck.

Exit status: 0 nothing odd, 1 an odd rank or ranks that disagree, 2 wrong use.
"""

import argparse
import pickle
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from common.dist import FLIGHT_PREFIX, STACK_HEADER

# Frames that are in every stack, between a collective and its caller: decorators
WRAPPERS = {("c10d_logger.py", "wrapper"), ("_contextlib.py", "decorate_context"), ("typing_extensions.py", "wrapper")}
# Whose tensors may rightly differ from rank to rank
UNEVEN = ("gather", "scatter", "all_to_all", "alltoall", "reduce", "send", "recv", "coalesced")
FLIGHT_MINUTES = 10  # one rank's timeout makes all ranks dump, within a minute; older files are of a wait that ended well
SHOWN_FRAMES = 6


class WrongUse(Exception):
    """Its text is the one line that the user reads."""


@dataclass
class Frame:
    file: str
    line: int
    name: str

    def __str__(self) -> str:
        parts = Path(self.file).parts
        return f"{self.name} ({'/'.join(parts[-2:])}:{self.line})"


@dataclass
class Stacks:
    """What one rank wrote in its newest start of an attempt."""

    host: str
    world_size: int
    main: list[Frame]  # innermost first; empty: no stacks were written
    seconds: float  # how long it had waited
    written: float  # mtime of the file

    @property
    def place(self) -> tuple:
        return tuple((frame.file, frame.line, frame.name) for frame in self.main)

    @property
    def collective(self) -> str | None:
        """The call of torch.distributed in which the rank waits; None where it is elsewhere."""
        if not self.main or not self.main[0].file.endswith("distributed_c10d.py"):
            return None
        names = []
        for frame in self.main:
            if not frame.file.endswith("distributed_c10d.py"):
                break
            names.append(frame.name)
        return names[-1]

    def describe(self) -> str:
        return " < ".join(map(str, self.main[:SHOWN_FRAMES]))


@dataclass
class Call:
    """One collective as one rank recorded it."""

    name: str
    sizes: tuple
    dtypes: tuple
    state: str
    frames: list[Frame]
    created_ns: int

    def signature(self) -> tuple:
        """What must be equal on all ranks."""
        # nccl:all_reduce -> all_reduce; all_gather_single and reduce_scatter_single move equal shards
        name = self.name.split(":")[-1]
        even = name.startswith(("all_reduce", "all_gather", "_all_gather", "reduce_scatter", "_reduce_scatter"))
        if not even and any(word in name for word in UNEVEN):
            return (self.name,)
        return self.name, self.sizes, self.dtypes

    def where(self) -> str:
        callers = [frame for frame in self.frames if not frame.file.endswith("distributed_c10d.py")]
        return " < ".join(map(str, callers[:SHOWN_FRAMES]))

    def __str__(self) -> str:
        return f"{self.name.split(':')[-1]} of {list(self.sizes[0])} {'/'.join(self.dtypes[0])}"


@dataclass
class Recorded:
    """What one rank recorded of one process group. Numbers count that group's collectives."""

    enqueued: int
    completed: int
    calls: dict[int, Call] = field(default_factory=dict)


@dataclass
class Verdict:
    lines: list[str]
    odd: dict[int, str] = field(default_factory=dict)  # rank -> why
    undecided: bool = False  # ranks disagree and nothing says which one is right


def ranks_text(ranks) -> str:
    """{0, 1, 2, 5} -> "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def count_text(ranks) -> str:
    return f"rank {ranks_text(ranks)}" if len(ranks) == 1 else f"{len(ranks)} ranks ({ranks_text(ranks)})"


def read_stacks(file: Path) -> Stacks:
    """The last stacks of one rank. ValueError where the file is not what common/dist.py writes."""
    sections = re.split(STACK_HEADER, file.read_text(encoding="utf-8", errors="replace"))
    if len(sections) < 4:
        raise ValueError(f"{file} does not start as stacks of a rank do")
    world_size, host, text = sections[-3:]
    dump = text.rsplit("Timeout (", 1)
    main: list[Frame] = []
    seconds = 0.0
    if len(dump) == 2:
        hours, minutes, rest = dump[1].split(")")[0].split(":")
        seconds = int(hours) * 3600 + int(minutes) * 60 + float(rest)
        # The main thread is the oldest one, which comes last.
        thread = re.split(r"^Thread .*\n", dump[1], flags=re.MULTILINE)[-1]
        found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', thread, flags=re.MULTILINE)
        main = [Frame(path, int(line), name) for path, line, name in found if (Path(path).name, name) not in WRAPPERS]
    return Stacks(host, int(world_size), main, seconds, file.stat().st_mtime)


class _PlainUnpickler(pickle.Unpickler):
    """Dumps hold dicts, lists, strings and numbers; nothing else is made from a file."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a dump")


def read_flight(file: Path) -> dict[tuple, Recorded]:
    """{(group name, description, its ranks): what the rank recorded of it}. ValueError where the file was not written to its end."""
    try:
        with open(file, "rb") as handle:
            dump = _PlainUnpickler(handle).load()
        groups: dict[tuple, Recorded] = {}
        for entry in dump["entries"]:
            if entry["is_p2p"]:
                continue
            name, description = entry["process_group"]
            # gloo leaves the ranks of its groups out
            ranks = re.findall(r"\d+", dump["pg_config"].get(name, {}).get("ranks", ""))
            number = entry["collective_seq_id"]
            # The buffer is a ring: what is no longer in it was completed.
            group = groups.setdefault((name, description, tuple(map(int, ranks))), Recorded(number, number - 1))
            done = entry["state"] == "completed" or (entry["retired"] and entry["profiling_name"].startswith("gloo"))
            group.enqueued = max(group.enqueued, number)
            if done:
                group.completed = max(group.completed, number)
            frames = [Frame(frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", [])]
            group.calls[number] = Call(
                entry["profiling_name"],
                _frozen(entry["input_sizes"] or [[]]),
                _frozen([entry["input_dtypes"]]),
                entry["state"],
                [frame for frame in frames if (Path(frame.file).name, frame.name) not in WRAPPERS],
                entry["time_created_ns"],
            )
    except (pickle.UnpicklingError, EOFError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({type(error).__name__}: {error}): its rank died while it wrote") from error
    return groups


def _frozen(value):
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def judge_stacks(stacks: dict[int, Stacks], world_size: int) -> Verdict:
    """`stacks`: of the ranks that wrote a file, whether or not it holds stacks."""
    dumped = {rank: one for rank, one in stacks.items() if one.main}
    if not dumped:
        return Verdict(["stacks: no rank waited longer than its limit"])
    # Ranks beat once a step, so the stacks of one hang are written close together; earlier ones are of a wait that ended well.
    newest = max(one.written for one in dumped.values())
    dumped = {rank: one for rank, one in dumped.items() if newest - one.written < max(one.seconds / 2, 1.0)}
    waited = max(one.seconds for one in dumped.values())
    when = datetime.fromtimestamp(newest).strftime("%Y-%m-%d %H:%M:%S")
    verdict = Verdict([f"stacks: {len(dumped)} of {world_size} ranks wrote them after waiting {waited:.0f} s, the last at {when}"])

    groups: dict[tuple, list[int]] = defaultdict(list)
    for rank, one in sorted(dumped.items()):
        groups[one.place].append(rank)
    by_size = sorted(groups.values(), key=len, reverse=True)
    for ranks in by_size:
        one = dumped[ranks[0]]
        verdict.lines.append(f"  {count_text(ranks)} {f'in {one.collective}' if one.collective else 'in no collective'}: {one.describe()}")

    silent = sorted(set(range(world_size)) - set(dumped))
    if silent and len(silent) <= len(dumped):
        why = "wrote no stacks while others did: its process or node is dead or stopped, or it still moves on without the others"
        verdict.odd = dict.fromkeys(silent, why)
        verdict.lines.append(f"  {count_text(silent)} wrote none")
    elif silent:
        verdict.odd = {rank: f"waits alone, at {dumped[rank].describe()}" for rank in dumped}
        return verdict
    if len(by_size) == 1:
        return verdict
    inside = [ranks for ranks in by_size if dumped[ranks[0]].collective]
    if 2 * len(by_size[0]) > len(dumped):
        right, others = by_size[0], by_size[1:]
    elif inside and len(inside) < len(by_size):  # no majority: those who are in no collective keep the others waiting
        right, others = inside[0], [ranks for ranks in by_size if ranks not in inside]
    else:
        verdict.undecided = True
        return verdict
    awaited = dumped[right[0]].collective
    for rank in (rank for ranks in others for rank in ranks):
        there = f"is not in the {awaited} that {count_text(right)} wait in, but" if awaited else "is not where the others are, but"
        verdict.odd[rank] = f"{there} at {dumped[rank].describe()}"
    return verdict


def judge_flight(flights: dict[int, dict[tuple, Recorded]], world_size: int) -> Verdict:
    """Follows every process group with an unfinished collective to the first number at which its ranks differ."""
    if not flights:
        return Verdict([])
    verdict = Verdict([f"flight recorder: dumps of {len(flights)} of {world_size} ranks"])
    stuck = []
    for key in sorted({key for groups in flights.values() for key in groups}):
        of_ranks = {rank: groups[key] for rank, groups in flights.items() if key in groups}
        waiting = {rank: one for rank, one in of_ranks.items() if one.completed < one.enqueued}
        if waiting:
            # Which group stopped first: later ones only wait for it.
            started = min(one.calls[min(n for n in one.calls if n > one.completed)].created_ns for one in waiting.values())
            stuck.append((started, key, of_ranks))
    if not stuck:
        verdict.lines.append("  every recorded collective was completed: the wait was not for NCCL")
        return verdict
    for _, key, of_ranks in sorted(stuck, key=lambda item: item[0]):
        _judge_group(verdict, key, of_ranks, flights)
        if verdict.odd or verdict.undecided:
            break
    return verdict


def _judge_group(verdict: Verdict, key: tuple, of_ranks: dict[int, Recorded], flights: dict) -> None:
    name, description, members = key
    members = set(members) or set(flights)
    label = f"group {name} ({description}, ranks {ranks_text(members)})"
    # What one rank has completed all have joined, so the next number is stuck; or an earlier one that a rank skipped or called differently.
    waiting = [one for one in of_ranks.values() if one.completed < one.enqueued]
    number = min(max(one.completed for one in of_ranks.values()), min(one.enqueued for one in of_ranks.values())) + 1
    for earlier in range(min(one.completed for one in waiting) + 1, number):
        if len({one.calls[earlier].signature() for one in of_ranks.values() if earlier in one.calls}) > 1:
            number = earlier
            break
    calls = {rank: one.calls[number] for rank, one in of_ranks.items() if number in one.calls}
    absent = sorted(members - {rank for rank, one in of_ranks.items() if one.enqueued >= number})
    if not calls:  # so long ago that its record was overwritten: only the numbers are left
        verdict.lines.append(f"  {label}: number {number} is not complete, but no longer recorded (TORCH_FR_BUFFER_SIZE)")
        verdict.undecided = True
        return

    counts = Counter(call.signature() for call in calls.values())
    usual_signature, usual_count = counts.most_common(1)[0]
    usual = next(call for call in calls.values() if call.signature() == usual_signature)
    what = f"{usual} (number {number} of {label})"
    verdict.lines.append(f"  stuck in {what}, called at {usual.where()}")
    if absent:
        for rank in absent:
            if rank not in flights:
                verdict.odd[rank] = (
                    f"left no dump of its collectives, while {count_text(calls)} wait in {what}: its process or node is dead"
                )
            else:
                done = of_ranks[rank].enqueued if rank in of_ranks else 0
                verdict.odd[rank] = f"never called {what}; its last one there is number {done}"
    elif len(counts) > 1 and 2 * usual_count > len(calls):
        for rank, call in sorted(calls.items()):
            if call.signature() != usual_signature:
                verdict.odd[rank] = f"called {call} where {usual_count} ranks called {what}; at {call.where()}"
    elif len(counts) > 1:
        for signature in counts:
            ranks = [rank for rank, call in calls.items() if call.signature() == signature]
            verdict.lines.append(f"  {count_text(ranks)}: {calls[ranks[0]]}, at {calls[ranks[0]].where()}")
        verdict.undecided = True
    else:
        late = sorted(rank for rank, call in calls.items() if call.state == "scheduled")
        if late and len(late) < len(calls):
            for rank in late:
                verdict.odd[rank] = (
                    f"called {what}, but its GPU never started it: an earlier kernel of this rank still runs, or the GPU is lost"
                )
        else:
            verdict.lines.append("  all ranks called it and none finished it: the network or a GPU failed, not the code")


def newest_with_evidence(attempts: list[Path]) -> Path:
    """The newest attempt in which a rank wrote stacks or a dump, else the newest."""
    for folder in attempts:
        stacked = any("Timeout (" in file.read_text(encoding="utf-8", errors="replace") for file in folder.glob("rank-*.txt"))
        if stacked or any(folder.glob(FLIGHT_PREFIX + "*")):
            return folder
    return attempts[0]


def examine(folder: Path) -> tuple[Verdict, dict[int, str]]:
    """What an attempt's folder says, and {rank: host}."""
    problems, stacks, flights = [], {}, {}
    for file in sorted(folder.glob("rank-*.txt")):
        try:
            stacks[int(file.stem.removeprefix("rank-"))] = read_stacks(file)
        except ValueError as error:
            problems.append(str(error))
    dumps = {int(file.name.removeprefix(FLIGHT_PREFIX)): file for file in folder.glob(FLIGHT_PREFIX + "[0-9]*")}
    newest = max((file.stat().st_mtime for file in dumps.values()), default=0.0)
    for rank, file in sorted(dumps.items()):
        if newest - file.stat().st_mtime < FLIGHT_MINUTES * 60:
            try:
                flights[rank] = read_flight(file)
            except ValueError as error:
                problems.append(str(error))
    if not stacks and not dumps:
        raise WrongUse(f"{folder} holds neither stacks nor dumps: no rank of this attempt came as far as starting")
    world_size = max([one.world_size for one in stacks.values()] + [rank + 1 for rank in (*stacks, *dumps)])
    recorder, written = judge_flight(flights, world_size), judge_stacks(stacks, world_size)
    # NCCL's numbers are facts; where Python waits is a hint.
    first, second = (recorder, written) if recorder.odd else (written, recorder)
    odd = first.odd or second.odd
    undecided = not odd and (recorder.undecided or written.undecided)
    return Verdict(problems + recorder.lines + written.lines, odd, undecided), {rank: one.host for rank, one in stacks.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m common.hang", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, help="the run's output_dir")
    parser.add_argument("--attempt", help="a folder of RUN/stacks; default: the newest one with evidence")
    args = parser.parse_args()
    try:
        attempts = sorted((args.run / "stacks").glob("*/"), key=lambda folder: folder.stat().st_mtime, reverse=True)
        if not attempts:
            raise WrongUse(f"{args.run} has no stacks/ATTEMPT: it is no run's folder, or no rank came as far as starting")
        folder = newest_with_evidence(attempts)
        if args.attempt is not None:
            folder = args.run / "stacks" / args.attempt
            if folder not in attempts:
                raise WrongUse(f"{args.run}/stacks has no attempt {args.attempt}, but {', '.join(one.name for one in attempts)}")
        verdict, hosts = examine(folder)
    except WrongUse as error:
        print(f"common.hang: {error}", file=sys.stderr)
        return 2

    print(f"{args.run}, attempt {folder.name} (of {len(attempts)})")
    print("\n".join(verdict.lines))
    metrics = args.run / "metrics.jsonl"
    evidence = max(file.stat().st_mtime for file in folder.iterdir())
    if (verdict.odd or verdict.undecided) and folder == attempts[0] and metrics.exists() and metrics.stat().st_mtime > evidence:
        print("the run went on afterwards: a step was slow, nothing hangs")
        return 0
    for rank, why in sorted(verdict.odd.items()):
        print(f"ODD: rank {rank}{f' on {hosts[rank]}' if rank in hosts else ''} {why}")
    if verdict.undecided:
        print("ODD: the ranks disagree, and none is in the majority: compare the places above")
    return 1 if verdict.odd or verdict.undecided else 0


if __name__ == "__main__":
    sys.exit(main())
