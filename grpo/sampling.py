"""Dynamic sampling: which groups carry signal, how a rollout is filled with them, and what the data let one expect.

A group (all answers to one prompt) whose answers are all right or all wrong teaches nothing. With `dynamic_sampling` a rollout draws batches
of prompts until `size` groups carry signal, `max_resample_times` (R) batches at most. Each group is looked at once, when it was generated.
What is left over trains first in the next rollout; it is always less than one batch, so nothing waits for more than one rollout. Where R
batches do not fill the rollout, it trains on the groups that are there, divided by their own count (arXiv 2503.14476 draws without a bound).

With collapse rate c a batch of N prompts gives N (1 - c) groups on average, so R batches fill it where c <= 1 - 1/R; more exactly with
probability P(Binomial(R N, 1 - c) >= N), which falls steeply there.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from common import dist
from common.data import Order
from grpo.advantages import is_collapsed
from grpo.rollout import Answer, Question, RolloutArguments

log = logging.getLogger(__name__)

PASS = 1.0  # an answer whose accuracy reward reaches this is right, for pass rates
PRIOR_RANGE = (0.02, 50.0)  # of both parameters of the fitted Beta

Group = list[Answer]


# ---- what the data let one expect


def collapse_probability(p: float, num_generations: int) -> float:
    """That `num_generations` answers to a prompt with pass rate p are all right or all wrong."""
    return p**num_generations + (1 - p) ** num_generations


def log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def fit_prior(rates: Iterable[tuple[int, int]]) -> tuple[float, float]:
    """The Beta distribution of pass rates that makes these (k, n) most likely (beta-binomial likelihood; a grid, refined around its best).

    A strong model knows most answers or does not: its pass rates lie at both ends, and a uniform prior would call all-right prompts useful.
    """
    counts = Counter(rates)

    def likelihood(a: float, b: float) -> float:
        return math.fsum(count * (log_beta(k + a, n - k + b) - log_beta(a, b)) for (k, n), count in counts.items())

    low, high = map(math.log, PRIOR_RANGE)
    best, width = ((low + high) / 2,) * 2, (high - low) / 2
    for _ in range(12):
        steps = [width * i / 6 for i in range(-6, 7)]
        places = [(min(max(best[0] + x, low), high), min(max(best[1] + y, low), high)) for x in steps for y in steps]
        best = max(places, key=lambda place: likelihood(math.exp(place[0]), math.exp(place[1])))
        width /= 2
    return math.exp(best[0]), math.exp(best[1])


def expected_collapse(k: int, n: int, num_generations: int, prior: tuple[float, float] = (1.0, 1.0)) -> float:
    """The same where k of n answers were right: mean over what the pass rate may be (from a Beta prior, uniform if nothing else is given)."""
    right, wrong = k + prior[0], n - k + prior[1]
    whole = log_beta(right, wrong)
    return math.exp(log_beta(right + num_generations, wrong) - whole) + math.exp(log_beta(right, wrong + num_generations) - whole)


def fill_probability(size: int, rounds: int, collapse: float) -> float:
    """P(Binomial(rounds * size, 1 - collapse) >= size): that so many batches hold `size` groups with signal, nothing left over from before."""
    if collapse <= 0 or collapse >= 1:
        return float(collapse <= 0)
    draws = rounds * size
    terms = (
        math.lgamma(draws + 1)
        - math.lgamma(m + 1)
        - math.lgamma(draws - m + 1)
        + m * math.log1p(-collapse)
        + (draws - m) * math.log(collapse)
        for m in range(size, draws + 1)
    )
    return min(1.0, math.fsum(math.exp(term) for term in terms))


def read_pass_rates(path: str) -> dict[str, tuple[int, int]]:
    """{id: (right answers, answers)} from lines with id, k and n. ValueError names the line that has not."""
    rates = {}
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                    k, n = row["k"], row["n"]
                    if not (isinstance(k, int) and isinstance(n, int) and 0 <= k <= n and n):
                        raise ValueError(f"k is {k!r}, n {n!r}")
                    if str(row["id"]) in rates:
                        raise ValueError(f"id {row['id']!r} was there before")
                    rates[str(row["id"])] = (k, n)
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{path}:{number}: needs id, k and n with 0 <= k <= n ({type(error).__name__}: {error})") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"difficulty_file {path} cannot be read: {error}") from error
    return rates


def mean_expected_collapse(pass_rates: Iterable[tuple[int, int]], num_generations: int, prior: tuple[float, float]) -> float | None:
    values = [expected_collapse(k, n, num_generations, prior) for k, n in pass_rates]
    return math.fsum(values) / len(values) if values else None


def announce(questions: list[Question], pass_rates: dict[str, tuple[int, int]] | None, args: RolloutArguments) -> None:
    """Says at the start what dynamic sampling will find in these prompts, and warns where it must fail."""
    size, rounds = args.num_prompts_per_step, args.max_resample_times
    bound = 1 - 1 / rounds
    log.info("dynamic sampling: at most %d batches of %d prompts a rollout; fills it up to a collapse rate of %.3f", rounds, size, bound)
    if len(questions) < rounds * size:
        dist.warn(
            log,
            "dynamic sampling: %d prompts are fewer than %d batches of %d; none is drawn twice for one rollout",
            len(questions),
            rounds,
            size,
        )
    if pass_rates is None:
        return
    known = [pass_rates[question.id] for question in questions if question.id in pass_rates]
    if not known:
        raise ValueError("difficulty_file has none of the prompts' ids. Measure these prompts: python -m grpo.difficulty measure.")
    # Fitted to the whole file, as `python -m grpo.difficulty report` does: the prompts may be those of a few levels.
    expected = mean_expected_collapse(known, args.num_generations, fit_prior(pass_rates.values()))
    chance = fill_probability(size, rounds, expected)
    message = (
        "dynamic sampling: by the pass rates of %d of %d prompts %.3f of the groups collapse; a rollout is filled with probability %.4f"
    )
    log.info(message, len(known), len(questions), expected, chance)
    if expected > bound:
        dist.warn(
            log,
            "dynamic sampling cannot fill its rollouts: %.3f of the groups are expected to collapse, %d batches bear %.3f. Raise max_resample_times "
            "to %d, filter the prompts by difficulty, or raise num_generations.",
            expected, rounds, bound, math.ceil(1 / (1 - expected)),
        )  # fmt: skip


# ---- drawing and filling


@dataclass
class Prompts:
    """Questions in the order of the data; a position (epoch, offset) is all that a checkpoint needs."""

    questions: list[Question]
    order: Order
    size: int  # of a batch

    def next(self, epoch: int, offset: int, without: set[str] = frozenset()) -> tuple[list[Question], int, int]:
        """The batch at a position, less those whose id is in `without`, and the position after it.

        A group is known by its prompt's id, so no prompt may come twice into one rollout: two epochs may meet in it.
        """
        drawn, epoch, offset = self.order.next(epoch, offset, self.size)
        return [self.questions[index] for index in drawn if self.questions[index].id not in without], epoch, offset


def groups_of(answers: list[Answer]) -> list[Group]:
    """Answers by prompt, in the order in which the prompts first occur."""
    groups: dict[str, Group] = {}
    for answer in answers:
        groups.setdefault(answer.question.id, []).append(answer)
    return list(groups.values())


def accuracies(group: Group, name: str) -> list[float]:
    return [answer.rewards[name] for answer in group if answer.rewards[name] is not None]


def pass_rate(group: Group, name: str) -> tuple[int, int]:
    """(right answers, answers that the accuracy reward scored)"""
    values = accuracies(group, name)
    return sum(value >= PASS for value in values), len(values)


def carries_signal(group: Group, accuracy_reward: str, mask_truncated: bool) -> bool:
    """Whether right and wrong differ in a group whose advantages are set, and some answer of it trains.

    A second reward (format, language) can differ where all answers are wrong: such a group would teach that reward only.
    """
    trains = any(answer.informative and not (mask_truncated and answer.completion.finish_reason == "length") for answer in group)
    return trains and not is_collapsed(accuracies(group, accuracy_reward))


class Filled(NamedTuple):
    groups: list[Group]  # what trains, at most `size`
    surplus: list[Group]  # carries signal too, for the next rollout: fewer than `size`
    filtered: list[Group]  # carries none
    rounds: int  # batches drawn


def fill(
    size: int, rounds: int, kept: list[Group], draw: Callable[[int, set[str]], list[Group] | None], carries: Callable[[Group], bool]
) -> Filled | None:
    """Groups that carry signal: first those `kept` from the rollout before, then out of at most `rounds` batches. None when STOP came.

    draw(number, ids) generates batch `number` without the prompts `ids`; None: stopped.
    """
    groups, filtered = list(kept), []
    for number in range(rounds):
        drawn = draw(number, {group[0].question.id for group in groups + filtered})
        if drawn is None:
            return None
        for group in drawn:
            (groups if carries(group) else filtered).append(group)
        if len(groups) >= size:
            break
    return Filled(groups[:size], groups[size:], filtered, number + 1)
