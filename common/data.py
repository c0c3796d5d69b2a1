"""Files of conversations -> a tokenised dataset on disk -> packed micro-batches in a resumable, rank-even order.

    dataset = tokenize_files(files, tokenizer, max_length=4096, cache_dir=...)   # on one rank; the others: TokenizedDataset.open(path)
    bins = pack(dataset.lengths, max_length=4096)
    order = Order(len(bins), seed=0)
    ids, epoch, offset = order.next(epoch, offset, count)                        # the same on every rank
    batch = collate(dataset, bins, ids[rank::world_size])

A dataset is a folder of flat arrays that are memory-mapped: opening it reads nothing else, whatever its size. It is written under
a temporary name and renamed when it is complete, so an interrupted build never looks like a dataset. Names of shapes: T tokens of a
micro-batch, N its segments (examples, and the padding), B bins.
"""

import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import sys
import uuid
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from tqdm import tqdm

from common import chat as chat_module
from common import rows as rows_module
from common.chat import BadRow, Chat, Example, Rendered, generation_stop_ids
from common.rows import Unit, read_unit, row_weight, split_into_units, unused_columns

logger = logging.getLogger(__name__)

ROWS_PER_CALL = 256  # rows tokenised in one call
WORKERS_FROM_BYTES = 8 << 20  # starting workers costs seconds: smaller input is tokenised in this process
KEPT_MESSAGES = 20  # of skipped rows, in the report
NO_TARGET = -100


# ---- the dataset on disk


class TokenizedDataset:
    """`ids` int32 [tokens], `mask` bool [tokens], `offsets` int64 [examples + 1], `weights` float32 [examples]; `report` says what was dropped.

    Example i is ids[offsets[i]:offsets[i+1]]; `where(i)` names the file and line (Parquet: row) it came from, counted from 1.
    """

    def __init__(self, path: Path, info: dict):
        self.path, self.report, self._files = path, info["report"], info["files"]
        self.key = info["content"]  # hash of ids, masks and weights in their order: the same data, wherever the files lie
        self.offsets = np.load(path / "offsets.npy", mmap_mode="r")
        self.weights = np.load(path / "weights.npy", mmap_mode="r")
        self._sources = np.load(path / "sources.npy", mmap_mode="r")  # int64 [examples, 2]: file, line
        tokens = int(self.offsets[-1])
        self.ids = np.memmap(path / "ids.bin", np.int32, "r", shape=(tokens,))
        self.mask = np.memmap(path / "mask.bin", np.bool_, "r", shape=(tokens,))

    @classmethod
    def open(cls, path: str | os.PathLike) -> "TokenizedDataset":
        info = Path(path) / "info.json"
        if not info.is_file():
            raise ValueError(f"{path} is not a tokenised dataset (it has no info.json): delete the folder and build it again")
        return cls(Path(path), json.loads(info.read_text(encoding="utf-8")))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def example(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """ids and mask of one example."""
        start, end = self.offsets[index], self.offsets[index + 1]
        return self.ids[start:end], self.mask[start:end]

    def where(self, index: int) -> str:
        file, line = self._sources[index]
        return f"{self._files[file]}:{line}"

    def summary(self) -> str:
        """One line for the log; what was dropped is always in it."""
        report = self.report
        dropped = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in report["dropped"].items()) or "none"
        return (
            f"{report['rows']} rows -> {report['examples']} examples, {report['tokens']} tokens of which {report['loss_tokens']} carry loss; "
            f"truncated {report['truncated']}; dropped: {dropped}"
        )


def tokenize_files(
    files: list[str],
    tokenizer,
    *,
    max_length: int,
    cache_dir: str | os.PathLike,
    over_long: str = "drop",
    on_bad_row: str = "error",
    num_workers: int = 8,
    stop_ids=(),
    chat_template_kwargs: dict | None = None,
    rule: "RowRule | None" = None,
    progress: bool = True,
) -> TokenizedDataset:
    """Tokenises JSON Lines (.jsonl, .json) and Parquet files, or opens the result of an earlier call with the same input.

    To be called by one process. The result does not depend on `num_workers`, the most processes that tokenise (small input: this one).
    over_long: examples of more than max_length tokens are dropped and counted ("drop") or cut ("truncate").
    on_bad_row: the first bad row is a ValueError that names file and line ("error"), or bad rows are counted ("skip").
    A file that gives no example at all is a ValueError.
    rule: what becomes of a row; without one, a conversation gives examples that stand alone.
    """
    for name, value, allowed in (("over_long", over_long, ("drop", "truncate")), ("on_bad_row", on_bad_row, ("error", "skip"))):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    if not files:
        raise ValueError("no data files given")
    settings = Settings(max_length, over_long, on_bad_row, tuple(stop_ids), dict(chat_template_kwargs or {}), rule or RowRule())
    key = hashlib.sha256(
        json.dumps([[file_fingerprint(f) for f in files], tokenizer_fingerprint(tokenizer), settings.key(), code_fingerprint()]).encode()
    ).hexdigest()[:32]
    path = Path(cache_dir) / key
    if not (path / "info.json").is_file():
        _build(path, [str(f) for f in files], tokenizer, settings, num_workers, progress)
    dataset = TokenizedDataset.open(path)
    logger.info("%s: %s", ", ".join(map(str, files)), dataset.summary())
    for message in (line for file in map(str, files) for line in unused_columns(file)):
        logger.warning(message)
    for message in dataset.report["bad_rows"]:
        logger.warning("skipped %s", message)
    for note, count in dataset.report["notes"].items():
        logger.warning("%s in %d rows", note.replace("_", " "), count)
    return dataset


@dataclass(frozen=True)
class Settings:
    max_length: int
    over_long: str
    on_bad_row: str
    stop_ids: tuple
    chat_template_kwargs: dict
    rule: "RowRule"

    def key(self) -> list:
        kwargs = sorted(self.chat_template_kwargs.items())
        return [self.max_length, self.over_long, self.on_bad_row, sorted(self.stop_ids), kwargs, self.rule.fingerprint()]


class RowRule:
    """What becomes of a row: here, examples that stand alone. A method with other rows passes a subclass (one that can be pickled).

    `group`: so many successive examples belong together; `pack` never parts them.
    """

    group = 1

    def fingerprint(self) -> str:
        """Changes with the rule's name and code."""
        source = Path(sys.modules[type(self).__module__].__file__).read_bytes()
        return f"{type(self).__qualname__} {hashlib.sha256(source).hexdigest()}"

    def render(self, chat: Chat, row: dict) -> list[Rendered]:
        """The texts of a row; none where there is nothing to learn. Raises BadRow."""
        return chat.render(row)

    def keep(self, chat: Chat, renders: list[Rendered], examples: list[Example], settings: Settings, part: "Part") -> list[Example]:
        """What of a row's tokenised texts enters the dataset. Counts in `part` what is truncated, and by reason what is dropped."""
        if not examples:
            part.dropped["nothing_to_learn"] += 1
        kept = []
        for ids, mask in examples:
            if len(ids) > settings.max_length:
                if settings.over_long == "drop":
                    part.dropped["over_long"] += 1
                    continue
                part.truncated += 1
                ids, mask = ids[: settings.max_length], mask[: settings.max_length]
            if not any(mask):
                part.dropped["nothing_to_learn"] += 1
                continue
            kept.append(Example(ids, mask))
        return kept


def file_fingerprint(path: str | os.PathLike) -> list:
    """Name, size, time of change and a hash of both ends: reading all of a large file would cost as much as tokenising it is worth."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"data file {path} does not exist or is not a file")
    stat = path.stat()
    with open(path, "rb") as stream:
        digest = hashlib.sha256(stream.read(1 << 16))
        stream.seek(max(0, stat.st_size - (1 << 16)))
        digest.update(stream.read())
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns, digest.hexdigest()]


def tokenizer_fingerprint(tokenizer) -> str:
    """Hash of everything that decides ids and masks: vocabulary and rules, added tokens, special tokens, chat template, stop ids."""
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        rules.pop("padding", None), rules.pop("truncation", None)  # state of the last call, not of the tokenizer
    else:
        rules = sorted(tokenizer.get_vocab().items())
    added = sorted((index, str(token), token.special) for index, token in tokenizer.added_tokens_decoder.items())
    parts = [rules, added, tokenizer.special_tokens_map, tokenizer.chat_template, generation_stop_ids(tokenizer)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def code_fingerprint() -> list[str]:
    """A cache made by other code may hold other masks."""
    sources = [Path(module.__file__).read_bytes() for module in (chat_module, rows_module, sys.modules[__name__])]
    return [hashlib.sha256(b"".join(sources)).hexdigest(), transformers.__version__, tokenizers.__version__]


# ---- tokenising, in units that workers take


@dataclass
class Part:
    """What one unit gave. Lines count from 1 inside the unit. Token arrays lie in files beside each other: `<stem>.ids`, `<stem>.mask`."""

    stem: str
    rows: int = 0
    lines_read: int = 0
    lengths: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    loss_tokens: int = 0
    truncated: int = 0
    dropped: Counter = field(default_factory=Counter)
    notes: Counter = field(default_factory=Counter)
    bad_rows: list[tuple[int, str]] = field(default_factory=list)


def tokenize_unit(unit: Unit, chat: Chat, settings: Settings, stem: str) -> Part:
    """Writes the unit's tokens to `<stem>.ids` and `<stem>.mask`. With on_bad_row="error" it stops at the first bad row."""
    part = Part(stem)
    chat.notes.clear()
    waiting: list[tuple[int, float, list]] = []
    try:
        with open(f"{stem}.ids", "wb") as ids_file, open(f"{stem}.mask", "wb") as mask_file:
            for line, row in read_unit(unit):
                part.lines_read = line
                if row is None:
                    continue
                part.rows += 1
                try:
                    if isinstance(row, BadRow):
                        raise row
                    waiting.append((line, row_weight(row), settings.rule.render(chat, row)))
                except BadRow as error:
                    part.dropped["bad_row"] += 1
                    part.bad_rows.append((line, str(error)))
                    if settings.on_bad_row == "error":
                        break
                if len(waiting) == ROWS_PER_CALL:
                    _encode(waiting, chat, settings, part, ids_file, mask_file)
            _encode(waiting, chat, settings, part, ids_file, mask_file)
    except Exception as error:
        error.add_note(f"while reading {unit.file}, about {part.lines_read} lines after {unit}")
        raise
    part.notes = +chat.notes
    return part


def _encode(waiting: list, chat: Chat, settings: Settings, part: Part, ids_file, mask_file) -> None:
    encoded = iter(chat.encode([rendered for _, _, renders in waiting for rendered in renders]))
    for line, weight, renders in waiting:
        for ids, mask in settings.rule.keep(chat, renders, [next(encoded) for _ in renders], settings, part):
            ids_file.write(np.asarray(ids, np.int32).tobytes())
            mask_file.write(np.asarray(mask, np.bool_).tobytes())
            part.lengths.append(len(ids))
            part.lines.append(line)
            part.weights.append(weight)
            part.loss_tokens += sum(mask)
    waiting.clear()


_worker: tuple[Chat, Settings] | None = None


def _start_worker(tokenizer, settings: Settings) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    _worker = (Chat(tokenizer, stop_ids=settings.stop_ids, chat_template_kwargs=settings.chat_template_kwargs), settings)


def _work(unit: Unit, stem: str) -> Part:
    chat, settings = _worker
    return tokenize_unit(unit, chat, settings, stem)


def tokenized_parts(units: list[Unit], tokenizer, settings: Settings, folder: Path, num_workers: int) -> Iterator[Part]:
    """Parts in the order of `units`, whichever worker is done first."""
    stems = [str(folder / f"part-{i:06d}") for i in range(len(units))]
    if num_workers <= 1:
        chat = Chat(tokenizer, stop_ids=settings.stop_ids, chat_template_kwargs=settings.chat_template_kwargs)
        for unit, stem in zip(units, stems, strict=True):
            yield tokenize_unit(unit, chat, settings, stem)
        return
    # Spawned, not forked: the caller may hold CUDA and communication threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, _start_worker, (tokenizer, settings)) as pool:
        running, todo = deque(), deque(zip(units, stems, strict=True))
        try:
            while todo or running:
                while todo and len(running) < 2 * num_workers:  # a slow unit must not let finished ones pile up
                    running.append(pool.submit(_work, *todo.popleft()))
                yield running.popleft().result()
        except BrokenProcessPool as error:
            raise RuntimeError("a process that tokenises was killed, probably for want of memory: lower the number of workers") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _build(path: Path, files: list[str], tokenizer, settings: Settings, num_workers: int, progress: bool) -> None:
    units = split_into_units(files)
    size = sum(unit.size for unit in units)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    num_workers = 1 if size < WORKERS_FROM_BYTES else min(num_workers, cores, len(units))
    folder = path.with_name(f"{path.name}.building-{uuid.uuid4().hex[:8]}")
    folder.mkdir(parents=True)
    try:
        with tqdm(total=size, unit="B", unit_scale=True, desc="tokenising", disable=not progress) as bar:
            with closing(tokenized_parts(units, tokenizer, settings, folder, num_workers)) as parts:
                _write(folder, files, zip(units, parts, strict=True), settings, bar)
        try:
            os.rename(folder, path)
        except OSError:
            if not (path / "info.json").is_file():  # else another run has built the same dataset meanwhile
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, files: list[str], parts, settings: Settings, bar) -> None:
    """Joins the parts into the arrays of the dataset."""
    report = {
        "rows": 0,
        "examples": 0,
        "tokens": 0,
        "loss_tokens": 0,
        "truncated": 0,
        "dropped": Counter(),
        "notes": Counter(),
        "bad_rows": [],
    }
    per_file = [Counter() for _ in files]
    lengths, sources, weights, lines_before = [], [], [], 0
    current_file = -1
    content = {".ids": hashlib.sha256(), ".mask": hashlib.sha256()}
    with open(folder / "ids.bin", "wb") as ids_file, open(folder / "mask.bin", "wb") as mask_file:
        for unit, part in parts:
            if unit.file_index != current_file:
                current_file, lines_before = unit.file_index, 0
            if part.bad_rows and settings.on_bad_row == "error":
                line, message = part.bad_rows[0]
                raise ValueError(f"{unit.file}:{lines_before + line}: {message} (on_bad_row=skip drops and counts such rows)")
            for suffix, target in ((".ids", ids_file), (".mask", mask_file)):
                with open(part.stem + suffix, "rb") as source:
                    while block := source.read(1 << 20):
                        target.write(block)
                        content[suffix].update(block)
                os.remove(part.stem + suffix)
            lengths.append(np.array(part.lengths, np.int64))
            sources.append(np.array([(unit.file_index, lines_before + line) for line in part.lines], np.int64).reshape(-1, 2))
            weights.append(np.array(part.weights, np.float32))
            room = KEPT_MESSAGES - len(report["bad_rows"])
            report["bad_rows"] += [f"{unit.file}:{lines_before + line}: {message}" for line, message in part.bad_rows[:room]]
            report["dropped"] += part.dropped
            report["notes"] += part.notes
            report["rows"] += part.rows
            report["loss_tokens"] += part.loss_tokens
            report["truncated"] += part.truncated
            per_file[unit.file_index] += Counter(part.dropped, rows=part.rows, examples=len(part.lengths))
            lines_before += part.lines_read
            bar.update(unit.size)
    for file, counts in zip(files, per_file, strict=True):
        if not counts["examples"]:
            why = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in counts.items() if reason not in ("rows", "examples"))
            first = next((message for message in report["bad_rows"] if message.startswith(f"{file}:")), "")
            raise ValueError(
                f"{file} holds nothing to learn from: {counts['rows']} rows, {why or 'no rows'}. {first}\n"
                "Only assistant turns (or completions) carry loss; look at max_length, the roles and the column names."
            )
    lengths, weights = np.concatenate(lengths), np.concatenate(weights)
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]))
    np.save(folder / "sources.npy", np.concatenate(sources))
    np.save(folder / "weights.npy", weights)
    report |= {"examples": len(lengths), "tokens": int(lengths.sum())}
    hashes = [digest.hexdigest() for digest in content.values()] + [hashlib.sha256(a.tobytes()).hexdigest() for a in (lengths, weights)]
    info = {"content": hashlib.sha256("".join(hashes).encode()).hexdigest(), "files": files, "settings": settings.key(), "report": report}
    (folder / "info.json").write_text(json.dumps(info, indent=1), encoding="utf-8")
    for file in folder.iterdir():  # bytes before the name that vouches for them
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())


# ---- bins


@dataclass(frozen=True)
class Bins:
    """Bin b holds the examples rows[offsets[b]:offsets[b+1]]."""

    rows: np.ndarray  # int64 [examples]
    offsets: np.ndarray  # int64 [B + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.rows[self.offsets[index] : self.offsets[index + 1]]

    def fullest(self) -> int:
        """The bin with most rows, for checks that compare rows of a bin: long rows have bins to themselves."""
        return int(np.diff(self.offsets).argmax())


def pack(lengths: np.ndarray, max_length: int, packing: bool = True, group: int = 1) -> Bins:
    """Best-fit decreasing: the longest example first, each into the fullest bin that still has room. The same input gives the same bins.

    With packing off every example is a bin of its own, in order. Every `group` successive examples are placed as one, in order.
    """
    if group > 1:
        groups = pack(np.asarray(lengths, np.int64).reshape(-1, group).sum(axis=1), max_length, packing)
        return Bins((groups.rows[:, None] * group + np.arange(group)).reshape(-1), groups.offsets * group)
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and lengths.max() > max_length:
        raise ValueError(f"an example of {lengths.max()} tokens does not fit a bin of max_length {max_length}")
    if not packing:
        return Bins(np.arange(len(lengths)), np.arange(len(lengths) + 1))
    order = np.argsort(-lengths, kind="stable")
    bin_of = np.empty(len(lengths), np.int64)  # in the order of placing
    open_bins: list[list[int]] = [[] for _ in range(max_length + 1)]  # by remaining room
    rooms = 0  # bit r is set when some bin has r tokens of room left
    num_bins = 0
    values, starts = np.unique(lengths[order][::-1], return_index=True)
    stops = len(order) - starts  # the run of one length ends here, lengths descending
    at = 0
    for length, stop in zip(values[::-1].tolist(), stops[::-1].tolist(), strict=True):
        while at < stop:
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                index = open_bins[room].pop()
                if not open_bins[room]:
                    rooms ^= 1 << room
            else:
                room, index = max_length, num_bins
                num_bins += 1
            # Examples of one length follow each other into the bin: after the first it is the fullest that has room.
            count = min(room // length, stop - at)
            bin_of[at : at + count] = index
            at += count
            room -= count * length
            if not open_bins[room]:
                rooms |= 1 << room
            open_bins[room].append(index)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(bin_of, minlength=num_bins))]).astype(np.int64)
    return Bins(order[np.argsort(bin_of, kind="stable")], offsets)


BIN_NEEDS = (
    "(ranks x accumulation x bins a micro-batch): add rows, lower max_length, or lower gradient_accumulation_steps or "
    "per_device_train_batch_size"
)


class Order:
    """The order of bins: a permutation for each epoch that depends on nothing but (seed, epoch), cut at whole windows.

    A position (epoch, offset) is all that a checkpoint needs. It counts bins of the whole job, so it holds for any number of ranks.
    """

    def __init__(self, num_bins: int, seed: int, what: str = "bins", needs: str = BIN_NEEDS):
        """what: the things that are ordered; needs: what makes a window of them and what to do where there are too few; for messages."""
        self.num_bins, self.seed, self.what, self.needs = num_bins, seed, what, needs
        self._epoch, self._permutation = -1, None

    def next(self, epoch: int, offset: int, count: int) -> tuple[np.ndarray, int, int]:
        """`count` bin ids from position (epoch, offset) on, and the position after them.

        Where fewer than `count` bins are left in the epoch they are dropped and the next epoch starts; so the returned
        offset is never a place from which no window can be cut, and epoch == n exactly when n epochs are done.
        """
        self.steps_per_epoch(count)
        if offset + count > self.num_bins:
            epoch, offset = self._finish(epoch, offset)
        ids = self._of(epoch)[offset : offset + count]
        offset += count
        if offset + count > self.num_bins:
            epoch, offset = self._finish(epoch, offset)
        return ids, epoch, offset

    def steps_per_epoch(self, count: int) -> int:
        """Whole windows of `count` bins in an epoch. ValueError when there is not even one."""
        if self.num_bins < count:
            raise ValueError(f"the data gives {self.num_bins} {self.what} but one optimizer step needs {count} {self.needs}")
        return self.num_bins // count

    def _finish(self, epoch: int, offset: int) -> tuple[int, int]:
        if offset < self.num_bins:
            logger.info(
                "end of epoch %d: the last %d of %d %s do not fill a step and are dropped",
                epoch, self.num_bins - offset, self.num_bins, self.what,
            )  # fmt: skip
        return epoch + 1, 0

    def _of(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_bins)
        return self._permutation


# ---- micro-batches


@dataclass
class PackedBatch:
    """One row of T tokens: N segments one after the other, the padding (if any) the last of them."""

    input_ids: torch.Tensor  # [1, T] int64
    position_ids: torch.Tensor  # [1, T] int64, restarts in every segment
    seq_idx: torch.Tensor  # [1, T] int32, number of the segment
    cu_seq_lens: torch.Tensor  # [N + 1] int32
    max_length: int  # an upper bound of the longest segment
    targets: torch.Tensor  # [1, T] int64: the next token where it carries loss and is in the same segment, else -100
    weights: torch.Tensor  # [1, T] float32: weight of the target's row, 0 where there is no target
    num_tokens: int  # padding excluded
    rows: list[int]  # examples of the dataset, in order

    def to(self, device) -> "PackedBatch":
        moved = {
            f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self) if torch.is_tensor(getattr(self, f.name))
        }
        return replace(self, **moved)

    def squared_lengths(self) -> int:
        """Sum of the squared lengths of the segments (padding excluded): what attention costs."""
        return int((self.cu_seq_lens.diff().long()[: len(self.rows)] ** 2).sum())

    def model_inputs(self) -> dict:
        """Arguments of the model. All of them always: a model that is given only some silently mixes the segments."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.cu_seq_lens,
            "cu_seq_lens_k": self.cu_seq_lens,
            "max_length_q": self.max_length,
            "max_length_k": self.max_length,
            "seq_idx": self.seq_idx,
            "use_cache": False,
        }


def collate(dataset: TokenizedDataset, bins: Bins, bin_ids, *, pad_to: int | None = None, zero_weight: bool = False) -> PackedBatch:
    """The examples of some bins as one micro-batch.

    pad_to: T is filled up to this with a segment of its own that has no targets (constant shapes for compiled kernels).
    zero_weight: the batch takes part in the forward pass but has no targets (a rank that has run out of rows).
    """
    if not len(bin_ids):
        raise ValueError("a micro-batch needs at least one bin")
    rows = np.concatenate([bins[b] for b in bin_ids]).tolist()
    examples = [dataset.example(row) for row in rows]
    ids = np.concatenate([ids for ids, _ in examples]).astype(np.int64)
    learned = np.concatenate([mask for _, mask in examples])
    lengths = np.array([len(ids) for ids, _ in examples])
    num_tokens = len(ids)
    weights = np.repeat(np.asarray(dataset.weights[rows], np.float32), lengths)
    if pad_to is not None and pad_to < num_tokens:
        raise ValueError(f"{num_tokens} tokens do not fit into pad_to={pad_to}")
    if pad_to is not None and (padding := pad_to - num_tokens):
        lengths = np.append(lengths, padding)
        ids, learned, weights = (np.pad(array, (0, padding)) for array in (ids, learned, weights))
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    learned[boundaries[:-1]] = False  # the first token of a segment must not be predicted from the segment before
    has_target = np.append(learned[1:], False) & (not zero_weight)
    return PackedBatch(
        input_ids=torch.from_numpy(ids)[None],
        position_ids=torch.from_numpy(np.arange(len(ids)) - np.repeat(boundaries[:-1], lengths))[None],
        seq_idx=torch.from_numpy(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))[None],
        cu_seq_lens=torch.from_numpy(boundaries.astype(np.int32)),
        max_length=pad_to or int(lengths.max()),
        targets=torch.from_numpy(np.where(has_target, np.append(ids[1:], 0), NO_TARGET))[None],
        weights=torch.from_numpy(np.where(has_target, weights, 0).astype(np.float32))[None],
        num_tokens=num_tokens,
        rows=rows,
    )


# ---- looking at what carries loss


def describe(batch: PackedBatch, tokenizer, *, max_segments: int = 2, max_pieces: int = 20, max_chars: int = 600) -> str:
    """The first segments as text; what carries loss stands between {+ and +}. Printable on this process's terminal, whatever its encoding.

    A piece of text between two marks keeps its beginning and end, max_chars in all.
    """
    boundaries = batch.cu_seq_lens.tolist()
    lines = []
    for segment in range(min(len(batch.rows), max_segments)):
        start, end = boundaries[segment], boundaries[segment + 1]
        ids = batch.input_ids[0, start:end].tolist()
        learned = [False] + (batch.targets[0, start : end - 1] != NO_TARGET).tolist()
        cuts = [0, *(i for i in range(1, len(ids)) if learned[i] != learned[i - 1]), len(ids)]
        text = ""
        for first, last in list(pairwise(cuts))[:max_pieces]:
            piece = tokenizer.decode(ids[first:last], clean_up_tokenization_spaces=False)
            if len(piece) > max_chars:
                piece = f"{piece[: max_chars // 2]} ... {len(piece) - max_chars} characters ... {piece[-max_chars // 2 :]}"
            text += f"{{+{piece}+}}" if learned[first] else piece
        if len(cuts) - 1 > max_pieces:
            text += f" ... {len(cuts) - 1 - max_pieces} more pieces"
        lines.append(f"example {batch.rows[segment]} ({end - start} tokens, {sum(learned)} carry loss):\n{text}")
    return terminal_safe("\n".join(lines))


def terminal_safe(text: str) -> str:
    """Escapes what stdout or stderr cannot encode (a UnicodeEncodeError would end the run) and control characters that would act on the terminal."""
    text = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    for stream in (sys.stdout, sys.stderr):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, errors="backslashreplace").decode(encoding)
    return text
