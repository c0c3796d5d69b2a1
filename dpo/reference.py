"""Log-probabilities of the untrained model, computed once before training, with the model that is then trained.

    OUTPUT_DIR/reference/train/   key.json        everything that could change the numbers; compared at every start
                                  part-00003.bin  records of rank 3, appended row by row: they survive a kill, on any number of ranks
                                  sums.npy        [examples] float64, memory-mapped; written when all parts are there

The same kernels, precision and packing as in training, so that the first loss is ln 2 and not noise of a router that chose otherwise.
No second model is ever in memory, and a resumed run reads what was computed before its first step.
"""

import hashlib
import json
import logging
import os
from pathlib import Path

import numpy as np
import torch
import transformers

from common import attention, config, dist, fp8, fsdp, logprobs, run
from common.config import DataArguments, ModelArguments
from common.data import Bins, TokenizedDataset
from common.jsonl import write_json
from dpo import data as pair_data
from dpo.data import answer_sums, collate_pairs, rows_of_rank

log = logging.getLogger(__name__)

RECORD = np.dtype([("example", "<i8"), ("logps", "<f8"), ("tokens", "<i8")])
SYNC_EVERY = 100  # bins of a rank between two flushes to disk; a killed process loses none, a machine that dies up to this many

# Options of the model that leave its log-probabilities as they are; the path does not count, the weights' fingerprint does.
NO_CHANGE = (
    "model_name_or_path", "gradient_checkpointing", "load_balancing_coef",
    "detach_moe_output", "frozen_shard_group", "expert_units_per_layer",
)  # fmt: skip


def code_fingerprint() -> str:
    """Hash of the code that decides the numbers."""
    sources = [Path(module.__file__) for module in (attention, fp8, fsdp, logprobs, pair_data)] + [Path(__file__)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def key_of(dataset: TokenizedDataset, bins: Bins, model: run.Model, model_args: ModelArguments, data_args: DataArguments) -> dict:
    """Everything that could change a reference log-probability, by a name that says what it is."""
    return {
        "data": dataset.key,  # ids, masks and weights: files, tokenizer, chat template and truncation are in it
        "max_length": data_args.max_length,
        "packing": data_args.packing,
        "bins": hashlib.sha256(bins.rows.tobytes() + bins.offsets.tobytes()).hexdigest(),
        "model": model.base.fingerprint,
        **{name: value for name, value in config.resolved(model_args).items() if name not in NO_CHANGE},
        "device": dist.device().type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "code": code_fingerprint(),
    }


def compute_reference(
    folder: Path,
    model: run.Model,
    dataset: TokenizedDataset,
    bins: Bins,
    key: dict,
    *,
    bins_per_row: int,
    pad_to: int | None,
    stop_dir: Path,
) -> np.ndarray | None:
    """Summed log-probability of every example [examples] float64, memory-mapped; None if STOP appeared in `stop_dir` meanwhile.

    Rows are those of training: `bins_per_row` bins, padded to `pad_to` tokens.
    A collective, to be called before anything is loaded into the model. ValueError where `folder` belongs to other data or another model.
    """
    result = folder / "sums.npy"
    todo = None
    with dist.main_rank_first() as mine:
        if mine:
            check_key(folder, key)
            if not result.exists():
                done = np.isfinite(read_parts(folder, dataset))
                todo = np.array([b for b in range(len(bins)) if not done[bins[b]].all()], np.int64)
    todo = dist.broadcast_object(todo)
    if todo is not None:
        if not forward_bins(folder, model, dataset, bins, todo, bins_per_row, pad_to, stop_dir):
            return None
        with dist.main_rank_first() as mine:
            if mine:
                merge(folder, dataset)
    return open_sums(result, dataset)


def open_sums(path: Path, dataset: TokenizedDataset) -> np.ndarray:
    """ValueError where a disk that ran full or a copy that broke off has left another number of values."""
    try:
        sums = np.load(path, mmap_mode="r")
        if sums.shape != (len(dataset),) or sums.dtype != np.float64:
            raise ValueError(f"it holds {sums.shape} values of {sums.dtype}, the data has {len(dataset)} answers")
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be used: {error}. Delete {path.parent} to compute it anew.") from error
    return sums


def check_key(folder: Path, key: dict) -> None:
    """Writes key.json into a new folder; ValueError that names what differs where there is one of something else."""
    path = folder / "key.json"
    if not path.exists():
        write_json(path, key)
        return
    try:
        saved = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Delete {folder} to compute the reference anew.") from error
    changed = [f"{name} was {saved.get(name)}, now {key.get(name)}" for name in sorted({*saved, *key}) if saved.get(name) != key.get(name)]
    if changed:
        raise ValueError(
            f"{folder} holds reference log-probabilities of something else: {'; '.join(changed)}. "
            f"Give another output_dir, or delete {folder} to compute them anew."
        )


def part_path(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank:05d}.bin"


def forward_bins(
    folder: Path,
    model: run.Model,
    dataset: TokenizedDataset,
    bins: Bins,
    todo: np.ndarray,
    bins_per_row: int,
    pad_to: int | None,
    stop_dir: Path,
) -> bool:
    """Appends the answers' log-probabilities of the bins `todo` to this rank's part. False if STOP appeared."""
    path = part_path(folder, dist.rank())
    if path.exists():  # a record that a kill cut short would shift all that follow
        os.truncate(path, path.stat().st_size // RECORD.itemsize * RECORD.itemsize)
    log.info("reference log-probabilities: %d of %d bins to compute, in %s", len(todo), len(bins), folder)
    model.sharded.train(False)
    bar = dist.progress(len(todo), "reference", "bin")
    stopped = False
    with open(path, "ab") as file, torch.no_grad():
        for count, (bin_ids, filler) in enumerate(rows_of_rank(todo, bins_per_row)):
            stopped = bool(run.agree(run.stop_requested(stop_dir))[0])
            if stopped:
                break
            batch = collate_pairs(dataset, bins, bin_ids, None, pad_to=pad_to, zero_weight=filler).to(dist.device())
            packed = batch.packed
            output = model.sharded(packed.model_inputs(), packed.targets, num_tokens=packed.num_tokens)
            if not filler:
                records = np.empty(len(packed.rows), RECORD)
                records["example"], records["tokens"] = packed.rows, batch.lengths.cpu()
                records["logps"] = answer_sums(output.logps, packed).cpu()
                if not np.isfinite(records["logps"]).all():
                    where = ", ".join(dataset.where(row) for row in packed.rows)
                    raise RuntimeError(f"the base model gives log-probabilities that are not finite, in a bin of {where}")
                file.write(records.tobytes())
                file.flush()
                if count % SYNC_EVERY == 0:
                    os.fsync(file.fileno())
            bar.update(min(dist.world_size() * bins_per_row, len(todo) - bar.n))
        os.fsync(file.fileno())
    bar.close()
    model.sharded.train()
    dist.barrier()  # every part is on disk
    return not stopped


def answer_lengths(dataset: TokenizedDataset) -> np.ndarray:
    """Tokens of each example that carry loss [examples]."""
    return np.add.reduceat(dataset.mask.view(np.uint8), dataset.offsets[:-1], dtype=np.int64)


def read_parts(folder: Path, dataset: TokenizedDataset) -> np.ndarray:
    """Log-probability sums [examples] of all parts; NaN where there is no whole record. A record must name its answer's length."""
    sums, lengths = np.full(len(dataset), np.nan), answer_lengths(dataset)
    for path in sorted(folder.glob("part-*.bin")):
        content = path.read_bytes()
        records = np.frombuffer(content, RECORD, count=len(content) // RECORD.itemsize)
        records = records[(records["example"] >= 0) & (records["example"] < len(dataset))]
        records = records[records["tokens"] == lengths[records["example"]]]
        sums[records["example"]] = records["logps"]
    return sums


def merge(folder: Path, dataset: TokenizedDataset) -> None:
    """All parts as one array, written under a temporary name and renamed."""
    sums = read_parts(folder, dataset)
    missing = np.flatnonzero(~np.isfinite(sums))
    if len(missing):
        first = dataset.where(missing[0])
        raise RuntimeError(f"{folder}: {len(missing)} of {len(sums)} reference log-probabilities are missing, the first of {first}")
    temporary = folder / "sums.tmp"
    with open(temporary, "wb") as file:
        np.save(file, sums)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / "sums.npy")
    for path in folder.glob("part-*.bin"):
        path.unlink()
    log.info("reference log-probabilities of %d answers, mean %.3f: %s", len(sums), sums.mean(), folder / "sums.npy")
