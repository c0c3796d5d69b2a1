"""Answers as packed rows: mini-batches (one optimizer step each) of micro-batches, with everything that the loss needs at hand.

Shapes: N completion tokens of a packed row, R answers in it.
"""

import json
import os
import zipfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common import dist
from common.data import Bins, PackedBatch, collate, pack
from common.logprobs import NO_TARGET
from grpo import objectives
from grpo.objectives import ObjectiveArguments
from grpo.rollout import Answer, rollout_path


class AnswerRows:
    """Answers in the form that `common.data.collate` takes: ids and loss mask of prompt + completion."""

    def __init__(self, answers: list[Answer]):
        self.answers = answers
        self.weights = np.ones(len(answers), np.float32)

    def lengths(self) -> np.ndarray:
        return np.array([len(a.question.prompt_ids) + len(a.completion.completion_ids) for a in self.answers], np.int64)

    def example(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        prompt, completion = self.answers[index].question.prompt_ids, self.answers[index].completion.completion_ids
        return np.array(prompt + completion, np.int64), np.arange(len(prompt) + len(completion)) >= len(prompt)


@dataclass
class MicroBatch:
    """One packed row of one rank. Without targets where a rank has run out of rows: it still takes part in every collective."""

    packed: PackedBatch
    answers: list[int]  # index of each answer [R] among those of the rollout; empty in a row without targets
    row: Tensor  # [N] the answer that a token belongs to, an index into `answers`
    advantages: Tensor  # [R] float64
    sampled: Tensor  # [N] log-probabilities of the engine
    policy: Tensor  # [N] bool: the answer takes part in the policy term
    divergence: Tensor  # [N] bool: the answer takes part in the KL term
    old: Tensor | None = None  # [N] log-probabilities of the trainer at the weights of the rollout
    reference: Tensor | None = None  # [N] those of the untrained model
    weights: Tensor | None = None  # [N] correction, 0 where it rejects the token
    policy_scale: Tensor | None = None  # [N]
    kl_scale: Tensor | None = None  # [N]

    def to(self, device) -> "MicroBatch":
        moved = {name: value.to(device) for name, value in vars(self).items() if torch.is_tensor(value)}
        return replace(self, packed=self.packed.to(device), **moved)

    def of_targets(self, values: Tensor) -> Tensor:
        """values [T] of the packed row at its completion tokens [N]."""
        return values[self.packed.targets.flatten() != NO_TARGET]


def is_trained(answer: Answer, mask_truncated: bool) -> bool:
    return answer.informative and not (mask_truncated and answer.completion.finish_reason == "length")


def _mini_batch_of(answers: list[Answer], num_minibatches: int) -> dict[str, int]:
    """The mini-batch of each prompt, by its id: prompts go to them whole, in order."""
    ids = list(dict.fromkeys(answer.question.id for answer in answers))
    return {name: number * num_minibatches // len(ids) for number, name in enumerate(ids)}


def why_idle(answers: list[Answer], num_minibatches: int, mask_truncated: bool) -> list[str]:
    """For each mini-batch how many of its answers do not train, by reason; the same on all ranks."""
    place = _mini_batch_of(answers, num_minibatches)
    counts = [Counter() for _ in range(num_minibatches)]
    for answer in answers:
        unscored, equal = answer.reward is None, not answer.informative
        cut = mask_truncated and answer.completion.finish_reason == "length"
        # What trains is still out where the correction rejects all its tokens.
        reason = "not scored" if unscored else "in groups of equal rewards" if equal else "cut off" if cut else "scored and different"
        counts[place[answer.question.id]][reason] += 1
    return [f"of {count.total()} answers " + (", ".join(f"{n} {why}" for why, n in count.items()) or "none is there") for count in counts]


def make_mini_batches(
    answers: list[Answer],
    num_minibatches: int,
    *,
    max_length: int,
    bins_per_row: int,
    packing: bool,
    pad_to: int | None,
    mask_truncated: bool,
    with_kl: bool,
) -> list[list[MicroBatch]]:
    """This rank's micro-batches of each mini-batch; every rank has equally many in each. All ranks pass the same answers.

    Prompts go to mini-batches whole, in order. Answers that no term of the loss sees are left out; a mini-batch may be empty.
    """
    place = _mini_batch_of(answers, num_minibatches)
    data = AnswerRows(answers)
    lengths = data.lengths()
    batches = []
    for number in range(num_minibatches):
        chosen = [
            index
            for index, answer in enumerate(answers)
            if place[answer.question.id] == number
            and (is_trained(answer, mask_truncated) or (with_kl and _in_divergence(answer, mask_truncated)))
        ]
        bins = _pack(lengths[chosen], max_length, packing, dist.world_size() * bins_per_row, fixed=pad_to is not None)
        bins = Bins(np.array(chosen, np.int64)[bins.rows], bins.offsets)
        size = bins_per_row * dist.world_size()
        rows = []
        for first in range(0, len(bins), size):
            start = first + dist.rank() * bins_per_row
            mine = [b for b in range(start, start + bins_per_row) if b < len(bins)]
            rows.append(_micro_batch(data, bins, mine, pad_to, mask_truncated))
        batches.append(rows)
    return batches


def _in_divergence(answer: Answer, mask_truncated: bool) -> bool:
    return not (mask_truncated and answer.completion.finish_reason == "length")


def _pack(lengths: np.ndarray, max_length: int, packing: bool, bins_per_window: int, fixed: bool) -> Bins:
    """Bins of up to max_length tokens; where the last window would stay partly empty, shorter ones, so that all ranks have work."""
    bins = pack(lengths, max_length, packing)
    room = -(-len(bins) // bins_per_window) * bins_per_window
    if packing and not fixed and len(bins) < room:
        even = pack(lengths, max(int(lengths.max()), int(1.1 * lengths.sum() / room)), packing)
        bins = even if len(even) <= room else bins
    return bins


def _micro_batch(data: AnswerRows, bins: Bins, mine: list[int], pad_to: int | None, mask_truncated: bool) -> MicroBatch:
    packed = collate(data, bins, mine or [len(bins) - 1], pad_to=pad_to, zero_weight=not mine)
    rows = packed.rows if mine else []
    answers = [data.answers[index] for index in rows]
    counts = torch.tensor([len(answer.completion.completion_ids) for answer in answers], dtype=torch.int64)
    row = torch.repeat_interleave(torch.arange(len(answers)), counts)

    def per_token(values, dtype):
        return torch.tensor(values, dtype=dtype)[row] if rows else torch.zeros(0, dtype=dtype)

    return MicroBatch(
        packed,
        rows,
        row,
        torch.tensor([answer.advantage for answer in answers], dtype=torch.float64),
        torch.tensor([logp for answer in answers for logp in answer.completion.logps], dtype=torch.float32),
        per_token([is_trained(answer, mask_truncated) for answer in answers], torch.bool),
        per_token([_in_divergence(answer, mask_truncated) for answer in answers], torch.bool),
    )


def weigh(mini_batches: list[list[MicroBatch]], args: ObjectiveArguments, max_completion_length: int) -> list[Tensor]:
    """Sets each micro-batch's correction weights and scales, once `old` is there. A collective.

    Returns for each mini-batch the window's counts [4]: tokens and answers of the policy term, tokens and answers of the KL term.
    """
    windows = torch.zeros(len(mini_batches), 4, dtype=torch.float64, device=dist.device())
    for number, batches in enumerate(mini_batches):
        for batch in batches:
            num_rows = len(batch.answers)
            batch.weights = objectives.correction_weights(batch.old - batch.sampled, batch.row, num_rows, args)
            # A token that the correction rejects counts nowhere: neither in the sum nor in what divides it.
            batch.policy = batch.policy & (batch.weights > 0)
            both = [objectives.counts(mask, batch.row, num_rows) for mask in (batch.policy, batch.divergence)]
            windows[number] += torch.cat(both).to(windows.device)
    dist.all_sum(windows)
    for batches, window in zip(mini_batches, windows, strict=True):
        for batch in batches:
            batch.policy_scale, batch.kl_scale = (
                objectives.token_scales(mask, batch.row, len(batch.answers), part, args.loss_type, max_completion_length)
                for mask, part in ((batch.policy, window[:2]), (batch.divergence, window[2:]))
            )
    return list(windows.cpu())


# ---- log-probabilities on the disk: a run that stops between two updates of a rollout goes on with the same numbers


def logps_path(output_dir: Path, first_step: int) -> Path:
    return rollout_path(output_dir, "step", first_step).with_suffix(".npz")


def _places(answers: list[Answer]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([len(answer.completion.completion_ids) for answer in answers])])


def save_logps(path: Path, batches: list[MicroBatch], answers: list[Answer], figures: dict[str, float]) -> None:
    """Writes all ranks' log-probabilities and the rollout's figures. A collective."""
    parts = [(batch.answers, batch.old.numpy(), None if batch.reference is None else batch.reference.numpy()) for batch in batches]
    gathered = dist.gather_objects(parts)
    with dist.main_rank_first() as mine:
        if mine:
            places = _places(answers)
            arrays = {name: np.full(places[-1], np.nan, np.float32) for name in ("old", "reference")}
            for indices, *values in (part for rank_parts in gathered for part in rank_parts):
                where = np.concatenate([np.arange(places[i], places[i + 1]) for i in indices] or [np.zeros(0, np.int64)])
                for array, value in zip(arrays.values(), values, strict=True):
                    if value is not None:
                        array[where] = value
            kept = {name: value for name, value in figures.items() if not name.startswith("perf/")}
            temporary = path.with_suffix(".tmp")
            with open(temporary, "wb") as file:
                np.savez(file, figures=np.array(json.dumps(kept)), **arrays)
            os.replace(temporary, path)


def read_logps(path: Path) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """({old, reference}, figures) of `save_logps`. ValueError names a file that is torn."""
    try:
        with np.load(path) as saved:
            return {name: saved[name] for name in ("old", "reference")}, json.loads(str(saved["figures"]))
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read ({error}): restore it, or resume an earlier checkpoint.") from error


def load_logps(path: Path, batches: list[MicroBatch], answers: list[Answer]) -> None:
    """Sets each micro-batch's `old` and `reference`. ValueError where the file is not of these answers."""
    places, (saved, _) = _places(answers), read_logps(path)
    if len(saved["old"]) != places[-1]:
        raise ValueError(f"{path} holds {len(saved['old'])} log-probabilities, the answers beside it have {places[-1]} tokens")
    for batch in batches:
        where = np.concatenate([np.arange(places[i], places[i + 1]) for i in batch.answers] or [np.zeros(0, np.int64)])
        batch.old = torch.from_numpy(saved["old"][where])
        batch.reference = torch.from_numpy(saved["reference"][where])
        assert not batch.old.isnan().any(), path
