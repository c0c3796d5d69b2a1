"""Group-relative policy optimisation on plain PyTorch FSDP.

    torchrun --nproc-per-node 8 -m grpo.train --config grpo/configs/qwen3_next_80b.yaml --model_name_or_path BASE --train_files prompts.jsonl \
        --eval_files held_out.jsonl --output_dir runs/a

A rollout draws prompts, generates `num_generations` answers to each with the current weights, scores them and turns rewards into
advantages. The trainer then computes the answers' log-probabilities itself (the engine's are only compared with them), and takes
num_iterations x num_minibatches optimizer steps on packed rows before the next rollout. A step is one optimizer step, as in the other
methods. Every term of the loss is a sum over the mini-batch of all ranks divided by its count, counted before the first backward.
`touch OUTPUT_DIR/STOP` saves and ends the run, also in the middle of a rollout; the same command resumes it.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from common import config, dist, run
from common.chat import Chat
from common.config import DataArguments, ModelArguments
from common.data import Order, PackedBatch
from common.metrics import MetricsLog, Performance, max_load, squared_lengths
from common.optim import AdamW, learning_rate
from common.sync_server import SyncError, UnusableServer
from common.weight_sync import ServersLost
from grpo import audit, difficulty, objectives, one_node
from grpo.batches import MicroBatch
from grpo.chord import Chord, ChordArguments, load_chord, micro_bins, mu_at
from grpo.experience import (
    GRPOTrainArguments,
    Rollout,
    Setup,
    check_engine,
    check_rows,
    evaluate,
    prepare,
    resume_rollout,
    resume_surplus,
    roll_out,
    show,
    start_ahead,
    write_unfinished,
)
from grpo.objectives import ObjectiveArguments
from grpo.reference import ReferenceWeights
from grpo.rollout import Question, RolloutArguments, RolloutBackend, fingerprint, read_questions, rollout_path, scorable
from grpo.sampling import Prompts, announce, fit_prior
from grpo.scoring import RewardArguments, RewardPool
from grpo.twin import HfBackend
from grpo.vllm_client import VllmBackend

log = logging.getLogger(__name__)


def check_arguments(
    model_args: ModelArguments,
    data_args: DataArguments,
    rollout_args: RolloutArguments,
    objective: ObjectiveArguments,
    chord_args: ChordArguments,
    args: GRPOTrainArguments,
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
    if model_args.quantization != "none" and rollout_args.rollout_backend != "hf":
        raise ValueError("quantization: nf4 generates its answers itself; leave rollout_backend at hf and give no vllm_servers.")
    if chord_args.chord_sft_files:
        micro_bins(chord_args, args)


def off_policy_warning(rollout_args: RolloutArguments, objective: ObjectiveArguments) -> str | None:
    """Where answers of older weights train without a correction."""
    if objective.rollout_correction != "none" or not (rollout_args.rollout_lag or rollout_args.dynamic_sampling):
        return None
    what = "rollout_lag: 1" if rollout_args.rollout_lag else "dynamic_sampling (the groups that are left over)"
    return f"{what} trains on answers of weights one rollout old, and rollout_correction is none: choose one, for instance token_tis."


def forward_backward(setup: Setup, batches: list[MicroBatch], share: float = 1.0) -> tuple[float, dict, float, torch.Tensor | None]:
    """`share` times the gradients of one mini-batch, from this rank's micro-batches.

    (loss, figures, mean load-balancing term of a micro-batch: all over the window and all ranks, not multiplied by `share`; assignments
    [MoE layers, experts] on this rank or None for a dense model).
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
        ((loss + coefficient * balance) * share * dist.world_size()).backward()  # FSDP divides gradients by the number of ranks
        policy, entropy = batch.policy.double(), batch.of_targets(output.entropy)
        columns = [policy * losses.ratio, policy * losses.clipped, policy, batch.divergence * k3, batch.divergence, policy * entropy]
        columns += [(logps - batch.old).abs() * policy]
        with torch.no_grad():
            parts = [loss.double(), balance.double(), *(column.double().sum() for column in columns)]
            sums += torch.stack([part.detach() for part in parts])
        if output.expert_load is not None:
            load = output.expert_load if load is None else load + output.expert_load
    loss, balance, ratio, clipped, tokens, kl, kl_tokens, entropy, drift = dist.all_sum(sums).tolist()
    figures = {}
    if tokens:
        named = {"grpo/ratio": ratio, "grpo/clip_share": clipped, "grpo/entropy": entropy, "drift": drift}
        figures = {name: value / tokens for name, value in named.items()}
    if objective.beta > 0 and kl_tokens:
        figures["grpo/kl"] = kl / kl_tokens
    return loss, figures, balance, load


def forward_backward_both(
    setup: Setup, chord: Chord, batches: list[MicroBatch], experts: list[PackedBatch], step: int, optimizer: AdamW
) -> tuple[float, dict, float, torch.Tensor | None]:
    """The same for (1 - mu) L_GRPO + mu L_SFT.

    In some steps the gradient of the SFT term is taken once more before, alone, and its norm measured; that of the GRPO term is measured
    before the SFT term is added to it. No second copy of the gradients is kept, and what the step does is the same to the bit.
    """
    mu, coefficient = mu_at(step, chord.args), setup.model_args.load_balancing_coef
    model, measured = setup.model.sharded, {}
    if chord.measures(step):
        if experts:
            devices = {parameter.device for parameter in model.root.parameters() if parameter.is_cuda}
            with torch.random.fork_rng(devices=devices):  # adapters may drop out
                chord.forward_backward(model, experts, mu, coefficient)
        measured["chord/sft_grad_norm"] = model.clip_grad_norm(0).item()
        optimizer.zero_grad()
    loss, figures, balance, load = forward_backward(setup, batches, 1 - mu)
    figures |= measured | {"chord/mu": mu, "chord/grpo_loss": loss}
    if chord.measures(step):
        figures["chord/grpo_grad_norm"] = model.clip_grad_norm(0).item()
    if experts:
        expert = chord.forward_backward(model, experts, mu, coefficient)
        figures["chord/sft_loss"] = expert.loss
        loss, balance = (1 - mu) * loss + mu * expert.loss, (1 - mu) * balance + mu * expert.balance
        load = expert.load if load is None else load if expert.load is None else load + expert.load
    return loss, figures, balance, load


def check_first_ratio(drift: float, compute_dtype: str) -> None:
    """Before a rollout's first update the policy is the one that computed `old`: what differs is a fault."""
    limit = run.PACKING_TOLERANCE[getattr(torch, compute_dtype)]
    if not drift <= limit:
        raise RuntimeError(
            f"before the first update log-probabilities differ from those just computed by {drift:.4f} a token, allowed {limit}."
        )
    log.info("ratio check: training and log-probability pass agree to %.2g a token before the first update", drift)


def rows_of(setup: Setup, rollout: Rollout, chord: Chord | None, step: int) -> str:
    """Where a step's rows are, for messages."""
    answers = f"the answers in {rollout_path(setup.output_dir, 'step', rollout.first_step)}"
    return f"{answers}, expert rows {chord.where(step)}" if chord else answers


def make_backend(
    model: run.Model, tokenizer, model_args: ModelArguments, rollout_args: RolloutArguments, questions: list[Question]
) -> RolloutBackend:
    if rollout_args.rollout_backend == "vllm":
        probe = [question.prompt_ids for question in questions[:8]]
        lag, wait_minutes = rollout_args.rollout_lag, rollout_args.server_wait_minutes
        return VllmBackend(rollout_args.vllm_servers, model, rollout_lag=lag, probe_prompts=probe, wait_minutes=wait_minutes)
    stop_ids = sorted(Chat(tokenizer).stops.values())
    if not stop_ids:
        raise ValueError("neither tokenizer nor generation_config.json names a token that ends an answer")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
    if model_args.quantization == "nf4":
        return one_node.OneNodeBackend(model, stop_ids=stop_ids, pad_id=pad_id, batch_size=rollout_args.rollout_batch_size)
    return HfBackend(model, model_args, stop_ids=stop_ids, pad_id=pad_id, batch_size=rollout_args.rollout_batch_size)


@contextmanager
def saved_when_servers_fail(save: Callable[[], None], trained: bool) -> Iterator[None]:
    """A run whose servers do not come back, or cannot be used any more, ends, but keeps the steps since its last checkpoint. These errors are
    raised on all ranks; after others, which one rank may raise alone, a collective would hang."""
    try:
        yield
    except (ServersLost, SyncError, UnusableServer):
        if trained:
            save()
        raise


@record
def main() -> None:
    model_args, data_args, rollout_args, reward_args, objective, chord_args, args = all_args = config.parse(
        ModelArguments, DataArguments, RolloutArguments, RewardArguments, ObjectiveArguments, ChordArguments, GRPOTrainArguments
    )
    with config.wrong_use():
        check_arguments(model_args, data_args, rollout_args, objective, chord_args, args)
    output_dir = Path(args.output_dir)
    run.start(output_dir, args)
    if text := off_policy_warning(rollout_args, objective):
        dist.warn(log, "%s", text)
    tokenizer = run.load_tokenizer(model_args.model_name_or_path)

    # Data and reward functions first: what is wrong with them must be known before a large model is loaded.
    room = data_args.max_length - rollout_args.max_completion_length
    how = (tokenizer, room, data_args.on_bad_row, data_args.chat_template_kwargs)
    questions = read_questions(data_args.train_files, *how)
    held_out = read_questions(data_args.eval_files, *how) if data_args.eval_files else []
    pool, wrong = None, {}
    with dist.main_rank_first() as mine:
        if mine:
            pool = RewardPool(reward_args)
            if reward_args.on_reward_error == "error":  # else they are counted when they are scored
                wrong = pool.check([(question.where, question.columns) for question in (*questions, *held_out)])
    wrong = dist.broadcast_object(wrong)
    questions, held_out = (scorable(rows, wrong, data_args.on_bad_row) for rows in (questions, held_out))
    chord = load_chord(chord_args, reward_args.reward_funcs, tokenizer, data_args, model_args, args) if chord_args.chord_sft_files else None
    identity = {
        "data": fingerprint(questions),
        "num_prompts_per_step": rollout_args.num_prompts_per_step,
        "num_generations": rollout_args.num_generations,
        "updates_per_rollout": [args.num_iterations, args.num_minibatches],
        "max_length": data_args.max_length,
        "packing": data_args.packing,
        "chord_sft_files": chord.data.key if chord else None,
        # Groups that are left over, and a rollout that has trained in part, are scored and chosen by these.
        "reward_funcs": reward_args.reward_funcs,
        "reward_weights": reward_args.reward_weights,
        "accuracy_reward": reward_args.accuracy_reward,
    }
    measured = difficulty.read_measurement(rollout_args.difficulty_file) if rollout_args.difficulty_file else None
    if rollout_args.dynamic_sampling:
        announce(questions, measured and measured.rates, rollout_args)
    order = Order(len(questions), args.seed, "prompts", "(num_prompts_per_step): add prompts, or lower num_prompts_per_step")
    prompts = Prompts(questions, order, rollout_args.num_prompts_per_step)
    updates = args.num_iterations * args.num_minibatches
    steps_per_epoch = prompts.order.steps_per_epoch(prompts.size) * updates
    total_steps = args.max_steps if args.max_steps > 0 else max(1, int(args.num_train_epochs * steps_per_epoch))
    log.info(
        "%d steps, %d on each rollout of %d prompts; %d steps an epoch",
        total_steps,
        updates,
        rollout_args.num_prompts_per_step,
        steps_per_epoch,
    )

    if model_args.quantization == "nf4":
        model = one_node.build_model(model_args, data_args, rollout_args, args, [*questions, *held_out])
    else:
        model = run.build_model(model_args)
    reference = ReferenceWeights(model.sharded) if objective.beta > 0 else None  # before a resume changes the weights
    optimizer = AdamW(model.sharded.trained_shards(), model_args, args)
    state = run.resume(output_dir, args, model, optimizer, identity)
    run.begin(output_dir, *all_args)
    first_step = state.step
    backend = make_backend(model, tokenizer, model_args, rollout_args, questions)
    setup = Setup(model, backend, tokenizer, pool, reference, model_args, data_args, rollout_args, reward_args, objective, args, output_dir)
    setup.surplus = resume_surplus(setup, questions, state.step)
    if measured:
        setup.pass_rates, setup.prior = measured.rates, fit_prior(measured.rates.values())
        for text in difficulty.stale_warnings(measured, fingerprint=model.base.fingerprint, run=config.resolved(*all_args)):
            dist.warn(log, "%s", text)
    if chord:
        chord.check(model.sharded, tokenizer, model_args.compute_dtype)
    backend.start()
    metrics = MetricsLog(output_dir, args.report_to, args.run_name or output_dir.name, config.resolved(*all_args), state.step)

    guard = run.StepGuard(model.sharded, optimizer, args)
    performance = Performance(model.flops)
    logged_step = first_step
    model.sharded.train()
    rollout: Rollout | None = None
    checked = compared = False  # rows and rewards; that the engine samples from what the trainer computes
    if held_out and rollout_args.eval_on_start and state.step == 0:
        metrics.log(0, evaluate(setup, held_out, 0))
    if rollout_args.baseline_prompts and state.step == 0:
        audit.measure_baseline(setup, prompts, -(-total_steps // updates))
    if position := state.step % updates:
        rollout = resume_rollout(setup, questions, state.step - position + 1)
    save = partial(run.save, output_dir, args, model, optimizer, state, identity)
    progress = dist.progress(total_steps, "grpo", "step", initial=state.step)
    performance.restart()
    while state.step < total_steps:
        position = state.step % updates
        stop = bool(run.agree(run.stop_requested(output_dir))[0])
        if not stop and position == 0:
            with saved_when_servers_fail(save, state.step > first_step):
                made = roll_out(setup, prompts, state)
            run.step_starts()  # the rollout looks for STOP itself
            stop = made is None
            if made is not None:
                if rollout_args.rollout_lag and state.step + updates < total_steps:
                    start_ahead(setup, prompts, made, state.step + updates + 1)
                rollout = prepare(setup, made.answers, made.figures, state.step + 1)
                if made.answers and not checked:
                    show(made.answers, rollout_args.num_generations)
                    check_rows(setup, made.answers)
                    audit.check_first_rewards(setup, made.answers)
                if made.answers and not compared:  # the first rollout that can show it
                    compared = check_engine(setup, made.answers, rollout, first=not checked)
                checked = checked or bool(made.answers)
                state.epoch, state.offset = made.epoch, made.offset
        if stop:
            if setup.ahead is not None:
                write_unfinished(setup, setup.ahead.take(), questions, setup.ahead_step)
            save()
            run.check_frozen(model)
            log.info("%s found: saved at step %d, ending", run.STOP, state.step)
            close(setup, metrics)
            return

        batches, window = rollout.mini_batches[position % args.num_minibatches], rollout.windows[position % args.num_minibatches]
        start = time.perf_counter()
        lr = learning_rate(state.step, total_steps, args.learning_rate, args.warmup_steps, args.lr_scheduler_type)
        values: dict[str, float | None] = {}
        experts = chord.micro_batches(state.step) if chord else []
        if not experts and window[0] == 0 and (objective.beta == 0 or window[2] == 0):
            why = rollout.idle[position % args.num_minibatches]
            dist.warn(log, "step %d skipped: nothing in its mini-batch trains; %s", state.step + 1, why)
            loss, grad_norm, skipped, figures, balance, load = None, None, True, {}, None, None
        else:
            if chord:
                loss, figures, balance, load = forward_backward_both(setup, chord, batches, experts, state.step, optimizer)
            else:
                loss, figures, balance, load = forward_backward(setup, batches)
            drift = figures.pop("drift", 0.0)  # nothing where no answer trains
            # Fresh adapters add nothing, dropped out or not; trained ones add another sum in each pass.
            if position == 0 and rollout.first_step == first_step + 1 and not (first_step and model_args.drops_out):
                check_first_ratio(drift, model_args.compute_dtype)
            grad_norm, skipped = guard.step(loss, lr, partial(rows_of, setup, rollout, chord if experts else None, state.step))
        train_seconds = time.perf_counter() - start
        used = [batch.packed for batch in batches if batch.answers] + experts
        tokens, squares = run.agree(
            sum(packed.num_tokens for packed in used),
            sum(squared_lengths(packed.cu_seq_lens) for packed in used),
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
            values |= figures | rollout.figures
            values |= performance.of_steps(state.step - logged_step, tokens, squares)
            logged_step = state.step
            log.info("%s %s", run.step_line(state.step, values), rollout_line(values))
            progress.set_postfix(reward=f"{values['grpo/reward'] or 0:.3f}", refresh=False)
        progress.update()

        try:
            if held_out and (last or (args.eval_steps and state.step % args.eval_steps == 0)):
                with saved_when_servers_fail(save, trained=True):
                    values |= evaluate(setup, held_out, state.step)
        finally:  # an evaluation that fails does not take the step's figures with it
            if values:
                metrics.log(state.step, values)
        if args.save_steps and (last or state.step % args.save_steps == 0):
            save()
        if values:
            performance.restart()  # evaluation and saving do not count as training time

    progress.close()
    run.finish(output_dir, args, model, state, trained=state.step > first_step)
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
