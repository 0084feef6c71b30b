"""What can be said from a few seeds: paired tests, Holm's correction, what they can show.

scipy.special, a tenth of scipy.stats, is imported inside functions, for speed of start: one seed needs no statistics.

`anytime_p` is a paired test that may be looked at after every seed: it bets on the sign of each difference.
If two rules do not differ, a difference is as likely d as −d, whatever its size (they are exchangeable within a seed).
Given |dᵢ|, the sign is then a fair coin, and with stakes βᵢ that only the past and |dᵢ| decide

    Wₙ = Π (1 + βᵢ sign dᵢ),   |βᵢ| < 1

is a martingale that begins at 1. By Ville's inequality it ever reaches 1/α with a chance of α at most, so 1/max W is a
p-value at any time: whoever stops when it is small enough makes no more false verdicts than were allowed. No normal
distribution is assumed, and no number of seeds in advance. The stakes are those that would be best if differences were
normal with the mean and variance of the past ones, βᵢ = tanh(m|dᵢ|/s²); half of the wealth is on each side.

Ramdas, Grünwald, Vovk and Shafer 2023, Game-theoretic statistics and safe anytime-valid inference, Statistical Science
38(4), https://doi.org/10.1214/23-STS894; Waudby-Smith and Ramdas 2024, Estimating means of bounded random variables by
betting, JRSS B 86(1), https://doi.org/10.1093/jrsssb/qkad009.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steelyard.base.measures import Estimate, deviation, estimate

ALPHA = 0.05
POWER = 0.8
"""How often a difference must be seen, at the least, to count as one that would have been seen."""
LEAST_SEEDS = 3
"""With fewer, nothing is recommended: the spread between seeds would rest on one difference."""
MOST_SEEDS = 1_000


def paired_p(differences: Sequence[float]) -> float | None:
    """Return the two-sided p-value of a paired t-test on differences from the baseline; None for fewer than two.

    Differences that are all the same have no spread to test with: all 0 gives 1, else the exact p of a sign test, 2/2ⁿ,
    the least that n pairs can show without a model of their spread.
    """
    count = len(differences)
    if count < 2:
        return None
    mean, spread = math.fsum(differences) / count, deviation(differences)
    if spread <= 1e-12 * max(1.0, abs(mean)):
        return 1.0 if abs(mean) <= 1e-12 else 2.0 / 2.0**count
    from scipy import special

    return float(2 * special.stdtr(count - 1, -abs(mean) / (spread / math.sqrt(count))))


def equivalence_p(differences: Sequence[float], margin: float) -> float | None:
    """Return the p-value of two one-sided t-tests that the mean difference lies within ± margin; None below two values.

    A small one says that two rules are equal within the margin, which a large p of `paired_p` never says. Differences
    that are all the same have no spread to test with: within the margin 1/2ⁿ, the least of n signs, else 1.
    """
    count = len(differences)
    if count < 2:
        return None
    mean, spread = math.fsum(differences) / count, deviation(differences)
    if spread <= 1e-12 * max(1.0, abs(mean)):
        return 1.0 / 2.0**count if abs(mean) < margin else 1.0
    from scipy import special

    return float(special.stdtr(count - 1, (abs(mean) - margin) / (spread / math.sqrt(count))))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return Holm's step-down adjusted p-values: the i-th smallest times (n − i + 1), never falling, at most 1.

    Use it when one baseline is compared with many rules; entries without a test stay None and do not count.
    """
    tested = sorted((value, index) for index, value in enumerate(values) if value is not None)
    adjusted: list[float | None] = [None] * len(values)
    highest = 0.0
    for rank, (value, index) in enumerate(tested):
        highest = max(highest, min(1.0, (len(tested) - rank) * value))
        adjusted[index] = highest
    return adjusted


def verdict(mean: float, adjusted: float | None, level: float = ALPHA) -> str:
    """Return better, worse, not distinguishable, or untested (a single seed); more is better."""
    if adjusted is None:
        return "untested"
    if adjusted < level and mean:
        return "better" if mean > 0 else "worse"
    return "not distinguishable"


@dataclass(frozen=True)
class PairedTest(Estimate):
    """A rule against the baseline in one figure: the difference, p before and after Holm's correction."""

    p: float | None
    p_holm: float | None
    verdict: str


def paired_tests(differences: Mapping[str, Sequence[float]]) -> dict[str, PairedTest]:
    """Test how several rules differ from one baseline, with Holm's correction over the rules; more is better."""
    raw = [paired_p(each) for each in differences.values()]
    tests: dict[str, PairedTest] = {}
    for (rule, each), p, adjusted in zip(differences.items(), raw, holm(raw), strict=True):
        found = estimate(each)
        tests[rule] = PairedTest(**vars(found), p=p, p_holm=adjusted, verdict=verdict(found.mean, adjusted))
    return tests


def detectable(spread: float, seeds: int, tests: int = 1) -> float:
    """Return the least difference that a paired t-test over so many seeds sees four times of five (80 % power).

    `spread` is the standard deviation of the differences between seeds. Of several tests, the first step of Holm's
    correction is taken, ALPHA / tests. Use it to say what a comparison could not have seen.
    """
    return _seen_shift(seeds, tests) * spread / math.sqrt(seeds)


@functools.cache
def _seen_shift(seeds: int, tests: int) -> float:
    """Return how many standard errors are seen four times of five; one comparison asks for the same ones many times."""
    from scipy import special

    limit = float(special.stdtrit(seeds - 1, 1 - ALPHA / tests / 2))
    low, high = 0.0, 1.0
    while _missed(seeds, high, limit) > 1 - POWER:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _missed(seeds, middle, limit) > 1 - POWER else (low, middle)
    return high


def _missed(seeds: int, shift: float, limit: float) -> float:
    """Return how often a t-test misses a difference of `shift` standard errors (the noncentral t distribution)."""
    from scipy import special

    return float(special.nctdtr(seeds - 1, shift, limit))


def seeds_for(difference: float, spread: float, tests: int = 1) -> int | None:
    """Return how many seeds see such a difference four times of five; None where a thousand do not."""
    low, high = LEAST_SEEDS, MOST_SEEDS
    if detectable(spread, high, tests) > difference:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if detectable(spread, middle, tests) <= difference else (middle + 1, high)
    return low


# The test that may be looked at after every seed.


MOST = 0.95
"""The most of the wealth that is staked on one sign, so that one of the other sign does not end it."""
FIRST = 0.5
"""The stake on the first difference, of which nothing is known."""


def anytime_p(differences: Sequence[float]) -> float:
    """Return a p-value of "no difference", two-sided, that holds however often it was looked at on the way.

    Use it where seeds are added until something is decided; `paired_p` is stronger where their number was fixed before.
    """
    up, down = _wealth(differences), _wealth([-value for value in differences])
    return 1.0 / max([1.0, *((one + other) / 2 for one, other in zip(up, down, strict=True))])


def anytime_equivalence_p(differences: Sequence[float], margin: float) -> float:
    """Return a p-value of "differs by the margin or more" that holds at any time: two one-sided tests, both to be won.

    It needs differences that lie about their middle symmetrically, with one peak.
    """
    above = _wealth([value + margin for value in differences])
    below = _wealth([margin - value for value in differences])
    return 1.0 / min(max([1.0, *above]), max([1.0, *below]))


def spent(level: float, number: int) -> float:
    """Return the level of the so manyth test of a row without end whose levels sum to `level`: level/(n(n + 1))."""
    return level / (number * (number + 1))


def _wealth(differences: Sequence[float]) -> list[float]:
    """Return the wealth after each difference of a player who bets that they are above 0."""
    wealth, total, squares = 1.0, 0.0, 0.0
    found: list[float] = []
    for count, value in enumerate(differences):
        stake = FIRST
        if count:
            mean = total / (count + 1)
            # The least variance keeps differences that were all the same from dividing by 0.
            variance = max(squares / count - mean * mean, 1e-12)
            stake = min(MOST, math.tanh(max(0.0, mean) * abs(value) / variance))
        wealth *= 1.0 + stake * ((value > 0) - (value < 0))
        found.append(wealth)
        total, squares = total + value, squares + value * value
    return found
