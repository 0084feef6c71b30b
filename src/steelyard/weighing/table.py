"""Weighing a table of clients without any training: measures in, scores and weights out, as in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from steelyard.base.errors import UserError, brief, listed
from steelyard.base.measures import TASKS
from steelyard.base.settings import validated
from steelyard.messages.updates import Floats
from steelyard.weighing import capacity as capacities
from steelyard.weighing import criteria as registry
from steelyard.weighing.measures import Measures, read_measures
from steelyard.weighing.rule import Rule, WeighingSettings, label
from steelyard.weighing.trust import bounded
from steelyard.weighing.weights import Normalising, Weighing
from steelyard.weighing.words import Frame, read_rule

_WORTH = tuple(task.criterion for task in TASKS.values())
"""The criteria by which a model does well on the server's rows, one for each task."""


@dataclass(frozen=True)
class RuleOptions:
    """A rule as options of the command line give it."""

    score: str = "prioritized"
    priority: str | None = None
    weights: str | None = None
    quantifier: str | None = None
    capacity: Path | None = None
    power: float | None = None

    def named(self) -> list[str]:
        """Return the criteria that the priority names; none without one."""
        return [part.strip() for part in self.priority.split(">")] if self.priority else []

    def settings(self, criteria: Sequence[str], normalise: str = "share") -> WeighingSettings:
        """Return the rule over these criteria, checked."""
        given = {
            "criteria": list(criteria),
            "score": self.score,
            "priority": self.priority,
            "weights": None if self.weights is None else _numbers(self.weights),
            "quantifier": self.quantifier,
            "capacity": None if self.capacity is None else capacities.read_file(self.capacity, "--capacity"),
            "power": self.power,
            "normalise": normalise,
        }
        return validated(WeighingSettings, {name: value for name, value in given.items() if value is not None}, "")


@dataclass(frozen=True, eq=False)
class Weighed:
    """Clients weighed by a rule; printing it shows the table.

    >>> float(steelyard.weigh({"ann": {"DS": 3}, "bob": {"DS": 1}}).weights.max())
    0.75
    """

    clients: tuple[str, ...]
    criteria: tuple[str, ...]
    values: Floats
    """[clients, criteria] as given."""
    scores: Floats
    weights: Floats
    """They sum to 1."""
    reasons: tuple[str, ...]
    """For each client what had to be made up for: a score of 0 for all, a cap; empty where nothing had to."""
    rule: str
    zero_criteria: tuple[str, ...]
    """Criteria that are 0 for every client and so say nothing."""
    uniform: bool
    """Whether all scores are 0, so that all weights are equal."""

    def document(self) -> WeighedDocument:
        """Return it for programs, as `steelyard weigh --format json` prints it."""
        rows: list[WeighedClient] = [
            {
                "client": client,
                "score": float(self.scores[row]),
                "weight": float(self.weights[row]),
                "reason": self.reasons[row],
            }
            for row, client in enumerate(self.clients)
        ]
        flags: Flags = {"zero_criteria": list(self.zero_criteria), "uniform": self.uniform}
        return {"clients": rows, "criteria": list(self.criteria), "rule": self.rule, "flags": flags}

    def __repr__(self) -> str:
        header = ("client", *self.criteria, "score", "weight")
        cells = [
            (
                client,
                *(f"{value:.6g}" for value in self.values[row]),
                f"{self.scores[row]:.6f}",
                f"{self.weights[row]:.6f}",
            )
            for row, client in enumerate(self.clients)
        ]
        widths = [max(len(row[column]) for row in (header, *cells)) for column in range(len(header))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in range(1, len(row)))])
            for row in (header, *cells)
        ]
        return "\n".join([*lines, *dict.fromkeys(reason for reason in self.reasons if reason)])


class WeighedClient(TypedDict):
    """One client of a table, weighed."""

    client: str
    score: float
    weight: float
    reason: str


class Flags(TypedDict):
    """What had to be made up for: criteria that are 0 for all, scores that are all 0."""

    zero_criteria: list[str]
    uniform: bool


class WeighedDocument(TypedDict):
    """A table's clients weighed, for programs."""

    clients: list[WeighedClient]
    criteria: list[str]
    rule: str
    flags: Flags


def weigh(table: Any, rule: str | WeighingSettings = "", normalise: Normalising | None = "share") -> Weighed:
    """Weigh clients by a rule, from measures that you have: no training, no torch; use it in code of your own.

    `table`: a mapping of clients to measures, {"ann": {"DS": 120, "VP": 0.8}, ...}, or to the one measure that the rule
    names, {"ann": 120, ...}; a mapping of columns to lists, with a column "client"; a data frame, with such a column or
    clients as its index; rows as mappings; the path of a CSV; or an array [clients, criteria] whose columns are the
    rule's criteria as it names them. Columns need not be registered
    criteria. `rule`: as in `steelyard compare --rules`; "" takes all columns in their order. `normalise`: how each
    column is brought to [0, 1] over the clients, as in a run, unless the rule says so itself ("VP>DS/max"); None takes
    values in [0, 1] as they are.

        >>> steelyard.weigh({"ann": {"DS": 300, "VP": 0.5}, "bob": {"DS": 100, "VP": 0.9}}, "VP>DS").weights
        array([0.4375, 0.5625])

    Raises:
        UserError: the table is empty, lacks a column, or holds what is no number from 0 on; the rule is not
            known or needs training.
    """
    criteria = rule.criteria if isinstance(rule, WeighingSettings) else read_words(rule, None).criteria
    measures = read_measures(table, criteria)
    settings = rule if isinstance(rule, WeighingSettings) else read_words(rule, measures.criteria)
    return _weighed(measures, settings, normalise)


def _weighed(measures: Measures, settings: WeighingSettings, normalise: Normalising | None) -> Weighed:
    if settings.adjust or settings.fit or settings.loss or settings.defence or settings.trained_by == "server":
        raise UserError(
            f"rule: '{label(settings)}' needs updates or rounds; allowed for a table: rules of measures alone"
        )
    if settings.policy is not None and not settings.policy.made().of_measures:
        raise UserError(
            f"rule: '{label(settings)}' looks at updates or remembers rounds; allowed for a table: rules of measures "
            "alone"
        )
    values = _columns(measures, settings.criteria)
    how = _normalising(settings, normalise)
    if how is None and values.max() > 1:
        raise UserError(f"table: holds {values.max():g}; allowed without normalising: values from 0 to 1")
    believed = bounded(values, [column_criterion(name) for name in settings.criteria], settings)
    found = Rule(settings.model_copy(update={"bound": None})).weigh(believed, how=how, clients=measures.clients)
    return Weighed(
        clients=measures.clients,
        criteria=settings.criteria,
        values=values,
        scores=found.scores,
        weights=found.weights,
        reasons=_reasons(found, believed, values, floored=settings.floored),
        rule=label(settings),
        zero_criteria=found.all_zero,
        uniform=found.uniform,
    )


def read_words(word: str, columns: Sequence[str] | None) -> WeighingSettings:
    """Read a rule's words over the columns of a table; None: columns that only the rule names."""
    if not isinstance(word, str):
        raise UserError(f"rule: got {brief(word)}; allowed: words as in `steelyard compare --rules`, or settings")
    names = tuple(columns or ("DS",))
    frame = Frame(
        known=columns if columns is None else (*columns, "EQ"),
        base=WeighingSettings(criteria=names),
        server_rows=columns is not None and not set(columns).isdisjoint(_WORTH),
        worth=next((name for name in _WORTH if name in (columns or ())), "VP"),
        option="rule",
    )
    given = read_rule(word.strip(), frame) if word.strip() else {"criteria": list(names)}
    return validated(WeighingSettings, given, "rule")


def check_columns(columns: Sequence[str], criteria: Sequence[str]) -> None:
    """Refuse a table that lacks a criterion of its rule; EQ is the same for all and needs no column."""
    for name in criteria:
        if name not in columns and name != "EQ":
            raise UserError(f"table: has no column '{name}'; allowed for this rule: {listed(criteria)}")


def _columns(measures: Measures, criteria: Sequence[str]) -> Floats:
    check_columns(measures.criteria, criteria)
    columns = [
        measures.values[:, measures.criteria.index(name)]
        if name in measures.criteria
        else np.ones(len(measures.clients))
        for name in criteria
    ]
    return np.column_stack(columns)


def _normalising(settings: WeighingSettings, normalise: Normalising | None) -> Normalising | None:
    if not isinstance(normalise, str | None) or normalise not in (None, "share", "max", "rank"):
        raise UserError(f"normalise: got {brief(normalise)}; allowed: share, max, rank, None")
    if settings.normalise != "share" and normalise not in ("share", settings.normalise):
        raise UserError(
            f"normalise: got {normalise} with a rule that says /{settings.normalise}; allowed: one of the two"
        )
    return settings.normalise if normalise == "share" else normalise


def column_criterion(name: str) -> registry.Criterion:
    """Return a registered criterion; any other column is taken for something that clients say of themselves."""
    known = registry.known()
    return known.get(name) or registry.Criterion(name, "client", "data", "a column of a table", lambda local: 0.0)


def _reasons(found: Weighing, believed: Floats, values: Floats, *, floored: bool) -> tuple[str, ...]:
    """Say for each client why its weight is not simply its score's share."""
    if found.uniform:
        return ("all scores are 0: equal weights",) * len(values)
    total = found.scores.sum()
    reasons: list[str] = []
    for row, weight in enumerate(found.weights):
        cut = believed[row] < values[row]
        words = [f"{name} cut at the bound" for column, name in enumerate(found.criteria) if cut[column]]
        share = found.scores[row] / total
        if weight < share - 1e-12:
            words.append("lowered for the floors of others" if floored else "capped")
        elif floored and weight > share + 1e-12:
            words.append("raised by the limits")
        reasons.append(", ".join(words))
    return tuple(reasons)


def weigh_file(path: Path, rule: str | RuleOptions, normalise: Normalising | None = "share") -> Weighed:
    """Weigh the clients of a CSV, by a rule in words or by options of the command line."""
    measures = read_measures(path, ())
    settings = read_words(rule, measures.criteria) if isinstance(rule, str) else rule.settings(measures.criteria)
    return _weighed(measures, settings, normalise)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.replace(" ", "").split(",")]
    except ValueError:
        raise UserError(f"--weights: got '{text}'; allowed: numbers with commas, such as 0.5,0.3,0.2") from None
