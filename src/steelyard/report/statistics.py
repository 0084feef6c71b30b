"""Figures of merit of curves, on how many rows they rest, and what can be said from a few seeds: paired tests.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from steelyard.base.documents import Document
from steelyard.base.measures import MEASURES, Estimate, Measure, Z, deviation, estimate
from steelyard.messages.updates import Counts, Floats
from steelyard.report.curves import OF_A_STEP, Curve
from steelyard.rounds.plan import RoundSettings, at_target, devices_needed

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


# On how many rows a score rests.


class OnRows(Document):
    """On how many rows a score was measured, its 95 % interval from these rows alone, and whether they are too few.

    The interval is NaN where the rows give none. Too few rows rank nobody.
    """

    rows: int
    low: float
    high: float
    too_few: bool


class OnSample(Document):
    """How many clients, drawn of how many, a score was measured on, and its 95 % interval for all of them."""

    clients: int
    of: int
    low: float
    high: float


def on_rows(
    scores: Sequence[Floats],
    rows: Sequence[Counts],
    measure: Measure = MEASURES["accuracy"],
    errors: Sequence[Floats | None] = (),
) -> OnRows | None:
    """Return on how many rows the mean score of some devices rests, and its interval; one array for each seed.

    Devices count alike, so that k devices with n rows each carry as much as k²/Σ(1/n) rows of one. Seeds test on the
    same rows, or on others of the same source: they do not multiply them. `errors` are the scores' standard errors,
    for a measure that is no share of rows; None where neither gives an interval.
    """
    carried = float(np.mean([len(mine) ** 2 / float((1 / np.maximum(mine, 1)).sum()) for mine in rows]))
    known = [each for each in errors if each is not None]
    error = math.sqrt(np.mean([float(np.square(each).sum()) / len(each) ** 2 for each in known])) if known else None
    found = measure.interval(float(np.mean([mine.mean() for mine in scores])), carried, error)
    if found is None:
        return None
    few = measure.too_few(carried, *found)
    counted = round(float(np.mean([mine.sum() for mine in rows])))
    return OnRows(rows=counted, low=found[0], high=found[1], too_few=few)


def on_sample(scores: Floats, rows: Counts, of: int) -> OnSample:
    """Return the interval of the score over all test rows, where some clients were drawn (scores, rows) `of` so many.

    The score is a ratio of two sums over clients: its variance is that of each client's part in it (linearised), less
    the share of the clients that were drawn.
    """
    count, total = len(scores), float(rows.sum())
    mean = float(scores @ rows / total)
    parts = rows * (scores - mean) * count / total
    half = Z * math.sqrt((1 - count / of) * float(parts @ parts) / (count * max(count - 1, 1)))
    return OnSample(clients=count, of=of, low=mean - half, high=mean + half)


# Rounds to target, the worst tenth, from local scores alone.


def rounds_to_target(
    rounds: NDArray[np.int64], scores: Floats, target: float, share: float, *, above: bool = False
) -> int | None:
    """Return the first round at which at least ceil(share · n) devices have a score of at least the target.

    `scores` is [rounds, devices]. None when no round reaches it (SPEC §6). `above` asks for more than the target.
    """
    return rounds_to_shares(rounds, scores, target, [share], above=above)[0]


def rounds_to_shares(
    rounds: NDArray[np.int64], scores: Floats, target: float, shares: Sequence[float], *, above: bool = False
) -> list[int | None]:
    """Return `rounds_to_target` for several shares; the devices at the target are counted once."""
    counts = at_target(scores, target, above=above)
    needed = [max(1, devices_needed(share, scores.shape[-1])) for share in shares]
    found = [np.flatnonzero(counts >= devices) for devices in needed]
    return [int(rounds[enough[0]]) if len(enough) else None for enough in found]


def worst_tenth(scores: Floats) -> float:
    """Return the mean score of the worst 10 % of the devices (at least one); use it to see who is left behind."""
    return float(scores[worst_devices(scores)].mean()) if len(scores) else float("nan")


def worst_score(scores: Floats) -> float:
    """Return the score of the worst device; use it where each client is somebody, such as a hospital."""
    return float(scores.min()) if len(scores) else float("nan")


def worst_devices(scores: Floats) -> NDArray[np.int64]:
    """Return the positions of the worst tenth of the devices, the worst first."""
    return np.argsort(scores, kind="stable")[: math.ceil(0.1 * len(scores) - 1e-9)]


def jain(scores: Floats) -> float:
    """Jain's fairness index (Σx)² / (n Σx²): 1 when all devices do equally well, 1/n when only one does."""
    squares = float(np.square(scores).sum())
    return float(scores.sum()) ** 2 / (len(scores) * squares) if squares else float("nan")


# Figures of merit: what is computed of every curve. Tables, documents, files and tests of rules follow from this list.


@dataclass(frozen=True)
class FigureOfMerit:
    """A figure of merit: its name in documents, what it is of a curve, and how and where tables show it."""

    name: str
    heading: str
    of: Callable[[Curve, RoundSettings], float]
    """Its value; NaN where a curve has none."""
    measure: Measure | None = None
    """How it is written; None: as the clients' scores are."""
    tables: tuple[Literal["main", "clients", "server"], ...] = ()
    """Which tables have a column of it."""
    tested: str = ""
    """What a paired test of it compares, in words; empty where none is made."""


COUNT, INDEX = Measure("count"), Measure("index", low=0.0, high=1.0)
SHARE = Measure("share", low=0.0, high=1.0, percent=True)
SERVER = (
    *(
        "accuracy",
        "macro_f1",
        "mape",
        "micro_f1",
        "c_index",
        "integrated_brier",
        "dice",
        "mae",
        "rmse",
        "r2",
        "balanced_accuracy",
    ),
    *("sensitivity", "specificity", "f1_score", "roc_auc", "average_precision", "brier", "calibration_error"),
)
"""What the server's tests of a model may find, as `measures.MEASURES` names it."""
_TESTED = {
    "accuracy": "accuracy on the server's test set",
    "accuracy_late": "mean accuracy of the last rounds on the server's test set",
    "macro_f1": "macro F1 on the server's test set",
    "macro_f1_late": "mean macro F1 of the last rounds on the server's test set",
    "mape": "error on the server's test set",
    "c_index": "C-index on the server's test set",
    "dice": "mean Dice on the server's test set",
}
"""What paired tests of these compare."""


def _last(values: Sequence[float] | Floats) -> float:
    return float(values[-1]) if len(values) else math.nan


def _late(values: Sequence[float] | Floats, settings: RoundSettings) -> float:
    return float(np.mean(values[-settings.last :])) if len(values) else math.nan


def _of_clients(figure: Callable[[Floats], float], curve: Curve, settings: RoundSettings) -> float:
    """Return a figure of the clients' scores after the last round."""
    return float(figure(curve.scores[-1])) if curve.scores.size else math.nan


def _of_server(name: str, curve: Curve, settings: RoundSettings) -> float:
    """Return a figure of the server's last test of a model, also where it did not test every round."""
    return curve.last_test.get(name, _last(curve.server.get(name, ())))


def _late_of_server(name: str, curve: Curve, settings: RoundSettings) -> float:
    return _late(curve.server.get(name, ()), settings)


def _reached(curve: Curve, settings: RoundSettings) -> float:
    found = rounds_to_target(curve.rounds, curve.scores, settings.target, settings.share, above=settings.above)
    return math.nan if found is None else float(found)


def _sum(column: str, curve: Curve, settings: RoundSettings) -> float:
    return curve.sums.get(column, math.nan)


def _flawed(of: str, curve: Curve, settings: RoundSettings) -> float:
    return curve.flawed.get(of, math.nan)


FIGURES = (
    FigureOfMerit("flawed_weight", "weight of faulty", partial(_flawed, "weight"), SHARE, ("main",)),
    FigureOfMerit("flawed_samples", "samples of faulty", partial(_flawed, "samples"), SHARE),
    FigureOfMerit("flawed_updates", "updates of faulty", partial(_flawed, "updates"), SHARE),
    FigureOfMerit(
        *("final", "final", lambda curve, settings: _last(curve.overall)),
        tables=("main", "clients"),
        tested="score after the last round",
    ),
    FigureOfMerit(
        *("late", "last rounds", lambda curve, settings: _late(curve.overall, settings)),
        tested="mean score of the last rounds",
    ),
    FigureOfMerit(
        "best", "best round", lambda curve, settings: float(max(curve.overall, default=math.nan)), None, ("clients",)
    ),
    FigureOfMerit("worst", "worst client", partial(_of_clients, worst_score), None, ("clients",)),
    FigureOfMerit("worst_tenth", "worst 10%", partial(_of_clients, worst_tenth), None, ("main", "clients")),
    FigureOfMerit(
        "p10", "10th percentile", partial(_of_clients, lambda scores: np.percentile(scores, 10)), None, ("clients",)
    ),
    FigureOfMerit(
        "p90", "90th percentile", partial(_of_clients, lambda scores: np.percentile(scores, 90)), None, ("clients",)
    ),
    FigureOfMerit("spread", "std. dev.", partial(_of_clients, np.std), None, ("clients",)),
    FigureOfMerit("jain", "Jain", partial(_of_clients, jain), INDEX, ("clients",)),
    *(
        figure
        for name in SERVER
        for figure in (
            FigureOfMerit(
                *(f"server_{name}", MEASURES[name].heading, partial(_of_server, name), MEASURES[name]),
                tables=("server",),
                tested=_TESTED.get(name, ""),
            ),
            FigureOfMerit(
                *(f"server_{name}_late", f"{MEASURES[name].heading}, last rounds"),
                partial(_late_of_server, name),
                MEASURES[name],
                tested=_TESTED.get(f"{name}_late", ""),
            ),
        )
    ),
    FigureOfMerit("testing_rounds", "testing rounds", lambda curve, settings: float(curve.tests), COUNT, ("main",)),
    FigureOfMerit("rounds_to_target", "rounds to target", _reached, COUNT),
    FigureOfMerit(
        "left_out",
        "excluded",
        lambda curve, settings: curve.sums.get("cohort", 0) - curve.sums.get("answered", 0),
        COUNT,
    ),
    FigureOfMerit("seconds", "seconds", partial(_sum, "seconds"), COUNT),
    FigureOfMerit("cpu_seconds", "seconds of processors", partial(_sum, "cpu"), COUNT),
    FigureOfMerit("gpu_seconds", "seconds of a GPU", partial(_sum, "gpu"), COUNT),
    FigureOfMerit("bytes_up", "bytes from clients", partial(_sum, "up"), COUNT),
    FigureOfMerit("bytes_down", "bytes to clients", partial(_sum, "down"), COUNT),
    *(
        FigureOfMerit(
            name, name.replace("_", " "), lambda curve, settings, name=name: curve.step.get(name, math.nan), SHARE
        )
        for name in OF_A_STEP
    ),
)
"""Every figure, in the order of tables."""


def figures_of(curves: Sequence[Curve], settings: RoundSettings) -> dict[str, list[float]]:
    """Return every figure of some curves, a value for each of them."""
    return {figure.name: [figure.of(curve, settings) for curve in curves] for figure in FIGURES}
