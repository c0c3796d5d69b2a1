"""AdamW over sharded parameters, learning-rate schedules, decay groups.

The optimizer sees pieces: one-dimensional views of this rank's shards. fp32 masters use torch's fused AdamW. bf16 masters and 8-bit moments use
torchao's, which rounds stochastically: plain bf16 AdamW at a learning rate of 1e-6 loses 98 % of all updates.
"""

import importlib
import math
from dataclasses import dataclass

import torch
from torch import nn

from common.config import ModelArguments, TrainArguments
from common.fsdp import LocalShard

BLOCK = 256  # elements that share one scale in 8-bit moments
MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(step: int, total_steps: int, peak: float, warmup_steps: float, schedule: str) -> float:
    """Learning rate of optimizer step `step` (0-based), a pure function, so that a resumed run cannot step a scheduler twice.

    Warm-up rises linearly and reaches `peak` after `warmup_steps` steps (below 1: a share of `total_steps`). The first step is not wasted on
    a rate of zero. cosine: peak * (1 + cos(pi t)) / 2 and linear: peak * (1 - t), t from 0 to 1 over the steps after the warm-up.
    """
    warmup = math.ceil(warmup_steps * total_steps) if warmup_steps < 1 else int(warmup_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return peak * (0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress)


@dataclass
class Piece:
    """What the optimizer updates: a view of a local shard, and where its gradient comes from."""

    shard: LocalShard
    start: int  # within the local shard
    parameter: nn.Parameter  # [n], shares memory with the shard

    def take_gradient(self) -> None:
        gradient = self.shard.parameter.grad
        n = self.parameter.numel()
        self.parameter.grad = None if gradient is None else gradient.view(-1)[self.start : self.start + n]


def _pieces(shard: LocalShard, aligned: bool) -> list[Piece]:
    """The shard as one piece; `aligned`: as a piece of whole blocks and a rest, since torchao silently keeps full-precision moments for a
    tensor whose length is no multiple of its block.
    """
    n = shard.tensor.numel()
    cuts = sorted({0, n - n % BLOCK, n}) if aligned else [0, n]
    return [Piece(shard, a, nn.Parameter(shard.tensor[a:b])) for a, b in zip(cuts, cuts[1:], strict=False)]


class AdamW:
    """AdamW of the run: `step(lr)` after the gradients are clipped, `zero_grad()` after it.

    Vectors (norms, biases, decay rates) are not decayed; whether a parameter is one is decided by its whole shape, not by the flat shard.
    """

    def __init__(self, shards: list[LocalShard], model_args: ModelArguments, args: TrainArguments):
        eight_bit = args.optim == "adamw_8bit"
        self.pieces = [piece for shard in shards for piece in _pieces(shard, eight_bit)]
        self._sources = {id(shard.parameter): shard.parameter for shard in shards}.values()
        groups = [
            {"params": [p.parameter for p in self.pieces if len(p.shard.shape) >= 2], "weight_decay": args.weight_decay},
            {"params": [p.parameter for p in self.pieces if len(p.shard.shape) < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        # A rank of a very small model may hold no elements at all; it still takes part in every collective.
        self.optimizer = _build(groups, model_args, args, eight_bit) if groups else None
        self.steps = 0

    def step(self, lr: float) -> None:
        """One update with learning rate `lr` from the gradients that backward left in the shards."""
        self.steps += 1
        if self.optimizer is None:
            return
        for piece in self.pieces:
            piece.take_gradient()
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):  # torchao compiles its step: a float would compile it anew at each rate
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self.optimizer.step()

    def zero_grad(self) -> None:
        for parameter in self._sources:
            parameter.grad = None
        for piece in self.pieces:
            piece.parameter.grad = None

    def moments(self, piece: Piece) -> dict[str, torch.Tensor]:
        """Both moments of a piece; zeros where it never had a gradient, so that every checkpoint is complete."""
        state = self.optimizer.state[piece.parameter]
        if not state:
            self._initialise(piece)
        return {name: state[name] for name in MOMENTS}

    def _initialise(self, piece: Piece) -> None:
        state, parameter = self.optimizer.state[piece.parameter], piece.parameter
        if hasattr(self.optimizer, "_new_buffer"):  # torchao: decides by size whether to quantise
            state["step"] = torch.tensor(float(self.steps))
            state["exp_avg"] = self.optimizer._new_buffer(parameter, True)
            state["exp_avg_sq"] = self.optimizer._new_buffer(parameter, False)
        else:
            state["step"] = torch.tensor(float(self.steps), device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)

    def set_steps(self, steps: int) -> None:
        """Sets the step count of a resumed run; bias correction depends on it."""
        self.steps = steps
        for piece in self.pieces:
            if not self.optimizer.state[piece.parameter]:
                self._initialise(piece)
            self.optimizer.state[piece.parameter]["step"].fill_(float(steps))


def _build(groups: list[dict], model_args: ModelArguments, args: TrainArguments, eight_bit: bool) -> torch.optim.Optimizer:
    options = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    rounding = model_args.master_dtype == "bfloat16"
    if not (eight_bit or rounding):
        return torch.optim.AdamW(groups, fused=True, **options)
    try:
        torchao = importlib.import_module("torchao.optim")
    except ImportError as error:
        raise ImportError("optim: adamw_8bit and master_dtype: bfloat16 need torchao. Install it: bash env/setup.sh train") from error
    return (torchao.AdamW8bit if eight_bit else torchao._AdamW)(groups, bf16_stochastic_round=rounding, **options)
