"""Figures of saved answers: reward curves beside a baseline, exact match beside F1. Lines are those of OUTPUT_DIR/rollouts."""

import math
from collections.abc import Iterable

from common.answers import f1, gold_of, is_right, read_answer
from common.paired_tests import mean_interval, others

LEAST_PROMPTS = 10  # with another difference than the commonest: with fewer an interval from the prompts' spread says little


def mean(values: Iterable[float | None]) -> float | None:
    values = [value for value in values if value is not None]
    return math.fsum(values) / len(values) if values else None


def by_prompt(lines: Iterable[dict]) -> dict[str, float]:
    """Mean reward of each prompt's scored answers."""
    rewards: dict[str, list[float]] = {}
    for line in lines:
        if line["reward"] is not None:
            rewards.setdefault(line["id"], []).append(line["reward"])
    return {name: math.fsum(values) / len(values) for name, values in rewards.items()}


def curve(rollouts: dict[int, list[dict]], baseline: dict[str, float], most: int = 10) -> list[dict]:
    """Mean reward of at most `most` stretches of rollouts {step: lines}, and its paired difference from the baseline {id: mean reward}."""
    steps = sorted(rollouts)
    width = -(-len(steps) // most) if steps else 1
    result = []
    for first in range(0, len(steps), width):
        part = steps[first : first + width]
        differences = []
        for step in part:
            differences += [reward - baseline[name] for name, reward in by_prompt(rollouts[step]).items() if name in baseline]
        row = {"from": part[0], "to": part[-1], "answers": sum(len(rollouts[step]) for step in part)}
        row["reward"] = mean(line["reward"] for step in part for line in rollouts[step])
        if differences:
            difference, low, high = mean_interval(differences)
            row |= {"paired_prompts": len(differences), "difference": difference}
            row |= {"low": low, "high": high} if others(differences) >= LEAST_PROMPTS else {}
        result.append(row)
    return result


def compare_marks(lines: list[dict], data: dict[str, dict]) -> dict | None:
    """Exact match beside F1 as the reward of the same answers; None where no right answer is letters.

    tied_*: share of groups (answers to one prompt in one rollout) in which all answers have one value, so that nothing is learned from them.
    changed_ranks: share of answers whose rank in their group differs. paid_though_wrong: of the wrong answers, the share that F1 puts above
    its group's mean. too_many: share of answers that name more letters than are right.
    """
    groups: dict[tuple, list[tuple[float, float, bool]]] = {}
    for line in lines:
        row = data[line["id"]]
        listed = row.get("choices")
        count = len(listed) if isinstance(listed, list) and listed else None
        try:
            gold = gold_of(row.get("answer"), count)
        except ValueError:
            continue
        if gold.number is not None:
            continue
        said = read_answer(line["completion"], gold, count)
        more = said is not None and len(said.split(",")) > gold.num_answers
        groups.setdefault((line["step"], line["id"]), []).append((float(is_right(said, gold)), f1(said, gold), more))
    if not groups:
        return None
    answers = [answer for group in groups.values() for answer in group]
    wrong, paid, changed = 0, 0, 0
    for group in groups.values():
        exact, soft = [answer[0] for answer in group], [answer[1] for answer in group]
        middle = math.fsum(soft) / len(soft)
        wrong += exact.count(0.0)
        paid += sum(e == 0 and s > middle + 1e-9 for e, s in zip(exact, soft, strict=True))
        changed += sum(rank(exact, e) != rank(soft, s) for e, s in zip(exact, soft, strict=True))
    return {
        "groups": len(groups),
        "answers": len(answers),
        "exact": mean(answer[0] for answer in answers),
        "f1": mean(answer[1] for answer in answers),
        "tied_exact": mean(float(len({a[0] for a in group}) == 1) for group in groups.values()),
        "tied_f1": mean(float(len({a[1] for a in group}) == 1) for group in groups.values()),
        "changed_ranks": changed / len(answers),
        "paid_though_wrong": paid / max(wrong, 1),
        "too_many": mean(float(answer[2]) for answer in answers),
    }


def rank(values: list[float], value: float) -> float:
    """Mean place of a value among values, equal ones sharing theirs."""
    return sum(v > value for v in values) + (values.count(value) - 1) / 2
