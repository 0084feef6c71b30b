"""Capacities (fuzzy measures) for the Choquet integral: a worth for every subset of the criteria, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from steelyard.base.errors import UserError, brief, listed, nearest
from steelyard.base.settings import parse

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


def checked(table: Mapping[frozenset[int], float], criteria: Sequence[str]) -> dict[frozenset[int], float]:
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
    return checked({_members(key, criteria): float(value) for key, value in table.items()}, criteria)


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
    return checked(table, criteria)


def read(document: Mapping[str, object], criteria: Sequence[str]) -> dict[frozenset[int], float]:
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


def read_file(path: Path, option: str) -> dict[str, Any]:
    """Read the capacity of a Choquet integral from a TOML file; `option` is who asks, for the error line."""
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        raise UserError(f"{option}: {path} is not UTF-8 text; allowed: a TOML file") from None
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be read: {error.strerror}; allowed: a TOML file") from error
