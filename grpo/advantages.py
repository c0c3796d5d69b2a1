"""Rewards to advantages. Everything in float64, groups formed by the prompt's id.

    group  (R - mean of its group) / (std of its group + 1e-4)     arXiv 2402.03300
    batch  (R - mean of its group) / (std of all rewards + 1e-4)   arXiv 2508.08221
    none    R - mean of its group                                  arXiv 2503.20783

std is the unbiased one. A group whose rewards are all equal teaches nothing: its advantages are exactly 0. Equal means max == min: the std of
eight rewards of 1.05 in float32 is 1.3e-7, and dividing by it makes signal out of rounding.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

STD_EPSILON = 1e-4


class Advantages(NamedTuple):
    values: np.ndarray  # [N] float64
    informative: np.ndarray  # [N] bool: scored, and in a group whose rewards differ
    collapse_rate: float  # share of the groups with fewer than two different rewards


def compute_advantages(rewards: Sequence[float | None], groups: Sequence[str], scale: str = "group", std_floor: float = 0.0) -> Advantages:
    """Advantage of each answer from its reward and the id of its prompt, both [N], in any order; groups may differ in size.

    An answer without a reward (None) is left out of its group's mean and std and has advantage 0. std_floor: the least that is divided by.
    """
    scored = np.array([reward is not None for reward in rewards], bool)
    values = np.array([0.0 if reward is None else reward for reward in rewards], np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"reward {values[~np.isfinite(values)][0]} is not finite")
    _, group = np.unique(np.asarray(groups, dtype=object).astype(str), return_inverse=True)
    result, informative = np.zeros(len(values)), np.zeros(len(values), bool)
    num_groups = int(group.max()) + 1 if len(group) else 0
    batch_std = values[scored].std(ddof=1) if scored.sum() > 1 else 0.0
    collapsed = 0
    for index in range(num_groups):
        rows = np.flatnonzero((group == index) & scored)
        if not len(rows) or values[rows].max() == values[rows].min():
            collapsed += 1
            continue
        centred = values[rows] - values[rows].mean()
        if scale != "none":
            std = values[rows].std(ddof=1) if scale == "group" else batch_std
            centred /= max(std, std_floor) + STD_EPSILON
        result[rows] = centred
        informative[rows] = True
    return Advantages(result, informative, collapsed / max(num_groups, 1))
