"""Rows of JSON Lines and Parquet files, read in units that several processes can share.

JSON Lines are cut into ranges of bytes: a line belongs to the range in which it begins. Parquet is cut into its row groups. Lines and
rows count from 1 inside a unit; units of a file in order, each with as many lines as it yields, give the line in the file.
"""

import difflib
import json
import math
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from common.chat import BadRow

COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", "tools", "chat_template_kwargs", "weight")
UNIT_BYTES = 2 << 20
PARQUET_BATCH = 256  # rows turned into Python objects at a time


class Unit(NamedTuple):
    """A part of one file: bytes [start, end) of JSON Lines (the lines that begin there), or row group `start` of a Parquet file."""

    file: str
    file_index: int
    start: int
    end: int
    size: int  # bytes, for the progress bar


def split_into_units(files: list[str]) -> list[Unit]:
    units = []
    for index, file in enumerate(files):
        size = os.path.getsize(file)
        if file.endswith(".parquet"):
            groups = _open_parquet(file).metadata
            units += [Unit(file, index, g, g + 1, groups.row_group(g).total_byte_size) for g in range(groups.num_row_groups)]
        elif file.endswith((".jsonl", ".json")):
            units += [Unit(file, index, s, min(s + UNIT_BYTES, size), min(UNIT_BYTES, size - s)) for s in range(0, size, UNIT_BYTES)]
        else:
            raise ValueError(f"{file}: data files are JSON Lines (.jsonl, .json) or Parquet (.parquet)")
    return units


def read_unit(unit: Unit) -> Iterator[tuple[int, dict | BadRow | None]]:
    """(line inside the unit, row). Blank lines give None, so that lines are counted as an editor does."""
    if unit.file.endswith(".parquet"):
        parquet = _open_parquet(unit.file)
        found = parquet.schema_arrow.names
        wanted = [name for name in COLUMNS if name in found]
        line = 0
        # Without a column that is known, the names of all are still needed for the error.
        for batch in parquet.iter_batches(batch_size=PARQUET_BATCH, row_groups=[unit.start], columns=wanted or found):
            for row in batch.to_pylist():
                line += 1
                yield line, _without_nulls(row)
        return
    with open(unit.file, "rb") as stream:
        if unit.start:
            stream.seek(unit.start - 1)
            stream.readline()  # the rest of a line that belongs to the unit before
        line = 0
        while stream.tell() < unit.end and (raw := stream.readline()):
            line += 1
            yield line, _parse_line(raw.removeprefix(b"\xef\xbb\xbf") if unit.start == 0 and line == 1 else raw)


def unused_columns(file: str) -> list[str]:
    """A line for each column of the file's first row that nothing reads although its name is almost that of one that would be read."""
    if file.endswith(".parquet"):
        names = set(_open_parquet(file).schema_arrow.names)
    else:
        first = next((row for unit in split_into_units([file]) for _, row in read_unit(unit) if row is not None), {})
        names = set(first) if isinstance(first, dict) else set()  # a bad row has its own error
    lines = []
    for name in sorted(names - set(COLUMNS)):
        if close := difflib.get_close_matches(name, set(COLUMNS) - names, n=1, cutoff=0.8):
            lines.append(f"{file}: column {name!r} is not used; did you mean {close[0]!r}?")
    return lines


def read_rows(file: str) -> Iterator[tuple[int, dict | BadRow]]:
    """(line in the file, row) of a whole file, with all columns of it."""
    if file.endswith(".parquet"):
        for line, row in enumerate(_open_parquet(file).read().to_pylist(), 1):
            yield line, row
        return
    before = 0
    for unit in split_into_units([file]):
        line = 0
        for line, row in read_unit(unit):
            if row is not None:
                yield before + line, row
        before += line


def row_id(row: dict, file: str, line: int) -> str:
    """Column `id`, else file name and line."""
    return str(row["id"]) if row.get("id") is not None else f"{os.path.basename(file)}:{line}"


def _parse_line(raw: bytes) -> dict | BadRow | None:
    if not raw.strip():
        return None
    try:
        row = json.loads(raw.decode("utf-8"))
        if b"\\ud" in raw.lower():
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        return BadRow(f"not valid UTF-8: {error}")
    except UnicodeEncodeError as error:
        return BadRow(f"half of a surrogate pair is no character: {error}")
    except (ValueError, RecursionError) as error:
        hint = " (the file looks like one JSON array: write one object a line)" if raw.lstrip()[:1] == b"[" else ""
        return BadRow(f"not valid JSON: {error}{hint}")
    return row if isinstance(row, dict) else BadRow(f"a line must hold one JSON object, not a {type(row).__name__}")


def _open_parquet(file: str):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"reading {file} needs pyarrow: bash env/setup.sh train installs it") from error
    try:
        return pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file} cannot be read as Parquet: {error}") from error


def _without_nulls(value):
    """Parquet gives every struct all fields of its type; those a row never had come back as None."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def row_weight(row: dict) -> float:
    weight = row.get("weight", 1.0)
    try:
        with np.errstate(over="ignore"):
            value = float("nan") if isinstance(weight, (bool, str)) else float(np.float32(weight))
    except (TypeError, ValueError, OverflowError):
        value = float("nan")
    if not math.isfinite(value) or value <= 0:
        raise BadRow(f"weight is {weight!r}; it must be a finite number above 0 (leave a row out instead of giving it weight 0)")
    return value
