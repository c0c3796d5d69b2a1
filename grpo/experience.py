"""One rollout from prompts to mini-batches: generate, score, advantages, the trainer's own log-probabilities, all of it on the disk.

What a step trains on is in OUTPUT_DIR/rollouts before it does. Where a rollout takes several optimizer steps, the log-probabilities are
kept beside it (step-000013.npz), so that a run that stops in between goes on with the same numbers.
"""

import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from common import dist, run
from common.checkpoint import TrainState
from common.config import DataArguments, ModelArguments, TrainArguments, option
from common.data import collate, pack, terminal_safe
from common.fsdp import ShardedModel
from common.jsonl import write_lines
from common.weight_sync import ServersLost
from grpo import objectives
from grpo.advantages import compute_advantages, compute_gdpo_advantages, is_collapsed
from grpo.batches import AnswerRows, MicroBatch, load_logps, logps_path, make_mini_batches, read_logps, save_logps, weigh, why_idle
from grpo.objectives import ObjectiveArguments
from grpo.reference import ReferenceWeights
from grpo.rollout import (
    Ahead,
    Answer,
    Completion,
    Question,
    RolloutArguments,
    RolloutBackend,
    collect,
    completion_of,
    read_lines,
    rollout_path,
)
from grpo.sampling import (
    Filled,
    Group,
    Prompts,
    accuracies,
    carries_signal,
    fill,
    fit_prior,
    groups_of,
    mean_expected_collapse,
    pass_rate,
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
    sync_seconds: float = 0.0  # of giving them to it: for the metrics of the next rollout, also where an evaluation did it
    ahead: Ahead | None = None  # the next rollout, where it is generated while this one trains
    ahead_step: int = 0  # the first step that will train on it
    surplus: list[Group] = field(default_factory=list)  # groups with signal that the next rollout begins with
    pass_rates: dict[str, tuple[int, int]] | None = None  # of the prompts, where they were measured
    prior: tuple[float, float] | None = None  # fitted to them

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
    idle: list[str] = field(default_factory=list)  # why answers of each mini-batch do not train


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


def set_advantages(answers: list[Answer], args: RewardArguments) -> None:
    """Fills in advantages, and which answers carry signal."""
    ids = [answer.question.id for answer in answers]
    if args.scale_rewards == "gdpo":
        result = compute_gdpo_advantages([answer.rewards for answer in answers], args.reward_weights, ids, args.std_floor)
    else:
        result = compute_advantages([answer.reward for answer in answers], ids, args.scale_rewards, args.std_floor)
    for answer, value, informative in zip(answers, result.values.tolist(), result.informative.tolist(), strict=True):
        answer.advantage, answer.informative = value, informative


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


def rollout_seed(setup: Setup, first_step: int, batch: int = 0) -> int:
    return setup.args.seed * 1_000_003 + first_step + batch * 1_000_000_007


def generate(
    setup: Setup, questions: list[Question], num_generations: int, temperature: float, seed: int, kept: list[Completion] = ()
) -> tuple[list[Answer], bool]:
    """(answers in the questions' order, on every rank; whether STOP cut it short)."""
    options = {"version": setup.synced, "seed": seed, **sampling(setup, temperature)}
    completions, stopped = collect(setup.backend, questions, num_generations, setup.output_dir / run.STOP, kept, **options)
    by_id = {question.id: question for question in questions}
    texts = setup.tokenizer.batch_decode([c.completion_ids for c in completions], skip_special_tokens=True)
    return [Answer(by_id[c.id], c, text) for c, text in zip(completions, texts, strict=True)], stopped


def sync(setup: Setup, version: int) -> None:
    """Gives the engine the weights of now, unless it has them."""
    if version != setup.synced:
        setup.sync_seconds += setup.backend.sync(version).seconds
        setup.synced = version


class Made(NamedTuple):
    """What `roll_out` returns."""

    answers: list[Answer]  # to train on
    figures: dict[str, float | None]
    epoch: int  # position in the data after it
    offset: int


def roll_out(setup: Setup, prompts: Prompts, state: TrainState) -> Made | None:
    """Scored answers to the prompts at the state's position, on disk in rollouts/; None when STOP came (finished answers are kept).

    With dynamic sampling: of as many batches as it takes, and what is left over goes to `setup.surplus`. A collective.
    """
    args, rewards, first_step = setup.rollout_args, setup.reward_args, state.step + 1
    start = time.perf_counter()
    finished, ahead_seconds = keep_finished(setup, first_step)
    waited = time.perf_counter() - start
    epoch, offset = state.epoch, state.offset
    generated: list[Answer] = []
    seconds = {"rollout": 0.0, "reward": 0.0}

    def keep(completions: list[Completion]) -> None:
        made = [answer.completion for answer in generated] + completions
        ids = {completion.id for completion in made}
        write_unfinished(setup, made + [c for c in finished if c.id not in ids], prompts.questions, first_step)

    try:
        sync(setup, state.step)
    except ServersLost:
        keep([])
        raise

    def draw(number: int, without: set[str]) -> list[Group] | None:
        nonlocal epoch, offset
        start = time.perf_counter()
        questions, epoch, offset = prompts.next(epoch, offset, without)
        seed = rollout_seed(setup, first_step, number)
        try:
            answers, stopped = generate(setup, questions, args.num_generations, args.temperature, seed, finished)
        except ServersLost as error:
            keep(error.completions)
            raise
        seconds["rollout"] += time.perf_counter() - start
        if stopped:
            keep([answer.completion for answer in answers])
            return None
        start = time.perf_counter()
        score(setup, answers)
        seconds["reward"] += time.perf_counter() - start
        set_advantages(answers, rewards)
        generated.extend(answers)
        return groups_of(answers)

    def carries(group: Group) -> bool:
        return not args.dynamic_sampling or carries_signal(group, rewards.accuracy_reward, rewards.mask_truncated_completions)

    rounds = args.max_resample_times if args.dynamic_sampling else 1
    filled = fill(prompts.size, rounds, setup.surplus, draw, carries)
    if filled is None:
        return None
    setup.surplus = filled.surplus
    for answer in (answer for group in filled.filtered for answer in group):
        answer.advantage, answer.informative = 0.0, False
    answers = [answer for group in filled.groups for answer in group]
    set_advantages(answers, rewards)
    write_rollout(setup, filled, first_step)
    figures = reward_figures(generated, "grpo/") | collapse_figures(setup, filled, groups_of(generated))
    tokens = sum(len(answer.completion.completion_ids) for answer in generated)
    figures |= {
        "perf/rollout_seconds": waited + seconds["rollout"],  # that training stood still for it
        "perf/rollout_tokens_per_second": tokens / (ahead_seconds + seconds["rollout"]),
        "perf/reward_seconds": seconds["reward"],
        "perf/sync_seconds": setup.sync_seconds,
    }
    setup.sync_seconds = 0.0
    return Made(answers, figures, epoch, offset)


def collapse_figures(setup: Setup, filled: Filled, generated: list[Group]) -> dict[str, float | None]:
    """Share of the groups generated for this rollout, before any is filtered, whose answers are all right or all wrong; and what of it was to
    be expected: from `difficulty_file`, or else from the pass rates in these very groups."""
    args, accuracy = setup.rollout_args, setup.reward_args.accuracy_reward
    rate = sum(is_collapsed(accuracies(group, accuracy)) for group in generated) / len(generated)
    figures = {"grpo/collapse_rate": rate}
    prior = setup.prior
    if setup.pass_rates is not None:
        rates = [setup.pass_rates[g[0].question.id] for g in generated if g[0].question.id in setup.pass_rates]
    else:
        rates = [(k, n) for k, n in (pass_rate(group, accuracy) for group in generated) if n]
        prior = fit_prior(rates)
    figures["grpo/collapse_expected"] = mean_expected_collapse(rates, args.num_generations, prior)
    if not args.dynamic_sampling:
        return figures
    bound = 1 - 1 / args.max_resample_times
    if len(filled.groups) < args.num_prompts_per_step:
        dist.warn(
            log,
            "the rollout is not full: %d of %d groups after %d batches; %.3f of the groups collapsed, %d batches bear %.3f. It trains on what is "
            "there. Raise max_resample_times, or filter the prompts by difficulty.",
            len(filled.groups), args.num_prompts_per_step, filled.rounds, rate, args.max_resample_times, bound,
        )  # fmt: skip
    return figures | {
        "grpo/collapse_bound": bound,
        "grpo/batches": filled.rounds,
        "grpo/groups": len(filled.groups),
        "grpo/surplus": len(filled.surplus),
    }


def write_rollout(setup: Setup, filled: Filled, first_step: int) -> None:
    """What `first_step` trains on, what was generated for it and carries no signal, and what is left over for the next rollout."""
    parts = {"step": filled.groups}
    if setup.rollout_args.dynamic_sampling:
        parts = {"filtered": filled.filtered, "kept": filled.surplus} | parts
    with dist.main_rank_first() as mine:
        if mine:
            for kind, groups in parts.items():
                lines = (answer.line(first_step) for group in groups for answer in group)
                write_lines(rollout_path(setup.output_dir, kind, first_step), lines)
            rollout_path(setup.output_dir, "unfinished", first_step).unlink(missing_ok=True)


def start_ahead(setup: Setup, prompts: Prompts, made: Made, first_step: int) -> None:
    """Begins the rollout that step `first_step` will train on, with the weights of now: its first batch, where it takes several."""
    args = setup.rollout_args
    questions, _, _ = prompts.next(made.epoch, made.offset, {group[0].question.id for group in setup.surplus})
    options = {"seed": rollout_seed(setup, first_step), **sampling(setup, args.temperature)}
    setup.ahead_step = first_step
    setup.ahead = Ahead(setup.backend, questions, args.num_generations, setup.output_dir / run.STOP, **options)


def read_on_all(path: Path) -> list[dict] | None:
    """The answers in a file that rank 0 reads; None where there is none. A collective."""
    lines = None
    with dist.main_rank_first() as mine:
        if mine and path.exists():
            lines = read_lines(path)
    return dist.broadcast_object(lines)


def keep_finished(setup: Setup, first_step: int) -> tuple[list[Completion], float]:
    """Answers for this rollout that exist: of a run that was stopped in the middle of it, and what was generated ahead; seconds of the latter."""
    path = rollout_path(setup.output_dir, "unfinished", first_step)
    kept, seconds = [completion_of(line) for line in read_on_all(path) or []], 0.0
    if setup.ahead is not None:
        kept += setup.ahead.take()
        seconds = setup.ahead.seconds
        setup.ahead = None
    return kept, seconds


def write_unfinished(setup: Setup, completions: list[Completion], questions: list[Question], first_step: int) -> None:
    """Keeps what is finished for the attempt that resumes this one."""
    by_id = {question.id: question for question in questions}
    with dist.main_rank_first() as mine:
        if mine:
            path = rollout_path(setup.output_dir, "unfinished", first_step)
            write_lines(path, (Answer(by_id[c.id], c, "").line(first_step) for c in completions))
    log.info("%d answers to the prompts of step %d are finished and kept", len(completions), first_step)


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
    idle = why_idle(answers, setup.args.num_minibatches, setup.reward_args.mask_truncated_completions)
    version = min((span[0] for answer in answers for span in answer.completion.weight_versions), default=first_step - 1)
    if saved is not None:
        load_logps(saved, everything, answers)
        windows = weigh(mini_batches, setup.objective, setup.rollout_args.max_completion_length)
        return Rollout(first_step, mini_batches, windows, figures, version, idle)
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
    figures["grpo/trained"] = sum(window[1].item() for window in windows) / max(len(answers), 1)
    if setup.updates > 1:  # a run that stops between two updates goes on with the same numbers
        save_logps(logps_path(setup.output_dir, first_step), everything, answers, figures)
    return Rollout(first_step, mini_batches, windows, figures, version, idle)


def distance_figures(batches: list[MicroBatch]) -> dict[str, float]:
    """How far engine and trainer are apart on the tokens that train, and what the correction makes of it; nothing where no token does."""
    sums = torch.zeros(5, dtype=torch.float64, device=dist.device())
    largest = torch.zeros(1, dtype=torch.float64, device=dist.device())
    for batch in batches:
        log_ratio = batch.old - batch.sampled
        rejected = torch.tensor([(batch.weights == 0).sum(), batch.weights.double().sum()], dtype=torch.float64)
        sums += torch.cat([objectives.mismatch(log_ratio), rejected]).to(sums.device)
        if len(log_ratio):
            largest = torch.maximum(largest, log_ratio.abs().max().double().to(sums.device))
    absolute, k3, tokens, rejected, weights = dist.all_sum(sums).tolist()
    largest = dist.all_max(largest).item()
    if not tokens:
        return {}  # zeros would look like agreement
    return {
        "grpo/logp_diff_mean": absolute / tokens,
        "grpo/logp_diff_max": largest,
        "grpo/logp_diff_k3": k3 / tokens,
        "grpo/correction_mean": weights / tokens,
        "grpo/correction_rejected": rejected / tokens,
    }


def answers_of(lines: list[dict], path: Path, questions: list[Question], names: list[str]) -> list[Answer]:
    """Scored answers from their lines in rollouts/. ValueError where the components of a reward are not `names`, or a prompt is not there."""
    by_id = {question.id: question for question in questions}
    for number, line in enumerate(lines, 1):
        if [*line["rewards"]] != names:
            raise ValueError(
                f"{path}:{number}: scored by {', '.join(line['rewards']) or 'nothing'}; now reward_funcs is {', '.join(names)}"
            )
        if line["id"] not in by_id:
            raise ValueError(f"{path}:{number}: there is no prompt {line['id']!r} in the data")
    return [Answer(by_id[line["id"]], completion_of(line), line["completion"], line["rewards"], line["reward"]) for line in lines]


def resume_surplus(setup: Setup, questions: list[Question], step: int) -> list[Group]:
    """What the last rollout of a checkpoint left over, from its file. A collective."""
    if step == 0:
        return []
    path = rollout_path(setup.output_dir, "kept", (step - 1) // setup.updates * setup.updates + 1)
    lines = read_on_all(path)
    if not setup.rollout_args.dynamic_sampling:
        if lines:
            dist.warn(log, "dynamic_sampling is off: the answers in %s, left over by the rollout before, are not trained on", path)
        return []
    if lines is None:
        dist.warn(log, "dynamic sampling starts anew: there is no %s", path)
    return groups_of(answers_of(lines or [], path, questions, setup.reward_args.names()))


def resume_rollout(setup: Setup, questions: list[Question], first_step: int) -> Rollout:
    """The rollout whose first updates a checkpoint already holds, from its files."""
    path = rollout_path(setup.output_dir, "step", first_step)
    saved = logps_path(setup.output_dir, first_step)
    if not path.exists() or not saved.exists():
        raise ValueError(f"the checkpoint lies between the updates of one rollout, and {path} or {saved.name} beside it is missing")
    answers = answers_of(read_lines(path), path, questions, setup.reward_args.names())
    set_advantages(answers, setup.reward_args)
    return prepare(setup, answers, read_logps(saved)[1], first_step, saved)


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


def on_policy_distance(rollout: Rollout, answers: list[Answer], version: int) -> float | None:
    """Mean |log p of the engine - log p of the trainer| over answers sampled with the weights `version` only; None without any. A collective."""
    fresh = [all(span[0] == version for span in answer.completion.weight_versions) for answer in answers]
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in (batch for batches in rollout.mini_batches for batch in batches if batch.answers):
        mine = torch.tensor([fresh[index] for index in batch.answers])[batch.row]
        sums += torch.stack([(batch.old - batch.sampled).abs()[mine].double().sum(), mine.double().sum()])
    absolute, tokens = dist.all_sum(sums.to(dist.device())).tolist()
    return absolute / tokens if tokens else None


def check_rows(setup: Setup, answers: list[Answer]) -> None:
    """The first rollout of a process: its rows are apart. RuntimeError otherwise."""
    rows = AnswerRows(answers)
    bins = pack(rows.lengths(), setup.data_args.max_length)
    run.check_packing(setup.model.sharded, collate(rows, bins, [bins.fullest()], pad_to=setup.pad_to), setup.model_args.compute_dtype)


def check_engine(setup: Setup, answers: list[Answer], rollout: Rollout, first: bool) -> bool:
    """Whether a rollout could show that the engine samples from what the trainer computes; RuntimeError where it shows that it does not.

    Of answers that the weights of now have sampled: others, left over or generated ahead, are rightly further away.
    """
    limit = ENGINE_TOLERANCE[getattr(torch, setup.model_args.compute_dtype)]
    distance = on_policy_distance(rollout, answers, setup.synced)
    if setup.rollout_args.top_p == 1 and distance is not None and not distance <= limit:
        raise RuntimeError(
            f"the engine gives its own samples log-probabilities that differ from the trainer's by {distance:.4f} a token, allowed {limit}: "
            "it does not have the trainer's weights, or samples in another way (temperature, top_k, penalties)."
        )
    if distance is None:
        if first:
            dist.warn(log, "rollout check: no answer of the weights of now trains, so engine and trainer were not compared yet")
        return False
    log.info(
        "rollout check: log-probabilities of engine and trainer differ by %.2g a token, %.2g at most",
        rollout.figures["grpo/logp_diff_mean"],
        rollout.figures["grpo/logp_diff_max"],
    )
    return True
