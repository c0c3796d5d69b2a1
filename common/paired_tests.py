"""Statistics of answers to the same questions by two models. No dependencies beyond the standard library.

exact McNemar   p = min(1, 2 BinomCDF(min(b, c); b + c, 1/2)), b: base right and new wrong, c: base wrong and new right    McNemar 1947
difference      mean of d_i +- 1.96 sqrt(sum d_i^2 - (sum d_i)^2 / N) / N. For d_i in -1, 0, 1 it is (c - b) / N +- 1.96 sqrt(b + c - (c - b)^2 / N) / N;
                with several samples a question, d_i is the difference of shares: the question stays the unit
small counts    where fewer than 25 d_i are not the commonest one, the interval is that of two questions more, with d = 1 and d = -1: alone it has
                no width where all d_i are alike, and leaves out 0 beside a p of 1/2                              Bonett and Price 2012
Holm            p of several tests, adjusted so that the chance of any false alarm stays below the level                    Holm 1979
Wilson          interval of a share, good also near 0 and 1                                                                 Wilson 1927
"""

import math
from collections import Counter
from collections.abc import Sequence

FEW = 25
Z95 = 1.959963984540054  # of the normal distribution: 95 % lie within


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided exact p of b against c among the questions on which the two differ; 1 where they never do."""
    n, tail, term = b + c, 0, 1
    for k in range(min(b, c) + 1):
        tail += term
        term = term * (n - k) // (k + 1)  # binomial coefficients as integers: exact for any n
    return min(1.0, 2 * tail / 2**n)


def mean_interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) with 95 % of paired differences [N], N >= 1."""
    n, total = len(differences), math.fsum(differences)
    spread = max(0.0, math.fsum(d * d for d in differences) - total * total / n)
    half = Z95 * math.sqrt(spread) / n
    return total / n, total / n - half, total / n + half


def others(differences: Sequence[float]) -> int:
    """How many are not the commonest one: what a spread is known from."""
    return len(differences) - Counter(differences).most_common(1)[0][1]


def share_interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) with 95 % of paired differences [N] of shares, each within -1 and 1."""
    mean, low, high = mean_interval(differences)
    if others(differences) < FEW:
        _, low, high = mean_interval([*differences, 1.0, -1.0])
    return mean, max(-1.0, low), min(1.0, high)


def wilson(share: float, n: int) -> tuple[float, float]:
    """(low, high) with 95 % of a share of n questions. With several samples a question `n` stays the questions: rather too wide."""
    z2 = Z95 * Z95 / n
    centre, half = share + z2 / 2, Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n))
    return max(0.0, (centre - half) / (1 + z2)), min(1.0, (centre + half) / (1 + z2))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p of each test, in their order."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = largest
    return adjusted
