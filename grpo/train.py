"""Group-relative policy optimisation on plain PyTorch FSDP.

    torchrun --nproc-per-node 8 -m grpo.train --config grpo/configs/qwen3_next_80b.yaml --model_name_or_path BASE --train_files prompts.jsonl \
        --eval_files held_out.jsonl --output_dir runs/a

A rollout draws prompts, generates `num_generations` answers to each with the current weights, scores them and turns rewards into
advantages. The trainer then computes the answers' log-probabilities itself (the engine's are only compared with them), and takes
num_iterations x num_minibatches optimizer steps on packed rows before the next rollout. A step is one optimizer step, as in the other
methods. Every term of the loss is a sum over the mini-batch of all ranks divided by its count, counted before the first backward.
`touch OUTPUT_DIR/STOP` saves and ends the run, also in the middle of a rollout; the same command resumes it.
"""

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common import config, dist, run
from common.chat import Chat
from common.config import DataArguments, ModelArguments, TrainArguments, option
from common.data import Bins, Order, collate, terminal_safe
from common.fsdp import ShardedModel
from common.metrics import MetricsLog, Performance, max_load, squared_lengths
from common.optim import AdamW, learning_rate
from grpo import objectives
from grpo.advantages import compute_advantages
from grpo.batches import AnswerRows, MicroBatch, make_mini_batches, weigh
from grpo.objectives import ObjectiveArguments
from grpo.reference import ReferenceWeights
from grpo.rollout import (
    Answer,
    Question,
    RolloutArguments,
    RolloutBackend,
    collect,
    completion_of,
    fingerprint,
    read_lines,
    read_questions,
    rollout_path,
    write_lines,
)
from grpo.scoring import RewardArguments, RewardPool
from grpo.twin import HfBackend

log = logging.getLogger(__name__)

# Mean |log p of the engine - log p of the trainer| of sampled tokens that rounding explains; wrong weights or templates move it by more.
ENGINE_TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 1e-3}


@dataclass
class GRPOTrainArguments(TrainArguments):
    """The loop: how long, how fast, what is written."""

    learning_rate: float = option(1e-6, "Peak learning rate.")
    lr_scheduler_type: str = option("constant", "Shape after the warm-up: constant, linear or cosine; the latter two end at 0.")
    num_iterations: int = option(1, "Passes over the answers of one rollout.")
    num_minibatches: int = option(1, "Optimizer steps of one pass.")

    def __post_init__(self):
        super().__post_init__()
        if self.lr_scheduler_type not in ("constant", "linear", "cosine"):
            raise ValueError(f"lr_scheduler_type is {self.lr_scheduler_type}; it must be constant, linear or cosine.")
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


def check_arguments(
    data_args: DataArguments, rollout_args: RolloutArguments, objective: ObjectiveArguments, args: GRPOTrainArguments
) -> None:
    """ValueError for options that do not go together."""
    if data_args.max_length <= rollout_args.max_completion_length:
        raise ValueError(
            f"max_length {data_args.max_length} must hold a prompt and max_completion_length {rollout_args.max_completion_length}."
        )
    if data_args.over_long == "truncate":
        raise ValueError("over_long: truncate would cut prompts; GRPO drops and counts those that are too long.")
    if rollout_args.num_prompts_per_step < args.num_minibatches:
        raise ValueError(
            f"num_prompts_per_step {rollout_args.num_prompts_per_step} must be at least num_minibatches {args.num_minibatches}."
        )
    if rollout_args.top_p < 1 and objective.rollout_correction == "none":
        raise ValueError(
            f"top_p is {rollout_args.top_p}: answers are then drawn from another distribution than the one that trains. Leave it at 1, or "
            "choose a rollout_correction, which then corrects for it."
        )


# ---- rollouts ----------------------------------------------------------------------------------------------------------------------------


def score(setup: Setup, answers: list[Answer]) -> None:
    """Fills in rewards and reward of each answer. Rank 0 calls the reward functions, the others wait for it."""
    scores = None
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
        return sum(values) / len(values) if values else None

    figures = {f"{prefix}reward": mean(answer.reward for answer in answers)}
    for name in answers[0].rewards:
        figures[f"{prefix}reward/{name}"] = mean(answer.rewards[name] for answer in answers)
    return figures | {
        f"{prefix}completion_length": mean(len(answer.completion.completion_ids) for answer in answers),
        f"{prefix}truncated": mean(answer.completion.finish_reason == "length" for answer in answers),
        f"{prefix}unscored": mean(answer.reward is None for answer in answers),
    }


def generate(
    setup: Setup, questions: list[Question], num_generations: int, temperature: float, seed: int, kept=()
) -> tuple[list[Answer], bool]:
    """(answers in the questions' order, on every rank; whether STOP cut it short)."""
    completions, stopped = collect(
        setup.backend,
        questions,
        num_generations,
        setup.output_dir / run.STOP,
        kept,
        seed=seed,
        temperature=temperature,
        top_p=setup.rollout_args.top_p if temperature else 1.0,
        max_new_tokens=setup.rollout_args.max_completion_length,
    )
    by_id = {question.id: question for question in questions}
    texts = setup.tokenizer.batch_decode([c.completion_ids for c in completions], skip_special_tokens=True)
    return [Answer(by_id[c.id], c, text) for c, text in zip(completions, texts, strict=True)], stopped


def roll_out(setup: Setup, questions: list[Question], first_step: int) -> tuple[list[Answer], dict[str, float]] | None:
    """Scored answers to `questions`, on disk in rollouts/, and their figures; None when STOP came (finished answers are kept). A collective."""
    args = setup.rollout_args
    report = setup.backend.sync(first_step - 1)
    unfinished = rollout_path(setup.output_dir, "unfinished", first_step)
    kept = [completion_of(line) for line in dist.broadcast_object(read_lines(unfinished) if dist.is_main() and unfinished.exists() else [])]
    start = time.perf_counter()
    answers, stopped = generate(setup, questions, args.num_generations, args.temperature, setup.args.seed * 1_000_003 + first_step, kept)
    rollout_seconds = time.perf_counter() - start
    if stopped:
        with dist.main_rank_first() as mine:
            if mine:
                write_lines(unfinished, (answer.line(first_step) for answer in answers))
        log.info("%s found: %d of %d answers are finished and kept", run.STOP, len(answers), len(questions) * args.num_generations)
        return None
    start = time.perf_counter()
    score(setup, answers)
    reward_seconds = time.perf_counter() - start
    figures = reward_figures(answers, "grpo/") | {"grpo/collapse_rate": set_advantages(answers, setup.reward_args)}
    with dist.main_rank_first() as mine:
        if mine:
            write_lines(rollout_path(setup.output_dir, "step", first_step), (answer.line(first_step) for answer in answers))
            unfinished.unlink(missing_ok=True)
    tokens = sum(len(answer.completion.completion_ids) for answer in answers)
    return answers, figures | {
        "perf/rollout_seconds": rollout_seconds,
        "perf/rollout_tokens_per_second": tokens / rollout_seconds,
        "perf/reward_seconds": reward_seconds,
        "perf/sync_seconds": report.seconds,
    }


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
    setup.backend.sync(step)
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
    limit = ENGINE_TOLERANCE[getattr(torch, setup.model_args.compute_dtype)]
    distance = figures["grpo/logp_diff_mean"]
    if setup.rollout_args.top_p == 1 and not distance <= limit:
        raise RuntimeError(
            f"the engine gives its own samples log-probabilities that differ from the trainer's by {distance:.4f} a token, allowed {limit}: "
            "it does not have the trainer's weights, or samples in another way (temperature, top_k, penalties)."
        )
    log.info(
        "rollout check: log-probabilities of engine and trainer differ by %.2g a token, %.2g at most",
        distance,
        figures["grpo/logp_diff_max"],
    )


# ---- training ----------------------------------------------------------------------------------------------------------------------------


def forward_backward(setup: Setup, batches: list[MicroBatch]) -> tuple[float, dict[str, float], float, torch.Tensor | None]:
    """Gradients of one mini-batch from this rank's micro-batches.

    (loss, figures, mean load-balancing term of a micro-batch: all over the window and all ranks; assignments [MoE layers, experts] on this
    rank or None for a dense model).
    """
    objective, coefficient = setup.objective, setup.model_args.load_balancing_coef
    sums = torch.zeros(9, dtype=torch.float64, device=dist.device())
    load = None
    for batch in batches:
        batch = batch.to(dist.device())
        output = setup.model.sharded(
            batch.packed.model_inputs(),
            batch.packed.targets,
            temperature=setup.rollout_args.temperature,
            num_tokens=batch.packed.num_tokens,
            with_entropy=True,
        )
        logps = batch.of_targets(output.logps)
        losses = objectives.policy_losses(logps, batch.old, batch.advantages, batch.row, objective)
        loss = (batch.policy_scale * batch.weights * losses.loss).sum()
        k3 = torch.zeros_like(logps)
        if objective.beta > 0:
            k3 = objectives.kl_estimates(logps, batch.reference, batch.old if objective.use_bias_correction_kl else None)
            loss = loss + objective.beta * (batch.kl_scale * k3).sum()
        balance = output.aux_loss / len(batches)  # of one micro-batch of all ranks; the step takes the mean over its micro-batches
        ((loss + coefficient * balance) * dist.world_size()).backward()  # FSDP divides gradients by the number of ranks
        policy, entropy = batch.policy.double(), batch.of_targets(output.entropy)
        columns = [policy * losses.ratio, policy * losses.clipped, policy, batch.divergence * k3, batch.divergence, policy * entropy]
        columns += [(logps - batch.old).abs() * policy]
        with torch.no_grad():
            parts = [loss.double(), balance.double(), *(column.double().sum() for column in columns)]
            sums += torch.stack([part.detach() for part in parts])
        if output.expert_load is not None:
            load = output.expert_load if load is None else load + output.expert_load
    loss, balance, ratio, clipped, tokens, kl, kl_tokens, entropy, drift = dist.all_sum(sums).tolist()
    tokens = max(tokens, 1.0)
    figures = {"ratio": ratio / tokens, "clip_share": clipped / tokens, "entropy": entropy / tokens, "drift": drift / tokens}
    if objective.beta > 0:
        figures["kl"] = kl / max(kl_tokens, 1.0)
    return loss, figures, balance, load


def check_first_ratio(drift: float, compute_dtype: str) -> None:
    """Before a rollout's first update the policy is the one that computed `old`: what differs is a fault."""
    limit = run.PACKING_TOLERANCE[getattr(torch, compute_dtype)]
    if not drift <= limit:
        raise RuntimeError(
            f"before the first update log-probabilities differ from those just computed by {drift:.4f} a token, allowed {limit}."
        )
    log.info("ratio check: training and log-probability pass agree to %.2g a token before the first update", drift)


def make_backend(model: run.Model, tokenizer, model_args: ModelArguments, rollout_args: RolloutArguments) -> RolloutBackend:
    if rollout_args.rollout_backend == "vllm":
        raise ValueError("rollout_backend: vllm is not available yet; use hf.")
    stop_ids = sorted(Chat(tokenizer).stops.values())
    if not stop_ids:
        raise ValueError("neither tokenizer nor generation_config.json names a token that ends an answer")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
    return HfBackend(model, model_args, stop_ids=stop_ids, pad_id=pad_id, batch_size=rollout_args.rollout_batch_size)


@record
def main() -> None:
    model_args, data_args, rollout_args, reward_args, objective, args = all_args = config.parse(
        ModelArguments, DataArguments, RolloutArguments, RewardArguments, ObjectiveArguments, GRPOTrainArguments
    )
    check_arguments(data_args, rollout_args, objective, args)
    output_dir = Path(args.output_dir)
    run.start(output_dir, args, *all_args)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)

    # Data and reward functions first: what is wrong with them must be known before a large model is loaded.
    room = data_args.max_length - rollout_args.max_completion_length
    questions = read_questions(data_args.train_files, tokenizer, room, data_args.on_bad_row)
    held_out = read_questions(data_args.eval_files, tokenizer, room, data_args.on_bad_row) if data_args.eval_files else []
    pool = None
    with dist.main_rank_first() as mine:
        if mine:
            pool = RewardPool(reward_args)
    identity = {
        "data": fingerprint(questions),
        "num_prompts_per_step": rollout_args.num_prompts_per_step,
        "num_generations": rollout_args.num_generations,
        "updates_per_rollout": [args.num_iterations, args.num_minibatches],
        "max_length": data_args.max_length,
        "packing": data_args.packing,
    }
    order = Order(len(questions), args.seed)
    updates = args.num_iterations * args.num_minibatches
    steps_per_epoch = order.steps_per_epoch(rollout_args.num_prompts_per_step) * updates
    total_steps = args.max_steps if args.max_steps > 0 else max(1, int(args.num_train_epochs * steps_per_epoch))
    log.info(
        "%d steps, %d on each rollout of %d prompts; %d steps an epoch",
        total_steps,
        updates,
        rollout_args.num_prompts_per_step,
        steps_per_epoch,
    )

    model = run.build_model(model_args)
    reference = ReferenceWeights(model.sharded) if objective.beta > 0 else None  # before a resume changes the weights
    optimizer = AdamW(model.sharded.trained_shards(), model_args, args)
    state = run.resume(output_dir, args, model, optimizer, identity)
    first_step = state.step
    backend = make_backend(model, tokenizer, model_args, rollout_args)
    setup = Setup(model, backend, tokenizer, pool, reference, model_args, data_args, rollout_args, reward_args, objective, args, output_dir)
    backend.start()
    metrics = MetricsLog(output_dir, args.report_to, args.run_name or output_dir.name, config.resolved(*all_args), state.step)

    guard = run.StepGuard(model.sharded, optimizer, args)
    performance = Performance(model.flops)
    logged_step = first_step
    model.sharded.train()
    rollout: Rollout | None = None
    if held_out and rollout_args.eval_on_start and state.step == 0:
        metrics.log(0, evaluate(setup, held_out, 0))
    if position := state.step % updates:
        rollout = resume_rollout(setup, questions, state.step - position + 1)
    progress = dist.progress(total_steps, "grpo", "step", initial=state.step)
    performance.restart()
    while state.step < total_steps:
        position = state.step % updates
        stop = bool(run.agree(run.stop_requested(output_dir))[0])
        if not stop and position == 0:
            drawn, epoch, offset = order.next(state.epoch, state.offset, rollout_args.num_prompts_per_step)
            made = roll_out(setup, [questions[index] for index in drawn], state.step + 1)
            stop = made is None
            if made is not None:
                rolled_before = rollout is not None
                rollout = prepare(setup, *made, state.step + 1)
                if not rolled_before:
                    show(made[0], rollout_args.num_generations)
                    check_first_rollout(setup, made[0], rollout.figures)
                state.epoch, state.offset = epoch, offset
        if stop:
            run.save(output_dir, args, model, optimizer, state, identity)
            run.check_frozen(model)
            log.info("%s found: saved at step %d, ending", run.STOP, state.step)
            close(setup, metrics)
            return

        batches, window = rollout.mini_batches[position % args.num_minibatches], rollout.windows[position % args.num_minibatches]
        start = time.perf_counter()
        lr = learning_rate(state.step, total_steps, args.learning_rate, args.warmup_steps, args.lr_scheduler_type)
        values: dict[str, float | None] = {}
        if window[0] == 0 and (objective.beta == 0 or window[2] == 0):
            log.warning("step %d skipped: no answer of its mini-batch carries signal (equal rewards, or cut off)", state.step + 1)
            loss, grad_norm, skipped, figures, balance, load = None, None, True, {}, None, None
        else:
            loss, figures, balance, load = forward_backward(setup, batches)
            drift = figures.pop("drift")
            if position == 0 and rollout.first_step == first_step + 1:
                check_first_ratio(drift, model_args.compute_dtype)
            where = rollout_path(output_dir, "step", rollout.first_step)
            grad_norm, skipped = guard.step(loss, lr, lambda where=where: f"those of {where}")
        train_seconds = time.perf_counter() - start
        tokens, squares = run.agree(
            sum(batch.packed.num_tokens for batch in batches if batch.answers),
            sum(squared_lengths(batch.packed.cu_seq_lens) for batch in batches if batch.answers),
        )
        lag = state.step - rollout.version
        state.step += 1
        state.tokens += int(tokens)
        state.skipped_steps += skipped

        last = state.step == total_steps
        if last or state.step % args.logging_steps == 0:
            values = {
                "loss": loss,
                "grad_norm": grad_norm,
                "learning_rate": lr,
                "epoch": state.epoch + state.offset / len(questions),
                "tokens": state.tokens,
                "skipped_steps": state.skipped_steps,
                "moe/aux_loss": balance if model_args.load_balancing_coef > 0 else None,
                "moe/max_load": max_load(load) if load is not None else None,
                "grpo/weight_version": rollout.version,
                "grpo/weight_lag": lag,
                "perf/train_seconds": train_seconds,
            }
            values |= {f"grpo/{name}": value for name, value in figures.items()} | rollout.figures
            values |= performance.of_steps(state.step - logged_step, tokens, squares)
            logged_step = state.step
            log.info("%s %s", run.step_line(state.step, values), rollout_line(values))
            progress.set_postfix(reward=f"{values['grpo/reward'] or 0:.3f}", refresh=False)
        progress.update()

        if held_out and (last or (args.eval_steps and state.step % args.eval_steps == 0)):
            values |= evaluate(setup, held_out, state.step)
        if values:
            metrics.log(state.step, values)
        if args.save_steps and (last or state.step % args.save_steps == 0):
            run.save(output_dir, args, model, optimizer, state, identity)
        if values:
            performance.restart()  # evaluation and saving do not count as training time

    progress.close()
    run.check_frozen(model)
    if args.export_final and (state.step > first_step or not (output_dir / "final").exists()):
        run.export(output_dir / "final", model)
    with dist.main_rank_first() as mine:
        if mine:
            (output_dir / run.DONE).touch()
    close(setup, metrics)


def rollout_line(values: dict[str, float | None]) -> str:
    shown = {
        "reward": ".3f",
        "collapse_rate": ".2f",
        "completion_length": ".0f",
        "ratio": ".4f",
        "entropy": ".3f",
        "kl": ".4f",
        "logp_diff_mean": ".2g",
    }
    return " ".join(f"{name} {values[f'grpo/{name}']:{form}}" for name, form in shown.items() if values.get(f"grpo/{name}") is not None)


def close(setup: Setup, metrics: MetricsLog) -> None:
    setup.backend.close()
    if setup.pool is not None:
        setup.pool.close()
    metrics.close()
    dist.shutdown()


if __name__ == "__main__":
    main()
