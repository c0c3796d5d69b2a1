"""Objectives of the GRPO family on completion tokens, correction of the engine's own probabilities, and the counts that divide each sum.

r = pi / pi_old of a token (gspo: of the answer, geometric mean over its tokens), A the answer's advantage:

    dapo     -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)      mean over tokens of the window           arXiv 2503.14476
    grpo     the same                                                 mean over answers of their token means   arXiv 2402.03300
    dr_grpo  the same                                                 sum / (answers * max_completion_length)  arXiv 2503.20783
    gspo     the same with the answer's ratio                         mean over answers                        arXiv 2507.18071
    gspo_token_mean  as gspo                                          mean over tokens of the window
    luspo    as gspo                                                  mean over answers of length * loss
    cispo    -sg[min(r, cispo_cap)] A log pi                          mean over tokens of the window           arXiv 2506.13585
    sapo     -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A  mean over answers of their token means   arXiv 2511.20347

A window is everything that one optimizer step sees: a mini-batch on all ranks. What is masked (answers without signal or cut off, tokens that
the correction rejects) leaves numerator and denominator; the denominators are counted before the first backward. With beta > 0 comes
beta * KL, aggregated in the same way over its own count: the correction neither weighs nor masks it.

Shapes: N completion tokens of a packed row, R answers; `row` [N] is the answer that a token belongs to.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from common.config import option

SEQUENCE_MEAN = ("grpo", "gspo", "sapo")  # mean over answers of their token means
SEQUENCE_RATIO = ("gspo", "gspo_token_mean", "luspo")  # one ratio for all tokens of an answer
# (low, high) where none is given: what the forms' authors and common implementations use.
CORRECTION_LIMITS = {
    "none": (None, None),
    "token_tis": (None, 2.0),
    "token_mis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "seq_tis": (None, 2.0),
    "seq_mis": (0.0, 2.0),
    "geo_mask": (0.999, 1.001),
}


@dataclass
class ObjectiveArguments:
    """What is optimised."""

    loss_type: Literal["dapo", "grpo", "dr_grpo", "gspo", "gspo_token_mean", "luspo", "cispo", "sapo"] = option(
        "dapo", "The objective; see grpo/objectives.py."
    )
    epsilon: float | None = option(None, "The ratio is clipped below 1 - epsilon. Default: 0.2; 3e-4 where it is an answer's (gspo).")
    epsilon_high: float | None = option(None, "The ratio is clipped above 1 + epsilon_high. Default: 0.28; 4e-4 where it is an answer's.")
    dual_clip: float | None = option(None, "Bound the loss of a token with negative advantage at dual_clip * |A| (usual: 3). Default: off.")
    cispo_cap: float = option(5.0, "cispo: largest weight of a token, an absolute ratio.")
    sapo_temperature_pos: float = option(1.0, "sapo: tau of answers with positive advantage.")
    sapo_temperature_neg: float = option(1.05, "sapo: tau of the others.")
    beta: float = option(0.0, "Weight of the KL divergence to the untrained model (k3 estimate), of which a copy is kept then.")
    use_bias_correction_kl: bool = option(False, "Multiply the KL estimate with the ratio r, gradient included (DeepSeek-V3.2).")
    rollout_correction: Literal["none", "token_tis", "token_mis", "icepop", "seq_tis", "seq_mis", "geo_mask"] = option(
        "none", "Correct for engine and trainer giving a sampled token different probabilities: grpo/README.md."
    )
    rollout_correction_low: float | None = option(None, "Lower limit of the ratio trainer / engine; the default depends on the form.")
    rollout_correction_high: float | None = option(None, "Upper limit of it.")

    def __post_init__(self):
        sequence = self.loss_type in SEQUENCE_RATIO
        self.epsilon = (3e-4 if sequence else 0.2) if self.epsilon is None else self.epsilon
        self.epsilon_high = (4e-4 if sequence else 0.28) if self.epsilon_high is None else self.epsilon_high
        if not 0 <= self.epsilon < 1 or self.epsilon_high < 0:
            raise ValueError(f"epsilon is {self.epsilon}, epsilon_high {self.epsilon_high}; they must be at least 0, epsilon below 1.")
        if self.dual_clip is not None and (self.dual_clip <= 1 + self.epsilon_high or self.loss_type in ("cispo", "sapo")):
            raise ValueError(f"dual_clip is {self.dual_clip}; it must be above 1 + epsilon_high, and does not go with cispo and sapo.")
        for name in ("cispo_cap", "sapo_temperature_pos", "sapo_temperature_neg"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive.")
        if self.beta < 0:
            raise ValueError(f"beta is {self.beta}; it cannot be negative.")
        if self.use_bias_correction_kl and not self.beta:
            raise ValueError("use_bias_correction_kl changes the KL term, which beta: 0 switches off.")
        low, high = CORRECTION_LIMITS[self.rollout_correction]
        if (low is None and self.rollout_correction_low is not None) or (high is None and self.rollout_correction_high is not None):
            raise ValueError(f"rollout_correction: {self.rollout_correction} has no such limit; leave rollout_correction_low / _high out.")
        self.rollout_correction_low = low if self.rollout_correction_low is None else self.rollout_correction_low
        self.rollout_correction_high = high if self.rollout_correction_high is None else self.rollout_correction_high
        if high is not None and not (self.rollout_correction_low or 0.0) < self.rollout_correction_high:
            raise ValueError(
                f"rollout_correction_low {self.rollout_correction_low} must be below rollout_correction_high {self.rollout_correction_high}."
            )


def row_sums(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """values [N] summed by answer [R]."""
    return torch.zeros(num_rows, dtype=values.dtype, device=values.device).index_add(0, row, values)


def row_means(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    return row_sums(values, row, num_rows) / row_sums(torch.ones_like(values), row, num_rows).clamp(min=1)


# ---- correction --------------------------------------------------------------------------------------------------------------------------


def correction_weights(log_ratio: Tensor, row: Tensor, num_rows: int, args: ObjectiveArguments) -> Tensor:
    """Weight of each token [N], 0 where the form rejects it; log_ratio = log pi_old - log mu, trainer less engine at the same weights.

    token_tis  min(w, high)                        w the token's ratio
    token_mis  w, rejected outside [low, high]     icepop: the same, usually with low 0.5 and high 5 (arXiv 2510.18855)
    seq_tis    min(W, high)                        W the answer's ratio: the PRODUCT over its tokens
    seq_mis    W, rejected outside [low, high]
    geo_mask   1, the whole answer rejected where the GEOMETRIC MEAN of its tokens' ratios is outside [low, high]
    """
    form, low, high = args.rollout_correction, args.rollout_correction_low, args.rollout_correction_high
    if form == "none":
        return torch.ones_like(log_ratio)
    if form.startswith("seq_"):
        log_ratio = row_sums(log_ratio, row, num_rows)[row]
    elif form == "geo_mask":
        log_ratio = row_means(log_ratio, row, num_rows)[row]
    weights = log_ratio.clamp(max=20.0).exp()  # beyond e^20 every form caps or rejects; exp must not reach infinity before it does
    if form.endswith("_tis"):
        return weights.clamp(max=high)
    inside = (weights >= low) & (weights <= high)
    return inside.to(weights.dtype) if form == "geo_mask" else torch.where(inside, weights, 0.0)


# ---- counts ------------------------------------------------------------------------------------------------------------------------------


def counts(mask: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """[2] float64: tokens in `mask` [N], and answers with at least one. Sums over micro-batches and ranks are the window's."""
    kept = mask.double()
    return torch.stack([kept.sum(), (row_sums(kept, row, num_rows) > 0).double().sum()])


def token_scales(mask: Tensor, row: Tensor, num_rows: int, window: Tensor, loss_type: str, max_completion_length: int) -> Tensor:
    """What each token's loss is multiplied with [N], so that the sum over the window is the objective's aggregate; 0 outside `mask`.

    window [2]: `counts` summed over the whole window.
    """
    tokens, rows = window.clamp(min=1).tolist()
    kept = mask.double()
    if loss_type in SEQUENCE_MEAN:
        return kept / (row_sums(kept, row, num_rows).clamp(min=1)[row] * rows)
    divisors = {"dr_grpo": rows * max_completion_length, "luspo": rows}
    return kept / divisors.get(loss_type, tokens)


# ---- losses ------------------------------------------------------------------------------------------------------------------------------


class TokenLosses(NamedTuple):
    """All [N]."""

    loss: Tensor
    ratio: Tensor  # detached; of the token, or of its answer (SEQUENCE_RATIO)
    clipped: Tensor  # bool: the clip takes the gradient away


def policy_losses(logps: Tensor, old: Tensor, advantages: Tensor, row: Tensor, args: ObjectiveArguments) -> TokenLosses:
    """The objective's term of each token. logps, old [N]; advantages [R]."""
    log_ratio = logps - old
    if args.loss_type in SEQUENCE_RATIO:
        log_ratio = row_means(log_ratio, row, len(advantages))[row]
    ratio, advantage = log_ratio.exp(), advantages[row]
    clipped = ((ratio < 1 - args.epsilon) & (advantage < 0)) | ((ratio > 1 + args.epsilon_high) & (advantage > 0))
    match args.loss_type:
        case "cispo":
            loss = -ratio.detach().clamp(max=args.cispo_cap) * advantage * logps
            clipped = ratio > args.cispo_cap
        case "sapo":
            tau = torch.full_like(advantage, args.sapo_temperature_neg).masked_fill(advantage > 0, args.sapo_temperature_pos)
            loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
            clipped = torch.zeros_like(clipped)
        case _:
            loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - args.epsilon, 1 + args.epsilon_high) * advantage)
            if args.dual_clip is not None:
                bound = -args.dual_clip * advantage
                clipped |= (advantage < 0) & (loss > bound)
                loss = torch.where(advantage < 0, torch.minimum(loss, bound), loss)
    return TokenLosses(loss, ratio.detach(), clipped)


def kl_estimates(logps: Tensor, reference: Tensor, old: Tensor | None = None) -> Tensor:
    """k3 of each token: e^d - d - 1, d = log pi_ref - log pi (http://joschu.net/blog/kl-approx.html). With `old`: times pi / pi_old.

    d is held within 20, where e^d would swamp the sum of a whole window."""
    difference = (reference - logps).clamp(-20.0, 20.0)
    estimate = difference.exp() - difference - 1
    return estimate if old is None else estimate * (logps - old).exp()


@torch.no_grad()
def mismatch(log_ratio: Tensor) -> Tensor:
    """[3] float64, sums over tokens of the engine-trainer distance: |d|, k3 estimate of KL(engine || trainer), count. log_ratio as above."""
    d = log_ratio.double()
    return torch.stack([d.abs().sum(), (d.clamp(max=20.0).exp() - d - 1).sum(), torch.ones_like(d).sum()])
