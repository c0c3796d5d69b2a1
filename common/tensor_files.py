"""Safetensors folders: where each tensor lies, reading many of them with few large requests, writing one file.

Own code for the format (8 bytes of length, a JSON header, tensor data; the README of the safetensors project describes it), because tensors
are read straight into the slices of the larger tensors that they become, and written with a hash of each tensor as it passes.
"""

import dataclasses
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# A read is cut here so that another thread can stop it, and so that a vector of buffers stays below the kernel's IOV_MAX.
READ_BYTES = 64 << 20
READ_BUFFERS = 1024


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint folder as it is on disk."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"{path} is not a folder. Download the checkpoint first (hf download NAME --local-dir FOLDER) and give the folder."
        )
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: is it a Hugging Face checkpoint?")
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one tensor lies: file name, byte range in the file, dtype, shape."""

    file: str
    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, Entry]:
    """Entries of one safetensors file: 8 bytes of length (little endian), a JSON header, tensor data.

    Format: the README of the safetensors project. Raises ValueError naming the file when it is cut short or is something else.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{file} is not a complete safetensors file: it has {size} bytes. Download or copy it again.")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{file} is not a safetensors file: its header is not JSON ({error}).") from error
    header.pop("__metadata__", None)
    entries = {}
    for name, info in header.items():
        if info["dtype"] not in DTYPES:
            raise ValueError(f"{file}: tensor {name} has dtype {info['dtype']}, which is not supported.")
        start, stop = info["data_offsets"]
        entries[name] = Entry(file.name, 8 + length + start, 8 + length + stop, DTYPES[info["dtype"]], tuple(info["shape"]))
    expected = max((entry.stop for entry in entries.values()), default=8 + length)
    if size != expected:
        raise ValueError(f"{file} has {size} bytes, but its header describes {expected}. Download or copy it again.")
    return entries


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a flat uint8 tensor (a view)."""
    assert tensor.is_contiguous()
    return tensor.reshape(-1).view(torch.uint8)


class Checkpoint:
    """A Hugging Face folder of safetensors, one file or several with an index. Opening reads the headers and no tensor."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = read_config(path)
        self._entries = self._read_headers()

    def _read_headers(self) -> dict[str, Entry]:
        if (self.path / INDEX_FILE).is_file():
            index = json.loads((self.path / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
        elif (self.path / SINGLE_FILE).is_file():
            index = None
        else:
            present = ", ".join(sorted(file.name for file in self.path.iterdir())) or "nothing"
            raise ValueError(
                f"{self.path} has neither {INDEX_FILE} nor {SINGLE_FILE}. Only safetensors can be loaded; there is: {present}."
            )
        files = [SINGLE_FILE] if index is None else sorted(set(index.values()))
        if absent := [file for file in files if not (self.path / file).is_file()]:
            raise ValueError(f"{self.path}: {INDEX_FILE} names files that do not exist: {', '.join(absent)}.")
        entries: dict[str, Entry] = {}
        for file in files:
            for name, entry in read_header(self.path / file).items():
                if index is not None and index.get(name, file) != file:
                    continue  # a second copy; the index says which one counts
                if name in entries:
                    raise ValueError(f"{self.path}: tensor {name} is in {entries[name].file} and in {file}, and not in {INDEX_FILE}.")
                entries[name] = entry
        if absent := sorted(set(index or ()) - set(entries)):
            raise ValueError(f"{self.path}: {INDEX_FILE} names tensors that are in none of its files:{summary(absent)}")
        return entries

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._entries[name].dtype

    def empty(self, name: str, device: str = "cpu") -> Tensor:
        """An uninitialised tensor of this name's shape and dtype."""
        return torch.empty(self.shape(name), dtype=self.dtype(name), device=device)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        tensors = {name: self.empty(name) for name in names}
        self.read_into(tensors)
        return tensors

    def read_into(self, tensors: dict[str, Tensor], stop: threading.Event | None = None) -> None:
        """Reads each name's bytes into the given contiguous CPU tensor of the same shape and dtype.

        Names of a file are read in the order in which they lie there, neighbours by one vectored read, so that a network file system sees
        large sequential requests. Plain reads, not a memory map: mapped pages count as this process's memory for as long as they stay.
        Raises InterruptedError when `stop` is set.
        """
        by_file: dict[str, list[str]] = {}
        for name in sorted(tensors, key=lambda name: self._entries[name].start):
            entry = self._entries[name]
            assert tensors[name].shape == entry.shape and tensors[name].dtype == entry.dtype, name
            if entry.stop > entry.start:
                by_file.setdefault(entry.file, []).append(name)
        for file, names in by_file.items():
            descriptor = os.open(self.path / file, os.O_RDONLY)
            try:
                for run in contiguous_runs([self._entries[name] for name in names]):
                    buffers = [memoryview(bytes_of(tensors[names[i]]).numpy()) for i in run]
                    read_run(descriptor, self._entries[names[run.start]].start, buffers, stop, self.path / file)
            finally:
                os.close(descriptor)


def contiguous_runs(entries: list[Entry]) -> Iterable[range]:
    """Ranges of positions in `entries` (sorted by start) whose byte ranges follow each other without a gap."""
    first = 0
    for i in range(1, len(entries) + 1):
        if i == len(entries) or entries[i].start != entries[i - 1].stop:
            yield range(first, i)
            first = i


def read_run(descriptor: int, offset: int, buffers: list[memoryview], stop: threading.Event | None, file: Path) -> None:
    """Fills `buffers` one after the other with the bytes from `offset` on, READ_BYTES at a time."""
    buffers = [part for buffer in buffers for part in (buffer[i : i + READ_BYTES] for i in range(0, len(buffer), READ_BYTES))]
    position = 0
    while position < len(buffers):
        if stop is not None and stop.is_set():
            raise InterruptedError("reading was stopped")
        batch, size = [], 0
        for buffer in buffers[position : position + READ_BUFFERS]:
            if batch and size + len(buffer) > READ_BYTES:
                break
            batch.append(buffer)
            size += len(buffer)
        count = os.preadv(descriptor, batch, offset)
        if count == 0:
            raise ValueError(f"{file} ends before its last tensor; it was cut short after it was opened.")
        offset += count
        while position < len(buffers) and count >= len(buffers[position]):
            count -= len(buffers[position])
            position += 1
        if count:  # a short read ends inside a buffer
            buffers[position] = buffers[position][count:]


def summary(names: Iterable[str], limit: int = 40) -> str:
    """A list for an error message: one name a line, cut after `limit`."""
    names = list(names)
    lines = [f"\n  {name}" for name in names[:limit]]
    if len(names) > limit:
        lines.append(f"\n  ... and {len(names) - limit} more")
    return "".join(lines)


# ----------------------------------------------------------------------------------------------------------------------------------
# Writing


@dataclasses.dataclass(frozen=True)
class Spec:
    """Name, dtype and shape of a tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def write_file(file: Path, specs: list[Spec], tensor_of: Callable[[str], Tensor]) -> dict[str, str]:
    """Writes one safetensors file, asking for one tensor at a time, and flushes it to the disk.

    tensor_of: name -> tensor of the spec's dtype and shape, on any device; may be a view.
    Returns the sha256 of each tensor's bytes.
    """
    # Wide dtypes first, so that every tensor starts at a multiple of its element size: readers may map it.
    specs = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        offsets = [offset, offset + spec.num_bytes]
        header[spec.name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        offset += spec.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    hashes = {}
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for spec in specs:
            tensor = tensor_of(spec.name)
            assert tensor.dtype == spec.dtype and tuple(tensor.shape) == spec.shape, spec
            data = memoryview(bytes_of(tensor.detach().cpu().contiguous()).numpy())
            hashes[spec.name] = hashlib.sha256(data).hexdigest()
            stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return hashes


def sha256_of_tensor(tensor: Tensor, chunk: int = 64 << 20) -> str:
    """sha256 of a tensor's bytes, on any device, `chunk` of them on the host at a time."""
    digest = hashlib.sha256()
    for part in bytes_of(tensor.detach().contiguous()).split(chunk):
        digest.update(memoryview(part.cpu().numpy()))
    return digest.hexdigest()


def sha256_of(folder: Path, entry: Entry) -> str:
    """sha256 of one tensor's bytes on the disk, READ_BYTES in memory at a time."""
    digest = hashlib.sha256()
    with open(folder / entry.file, "rb") as stream:
        stream.seek(entry.start)
        for start in range(entry.start, entry.stop, READ_BYTES):
            digest.update(stream.read(min(READ_BYTES, entry.stop - start)))
    return digest.hexdigest()
