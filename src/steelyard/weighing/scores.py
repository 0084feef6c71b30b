"""Score functions f: [0,1]^m → R, on the last axis of an array, so that a whole cohort is scored in one call.

Each maps criteria values [..., m] to scores [...]. They do not normalise: that is a step of its own, before them.
`@score("name")` makes a function known as `weighing.score`. `@score("name", "field", ...)` names the fields of
`ScoreSettings` that are its parameters; it is then called with the criteria and these fields, and returns such a
function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import Field, field_validator, model_validator

from steelyard.base.errors import UserError, brief, listed, nearest
from steelyard.base.settings import Section, parse
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
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Scoring(NamedTuple):
    """What is known under the name of a score."""

    function: Callable[..., Any]
    """The score itself; of one with parameters, what makes it from the criteria and the fields that it takes."""
    takes: tuple[str, ...]
    """Its parameters, fields of `ScoreSettings`."""
    reads: str
    """How it reads: {} stands for the criteria, {power} for the exponent."""


_registry: Registry[Scoring] = Registry("score", SCORES, lambda scoring: scoring.function.__qualname__)


def score(name: str, *takes: str, reads: str = "") -> Callable[[FunctionT], FunctionT]:
    """Make a score known by this name, in TOML and in --rules; `takes` are its parameters, `reads` says it in words."""

    def register(function: FunctionT) -> FunctionT:
        _registry.add(name, Scoring(function, takes, reads or f"{name} of {{}}"))
        return function

    return register


def known() -> dict[str, Scoring]:
    """Return the scores by name."""
    return _registry.known()


def _list_scores(schema: dict[str, Any]) -> None:
    schema["enum"] = list(known())


class ScoreSettings(Section):
    """The criteria of a rule, the score that joins them, and its parameters: one of another score is refused."""

    criteria: tuple[str, ...] = Field(default=("DS",), min_length=1)
    """Names of the criteria, such as ["DS", "LD", "MD"]; `steelyard list criteria` shows them all."""
    score: Annotated[str, Field(json_schema_extra=_list_scores)] = "prioritized"
    """Score function that joins the criteria of a client into one number."""
    priority: str | None = None
    """For prioritized: the criteria from most to least important, "DS>LD>MD". Default: as listed in `criteria`."""
    weights: tuple[float, ...] | None = None
    """For weighted-mean: a weight per criterion. For owa: a weight per rank, largest value first."""
    quantifier: str | None = None
    """For owa: all, most, at-least-half, as-many-as-possible, or "a,b" for Q(r) = (r − a)/(b − a)."""
    capacity: dict[str, Any] | None = None
    """For choquet: a worth per subset of criteria, {"DS" = 0.4, "DS,LD" = 0.7, ...}, or {two_additive = {...}}."""
    power: float | None = Field(default=None, gt=0, le=1000)
    """For power: the exponent k of p_i = c^k. Default 1."""

    @field_validator("score", mode="before")
    @classmethod
    def _plain_score(cls, value: object) -> object:
        return value.strip().lower().replace("_", "-") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_score(self) -> Self:
        scores = known()
        if self.score not in scores:
            raise UserError(f"score: got '{self.score}'{nearest(self.score, scores)}; allowed: {listed(scores)}")
        if len(set(self.criteria)) != len(self.criteria):
            raise UserError(f"criteria: got {listed(self.criteria)}; allowed: each criterion once")
        for name in dict.fromkeys(name for scoring in scores.values() for name in scoring.takes):
            if getattr(self, name) is not None and name not in scores[self.score].takes:
                allowed = listed(other for other, scoring in scores.items() if name in scoring.takes)
                raise UserError(f"{name}: given with score = '{self.score}'; allowed only with {allowed}")
        self.score_function()
        return self

    def order(self) -> tuple[int, ...]:
        """Return the priority order as positions in `criteria`."""
        if self.priority is None:
            return tuple(range(len(self.criteria)))
        return parse_priority(self.priority, self.criteria)

    def score_function(self) -> Score:
        """Return the score as a function of values [..., criteria]; for prioritized they stand in priority order."""
        function, takes, _ = known()[self.score]
        return function(self.criteria, *(getattr(self, name) for name in takes)) if takes else function


def parse_priority(text: str, criteria: Sequence[str]) -> tuple[int, ...]:
    """Read "DS>LD>MD" as positions in `criteria`; it must name each criterion exactly once."""
    names = [part.strip() for part in text.split(">")]
    for name in names:
        if name not in criteria:
            raise UserError(
                f"priority: '{text}' names '{name}', which is not among the criteria"
                f"{nearest(name, criteria)}; allowed: an order of {listed(criteria)}"
            )
    if sorted(names) != sorted(criteria):
        raise UserError(f"priority: got '{text}'; allowed: an order that names each of {listed(criteria)} once")
    return tuple(criteria.index(name) for name in names)


@score("prioritized", "priority")
def by_priority(criteria: Sequence[str], priority: str | None) -> Score:
    """Make the papers' score; the order of the values is the rule's."""
    if priority is not None:
        parse_priority(priority, criteria)
    return prioritized


def prioritized(values: Floats) -> Floats:
    """f_m(c) = Σ_i Π_{j≤i} c_(j) (paper 000, Eq. 6): values in priority order, each gated by all before it."""
    return np.cumprod(values, axis=-1).sum(axis=-1)


@score("mean", reads="the mean of {}")
def mean(values: Floats) -> Floats:
    """Σ c_i / m; use it as the rule without preferences."""
    return values.mean(axis=-1)


def _shares(weights: Sequence[float] | None, criteria: Sequence[str], meaning: str) -> Floats:
    if weights is None or len(weights) != len(criteria):
        shown = "nothing" if weights is None else f"{len(weights)} numbers"
        raise UserError(f"weights: got {shown}; allowed: {len(criteria)} numbers, {meaning}")
    if not all(np.isfinite(weights)) or min(weights) < 0 or sum(weights) <= 0:
        raise UserError(f"weights: got {listed(map(str, weights))}; allowed: numbers >= 0, not all 0")
    return np.array(weights) / sum(weights)


@score("weighted-mean", "weights", reads="the weighted mean of {}")
def weighted_mean(criteria: Sequence[str], weights: Sequence[float] | None) -> Score:
    """Σ w_i c_i / Σ w_i; use it when criteria trade off against each other at fixed rates."""
    share = _shares(weights, criteria, "a weight per criterion")
    return lambda values: values @ share


@score("owa", "weights", "quantifier", reads="the ordered weighted average of {}")
def owa(criteria: Sequence[str], weights: Sequence[float] | None, quantifier: str | None) -> Score:
    """Σ w_i c_(i) over the values sorted from largest to smallest; Yager's ordered weighted average."""
    if (weights is None) == (quantifier is None):
        raise UserError("weights, quantifier: score = 'owa' needs exactly one of the two")
    if quantifier is not None:
        weights = quantifier_weights(quantifier_bounds(quantifier), len(criteria)).tolist()
    share = _shares(weights, criteria, "a weight per rank")
    return lambda values: np.sort(values, axis=-1)[..., ::-1] @ share


def quantifier_weights(bounds: tuple[float, float] | None, count: int) -> Floats:
    """w_i = Q(i/m) − Q((i−1)/m) with Q(r) = (r − a)/(b − a) cut to [0, 1]; None gives the weights of the minimum."""
    if bounds is None:
        return np.eye(count)[-1]
    low, high = bounds
    steps = np.clip((np.arange(count + 1) / count - low) / (high - low), 0.0, 1.0)
    return np.diff(steps)


@score("choquet", "capacity", reads="Choquet's integral of {}")
def choquet(criteria: Sequence[str], given: Mapping[str, object] | None) -> Score:
    """Σ_i (c_(i) − c_(i−1)) μ(A_(i)), values ascending, A_(i) the criteria from the i-th up (criteria interact)."""
    if given is None:
        raise UserError("capacity: missing; score = 'choquet' needs a worth for every subset of criteria")
    capacity = read_capacity(given, criteria)

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


@score("product", reads="the product of {}")
def product(values: Floats) -> Floats:
    """Π c_i; a client must do well on everything."""
    return values.prod(axis=-1)


@score("power", "power", reads="{} to the power of {power:g}")
def power(_criteria: Sequence[str], given: float | None) -> Score:
    """(Π c_i)^k; for one criterion, AdaFed's p_i = accuracy^k (paper 001); a larger k trusts the best more."""
    exponent = 1.0 if given is None else given
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
