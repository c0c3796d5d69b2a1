"""Checks one machine before anything is trained on it: packages, GPUs, communication between processes, limits, folders.

    .venv/train/bin/python env/check.py --path /scratch/me/runs
    srun --ntasks-per-node 1 .venv/train/bin/python env/check.py --path /scratch/me/runs      (every node of a job)

Each line is ok, note (training works, but read it) or FAIL (with what to do). Exit status: 0 nothing failed, 1 something did, 2 wrong use.
"""

import argparse
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OK, NOTE, FAIL = "ok  ", "note", "FAIL"
Finding = tuple[str, str]


def pins(file: Path) -> dict[str, str]:
    """{package: version} of a requirement file in which every package is pinned."""
    lines = [line.split("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return dict(line.split("==") for line in lines if line)


def version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def check_python() -> Iterator[Finding]:
    found = f"Python {platform.python_version()} on {socket.gethostname()}, {os.cpu_count()} processors"
    yield (OK, found) if sys.version_info >= (3, 11) else (FAIL, f"{found}: 3.11 or newer is needed, see bash env/setup.sh --help")


def check_packages() -> Iterator[Finding]:
    wanted = pins(ROOT / "env" / "train.txt")
    missing, other = [], []
    for package, version in wanted.items():
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
            continue
        if installed.split("+")[0] != version:
            other.append(f"{package} {installed} (tested: {version})")
    if missing:
        yield FAIL, f"not installed: {', '.join(missing)}. Run: bash env/setup.sh train"
    if other:
        yield NOTE, f"other versions than the tested ones: {', '.join(other)}"
    if not missing and not other:
        yield OK, f"{len(wanted)} packages of env/train.txt in their pinned versions"


def check_gpus(wanted: int | None = None) -> Iterator[Finding]:
    """wanted: how many GPUs this machine must have."""
    import torch

    if wanted is not None and torch.cuda.device_count() != wanted:
        yield FAIL, f"{torch.cuda.device_count()} usable GPUs, not {wanted}: nvidia-smi shows whether one is missing; leave this node out"

    build = f"torch {torch.__version__} for {'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPUs'}"
    driver = nvidia_driver()
    if not torch.cuda.is_available():
        if driver:
            yield (
                FAIL,
                f"{build} cannot use the GPU of driver {driver}. Set TORCH_INDEX_URL to an index with builds for a CUDA version that "
                "this driver supports (nvidia-smi prints it), remove .venv/train and run bash env/setup.sh train",
            )
        else:
            yield OK, f"{build}; no GPU here: tests and tiny models only"
        return
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    memory = [torch.cuda.get_device_properties(index).total_memory for index in range(len(names))]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
    yield OK, f"{build}, driver {driver or 'unknown'}: {gpus}, {min(memory) / 2**30:.0f} GiB each"
    capability = min(torch.cuda.get_device_capability(index) for index in range(len(names)))
    if capability < (8, 0):
        yield FAIL, f"compute capability {capability[0]}.{capability[1]}: bfloat16 kernels need 8.0 (A100) or newer"
    yield OK, "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    yield from check_gated_delta_net(capability)


def nvidia_driver() -> str | None:
    """Version of the NVIDIA driver, None where there is none."""
    if not shutil.which("nvidia-smi"):
        return None
    query = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    return query.stdout.split("\n")[0].strip() or None if query.returncode == 0 else None


def check_gated_delta_net(capability: tuple[int, int]) -> Iterator[Finding]:
    try:
        fla = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        yield NOTE, "fla-core is not installed: Qwen3-Next and Qwen3.5 need it on GPUs. Run: bash env/setup.sh train --with fla-core"
        return
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        yield FAIL, "fla-core is installed without triton: remove .venv/train and run bash env/setup.sh train --with fla-core"
        return
    # fla-core itself refuses to run its backward then: the results are wrong.
    if (3, 4) <= version_tuple(triton) < (3, 7, 1) and capability >= (9, 0):
        yield (
            FAIL,
            f"Triton {triton} makes fla-core's backward wrong on this GPU: install triton>=3.7.1 (or tilelang) to train Gated DeltaNet",
        )
    else:
        yield OK, f"fla-core {fla} with Triton {triton}"


def check_compiler() -> Iterator[Finding]:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if compiler and header.exists():
        yield OK, f"C compiler {compiler} and Python.h: torch.compile and Triton can build"
    else:
        lacking = "a C compiler (gcc)" if not compiler else f"{header} (Debian, Ubuntu: python3-dev)"
        yield NOTE, f"{lacking} is missing: compile and Triton kernels (Gated DeltaNet on GPUs) will not work"


def communicate(rank: int, backend: str, world_size: int, port: int, results: str) -> None:
    """One process of check_processes: sums its rank over all, then times larger sums; rank 0 writes the GB/s into `results`."""
    import datetime

    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size, timeout=timeout)
    value = torch.full((1,), float(rank), device=device)
    dist.all_reduce(value)
    expected = world_size * (world_size - 1) / 2
    if value.item() != expected:
        raise RuntimeError(f"the sum of ranks is {value.item()}, not {expected}")
    buffer = torch.ones((256 if backend == "nccl" else 4) * 2**20 // 4, device=device)
    for _ in range(3):  # the first calls set up connections
        dist.all_reduce(buffer)
        value.item()
    start = time.perf_counter()
    for _ in range(5):
        dist.all_reduce(buffer)
    buffer[0].item()  # waits for the GPU
    seconds = (time.perf_counter() - start) / 5
    if rank == 0:
        # what a ring moves over each link: 2 (n - 1) / n of the buffer
        Path(results).write_text(str(2 * (world_size - 1) / world_size * buffer.nbytes / seconds / 1e9))
    dist.destroy_process_group()


def check_processes() -> Iterator[Finding]:
    """Two processes on gloo, and all GPUs of this machine on NCCL."""
    import torch
    import torch.multiprocessing

    groups = [("gloo", 2)]
    if torch.cuda.device_count() > 1:
        groups.append(("nccl", torch.cuda.device_count()))
    for backend, world_size in groups:
        with socket.socket() as free, tempfile.NamedTemporaryFile() as results:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            try:
                torch.multiprocessing.spawn(communicate, (backend, world_size, port, results.name), nprocs=world_size)
            except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
                reason = str(error).strip().splitlines()[-1]
                hint = "check the host name (/etc/hosts)" if backend == "gloo" else "run again with NCCL_DEBUG=INFO"
                yield FAIL, f"{world_size} processes cannot talk over {backend}: {reason}; {hint}"
                continue
            yield OK, f"{world_size} processes over {backend}: {float(Path(results.name).read_text()):.1f} GB/s"


def check_limits() -> Iterator[Finding]:
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < 4096:
        yield (
            NOTE,
            f"only {files} open files allowed: a giant checkpoint has more; ulimit -n {hard if hard > 0 else 'unlimited'} in the job",
        )
    else:
        yield OK, f"{files} open files allowed"
    shared_memory = Path("/dev/shm")
    if shared_memory.is_dir() and (free := shutil.disk_usage(shared_memory).free) < 2**30:
        yield NOTE, f"/dev/shm has {free / 2**20:.0f} MiB free: NCCL and data workers want 1 GiB (containers: --shm-size)"


def check_path(folder: Path) -> Iterator[Finding]:
    """Writes, flushes, renames and reads a small file, as saving a checkpoint does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".check-") as scratch:
            first, second = Path(scratch, "first"), Path(scratch, "second")
            start = time.perf_counter()
            with open(first, "wb") as file:
                file.write(b"0" * 2**24)
                file.flush()
                os.fsync(file.fileno())
            os.replace(first, second)
            seconds = time.perf_counter() - start
            if first.exists() or second.stat().st_size != 2**24:
                yield FAIL, f"{folder}: a renamed file is not there at once; checkpoints need a file system that renames in one step"
                return
    except OSError as error:
        yield FAIL, f"{folder}: {error.strerror or error}; choose a folder that every node can write"
        return
    free = shutil.disk_usage(folder).free
    yield OK, f"{folder}: writable, {2**24 / seconds / 1e6:.0f} MB/s on one file of 16 MB, {free / 2**30:.0f} GiB free"


def run(checks: list[Callable[[], Iterator[Finding]]]) -> bool:
    """Prints the findings of every check; True when nothing failed."""
    good = True
    for check in checks:
        try:
            findings = list(check())
        except ImportError as error:
            findings = [(FAIL, f"{check.__name__}: {error}. Run: bash env/setup.sh train")]
        for status, text in findings:
            print(f"{status}  {text}", flush=True)
            good &= status != FAIL
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="env/check.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--path", action="append", default=[], type=Path, help="a folder for runs that all nodes share; may be repeated")
    parser.add_argument("--gpus", type=int, help="how many GPUs there must be")
    parser.add_argument("--no_processes", action="store_true", help="do not start processes that talk to each other")
    args = parser.parse_args()
    checks = [check_python, check_packages, lambda: check_gpus(args.gpus), check_compiler, check_limits]
    if not args.no_processes:
        checks.append(check_processes)
    checks += [lambda folder=folder: check_path(folder) for folder in args.path]
    return 0 if run(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
