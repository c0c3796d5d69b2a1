"""Process group, devices, timeouts, sums over ranks, stacks of a stuck rank, rank-aware logging.

Every function answers as one process (rank 0 of 1) before `init()`, so tools without torchrun need no special case.
Two groups exist: the default one (NCCL on GPUs, gloo on CPUs) carries tensors of training; `control_group()` is always gloo and carries
objects and waits. A rank that waits for a file, a server or another rank's slow work waits on the control group: inside an NCCL
collective the watchdog would kill the job.
"""

import faulthandler
import logging
import os
import socket
import sys
from datetime import datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as torch_dist
from tqdm import tqdm

log = logging.getLogger(__name__)

# What common/hang.py looks for in `evidence_folder`: the first line of a rank's stacks (world size, host), and the name of NCCL's dumps
STACK_HEADER = r"rank \d+ of (\d+) on (\S+), process \d+, .*\n"
FLIGHT_PREFIX = "nccl-"

_control: torch_dist.ProcessGroup | None = None
_neighbours: dict[int, torch_dist.ProcessGroup] = {}
_devices: list[torch.device] | None = None
_setup_timeout: timedelta | None = None
_stack_file = None  # an open file: faulthandler writes to its descriptor from a signal-safe thread
_stack_seconds = 0.0


def init(setup_timeout_minutes: float = 60.0) -> None:
    """Starts the process group from torchrun's variables, or a group of one without them.

    The timeout is long at first, because reading a checkpoint, tokenising and compiling take minutes on one rank while the others wait;
    call `set_timeout` when the training loop starts.
    """
    global _control, _setup_timeout
    # A hang on 96 GPUs must leave evidence: NCCL keeps its last collectives and dumps them when one times out.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    timeout = _setup_timeout = timedelta(minutes=setup_timeout_minutes)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank())
    options = {"backend": "cpu:gloo,cuda:nccl" if cuda else "gloo", "timeout": timeout}
    if "RANK" not in os.environ:
        options |= {"store": torch_dist.HashStore(), "rank": 0, "world_size": 1}
    torch_dist.init_process_group(**options)
    _control = torch_dist.new_group(backend="gloo", timeout=timeout)


def shutdown() -> None:
    """Ends the process group. The barrier keeps a fast rank from tearing down connections that a slow one still uses."""
    global _control, _devices, _stack_file
    rest()
    if _stack_file is not None:
        _stack_file.close()
        _stack_file = None
    if torch_dist.is_initialized():
        barrier()
        torch_dist.destroy_process_group()
    _control = _devices = None
    _neighbours.clear()


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def node() -> int:
    """Number of this rank's node. torchrun numbers ranks node by node, with the same count on each."""
    return rank() // local_world_size()


def num_nodes() -> int:
    return -(-world_size() // local_world_size())


def is_main() -> bool:
    return rank() == 0


def device() -> torch.device:
    return torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def devices() -> list[torch.device]:
    """All devices that this process computes on: its own one, or every visible GPU after `use_all_devices`."""
    return _devices or [device()]


def use_all_devices() -> list[torch.device]:
    """For a run of one process: from now on all visible GPUs are its own."""
    global _devices
    assert world_size() == 1
    _devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or None
    return devices()


def control_group() -> torch_dist.ProcessGroup | None:
    """The gloo group for objects and waits; None before `init()`."""
    return _control


def set_timeout(minutes: float) -> None:
    """Changes how long a collective of training may take before the job is killed: long while loading and compiling, short in the loop.

    The control group keeps its long limit: during a save the fastest rank waits for the slowest disk. A rank that died is noticed there
    at once, by its closed connections.
    """
    for group in (torch_dist.group.WORLD, *_neighbours.values()):
        torch_dist.distributed_c10d._set_pg_timeout(timedelta(minutes=minutes), group)


def group_of_neighbours(ranks: int) -> torch_dist.ProcessGroup:
    """The group of `ranks` ranks in a row that this rank is in; `ranks` divides the world. A collective."""
    if ranks not in _neighbours:
        for first in range(0, world_size(), ranks):
            members = range(first, first + ranks)
            group = torch_dist.new_group(list(members), timeout=_setup_timeout)
            if rank() in members:
                _neighbours[ranks] = group
    return _neighbours[ranks]


def barrier() -> None:
    if torch_dist.is_initialized():
        torch_dist.barrier(group=_control)


def broadcast_object(value, src: int = 0):
    """Returns `src`'s value on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    torch_dist.broadcast_object_list(box, src=src, group=_control)
    return box[0]


def gather_objects(value) -> list:
    """Returns every rank's value, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size()
    torch_dist.all_gather_object(values, value, group=_control)
    return values


def all_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sums `tensor` over all ranks in place and returns it."""
    if world_size() > 1:
        torch_dist.all_reduce(tensor)
    return tensor


def all_gather_flat(output: torch.Tensor, tensor: torch.Tensor, group=None) -> None:
    """Concatenates every rank's `tensor` [n] into `output` [ranks * n]."""
    gather = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor  # renamed in torch 2.13
    gather(output, tensor, group=group)


def all_max(tensor: torch.Tensor) -> torch.Tensor:
    """Maximum of `tensor` over all ranks, in place, and returned."""
    if world_size() > 1:
        torch_dist.all_reduce(tensor, op=torch_dist.ReduceOp.MAX)
    return tensor


class main_rank_first:
    """`with main_rank_first() as mine: if mine: ...slow work of rank 0...`: the others wait on the control group, without a time limit of
    NCCL, and every rank raises when rank 0's block did. Without that, the others would wait for a rank that has already gone.
    """

    def __enter__(self) -> bool:
        return is_main()

    def __exit__(self, error_type, error, traceback) -> bool:
        failure = broadcast_object(f"{error_type.__name__}: {error}" if error_type is not None else None)
        if failure is not None and not is_main():
            raise RuntimeError(f"rank 0 failed: {failure}")
        return False


def evidence_folder(output_dir: Path) -> Path:
    """Where this start of a run leaves what shows why it hung. A requeued job has its old id, and one restart more."""
    return output_dir / "stacks" / f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}.{os.environ.get('SLURM_RESTART_COUNT', 0)}"


def watch_stacks(folder: Path, seconds: float) -> None:
    """From now on a rank that does not call `beat()` for `seconds` writes the stacks of all its threads to `folder/rank-00012.txt`, and NCCL
    dumps its last collectives to `folder/nccl-12` when one times out. `python -m common.hang` reads both.

    Set below the collective timeout: when one rank is stuck, all others wait in a collective, and their stacks beside the odd one's name
    the fault before the job is killed.
    """
    global _stack_file, _stack_seconds
    if _stack_file is None:
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder.absolute() / FLIGHT_PREFIX))  # read when it dumps
        _stack_file = open(folder / f"rank-{rank():05d}.txt", "a")  # noqa: SIM115 - stays open for the life of the process
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        print(f"rank {rank()} of {world_size()} on {host}, process {os.getpid()}, {now}", file=_stack_file, flush=True)
    _stack_seconds = seconds
    beat()


def beat() -> None:
    """Tells the watch that this rank is alive. Costs microseconds; does nothing before `watch_stacks`."""
    if _stack_file is not None:
        faulthandler.dump_traceback_later(_stack_seconds, repeat=False, file=_stack_file)


def rest() -> None:
    """Suspends the watch until the next `beat()`, before work that may rightly take long: a save, an export."""
    if _stack_file is not None:
        faulthandler.cancel_dump_traceback_later()


class _AboveProgressBar(logging.StreamHandler):
    """Prints above a progress bar instead of into it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=self.stream)


class _Lines:
    """A stream for progress bars that go to a file, where they cannot overwrite themselves: each state becomes a line."""

    def write(self, text: str) -> None:
        if line := text.strip("\r\n "):
            sys.stderr.write(line + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def progress(total: int, description: str, unit: str, initial: int = 0) -> tqdm:
    """A progress bar on rank 0; in a log file a line every half minute."""
    options = {} if sys.stderr.isatty() else {"file": _Lines(), "mininterval": 30.0, "maxinterval": 30.0, "ncols": 100}
    return tqdm(total=total, initial=initial, desc=description, unit=unit, disable=not is_main(), **options)


def _log_and_raise(error_type, error, traceback) -> None:
    """Why a run ended belongs into its log too: the terminal of a job of yesterday is gone."""
    if not issubclass(error_type, KeyboardInterrupt):
        log.critical("ended by %s: %s", error_type.__name__, error)
    sys.__excepthook__(error_type, error, traceback)


def warn(log: logging.Logger, text: str, *values) -> None:
    """A warning about what every rank knows: rank 0 says it. `log.warning` is for what one rank alone sees."""
    if is_main():
        log.warning(text, *values)


def setup_logging(log_file: Path | None = None) -> None:
    """INFO on rank 0, WARNING elsewhere, each line with its rank; rank 0 also appends to `log_file`."""
    for stream in (sys.stdout, sys.stderr):
        # A C-locale terminal must not kill a run because a sample holds Japanese.
        stream.reconfigure(errors="backslashreplace")
    handlers: list[logging.Handler] = [_AboveProgressBar(sys.stderr) if sys.stderr.isatty() else logging.StreamHandler(sys.stderr)]
    if log_file is not None and is_main():
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_file, encoding="utf-8"))
    logging.basicConfig(
        level=logging.INFO if is_main() else logging.WARNING,
        format=f"%(asctime)s [rank {rank()}] %(levelname)s %(message)s",
        handlers=handlers,
        force=True,
    )
    sys.excepthook = _log_and_raise
    for noisy in ("httpx", "httpcore", "filelock", "fsspec", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # dcp says on every save that it plans without a process group of its own, and torch logs each collective setting it reads.
    logging.getLogger("torch.distributed").setLevel(logging.WARNING)
