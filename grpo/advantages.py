"""Rewards to advantages. Everything in float64, groups formed by the prompt's id.

    group  (R - mean of its group) / (std of its group + 1e-4)     arXiv 2402.03300
    batch  (R - mean of its group) / (std of all rewards + 1e-4)   arXiv 2508.08221
    none    R - mean of its group                                  arXiv 2503.20783
    gdpo    each component as `group`, then A = sum of weight * component, then (A - mean of all A) / (std of all A + 1e-4)   arXiv 2601.05242

R is the weighted sum of the components; with gdpo a weight scales what a component says after it was normalised, so a reward of 0.05 with
weight 1 counts as much as one of 1. std is the unbiased one. A group whose rewards are all equal teaches nothing: its advantages are exactly
0. Equal means max == min: the std of eight rewards of 1.05 in float32 is 1.3e-7, and dividing by it makes signal out of rounding.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

STD_EPSILON = 1e-4


class Advantages(NamedTuple):
    values: np.ndarray  # [N] float64
    informative: np.ndarray  # [N] bool: scored, and in a group whose rewards differ


def is_collapsed(rewards: Iterable[float | None]) -> bool:
    """Whether the rewards of a group are all equal, or nobody scored it."""
    return len({reward for reward in rewards if reward is not None}) < 2


def compute_advantages(rewards: Sequence[float | None], groups: Sequence[str], scale: str = "group", std_floor: float = 0.0) -> Advantages:
    """Advantage of each answer from its reward and the id of its prompt, both [N], in any order; groups may differ in size.

    An answer without a reward (None) is left out of its group's mean and std and has advantage 0. std_floor: the least that is divided by.
    """
    values = np.array([np.nan if reward is None else reward for reward in rewards], np.float64)
    scored = np.array([reward is not None for reward in rewards], bool)
    if not np.isfinite(values[scored]).all():
        raise ValueError(f"reward {values[scored & ~np.isfinite(values)][0]} is not finite")
    result, informative = np.zeros(len(values)), np.zeros(len(values), bool)
    batch_std = values[scored].std(ddof=1) if scored.sum() > 1 else 0.0
    for rows in _rows_by_group(groups):
        rows = rows[scored[rows]]
        if is_collapsed(values[rows].tolist()):
            continue
        centred = values[rows] - values[rows].mean()
        if scale != "none":
            std = values[rows].std(ddof=1) if scale == "group" else batch_std
            centred /= max(std, std_floor) + STD_EPSILON
        result[rows] = centred
        informative[rows] = True
    return Advantages(result, informative)


def compute_gdpo_advantages(
    components: Sequence[dict[str, float | None]], weights: Sequence[float], groups: Sequence[str], std_floor: float = 0.0
) -> Advantages:
    """The same from the components of each answer [N], {name: reward} in the order of `weights`; std_floor: the least std of a group.

    A component without an opinion on an answer (None) says nothing about it. An answer that nobody scores is left out of the last mean and
    std; one in a group in which no component with a weight differs is in them (its A is 0), and has advantage 0.
    """
    names = [name for name, weight in zip(components[0], weights, strict=True) if weight] if len(components) else []
    total, informative = np.zeros(len(components)), np.zeros(len(components), bool)
    scored = np.array([any(row[name] is not None for name in names) for row in components], bool)
    weight_of = dict(zip(components[0], weights, strict=True)) if names else {}
    for name in names:
        part = compute_advantages([row[name] for row in components], groups, "group", std_floor)
        total += weight_of[name] * part.values
        informative |= part.informative
    if scored.sum() > 1:
        total = (total - total[scored].mean()) / (total[scored].std(ddof=1) + STD_EPSILON)
    for rows in _rows_by_group(groups):  # an answer on which only the others' components differ still differs from its group
        informative[rows] = informative[rows].any() & scored[rows]
    return Advantages(np.where(informative, total, 0.0), informative)


def _rows_by_group(groups: Sequence[str]) -> list[np.ndarray]:
    _, group = np.unique(np.asarray(groups, dtype=object).astype(str), return_inverse=True)
    return [np.flatnonzero(group == index) for index in range(int(group.max()) + 1 if len(group) else 0)]
