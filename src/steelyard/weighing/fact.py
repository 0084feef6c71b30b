"""Facts as criteria, in any rule: "fact(battery)", "fact(age=65..)", "fact(country=IT)", "fact(bandwidth;1..100)".

Papers 000 (§4.2, classes 3 and 4) and 003 (§2.2) weigh clients by what is known of a device or its user. A fact is a
boolean, a number or a word. It comes from the owner of a node (`user-age = 70`), from [facts] of an experiment, or from
the client's rows: the mean of a mark. Its degree is a number from 0 on, as of every criterion:

| written | degree |
|---|---|
| `fact(NAME)` | the number itself; true and false are 1 and 0 |
| `fact(NAME=65..)`, `=..17`, `=18..65`, `=3`, `=IT` | 1 where the fact is in the range, or equal; else 0 |
| `fact(NAME;1..100)` | (x − 1) / 99, at least 0 and at most 1 |

A client of which the fact is not known has 0. `NAME` may begin with `device-` or `user-`, where both have such a fact.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from steelyard.base.errors import UserError
from steelyard.weighing.cohort import LocalData

FACT = r"fact\([^()]*\)"
"""A fact within the words of a rule."""
_PARTS = re.compile(r"fact\(\s*((?:device-|user-)?)([A-Za-z][\w-]*)\s*(?:([=;])\s*([^=;]*?)\s*)?\)")
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})?\.\.({_NUMBER})?|({_NUMBER})")
_ALLOWED = "fact(NAME), fact(NAME=65..), fact(NAME=18..65), fact(NAME=WORD) or fact(NAME;0..100)"


Tables = Mapping[str, Mapping[str, float]]
"""Facts of a client by what they are of: "user", "device", "rows"."""


@dataclass(frozen=True)
class Fact:
    """One fact of a client as a degree: the measure of a criterion `fact(...)`; make it with `read_fact`."""

    name: str
    about: Literal["device", "user"] | None = None
    """Of what it is, where that is written; else the user's fact comes first, then the device's, then the rows'."""
    least: float = -math.inf
    most: float = math.inf
    word: str | None = None
    """The word that it must be."""
    asked: bool = False
    """Whether it is a condition, of degree 0 or 1."""

    @property
    def scaled(self) -> bool:
        """Whether a range makes its degree a number from 0 to 1."""
        return not self.asked and math.isfinite(self.most)

    def __str__(self) -> str:
        if self.word is not None or self.least == self.most:
            return f"{self.name} is {self.word or format(self.least, 'g')}"
        if self.scaled:
            return f"{self.name} between {self.least:g} and {self.most:g}"
        bounds = {"from": self.least, "to": self.most}
        return " ".join([self.name, *(f"{word} {end:g}" for word, end in bounds.items() if math.isfinite(end))])

    def among(self, facts: Mapping[str, float]) -> float | None:
        """Return the degree from facts by name, metrics of a reply or cells of a table; None where it is not known.

        A word is a yes there: `country=IT` is 1.
        """
        if self.word is not None:
            known = any(name.startswith(f"{self.name}=") for name in facts)
            return facts.get(f"{self.name}={self.word}", 0.0) if known else None
        if self.name not in facts:
            return None
        value = facts[self.name]
        if self.scaled:
            return min(1.0, max(0.0, (value - self.least) / (self.most - self.least)))
        return float(self.least <= value <= self.most) if self.asked else value

    def of(self, tables: Tables) -> float | None:
        """Return the degree from what is known of a client; the user's facts come first, then the device's."""
        order = (self.about,) if self.about else ("user", "device", "rows")
        found = (self.among(tables[about]) for about in order if about in tables)
        return next((degree for degree in found if degree is not None), None)

    def __call__(self, local: LocalData) -> float:
        rows = {name: float(np.mean(marks)) for name, marks in local.marks.items() if len(marks)}
        return self.of({"user": local.user, "device": local.device, "rows": rows}) or 0.0


@cache
def read_fact(text: str) -> Fact | None:
    """Return the fact that a criterion's name stands for; None where it is another criterion.

    Raises:
        UserError: it begins as a fact, and is none.
    """
    if not text.startswith("fact("):
        return None
    found = _PARTS.fullmatch(text)
    if found is None:
        raise UserError(f"criterion {text}: allowed: {_ALLOWED}")
    prefix, name, sign, condition = found.groups()
    about: Literal["device", "user"] | None = "device" if prefix == "device-" else "user" if prefix else None
    if sign is None:
        return Fact(name, about)
    ends = _RANGE.fullmatch(condition)
    if ends is None or condition == "..":
        if sign == ";" or not condition or ".." in condition:
            raise UserError(f"criterion {text}: '{condition}' is no range; allowed: {_ALLOWED}")
        return Fact(name, about, word=condition, asked=True)
    least, most = (float(end or ends[3] or usual) for end, usual in ((ends[1], "-inf"), (ends[2], "inf")))
    if least > most or (sign == ";" and not -math.inf < least < most < math.inf):
        raise UserError(f"criterion {text}: '{condition}' is empty or open; allowed: {_ALLOWED}")
    return Fact(name, about, least, most, asked=sign == "=")


def unknown(criteria: Iterable[str], clients: Mapping[str, Tables]) -> dict[str, list[str]]:
    """Return the clients of which the facts among criteria are not known, by criterion."""
    facts = {name: fact for name in criteria if (fact := read_fact(name)) is not None}
    found = {name: [one for one, tables in clients.items() if fact.of(tables) is None] for name, fact in facts.items()}
    return {name: without for name, without in found.items() if without}
