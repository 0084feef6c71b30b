"""Score functions f: [0,1]^m → R, on the last axis of an array, so that a whole cohort is scored in one call.

Each maps criteria values [..., m] to scores [...]. They do not normalise: that is a step of its own, before them.
`@score("name")` makes a function known as `weighing.score`; those with parameters are made from fields by `rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.usercode import SCORES, Registry
from steelyard.messages.updates import Floats

QUANTIFIERS: dict[str, tuple[float, float] | None] = {
    "all": None,
    "most": (0.3, 0.8),
    "at-least-half": (0.0, 0.5),
    "as-many-as-possible": (0.5, 1.0),
}
"""Yager's quantifiers as (a, b) of Q(r) = (r − a)/(b − a) cut to [0, 1]; "all" is the minimum."""

Score = Callable[[Floats], Floats]
WITH_PARAMETERS = ("weighted-mean", "owa", "choquet", "power")
"""Scores that fields of [weighing] give numbers to."""
_registry: Registry[Score] = Registry("score", SCORES, lambda function: function.__qualname__)


def score(name: str) -> Callable[[Score], Score]:
    """Make a function of values [..., m] known by this name, in TOML and in --rules."""

    def register(function: Score) -> Score:
        _registry.add(name, function)
        return function

    return register


def known() -> dict[str, Score]:
    """Return the scores without parameters, by name."""
    return _registry.known()


def checked_name(name: str) -> str:
    """Return the name of a score, or say which there are."""
    names = (*known(), *WITH_PARAMETERS)
    if name not in names:
        raise UserError(f"score: got '{name}'{nearest(name, names)}; allowed: {listed(names)}")
    return name


@score("prioritized")
def prioritized(values: Floats) -> Floats:
    """f_m(c) = Σ_i Π_{j≤i} c_(j) (paper 000, Eq. 6): values in priority order, each gated by all before it."""
    return np.cumprod(values, axis=-1).sum(axis=-1)


@score("mean")
def mean(values: Floats) -> Floats:
    """The plain average of the criteria; use it as the rule without preferences."""
    return values.mean(axis=-1)


def weighted_mean(weights: Sequence[float]) -> Score:
    """Σ w_i c_i / Σ w_i; use it when criteria trade off against each other at fixed rates."""
    share = np.array(weights) / sum(weights)
    return lambda values: values @ share


def owa(weights: Sequence[float]) -> Score:
    """Yager's ordered weighted average: Σ w_i c_(i) over the values sorted from largest to smallest."""
    share = np.array(weights) / sum(weights)
    return lambda values: np.sort(values, axis=-1)[..., ::-1] @ share


def quantifier_weights(bounds: tuple[float, float] | None, count: int) -> Floats:
    """w_i = Q(i/m) − Q((i−1)/m) with Q(r) = (r − a)/(b − a) cut to [0, 1]; None gives the weights of the minimum."""
    if bounds is None:
        return np.eye(count)[-1]
    low, high = bounds
    steps = np.clip((np.arange(count + 1) / count - low) / (high - low), 0.0, 1.0)
    return np.diff(steps)


def choquet(capacity: Mapping[frozenset[int], float]) -> Score:
    """Σ_i (c_(i) − c_(i−1)) μ(A_(i)), values ascending, A_(i) the criteria from the i-th up (criteria interact)."""

    def score(values: Floats) -> Floats:
        flat = values.reshape(-1, values.shape[-1])
        result = np.zeros(len(flat))
        for row, client in enumerate(flat):
            ascending, before = np.argsort(client, kind="stable"), 0.0
            for rank, index in enumerate(ascending):
                step = client[index] - before
                result[row] += step * capacity[frozenset(ascending[rank:].tolist())]
                before = client[index]
        return result.reshape(values.shape[:-1])

    return score


@score("product")
def product(values: Floats) -> Floats:
    """Π c_i: a client must do well on everything."""
    return values.prod(axis=-1)


def power(exponent: float) -> Score:
    """(Π c_i)^k: for one criterion, AdaFed's p_i = accuracy^k (paper 001); a larger k trusts the best more."""
    return lambda values: values.prod(axis=-1) ** exponent


def quantifier_bounds(text: str) -> tuple[float, float] | None:
    """Read a quantifier: one of the names, or "a,b" with 0 <= a < b <= 1."""
    name = "-".join(text.lower().replace("_", " ").replace("-", " ").split())
    if name in QUANTIFIERS:
        return QUANTIFIERS[name]
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise UserError(
            f"quantifier: got '{text}'{nearest(name, QUANTIFIERS)}; allowed: {listed(QUANTIFIERS)}, or 'a,b'"
        ) from None
    if not 0 <= low < high <= 1:
        raise UserError(f"quantifier: got '{text}'; allowed: 'a,b' with 0 <= a < b <= 1")
    return low, high
