"""What trainer and vLLM worker must do alike when weights travel between them: buckets, the group, waiting with a deadline, fingerprints.

Imported on both sides, so it needs torch alone.
"""

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch.distributed import PrefixStore, Store

_FINGERPRINT_ELEMENTS = 1 << 24
_LARGEST_PRIME_BELOW_2_16 = 65521
_ABORT_SECONDS = 60.0  # NCCL's takes about one
_aborts: list[Future] = []


def tensor_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def plan_buckets(sizes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Indices of tensors of `sizes` bytes, in order, cut into buckets of at most `bucket_bytes`; a larger tensor is a bucket of its own."""
    buckets: list[list[int]] = []
    room = -1
    for index, size in enumerate(sizes):
        if size > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(index)
        room -= size
    return buckets


def open_group(backend: str, store: Store, group_id: str, rank: int, world_size: int, timeout: float):
    """A c10d group apart from the default one, `gloo` or `nccl`. `timeout`, in seconds, is that of every collective; gloo's members also meet
    here, within it."""
    limit = timedelta(seconds=timeout)
    store = PrefixStore(f"weights/{group_id}", store)
    if backend == "gloo":
        return torch_dist.ProcessGroupGloo(store, rank, world_size, limit)
    # By default NCCL's watchdog ends the whole process when a peer is gone; here `wait` sees that, and the process goes on.
    name, before = "TORCH_NCCL_ASYNC_ERROR_HANDLING", os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    os.environ[name] = "0"
    try:
        options = torch_dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return torch_dist.ProcessGroupNCCL(store, rank, world_size, options)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def broadcast(group, tensor: torch.Tensor):
    """Starts the broadcast of a flat tensor from rank 0 of `group`; returns the work to `wait` for."""
    return group.broadcast(tensor, 0)


def wait(work, seconds: float, check: Callable[[], None] | None = None) -> None:
    """Waits for a collective by asking, never inside it: a blocked wait for a dead NCCL peer would have no end.

    `check` is called meanwhile and may raise. TimeoutError after `seconds`; the group must then be aborted.
    """
    deadline, pause = time.monotonic() + seconds, 1e-4
    while not work.is_completed():
        if check is not None:
            check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"a broadcast of weights was not over after {seconds:.0f} s")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.01)
    work.wait()  # raises what went wrong; on a GPU orders what follows behind the broadcast


def in_background(function: Callable, *args, **kwargs) -> Future:
    """Runs it in a thread that neither blocks the caller nor the end of the program, however long it hangs."""
    future: Future = Future()

    def run():
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def abort(group) -> None:
    """Ends a group whose peers may be gone, without waiting.

    Both gloo's abort and its destructor wait until what is in flight has timed out, the destructor while it holds Python's lock, which stops
    every thread. So abort runs beside, and the object is never destroyed: there is one for each time that a server was lost.
    """
    if group is not None and hasattr(group, "abort"):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        _aborts.append(in_background(group.abort))


@atexit.register
def _wait_for_aborts() -> None:
    """A thread that comes back from C++ while the interpreter ends is torn down inside it: "terminate called", exit code 134 of a good run."""
    futures.wait(_aborts, timeout=_ABORT_SECONDS)


def fingerprint(tensor: torch.Tensor) -> str:
    """Two 64-bit sums over the bytes of a tensor, one of them weighted by position, as hex: exact and independent of the device.

    It shows accidents, not attacks. Computed where the tensor lies: the weights of a large server never cross to the host.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = data[: data.numel() // 4 * 4].view(torch.int32)
    total = torch.zeros(2, dtype=torch.int64, device=data.device)
    for number, part in enumerate((words, data[words.numel() * 4 :])):
        for start in range(0, part.numel(), _FINGERPRINT_ELEMENTS):
            values = part[start : start + _FINGERPRINT_ELEMENTS].to(torch.int64)
            position = torch.arange(start, start + len(values), device=data.device) % _LARGEST_PRIME_BELOW_2_16 + 1 + number
            total += torch.stack([values.sum(), (values * position).sum()])
    return "".join(f"{value & (2**64 - 1):016x}" for value in total.tolist()) + f":{data.numel()}"
