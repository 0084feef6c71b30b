"""Score functions f: [0,1]^m → R, on the last axis of an array, so that a whole cohort is scored in one call.

Each maps criteria values [..., m] to scores [...]. They do not normalise: that is a step of its own, before them.
`@score("name")` makes a function known as `weighing.score`; those with parameters are made from fields by `rule`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.base.errors import UserError, brief, listed, nearest
from steelyard.base.settings import parse
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


# ---------------------------------------------------------------- capacities (fuzzy measures) for the Choquet integral


TOLERANCE = 1e-9


def _members(key: str, criteria: Sequence[str]) -> frozenset[int]:
    names = [part for part in re.split(r"[,+&|\s]+", key.strip("{}() ")) if part]
    for name in names:
        if name not in criteria:
            raise UserError(
                f"capacity: '{key}' names '{name}', which is no criterion{nearest(name, criteria)}; "
                f"allowed: subsets of {listed(criteria)}"
            )
    return frozenset(criteria.index(name) for name in names)


def _shown(subset: frozenset[int], criteria: Sequence[str]) -> str:
    return "{" + ",".join(criteria[i] for i in sorted(subset)) + "}"


def subsets(count: int) -> list[frozenset[int]]:
    """Return all subsets of range(count), smaller ones first."""
    every = chain.from_iterable(combinations(range(count), size) for size in range(count + 1))
    return [frozenset(subset) for subset in every]


def checked_capacity(table: Mapping[frozenset[int], float], criteria: Sequence[str]) -> dict[frozenset[int], float]:
    """Check that a capacity is complete, 0 on nothing, 1 on everything, and monotone; return it."""
    count = len(criteria)
    everything = frozenset(range(count))
    full = {frozenset[int](): 0.0, everything: 1.0, **table}
    if abs(full[frozenset()]) > TOLERANCE:
        raise UserError(f"capacity: the empty set has {full[frozenset()]}; allowed: 0")
    if abs(full[everything] - 1.0) > TOLERANCE:
        raise UserError(f"capacity: {_shown(everything, criteria)} has {full[everything]}; allowed: 1")
    for subset in subsets(count):
        if subset not in full:
            raise UserError(f"capacity: no value for {_shown(subset, criteria)}; allowed: one for every subset")
        for extra in everything - subset:
            larger = subset | {extra}
            if larger in full and full[larger] < full[subset] - TOLERANCE:
                raise UserError(
                    f"capacity: not monotone: {_shown(larger, criteria)} has {full[larger]}, "
                    f"less than {full[subset]} of its part {_shown(subset, criteria)}"
                )
    return full


def from_table(table: Mapping[str, float], criteria: Sequence[str]) -> dict[frozenset[int], float]:
    """Read a capacity given per subset, such as {"DS": .4, "DS,LD": .7, ...}; use it for a full table."""
    return checked_capacity({_members(key, criteria): float(value) for key, value in table.items()}, criteria)


def two_additive(
    singles: Mapping[str, float], pairs: Mapping[str, float], criteria: Sequence[str]
) -> dict[frozenset[int], float]:
    """Build μ(S) = Σ_{i∈S} m_i + Σ_{{i,j}⊆S} m_ij from the masses of single criteria and pairs.

    Use it as the shorthand for many criteria: m + m(m−1)/2 numbers in place of 2^m.
    """
    masses = {_members(key, criteria): float(value) for key, value in {**singles, **pairs}.items()}
    for name in criteria:
        masses.setdefault(frozenset({criteria.index(name)}), 0.0)
    for subset in masses:
        if not 1 <= len(subset) <= 2:
            raise UserError(
                f"capacity: two-additive masses are for one or two criteria, got {_shown(subset, criteria)}"
            )
    table = {subset: sum(mass for part, mass in masses.items() if part <= subset) for subset in subsets(len(criteria))}
    return checked_capacity(table, criteria)


def read_capacity(document: Mapping[str, object], criteria: Sequence[str]) -> dict[frozenset[int], float]:
    """Read a capacity from a TOML document: subsets at the top or under [capacity], or [two_additive] masses."""
    if "two_additive" in document:
        shorthand = _table(document["two_additive"], "two_additive")
        if not any(isinstance(value, Mapping) for value in shorthand.values()):
            return two_additive(_numbers(shorthand), {}, criteria)
        parts = {"singles": {}, "pairs": {}, **shorthand}
        for name in parts.keys() - {"singles", "pairs"}:
            raise UserError(f"capacity: two_additive has '{name}' beside its parts; allowed: singles, pairs")
        singles, pairs = (_numbers(_table(parts[name], name)) for name in ("singles", "pairs"))
        return two_additive(singles, pairs, criteria)
    return from_table(_numbers(_table(document.get("capacity", document), "capacity")), criteria)


def _table(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise UserError(f"capacity: '{name}' is not a table; allowed: a table of subset = value")
    return value  # type: ignore[return-value]


def _numbers(table: Mapping[str, object]) -> dict[str, float]:
    for key, value in table.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
            raise UserError(f"capacity: '{key}' has {brief(value)}; allowed: a number from 0 to 1")
    return {key: float(value) for key, value in table.items()}  # type: ignore[arg-type]


def read_capacity_file(path: Path, option: str) -> dict[str, Any]:
    """Read the capacity of a Choquet integral from a TOML file; `option` is who asks, for the error line."""
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        raise UserError(f"{option}: {path} is not UTF-8 text; allowed: a TOML file") from None
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be read: {error.strerror}; allowed: a TOML file") from error
