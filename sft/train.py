"""Supervised fine-tuning on plain PyTorch FSDP.

    torchrun --nproc-per-node 8 -m sft.train --config sft/configs/qwen3_235b.yaml --model_name_or_path BASE --train_files data.jsonl --output_dir runs/a

The loss of a step is sum(w m NLL) / sum(w m) over the whole window: all ranks, all micro-batches, m = 1 on assistant tokens (their end-of-turn
token included), w the row's weight. The denominator is counted before the first backward, so neither the number of ranks nor accumulation changes
the result. `touch OUTPUT_DIR/STOP` saves and ends the run; the same command resumes it.
"""

import logging
import math
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from common import config, dist, run
from common.config import DataArguments, ModelArguments, TrainArguments
from common.data import Bins, Order, PackedBatch, TokenizedDataset, collate, describe
from common.fsdp import ShardedModel
from common.metrics import MetricsLog, Performance, max_load, squared_lengths
from common.optim import AdamW, learning_rate

log = logging.getLogger(__name__)


def forward_backward(
    model: ShardedModel, batches: list[PackedBatch], total_weight: float, load_balancing_coef: float
) -> tuple[float, float, torch.Tensor | None]:
    """Gradients of one step from this rank's micro-batches. Returns sums over the window and all ranks.

    (sum of w m NLL, mean load-balancing term of a micro-batch, assignments [MoE layers, experts] on this rank or None for a dense model).
    """
    sums = torch.zeros(2, dtype=torch.float64, device=dist.device())
    load = None
    for batch in batches:
        batch = batch.to(dist.device())
        output = model(batch.model_inputs(), batch.targets, num_tokens=batch.num_tokens)
        nll = -(output.logps * batch.weights.flatten()).sum()
        # The load-balancing term belongs to one micro-batch of all ranks; the step takes the mean over its micro-batches.
        balance = output.aux_loss / len(batches)
        loss = nll / total_weight + load_balancing_coef * balance
        (loss * dist.world_size()).backward()  # FSDP divides gradients by the number of ranks
        sums += torch.stack([nll.detach(), balance.detach()])
        if output.expert_load is not None:
            load = output.expert_load if load is None else load + output.expert_load
    nll, balance = dist.all_sum(sums).tolist()
    return nll, balance, load


@torch.no_grad()
def evaluate(model: ShardedModel, dataset: TokenizedDataset, bins: Bins, pad_to: int | None) -> dict[str, float]:
    """Loss per token and perplexity over all of `dataset`. No row is dropped: a rank without a bin left runs one of zero weight."""
    model.train(False)
    total = torch.zeros(2, dtype=torch.float64, device=dist.device())
    for first in range(0, len(bins), dist.world_size()):
        mine = first + dist.rank()
        batch = collate(dataset, bins, [min(mine, len(bins) - 1)], pad_to=pad_to, zero_weight=mine >= len(bins)).to(dist.device())
        output = model(batch.model_inputs(), batch.targets, num_tokens=batch.num_tokens)
        weights = batch.weights.flatten()
        total += torch.stack([-(output.logps * weights).sum(), weights.sum()])
        dist.beat()
    model.train()
    loss = (dist.all_sum(total)[0] / total[1]).item()
    return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}


@record
def main() -> None:
    model_args, data_args, args = config.parse(ModelArguments, DataArguments, TrainArguments)
    with config.wrong_use():
        run.check_unquantised(model_args)
    output_dir = Path(args.output_dir)
    run.start(output_dir, args)
    tokenizer = run.load_tokenizer(model_args.model_name_or_path)

    # Data first: a bad row must be known before a large model is loaded.
    train_data, train_bins = run.load_data(data_args.train_files, tokenizer, data_args, output_dir)
    eval_data, eval_bins = run.load_data(data_args.eval_files, tokenizer, data_args, output_dir) if data_args.eval_files else (None, None)
    data_identity = {"data": train_data.key, "max_length": data_args.max_length, "packing": data_args.packing}
    bins_per_step = run.batch_identity(args)["bins_per_step"]
    order = Order(len(train_bins), args.seed)
    steps_per_epoch = order.steps_per_epoch(bins_per_step)
    total_steps = args.max_steps if args.max_steps > 0 else max(1, int(args.num_train_epochs * steps_per_epoch))
    pad_to = data_args.max_length * args.per_device_train_batch_size if model_args.compile else None
    eval_pad_to = data_args.max_length if model_args.compile else None
    log.info("%d steps of %d bins, %d steps an epoch", total_steps, bins_per_step, steps_per_epoch)
    log.info("what carries loss, between marks:\n%s", describe(collate(train_data, train_bins, [0]), tokenizer))

    model = run.build_model(model_args)
    optimizer = AdamW(model.sharded.trained_shards(), model_args, args)
    state = run.resume(output_dir, args, model, optimizer, data_identity)
    run.begin(output_dir, model_args, data_args, args)
    first_step = state.step
    if first_step >= total_steps:
        log.info("nothing to train: step %d of %d is reached. Give more max_steps or epochs to go on.", first_step, total_steps)
    first = collate(train_data, train_bins, [train_bins.fullest()], pad_to=eval_pad_to)
    run.check_packing(model.sharded, first, model_args.compute_dtype)
    metrics = MetricsLog(
        output_dir, args.report_to, args.run_name or output_dir.name, config.resolved(model_args, data_args, args), state.step
    )

    guard = run.StepGuard(model.sharded, optimizer, args)
    performance = Performance(model.flops)
    logged_step = first_step
    model.sharded.train()
    progress = dist.progress(total_steps, "sft", "step", initial=state.step)
    while state.step < total_steps:
        window, epoch, offset = order.next(state.epoch, state.offset, bins_per_step)
        batches = [collate(train_data, train_bins, bins, pad_to=pad_to) for bins in run.micro_batches(window, args)]

        # What divides every loss term is known before the first backward. The stop flag travels in the same sum.
        stop, total_weight, tokens, squares = run.agree(
            run.stop_requested(output_dir),
            sum(batch.weights.sum().item() for batch in batches),
            sum(batch.num_tokens for batch in batches),
            sum(squared_lengths(batch.cu_seq_lens) for batch in batches),
        )
        if stop:
            run.save(output_dir, args, model, optimizer, state, data_identity)
            run.check_frozen(model)
            log.info("%s found: saved at step %d, ending", run.STOP, state.step)
            metrics.close()
            dist.shutdown()
            return

        nll, balance, load = forward_backward(model.sharded, batches, total_weight, model_args.load_balancing_coef)
        loss = nll / total_weight
        lr = learning_rate(state.step, total_steps, args.learning_rate, args.warmup_steps, args.lr_scheduler_type)
        grad_norm, skipped = guard.step(
            loss, lr, lambda window=window: ", ".join(train_data.where(row) for bin_id in window for row in train_bins[bin_id])
        )
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
                "epoch": state.epoch + state.offset / len(train_bins),
                "tokens": state.tokens,
                "skipped_steps": state.skipped_steps,
                "moe/aux_loss": balance if model_args.load_balancing_coef > 0 else None,
                "moe/max_load": max_load(load) if load is not None else None,
            }
            values |= performance.of_steps(state.step - logged_step, tokens, squares)
            logged_step = state.step
            log.info(run.step_line(state.step, values))
            progress.set_postfix(loss=f"{loss:.4f}", refresh=False)
        progress.update()

        if eval_data is not None and (last or (args.eval_steps and state.step % args.eval_steps == 0)):
            values |= evaluate(model.sharded, eval_data, eval_bins, eval_pad_to)
            log.info("step %d eval loss %.4f perplexity %.3f", state.step, values["eval/loss"], values["eval/perplexity"])
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
