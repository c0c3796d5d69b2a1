r"""Direct preference optimisation on plain PyTorch FSDP.

    torchrun --nproc-per-node 8 -m dpo.train --config dpo/configs/qwen3_235b.yaml --model_name_or_path BASE \
        --train_files pairs.jsonl --output_dir runs/a

Both answers of a pair go through the model in one packed row. The untrained model's log-probabilities are computed first, into
OUTPUT_DIR/reference, so no second model is in memory. The loss of a step is a sum over the whole window (all ranks, all micro-batches)
divided by its count of pairs (for the sft term: of chosen tokens), counted before the first backward. `touch OUTPUT_DIR/STOP` saves and
ends the run; the same command resumes it.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.distributed.elastic.multiprocessing.errors import record

from common import config, dist, run
from common.config import DataArguments, ModelArguments, TrainArguments, option
from common.data import Bins, Order, TokenizedDataset, collate, describe
from common.fsdp import ShardedModel
from common.metrics import MetricsLog, Performance, max_load, squared_lengths
from common.optim import AdamW, learning_rate
from dpo.data import PairBatch, PairRule, answer_sums, collate_pairs, rows_of_rank
from dpo.loss import LossArguments, Pairs, figure_means, figure_sums, loss_scales, loss_sums
from dpo.reference import compute_reference, key_of

log = logging.getLogger(__name__)


@dataclass
class DPOTrainArguments(TrainArguments):
    """The loop: how long, how fast, what is written."""

    learning_rate: float = option(1e-6, "Peak learning rate.")


@dataclass
class PairData:
    """Pairs, the bins they are packed into, and the untrained model's log-probabilities of them."""

    dataset: TokenizedDataset
    bins: Bins
    reference: np.ndarray | None = None  # [examples]

    def batch(self, bin_ids, pad_to: int | None, zero_weight: bool = False) -> PairBatch:
        return collate_pairs(self.dataset, self.bins, bin_ids, self.reference, pad_to=pad_to, zero_weight=zero_weight)

    def where(self, bin_ids) -> str:
        """File and line of every pair of some bins."""
        return ", ".join(self.dataset.where(row) for bin_id in bin_ids for row in self.bins[bin_id][::2])


def forward(model: ShardedModel, batch: PairBatch):
    """(pairs, output of the model) of a micro-batch that is on the device."""
    output = model(batch.packed.model_inputs(), batch.packed.targets, num_tokens=batch.packed.num_tokens)
    return Pairs.of(answer_sums(output.logps, batch.packed), batch.reference, batch.lengths, batch.weights), output


def forward_backward(
    model: ShardedModel, batches: list[PairBatch], scales: torch.Tensor, loss_args: LossArguments, load_balancing_coef: float
) -> tuple[torch.Tensor, dict[str, float], float, torch.Tensor | None]:
    """Gradients of one step from this rank's micro-batches; `scales` [K] of loss_scales over the whole window.

    (value of each loss [K], means of the figures, mean load-balancing term of a micro-batch: all over the window and all ranks;
    assignments [MoE layers, experts] on this rank or None for a dense model).
    """
    losses, figures, balances = torch.zeros_like(scales), 0, torch.zeros_like(scales[:1])
    load = None
    for batch in batches:
        pairs, output = forward(model, batch.to(dist.device()))
        sums = loss_sums(pairs, loss_args)
        # The load-balancing term belongs to one micro-batch of all ranks; the step takes the mean over its micro-batches.
        balance = output.aux_loss / len(batches)
        loss = (sums * scales).sum() + load_balancing_coef * balance
        (loss * dist.world_size()).backward()  # FSDP divides gradients by the number of ranks
        losses += sums.detach() * scales
        figures = figures + figure_sums(pairs, loss_args.beta)
        balances += balance.detach()
        if output.expert_load is not None:
            load = output.expert_load if load is None else load + output.expert_load
    total = dist.all_sum(torch.cat([losses, balances, figures]))
    losses, balances, figures = total.split([len(losses), 1, len(figures)])
    return losses, figure_means(figures), balances.item(), load


@torch.no_grad()
def evaluate(model: ShardedModel, data: PairData, loss_args: LossArguments, bins_per_row: int, pad_to: int | None) -> dict[str, float]:
    """Loss and figures over all pairs of `data`. No pair is dropped: a rank without a bin left runs one of zero weight."""
    model.train(False)
    total = 0
    for bin_ids, filler in rows_of_rank(np.arange(len(data.bins)), bins_per_row):
        batch = data.batch(bin_ids, pad_to, zero_weight=filler).to(dist.device())
        pairs, _ = forward(model, batch)
        counts = torch.stack([batch.weights.sum(), (batch.weights * batch.lengths[0::2]).sum()])
        total = total + torch.cat([counts, loss_sums(pairs, loss_args), figure_sums(pairs, loss_args.beta)])
        dist.beat()
    model.train()
    counts, losses, figures = dist.all_sum(total).split([2, len(loss_args.loss_type), len(total) - 2 - len(loss_args.loss_type)])
    losses = losses.cpu() * loss_scales(loss_args, *counts.tolist())
    values = {f"eval/{name}": value for name, value in figure_means(figures).items() if name != "drift"}
    return {"eval/loss": losses.sum().item()} | loss_values("eval/", losses, loss_args) | values


def loss_values(prefix: str, losses: torch.Tensor, loss_args: LossArguments) -> dict[str, float]:
    """Each loss by name, where there are several: its share of the whole, weight included."""
    if len(losses) == 1:
        return {}
    return {f"{prefix}loss_{name}": value for name, value in zip(loss_args.loss_type, losses.tolist(), strict=True)}


def check_reference(drift: float, compute_dtype: str) -> None:
    """Before the first update the model is the reference: what differs is a fault. `drift`: mean |policy - reference| per token."""
    limit = run.PACKING_TOLERANCE[getattr(torch, compute_dtype)]
    if not drift <= limit:
        raise RuntimeError(
            f"the untrained model differs from its own reference log-probabilities by {drift:.4f} per token, allowed {limit}. "
            "Delete the run's folder `reference` to compute them anew; if it comes again, forward passes here are not repeatable."
        )
    log.info("reference check: model and reference agree to %.2g per token before the first update", drift)


@record
def main() -> None:
    model_args, data_args, loss_args, args = config.parse(ModelArguments, DataArguments, LossArguments, DPOTrainArguments)
    with config.wrong_use():
        run.check_unquantised(model_args)
    output_dir = Path(args.output_dir)
    run.start(output_dir, args)
    tokenizer = run.load_tokenizer(model_args.model_name_or_path)

    # Data first: a bad row must be known before a large model is loaded.
    train = PairData(*run.load_data(data_args.train_files, tokenizer, data_args, output_dir, PairRule()))
    held_out = None
    if data_args.eval_files:
        held_out = PairData(*run.load_data(data_args.eval_files, tokenizer, data_args, output_dir, PairRule()))
    data_identity = {"data": train.dataset.path.name, "max_length": data_args.max_length, "packing": data_args.packing}
    bins_per_step = run.batch_identity(args)["bins_per_step"]
    order = Order(len(train.bins), args.seed)
    steps_per_epoch = order.steps_per_epoch(bins_per_step)
    total_steps = args.max_steps if args.max_steps > 0 else max(1, int(args.num_train_epochs * steps_per_epoch))
    bins_per_row = args.per_device_train_batch_size
    pad_to = data_args.max_length * bins_per_row if model_args.compile else None  # one shape in all passes: nothing compiles twice
    log.info("%d steps of %d bins, %d steps an epoch", total_steps, bins_per_step, steps_per_epoch)
    first_bins = collate(train.dataset, train.bins, range(bins_per_row), pad_to=pad_to)
    log.info("a chosen and a rejected answer; what carries loss, between marks:\n%s", describe(first_bins, tokenizer))

    model = run.build_model(model_args)
    run.check_packing(model.sharded, first_bins, model_args.compute_dtype)
    # Before anything is loaded into the model: the reference is the untrained model, also in a run that is resumed.
    for name, data in (("train", train), ("eval", held_out)):
        if data is None:
            continue
        key = key_of(data.dataset, data.bins, model, model_args, data_args)
        folder = output_dir / "reference" / name
        data.reference = compute_reference(
            folder, model, data.dataset, data.bins, key, bins_per_row=bins_per_row, pad_to=pad_to, stop_dir=output_dir
        )
        if data.reference is None:
            log.info("%s found: ending; the same command goes on with the reference log-probabilities", run.STOP)
            dist.shutdown()
            return

    optimizer = AdamW(model.sharded.trained_shards(), model_args, args)
    state = run.resume(output_dir, args, model, optimizer, data_identity)
    run.begin(output_dir, model_args, data_args, loss_args, args)
    first_step = state.step
    options = config.resolved(model_args, data_args, loss_args, args)
    metrics = MetricsLog(output_dir, args.report_to, args.run_name or output_dir.name, options, state.step)

    guard = run.StepGuard(model.sharded, optimizer, args)
    performance = Performance(model.flops)
    logged_step = first_step
    model.sharded.train()
    progress = dist.progress(total_steps, "dpo", "step", initial=state.step)
    while state.step < total_steps:
        window, epoch, offset = order.next(state.epoch, state.offset, bins_per_step)
        batches = [train.batch(bins, pad_to) for bins in run.micro_batches(window, args)]

        # What divides every loss term is known before the first backward. The stop flag travels in the same sum.
        stop, pair_weight, chosen_tokens, tokens, squares = run.agree(
            run.stop_requested(output_dir),
            sum(batch.weights.sum().item() for batch in batches),
            sum(batch.chosen_tokens for batch in batches),
            sum(batch.packed.num_tokens for batch in batches),
            sum(squared_lengths(batch.packed.cu_seq_lens) for batch in batches),
        )
        if stop:
            run.save(output_dir, args, model, optimizer, state, data_identity)
            run.check_frozen(model)
            log.info("%s found: saved at step %d, ending", run.STOP, state.step)
            metrics.close()
            dist.shutdown()
            return

        scales = loss_scales(loss_args, pair_weight, chosen_tokens, dist.device())
        losses, figures, balance, load = forward_backward(model.sharded, batches, scales, loss_args, model_args.load_balancing_coef)
        loss = losses.sum().item()
        if state.step == 0:
            check_reference(figures["drift"], model_args.compute_dtype)
        lr = learning_rate(state.step, total_steps, args.learning_rate, args.warmup_steps, args.lr_scheduler_type)
        grad_norm, skipped = guard.step(loss, lr, lambda window=window: train.where(window))
        state.step, state.epoch, state.offset = state.step + 1, epoch, offset
        state.tokens += int(tokens)
        state.skipped_steps += skipped

        values: dict[str, float | None] = {}
        last = state.step == total_steps
        if last or state.step % args.logging_steps == 0:
            values = {
                "loss": loss,
                "grad_norm": grad_norm,
                "learning_rate": lr,
                "epoch": state.epoch + state.offset / len(train.bins),
                "tokens": state.tokens,
                "skipped_steps": state.skipped_steps,
                "moe/aux_loss": balance if model_args.load_balancing_coef > 0 else None,
                "moe/max_load": max_load(load) if load is not None else None,
            }
            values |= {f"dpo/{name}": value for name, value in figures.items() if name != "drift"}
            values |= loss_values("dpo/", losses, loss_args)
            values |= performance.of_steps(state.step - logged_step, tokens, squares)
            logged_step = state.step
            log.info("%s margin %.4f accuracy %.3f", run.step_line(state.step, values), values["dpo/margin"], values["dpo/accuracy"])
            progress.set_postfix(loss=f"{loss:.4f}", accuracy=f"{values['dpo/accuracy']:.2f}", refresh=False)
        progress.update()

        if held_out is not None and (last or (args.eval_steps and state.step % args.eval_steps == 0)):
            values |= evaluate(model.sharded, held_out, loss_args, bins_per_row, pad_to)
            log.info("step %d eval loss %.4f accuracy %.3f", state.step, values["eval/loss"], values["eval/accuracy"])
        if values:
            metrics.log(state.step, values)
        if args.save_steps and (last or state.step % args.save_steps == 0):
            run.save(output_dir, args, model, optimizer, state, data_identity)
        if values:
            performance.restart()  # evaluation and saving do not count as training time

    progress.close()
    metrics.close()
    run.finish(output_dir, args, model, state, trained=state.step > first_step)
    dist.shutdown()


if __name__ == "__main__":
    main()
