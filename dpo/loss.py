"""Preference losses on summed log-probabilities.

With d_w = log pi(chosen) - log ref(chosen), d_l the same of the rejected answer, and D = d_w - d_l (sums over the answer's tokens):

    sigmoid       -log s(beta D)                                            DPO, arXiv 2305.18290 eq. 7
                  with label_smoothing e: -(1-e) log s(beta D) - e log s(-beta D)          (conservative DPO)
    robust        [-(1-e) log s(beta D) + e log s(-beta D)] / (1 - 2e)      arXiv 2403.00409
    ipo           (d_w / T_w - d_l / T_l - 1 / (2 beta))^2                  arXiv 2310.12036 eq. 17, per token, as its authors do
    sigmoid_norm  -log s(beta (d_w / T_w - d_l / T_l))                      beta is about T times that of sigmoid (5 is usual)
    hinge         max(0, 1 - beta D)                                        SLiC, arXiv 2305.10425
    sft           -log pi(chosen)                                           per chosen token, not per pair

Each is a sum over the window (all ranks, all micro-batches) of weight x loss over its own count: pairs, or for sft chosen tokens.
Several at once: their sum with loss_weights. Shapes: P pairs, K losses.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.config import option

LOSS_TYPES = ("sigmoid", "robust", "ipo", "sigmoid_norm", "hinge", "sft")


@dataclass
class LossArguments:
    """What is optimised."""

    beta: float = option(0.1, "Strength of the pull to the reference model. sigmoid_norm compares means over tokens and needs about 5.")
    loss_type: list[str] = option(["sigmoid"], f"One or several of {', '.join(LOSS_TYPES)}.")
    loss_weights: list[float] = option([], "Weight of each loss, in their order. Default: 1 each.")
    label_smoothing: float = option(0.0, "Assumed share of swapped pairs, for sigmoid (then conservative DPO) and robust.")

    def __post_init__(self):
        self.loss_weights = self.loss_weights or [1.0] * len(self.loss_type)
        unknown = [name for name in self.loss_type if name not in LOSS_TYPES]
        if unknown or not self.loss_type or len(set(self.loss_type)) != len(self.loss_type):
            raise ValueError(f"loss_type is {self.loss_type}; give each of {', '.join(LOSS_TYPES)} at most once.")
        if len(self.loss_weights) != len(self.loss_type):
            losses = f"{len(self.loss_type)} losses ({', '.join(self.loss_type)})"
            raise ValueError(f"loss_weights has {len(self.loss_weights)} numbers for {losses}.")
        if not self.beta > 0:
            raise ValueError(f"beta is {self.beta}; it must be positive.")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; it must be at least 0 and below 0.5.")
        if self.label_smoothing and not {"sigmoid", "robust"} & set(self.loss_type):
            raise ValueError(f"label_smoothing changes sigmoid and robust only, not {', '.join(self.loss_type)}. Set it to 0.")


class Pairs(NamedTuple):
    """What the losses are made of; all [P]. Log-probabilities are sums over an answer's tokens."""

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    weights: Tensor

    @classmethod
    def of(cls, sums: Tensor, reference: Tensor, lengths: Tensor, weights: Tensor) -> "Pairs":
        """From [2 P] tensors in which the answers of a pair follow each other, chosen first, and weights [P]."""
        interleaved = [part for tensor in (sums, reference, lengths) for part in (tensor[0::2], tensor[1::2])]
        return cls(*interleaved, weights)


def pair_losses(loss_type: str, pairs: Pairs, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Loss of each pair [P]; for sft the negative log-probability of its chosen answer, summed over tokens."""
    chosen, rejected = pairs.chosen - pairs.reference_chosen, pairs.rejected - pairs.reference_rejected
    difference = chosen - rejected
    per_token = chosen / pairs.chosen_lengths.clamp(min=1) - rejected / pairs.rejected_lengths.clamp(min=1)
    match loss_type:
        case "sigmoid":
            agree, swapped = F.logsigmoid(beta * difference), F.logsigmoid(-beta * difference)
            return -(1 - label_smoothing) * agree - label_smoothing * swapped
        case "robust":
            agree, swapped = F.logsigmoid(beta * difference), F.logsigmoid(-beta * difference)
            return (-(1 - label_smoothing) * agree + label_smoothing * swapped) / (1 - 2 * label_smoothing)
        case "ipo":
            return (per_token - 1 / (2 * beta)).square()
        case "sigmoid_norm":
            return -F.logsigmoid(beta * per_token)
        case "hinge":
            return torch.relu(1 - beta * difference)
        case "sft":
            return -pairs.chosen
    raise ValueError(f"unknown loss_type {loss_type!r}; known: {', '.join(LOSS_TYPES)}")


def loss_sums(pairs: Pairs, args: LossArguments) -> Tensor:
    """Each loss summed over the pairs with their weights [K]."""
    return torch.stack([(pairs.weights * pair_losses(name, pairs, args.beta, args.label_smoothing)).sum() for name in args.loss_type])


def loss_scales(args: LossArguments, pair_weight: float, chosen_tokens: float, device=None) -> Tensor:
    """What each sum of `loss_sums` is multiplied with [K]: its weight over its count in the whole window."""
    counts = [chosen_tokens if name == "sft" else pair_weight for name in args.loss_type]
    return torch.tensor([w / n for w, n in zip(args.loss_weights, counts, strict=True)], dtype=torch.float64, device=device)


FIGURES = ("chosen", "rejected", "margin", "accuracy", "logps_chosen", "logps_rejected", "length_chosen", "length_rejected")


@torch.no_grad()
def figure_sums(pairs: Pairs, beta: float) -> Tensor:
    """Sums over the pairs (weight 0 excluded, else unweighted) of FIGURES, then of |policy - reference|, then the number of pairs.

    chosen, rejected, margin: implicit rewards beta * (log pi - log ref). accuracy: margin > 0, a tie counts as wrong.
    """
    drift_chosen, drift_rejected = pairs.chosen - pairs.reference_chosen, pairs.rejected - pairs.reference_rejected
    margin = beta * (drift_chosen - drift_rejected)
    columns = [
        beta * drift_chosen, beta * drift_rejected, margin, (margin > 0).double(),
        pairs.chosen, pairs.rejected, pairs.chosen_lengths, pairs.rejected_lengths,
        drift_chosen.abs() + drift_rejected.abs(), torch.ones_like(margin),
    ]  # fmt: skip
    return (torch.stack([column.double() for column in columns]) * (pairs.weights > 0)).sum(dim=1)


def figure_means(sums: Tensor) -> dict[str, float]:
    """{name: mean over the pairs} of summed figures; `drift` is the mean |policy - reference| per token of an answer."""
    values = sums.tolist()
    means = {name: value / values[-1] for name, value in zip(FIGURES, values, strict=False)}
    tokens = values[FIGURES.index("length_chosen")] + values[FIGURES.index("length_rejected")]
    return means | {"drift": values[len(FIGURES)] / tokens}
