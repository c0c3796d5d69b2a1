"""One rollout from prompts to mini-batches: generate, score, advantages, the trainer's own log-probabilities, all of it on the disk.

What a step trains on is in OUTPUT_DIR/rollouts before it does. Where a rollout takes several optimizer steps, the log-probabilities are
kept beside it (step-000013.npz), so that a run that stops in between goes on with the same numbers.
"""

import json
import logging
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from common import dist, run
from common.config import DataArguments, ModelArguments, TrainArguments, option
from common.data import Bins, collate, terminal_safe
from common.fsdp import ShardedModel
from grpo import objectives
from grpo.advantages import compute_advantages
from grpo.batches import AnswerRows, MicroBatch, make_mini_batches, weigh
from grpo.objectives import ObjectiveArguments
from grpo.reference import ReferenceWeights
from grpo.rollout import (
    Ahead,
    Answer,
    Completion,
    Question,
    RolloutArguments,
    RolloutBackend,
    SyncReport,
    collect,
    completion_of,
    read_lines,
    rollout_path,
    write_lines,
)
from grpo.scoring import RewardArguments, RewardPool

log = logging.getLogger(__name__)

# Mean |log p of the engine - log p of the trainer| of sampled tokens that rounding explains; wrong weights or templates move it by more.
ENGINE_TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 1e-3}


@dataclass
class GRPOTrainArguments(TrainArguments):
    """The loop: how long, how fast, what is written."""

    learning_rate: float = option(1e-6, "Peak learning rate.")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = option("constant", "Shape after the warm-up; cosine and linear end at 0.")
    num_iterations: int = option(1, "Passes over the answers of one rollout.")
    num_minibatches: int = option(1, "Optimizer steps of one pass.")

    def __post_init__(self):
        super().__post_init__()
        if self.num_iterations < 1 or self.num_minibatches < 1:
            raise ValueError(f"num_iterations is {self.num_iterations}, num_minibatches {self.num_minibatches}; both must be at least 1.")
        if self.gradient_accumulation_steps != 1:
            raise ValueError(
                "gradient_accumulation_steps: a mini-batch takes as many micro-batches as its answers fill; use num_minibatches."
            )


@dataclass
class Setup:
    """What a rollout needs, for the length of a run."""

    model: run.Model
    backend: RolloutBackend
    tokenizer: PreTrainedTokenizerBase
    pool: RewardPool | None  # on rank 0
    reference: ReferenceWeights | None
    model_args: ModelArguments
    data_args: DataArguments
    rollout_args: RolloutArguments
    reward_args: RewardArguments
    objective: ObjectiveArguments
    args: GRPOTrainArguments
    output_dir: Path
    synced: int = -1  # optimizer steps behind the weights that the engine has
    ahead: Ahead | None = None  # the next rollout, where it is generated while this one trains
    ahead_step: int = 0  # the first step that will train on it

    @property
    def updates(self) -> int:
        """Optimizer steps of one rollout."""
        return self.args.num_iterations * self.args.num_minibatches

    @property
    def pad_to(self) -> int | None:
        return self.data_args.max_length * self.args.per_device_train_batch_size if self.model_args.compile else None


@dataclass
class Rollout:
    """Answers of one rollout on the way to the optimizer."""

    first_step: int  # the first step that trains on it
    mini_batches: list[list[MicroBatch]]
    windows: list[torch.Tensor]  # counts of each mini-batch, see grpo.batches.weigh
    figures: dict[str, float]
    version: int  # optimizer steps behind the weights that sampled it


def score(setup: Setup, answers: list[Answer]) -> None:
    """Fills in rewards and reward of each answer. Rank 0 calls the reward functions, the others wait for it."""
    scores = None
    dist.rest()  # reward functions may take longer than a collective is allowed to
    with dist.main_rank_first() as mine:
        if mine:
            groups: dict[str, list[int]] = {}
            for index, answer in enumerate(answers):
                groups.setdefault(answer.question.id, []).append(index)
            questions = [answers[indices[0]].question for indices in groups.values()]
            texts = [[answers[index].text for index in indices] for indices in groups.values()]
            results = setup.pool.score([(q.id, q.prompt, t, q.columns) for q, t in zip(questions, texts, strict=True)])
            scores = [None] * len(answers)
            for indices, result in zip(groups.values(), results, strict=True):
                for index, value in zip(indices, result, strict=True):
                    scores[index] = (value.rewards, value.reward)
    for answer, (rewards, reward) in zip(answers, dist.broadcast_object(scores), strict=True):
        answer.rewards, answer.reward = rewards, reward
    dist.beat()


def set_advantages(answers: list[Answer], args: RewardArguments) -> float:
    """Fills in advantages; returns the share of groups whose rewards are all equal."""
    ids = [answer.question.id for answer in answers]
    result = compute_advantages([answer.reward for answer in answers], ids, args.scale_rewards, args.std_floor)
    for answer, value, informative in zip(answers, result.values.tolist(), result.informative.tolist(), strict=True):
        answer.advantage, answer.informative = value, informative
    return result.collapse_rate


def reward_figures(answers: list[Answer], prefix: str) -> dict[str, float | None]:
    """Means over the answers that are scored; shares over all of them."""

    def mean(values):
        values = [float(value) for value in values if value is not None]
        return math.fsum(values) / len(values) if values else None

    figures = {f"{prefix}reward": mean(answer.reward for answer in answers)}
    for name in answers[0].rewards:
        figures[f"{prefix}reward/{name}"] = mean(answer.rewards[name] for answer in answers)
    return figures | {
        f"{prefix}completion_length": mean(len(answer.completion.completion_ids) for answer in answers),
        f"{prefix}truncated": mean(answer.completion.finish_reason == "length" for answer in answers),
        f"{prefix}unscored": mean(answer.reward is None for answer in answers),
    }


def sampling(setup: Setup, temperature: float) -> dict:
    top_p = setup.rollout_args.top_p if temperature else 1.0
    return {"temperature": temperature, "top_p": top_p, "max_new_tokens": setup.rollout_args.max_completion_length}


def rollout_seed(setup: Setup, first_step: int) -> int:
    return setup.args.seed * 1_000_003 + first_step


def generate(
    setup: Setup, questions: list[Question], num_generations: int, temperature: float, seed: int, kept: list[Completion] = ()
) -> tuple[list[Answer], bool]:
    """(answers in the questions' order, on every rank; whether STOP cut it short)."""
    options = {"version": setup.synced, "seed": seed, **sampling(setup, temperature)}
    completions, stopped = collect(setup.backend, questions, num_generations, setup.output_dir / run.STOP, kept, **options)
    by_id = {question.id: question for question in questions}
    texts = setup.tokenizer.batch_decode([c.completion_ids for c in completions], skip_special_tokens=True)
    return [Answer(by_id[c.id], c, text) for c, text in zip(completions, texts, strict=True)], stopped


def sync(setup: Setup, version: int) -> SyncReport:
    """Gives the engine the weights of now, unless it has them."""
    if version == setup.synced:
        return SyncReport()
    report = setup.backend.sync(version)
    setup.synced = version
    return report


def roll_out(setup: Setup, questions: list[Question], first_step: int) -> tuple[list[Answer], dict[str, float]] | None:
    """Scored answers to `questions`, on disk in rollouts/, and their figures; None when STOP came (finished answers are kept). A collective."""
    args = setup.rollout_args
    start = time.perf_counter()
    kept = keep_finished(setup, questions, first_step)
    report = sync(setup, first_step - 1)
    answers, stopped = generate(setup, questions, args.num_generations, args.temperature, rollout_seed(setup, first_step), kept)
    rollout_seconds = time.perf_counter() - start - report.seconds
    if stopped:
        write_unfinished(setup, [answer.completion for answer in answers], questions, first_step)
        return None
    start = time.perf_counter()
    score(setup, answers)
    reward_seconds = time.perf_counter() - start
    figures = reward_figures(answers, "grpo/") | {"grpo/collapse_rate": set_advantages(answers, setup.reward_args)}
    with dist.main_rank_first() as mine:
        if mine:
            write_lines(rollout_path(setup.output_dir, "step", first_step), (answer.line(first_step) for answer in answers))
            rollout_path(setup.output_dir, "unfinished", first_step).unlink(missing_ok=True)
    tokens = sum(len(answer.completion.completion_ids) for answer in answers)
    return answers, figures | {
        "perf/rollout_seconds": rollout_seconds,
        "perf/rollout_tokens_per_second": tokens / rollout_seconds,
        "perf/reward_seconds": reward_seconds,
        "perf/sync_seconds": report.seconds,
    }


def start_ahead(setup: Setup, questions: list[Question], first_step: int) -> None:
    """Begins the rollout that step `first_step` will train on, with the weights of now."""
    args = setup.rollout_args
    options = {"seed": rollout_seed(setup, first_step), **sampling(setup, args.temperature)}
    setup.ahead_step = first_step
    setup.ahead = Ahead(setup.backend, questions, args.num_generations, setup.output_dir / run.STOP, **options)


def keep_finished(setup: Setup, questions: list[Question], first_step: int) -> list[Completion]:
    """Answers to `questions` that exist: of a run that was stopped in the middle of this rollout, and what was generated ahead."""
    path = rollout_path(setup.output_dir, "unfinished", first_step)
    kept = [completion_of(line) for line in dist.broadcast_object(read_lines(path) if dist.is_main() and path.exists() else [])]
    if setup.ahead is not None:
        kept += setup.ahead.take()
        setup.ahead = None
    ids = {question.id for question in questions}
    return [completion for completion in kept if completion.id in ids]


def write_unfinished(setup: Setup, completions: list[Completion], questions: list[Question], first_step: int) -> None:
    """Keeps what is finished for the attempt that resumes this one."""
    by_id = {question.id: question for question in questions}
    with dist.main_rank_first() as mine:
        if mine:
            path = rollout_path(setup.output_dir, "unfinished", first_step)
            write_lines(path, (Answer(by_id[c.id], c, "").line(first_step) for c in completions))
    wanted = len(questions) * setup.rollout_args.num_generations
    log.info("%s found: %d of %d answers to the prompts of step %d are finished and kept", run.STOP, len(completions), wanted, first_step)


@torch.no_grad()
def trainer_logps(model: ShardedModel, mini_batches: list[list[MicroBatch]], temperature: float) -> list[torch.Tensor]:
    """Log-probabilities [N] of each micro-batch's completion tokens, on the CPU, in the order of the micro-batches."""
    results = []
    for batch in (batch for batches in mini_batches for batch in batches):
        packed = batch.packed.to(dist.device())
        output = model(packed.model_inputs(), packed.targets, temperature=temperature, num_tokens=packed.num_tokens)
        results.append(output.logps[packed.targets.flatten() >= 0].cpu())
        dist.beat()
    return results


def prepare(setup: Setup, answers: list[Answer], figures: dict[str, float], first_step: int, saved: Path | None = None) -> Rollout:
    """Packs the answers and gives them the trainer's own log-probabilities, or those in the file `saved`. A collective."""
    mini_batches = make_mini_batches(
        answers,
        setup.args.num_minibatches,
        max_length=setup.data_args.max_length,
        bins_per_row=setup.args.per_device_train_batch_size,
        packing=setup.data_args.packing,
        pad_to=setup.pad_to,
        mask_truncated=setup.reward_args.mask_truncated_completions,
        with_kl=setup.objective.beta > 0,
    )
    everything = [batch for batches in mini_batches for batch in batches]
    version = min(span[0] for answer in answers for span in answer.completion.weight_versions)
    if saved is not None:
        load_logps(saved, everything, answers)
        windows = weigh(mini_batches, setup.objective, setup.rollout_args.max_completion_length)
        return Rollout(first_step, mini_batches, windows, figures, version)
    start = time.perf_counter()
    temperature = setup.rollout_args.temperature
    for batch, logps in zip(everything, trainer_logps(setup.model.sharded, mini_batches, temperature), strict=True):
        batch.old = logps
    if setup.reference is not None:
        with setup.reference.swapped_in():
            for batch, logps in zip(everything, trainer_logps(setup.model.sharded, mini_batches, temperature), strict=True):
                batch.reference = logps
    windows = weigh(mini_batches, setup.objective, setup.rollout_args.max_completion_length)
    figures = figures | distance_figures(everything) | {"perf/old_logps_seconds": time.perf_counter() - start}
    figures["grpo/trained"] = sum(window[1].item() for window in windows) / len(answers)
    if setup.updates > 1:  # a run that stops between two updates goes on with the same numbers
        save_logps(logps_path(setup.output_dir, first_step), everything, answers, figures)
    return Rollout(first_step, mini_batches, windows, figures, version)


def distance_figures(batches: list[MicroBatch]) -> dict[str, float]:
    """How far engine and trainer are apart on the tokens that train, and what the correction makes of it."""
    sums = torch.zeros(5, dtype=torch.float64, device=dist.device())
    largest = torch.zeros(1, dtype=torch.float64, device=dist.device())
    for batch in batches:
        log_ratio = batch.old - batch.sampled
        rejected = torch.tensor([(batch.weights == 0).sum(), batch.weights.double().sum()], dtype=torch.float64)
        sums += torch.cat([objectives.mismatch(log_ratio), rejected]).to(sums.device)
        if len(log_ratio):
            largest = torch.maximum(largest, log_ratio.abs().max().double().to(sums.device))
    absolute, k3, tokens, rejected, weights = dist.all_sum(sums).tolist()
    tokens = max(tokens, 1.0)
    return {
        "grpo/logp_diff_mean": absolute / tokens,
        "grpo/logp_diff_max": dist.all_max(largest).item(),
        "grpo/logp_diff_k3": k3 / tokens,
        "grpo/correction_mean": weights / tokens,
        "grpo/correction_rejected": rejected / tokens,
    }


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


def load_logps(path: Path, batches: list[MicroBatch], answers: list[Answer]) -> None:
    places, saved = _places(answers), np.load(path)
    for batch in batches:
        where = np.concatenate([np.arange(places[i], places[i + 1]) for i in batch.answers] or [np.zeros(0, np.int64)])
        batch.old = torch.from_numpy(saved["old"][where])
        batch.reference = torch.from_numpy(saved["reference"][where])
        assert not batch.old.isnan().any(), path


def resume_rollout(setup: Setup, questions: list[Question], first_step: int) -> Rollout:
    """The rollout whose first updates a checkpoint already holds, from its files."""
    path = rollout_path(setup.output_dir, "step", first_step)
    saved = logps_path(setup.output_dir, first_step)
    if not path.exists() or not saved.exists():
        raise ValueError(f"the checkpoint lies between the updates of one rollout, and {path} or {saved.name} beside it is missing")
    by_id = {question.id: question for question in questions}
    answers = []
    for line in read_lines(path):
        answer = Answer(by_id[line["id"]], completion_of(line), line["completion"], line["rewards"], line["reward"])
        answers.append(answer)
    set_advantages(answers, setup.reward_args)
    return prepare(setup, answers, json.loads(str(np.load(saved)["figures"])), first_step, saved)


def evaluate(setup: Setup, questions: list[Question], step: int) -> dict[str, float]:
    """Mean rewards on held-out prompts: greedy, or of several samples. Nothing when STOP came. A collective."""
    if setup.ahead is not None:
        setup.ahead.wait()
    sync(setup, step)
    count = setup.rollout_args.eval_num_generations
    answers, stopped = generate(setup, questions, count, setup.rollout_args.temperature if count > 1 else 0.0, setup.args.seed)
    if stopped:
        return {}
    score(setup, answers)
    with dist.main_rank_first() as mine:
        if mine:
            write_lines(rollout_path(setup.output_dir, "eval", step), (answer.line(step) for answer in answers))
    figures = reward_figures(answers, "eval/")
    log.info("step %d eval %s", step, " ".join(f"{k.removeprefix('eval/')} {v:.3f}" for k, v in figures.items() if v is not None))
    return figures


def show(answers: list[Answer], num_generations: int) -> None:
    """The first prompt with two answers to the log: what is generated and what it is worth."""
    question = answers[0].question
    lines = [f"prompt {question.id}: {str(question.prompt)[-600:]}"]
    lines += [
        f"reward {answer.reward}, {answer.completion.finish_reason}: {answer.text[:600]}" for answer in answers[: min(2, num_generations)]
    ]
    log.info("a first prompt and answers:\n%s", terminal_safe("\n".join(lines)))


def check_first_rollout(setup: Setup, answers: list[Answer], figures: dict[str, float]) -> None:
    """The first rollout of a process: rows are apart, and the engine samples from what the trainer computes. RuntimeError otherwise."""
    rows = AnswerRows(answers)
    count = max(1, int(np.searchsorted(np.cumsum(rows.lengths()), setup.data_args.max_length, "right")))
    bins = Bins(np.arange(count), np.array([0, count]))
    run.check_packing(setup.model.sharded, collate(rows, bins, [0], pad_to=setup.pad_to), setup.model_args.compute_dtype)
    on_policy = all(span[0] == setup.synced for answer in answers for span in answer.completion.weight_versions)
    limit = ENGINE_TOLERANCE[getattr(torch, setup.model_args.compute_dtype)]
    distance = figures["grpo/logp_diff_mean"]
    if setup.rollout_args.top_p == 1 and on_policy and not distance <= limit:
        raise RuntimeError(
            f"the engine gives its own samples log-probabilities that differ from the trainer's by {distance:.4f} a token, allowed {limit}: "
            "it does not have the trainer's weights, or samples in another way (temperature, top_k, penalties)."
        )
    log.info(
        "rollout check: log-probabilities of engine and trainer differ by %.2g a token, %.2g at most",
        distance,
        figures["grpo/logp_diff_max"],
    )
