"""JSON Lines files that only grow: what is in them survives a kill, and several processes may add to one."""

import fcntl
import json
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)


class AppendLog:
    """Adds whole lines to a file, and reads those that are there.

    A line that a killed process left unfinished is closed by the next one that writes, and skipped by every reader: its content is made
    again. Processes take turns with a lock on the file; where the file system has none (said once), only one may write.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - open as long as the object
        self._thread_lock = threading.Lock()
        self._locks = True
        self._read = 0  # bytes that `new` has returned

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "AppendLog":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def add(self, *lines: dict) -> None:
        """All lines in one write."""
        data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
        with self._thread_lock:
            self._lock(fcntl.LOCK_EX)
            try:
                end = self._file.seek(0, os.SEEK_END)
                if end:
                    self._file.seek(end - 1)
                    if self._file.read(1) != b"\n":
                        data = b"\n" + data
                left = memoryview(data)
                while left:
                    left = left[self._file.write(left) :]
            finally:
                self._lock(fcntl.LOCK_UN)

    def new(self) -> list[dict]:
        """Lines that were added, by anybody, since the last call; the first call returns all. What is no JSON object is skipped."""
        with self._thread_lock:
            if os.fstat(self._file.fileno()).st_size <= self._read:
                return []
            self._file.seek(self._read)
            data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        lines, broken = [], 0
        for raw in whole.splitlines():
            try:
                line = json.loads(raw)
            except ValueError:  # also not UTF-8
                line = None
            if isinstance(line, dict):
                lines.append(line)
            else:
                broken += bool(raw.strip())
        if broken:
            log.warning("%s: skipped %d lines that are not whole; what they held is made again", self.path, broken)
        return lines

    def _lock(self, kind: int) -> None:
        if not self._locks:
            return
        try:
            fcntl.flock(self._file, kind)
        except OSError as error:
            self._locks = False
            log.warning("%s cannot be locked (%s): let only one process write to it", self.path, error)


def refuse_overwriting(written: Iterable[str | os.PathLike], read: Iterable[str | os.PathLike]) -> None:
    """ValueError where a file that would be written is one of those that are read, under whatever name: a link, ./x. Call it first."""
    read = list(read)
    for path in written:
        for source in read:
            same = os.path.realpath(path) == os.path.realpath(source)
            if same or (os.path.exists(path) and os.path.exists(source) and os.path.samefile(path, source)):
                raise ValueError(f"{path} would be written, but it is what is read as {source}: give another output")


def read_json_object(path: str | os.PathLike) -> dict:
    """ValueError names the file where it holds no whole JSON object."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # also not UTF-8
        raise ValueError(f"{path} is not valid JSON (torn?): {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold one JSON object, not a {type(content).__name__}")
    return content


def write_lines(path: str | os.PathLike, lines: Iterable[dict]) -> None:
    """A whole file, under a temporary name, renamed when all is on the disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")  # not x.tmp beside x.jsonl, which may be somebody's
    with open(temporary, "w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: str | os.PathLike, content) -> None:
    """Under a temporary name, renamed when it is on the disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file, ensure_ascii=False, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
