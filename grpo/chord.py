"""CHORD: supervised fine-tuning on the answers of experts, mixed into GRPO (arXiv 2508.11408).

    L = (1 - mu) L_GRPO + mu L_SFT,    L_SFT = sum(w m phi NLL) / sum(w m) over the window,    phi = p (1 - p) or 1

w the weight of an expert's row, m = 1 on its assistant tokens, p the probability of the token, phi without a gradient through it (with one it
would push tokens below 1/2 down). Both terms are sums over all ranks and micro-batches of the step, each divided by its own count, so mu means
the same whatever the batches are. mu depends on the optimizer step alone: from 0 to mu_peak in mu_warmup_steps, to mu_valley in mu_decay_steps
more. The rows of a step depend on its number alone too, so a resumed run goes on with the rows that come next. At mu = 0 no expert row is read.

    python -m grpo.chord make-data --help      expert answers out of multiple-choice questions
"""

import logging
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from common import dist, run
from common.config import DataArguments, ModelArguments, TrainArguments, option
from common.data import Bins, Order, PackedBatch, TokenizedDataset, collate, describe
from common.fsdp import ShardedModel

log = logging.getLogger(__name__)


@dataclass
class ChordArguments:
    """Answers of experts mixed into GRPO (CHORD); on when chord_sft_files is given."""

    chord_sft_files: list[str] = option([], "Conversations of experts, JSON Lines or Parquet as for SFT.")
    chord_sft_per_device_train_batch_size: int = option(1, "Bins of expert rows on one rank in one optimizer step.")
    chord_mu_peak: float = option(0.9, "Largest weight of the SFT term; the GRPO term has 1 - mu.")
    chord_mu_valley: float = option(0.05, "Weight of the SFT term after the decay.")
    chord_mu_warmup_steps: int = option(0, "Optimizer steps from 0 to chord_mu_peak.")
    chord_mu_decay_steps: int = option(200, "Optimizer steps from chord_mu_peak to chord_mu_valley.")
    chord_mu_schedule: Literal["cosine", "linear"] = option("cosine", "Shape of the decay.")
    chord_enable_phi_function: bool = option(
        False,
        "Weigh each expert token by p (1 - p): what the model knows, or finds impossible, hardly counts. The term becomes about 10 x weaker.",
    )
    chord_norm_steps: int = option(
        10, "Measure the gradient norm of each term every so many steps, at the price of one more pass over the expert rows. 0: never."
    )

    def __post_init__(self):
        for name in ("chord_mu_peak", "chord_mu_valley"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be between 0 and 1.")
        for name in ("chord_mu_warmup_steps", "chord_mu_decay_steps", "chord_norm_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it cannot be negative.")
        if self.chord_sft_per_device_train_batch_size < 1:
            raise ValueError(
                f"chord_sft_per_device_train_batch_size is {self.chord_sft_per_device_train_batch_size}; it must be at least 1."
            )


def mu_at(step: int, args: ChordArguments) -> float:
    """Weight of the SFT term in optimizer step `step`, 0-based: with a warm-up the first step is pure GRPO."""
    warmup, decay, peak, valley = args.chord_mu_warmup_steps, args.chord_mu_decay_steps, args.chord_mu_peak, args.chord_mu_valley
    if step < warmup:
        return peak * step / warmup
    if step >= warmup + decay:
        return valley
    progress = (step - warmup) / decay
    return valley + (peak - valley) * (0.5 * (1 + math.cos(math.pi * progress)) if args.chord_mu_schedule == "cosine" else 1 - progress)


def sft_loss_sum(logps: Tensor, weights: Tensor, phi: bool) -> Tensor:
    """Sum of w m phi NLL over tokens [T]; weights 0 where there is no target."""
    if phi:
        p = logps.detach().exp()
        weights = weights * p * (1 - p)
    return -(logps * weights).sum()


class ExpertLoss(NamedTuple):
    loss: float  # over the window and all ranks, not multiplied by mu
    balance: float  # mean load-balancing term of a micro-batch
    load: Tensor | None  # assignments [MoE layers, experts] on this rank


@dataclass
class Chord:
    """The expert rows of a run and the SFT term."""

    args: ChordArguments
    data: TokenizedDataset
    bins: Bins
    seed: int
    micro_bins: int  # bins of one micro-batch
    pad_to: int | None
    order: Order = field(init=False)

    def __post_init__(self):
        needs = "(ranks x chord_sft_per_device_train_batch_size): add rows, or lower max_length or chord_sft_per_device_train_batch_size"
        self.order = Order(len(self.bins), self.seed, "bins of chord_sft_files", needs)
        self.steps_per_epoch = self.order.steps_per_epoch(self.bins_per_step)

    @property
    def bins_per_step(self) -> int:
        return self.args.chord_sft_per_device_train_batch_size * dist.world_size()

    def window(self, step: int) -> list[int]:
        """Bins of optimizer step `step` on all ranks: the windows that `sft.train` takes with as many bins a step."""
        epoch, number = divmod(step, self.steps_per_epoch)
        return self.order.next(epoch, number * self.bins_per_step, self.bins_per_step)[0].tolist()

    def micro_batches(self, step: int) -> list[PackedBatch]:
        """This rank's micro-batches of a step; every rank has equally many. None at all where mu is 0."""
        if mu_at(step, self.args) == 0:
            return []
        window, size = self.window(step), self.micro_bins
        starts = range(dist.rank() * size, len(window), dist.world_size() * size)
        return [collate(self.data, self.bins, window[start : start + size], pad_to=self.pad_to) for start in starts]

    def where(self, step: int) -> str:
        return ", ".join(self.data.where(row) for index in self.window(step) for row in self.bins[index])

    def measures(self, step: int) -> bool:
        """Whether the gradient norm of each term is measured in this step."""
        return bool(self.args.chord_norm_steps) and (step + 1) % self.args.chord_norm_steps == 0

    def forward_backward(self, model: ShardedModel, batches: list[PackedBatch], mu: float, load_balancing_coef: float) -> ExpertLoss:
        """Adds mu times the gradient of the SFT term (and of its load-balancing term) to the model's. A collective."""
        (total_weight,) = run.agree(sum(batch.weights.sum().item() for batch in batches))
        sums = torch.zeros(2, dtype=torch.float64, device=dist.device())
        load = None
        for batch in batches:
            batch = batch.to(dist.device())
            output = model(batch.model_inputs(), batch.targets, num_tokens=batch.num_tokens)
            nll = sft_loss_sum(output.logps, batch.weights.flatten(), self.args.chord_enable_phi_function)
            balance = output.aux_loss / len(batches)
            loss = nll / total_weight + load_balancing_coef * balance
            (loss * mu * dist.world_size()).backward()  # FSDP divides gradients by the number of ranks
            sums += torch.stack([nll.detach(), balance.detach()])
            if output.expert_load is not None:
                load = output.expert_load if load is None else load + output.expert_load
        nll, balance = dist.all_sum(sums).tolist()
        return ExpertLoss(nll / total_weight, balance, load)

    def check(self, model: ShardedModel, tokenizer, compute_dtype: str) -> None:
        """What carries loss in the expert rows, and that rows of a bin are apart. A collective."""
        bin_id = self.bins.fullest()
        pad_to = self.pad_to and self.pad_to // self.micro_bins
        batch = collate(self.data, self.bins, [bin_id], pad_to=pad_to)
        log.info("what carries loss in the expert rows, between marks:\n%s", describe(batch, tokenizer))
        run.check_packing(model, batch, compute_dtype)


def micro_bins(args: ChordArguments, train_args: TrainArguments) -> int:
    """Bins of a micro-batch of expert rows. ValueError where a step is no whole number of them."""
    mine, usual = args.chord_sft_per_device_train_batch_size, train_args.per_device_train_batch_size
    if mine % min(mine, usual):
        raise ValueError(
            f"chord_sft_per_device_train_batch_size {mine} must be a multiple of per_device_train_batch_size {usual}, or less: a micro-batch of "
            "expert rows takes as many bins as one of answers."
        )
    return min(mine, usual)


def load_chord(
    args: ChordArguments,
    reward_funcs: list[str],
    tokenizer,
    data_args: DataArguments,
    model_args: ModelArguments,
    train_args: TrainArguments,
) -> Chord:
    """Tokenises the expert rows, and says where they have another form than `reward_funcs` read. ValueError where they cannot be used."""
    from grpo import chord_data  # imports the client of endpoints, which only this needs

    with dist.main_rank_first() as mine:
        for text in chord_data.format_warnings(args.chord_sft_files, reward_funcs) if mine else []:
            log.warning("%s", text)
    data, bins = run.load_data(args.chord_sft_files, tokenizer, data_args, Path(train_args.output_dir))
    size = micro_bins(args, train_args)
    chord = Chord(args, data, bins, train_args.seed, size, data_args.max_length * size if model_args.compile else None)
    log.info(
        "CHORD: %d bins of expert rows a step, %d steps an epoch of them; mu %.3g in the first step, %.3g at its peak, %.3g from step %d on",
        chord.bins_per_step, chord.steps_per_epoch, mu_at(0, args), args.chord_mu_peak, args.chord_mu_valley,
        args.chord_mu_warmup_steps + args.chord_mu_decay_steps + 1,
    )  # fmt: skip
    return chord


def main(argv: list[str]) -> int:
    """The command line; returns its exit code."""
    from grpo import chord_data

    if argv[:1] == ["make-data"]:
        return chord_data.main(argv[1:]) or 0
    stream = sys.stdout if argv in (["--help"], ["-h"]) else sys.stderr
    print("usage: python -m grpo.chord make-data [options]    (--help lists them)", file=stream)
    return 0 if stream is sys.stdout else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
