"""Weighing a table of clients without any training: measures in, scores and weights out, as in a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np

from steelyard.base.errors import UserError, brief, listed, path_of
from steelyard.base.files import read_csv
from steelyard.base.measures import TASKS
from steelyard.base.settings import LARGEST_REAL, validated
from steelyard.messages.updates import Floats
from steelyard.weighing import criterion as registry
from steelyard.weighing.fact import read_fact
from steelyard.weighing.rule import Rule, WeighingSettings, bounded
from steelyard.weighing.weights import Normalising, Weighing
from steelyard.weighing.words import Frame, label, read_rule

if TYPE_CHECKING:
    import pandas

_WORTH = tuple(task.criterion for task in TASKS.values())
"""The criteria by which a model does well on the server's rows, one for each task."""


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
        import pandas  # For speed of start: few tables are printed.

        numbers = np.column_stack([self.values, self.scores, self.weights])
        frame = pandas.DataFrame(numbers, self.clients, [*self.criteria, "score", "weight"])
        formats = [" {:.6g}".format] * len(self.criteria) + [" {:.6f}".format] * 2
        table = frame.rename_axis(columns="client").to_string(formatters=formats)
        zero = [f"{name} is 0 for every client: everyone got 1/n for it" for name in self.zero_criteria]
        return "\n".join([table, *zero, *dict.fromkeys(reason for reason in self.reasons if reason)])


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
    if settings.policy is not None and not settings.policy.of_measures:
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
    known = dict(zip(measures.criteria, measures.values.T, strict=True)) | {"EQ": np.ones(len(measures.clients))}
    for name in criteria:
        fact = read_fact(name)
        if name not in known and fact is not None and fact.name in known:
            known[name] = np.array([fact.among({fact.name: cell}) for cell in known[fact.name].tolist()])
    check_columns(list(known), criteria)
    return np.column_stack([known[name] for name in criteria])


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
    return registry.find(name) or registry.Criterion(name=name, measured_by="client", measure=lambda local: 0.0)


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


# ---------------------------------------------------------------- measures of clients as people have them


CLIENT = "client"


@dataclass(frozen=True, eq=False)
class Measures:
    """A table of clients: one row each, one column for each measure."""

    clients: tuple[str, ...]
    criteria: tuple[str, ...]
    values: Floats
    """[clients, criteria], finite and from 0 on."""


def read_measures(table: Any, named: Sequence[str]) -> Measures:
    """Return whatever form of table as measures; `named` are the columns of an array, which has no names itself."""
    if isinstance(table, str | Path):
        return read_table(path_of(table, "table", "a CSV with a header"))
    frame = _framed(table, named)
    columns = [str(name) for name in frame.columns]
    if len(set(columns)) != len(columns):
        raise UserError(f"table: columns {', '.join(columns)}; allowed: each name once")
    own = next((at for at, name in enumerate(columns) if name.lower() == CLIENT), None)
    clients = list(frame.index if own is None else frame.iloc[:, own])
    kept = [at for at in range(len(columns)) if at != own]
    return _checked(clients, [columns[at] for at in kept], frame.iloc[:, kept].to_numpy(dtype=object).tolist())


def _framed(table: Any, named: Sequence[str]) -> pandas.DataFrame:
    """Return {client: {measure: value}}, {client: value of the one measure that is named}, {measure: [values]}, rows or
    an array as a frame; its index names the clients unless one of its columns does.
    """
    import pandas  # Late for speed of start: a CSV is weighed without it.

    if isinstance(table, pandas.Series) and len(named) == 1:
        return table.to_frame(named[0])
    if isinstance(table, pandas.DataFrame):
        return table
    if not isinstance(table, Mapping) and hasattr(table, "columns") and hasattr(table, "to_dict"):
        table = table.to_dict()  # Frames of other libraries.
    if isinstance(table, Mapping):
        clients, values = list(table), list(table.values())
        if all(isinstance(value, Mapping) for value in values):
            return pandas.DataFrame(values, index=clients, dtype=object)
        if len(named) == 1 and not any(isinstance(value, Iterable) for value in values):
            return pandas.DataFrame({named[0]: values}, index=clients, dtype=object)
        columns = {str(name): _rows(column) for name, column in table.items()}
        try:
            return pandas.DataFrame(columns, dtype=object)
        except ValueError:
            lengths = ", ".join(f"{name} {len(column)}" for name, column in columns.items())
            raise UserError(
                f"table: columns of different lengths ({lengths}); allowed: a value of each for every client"
            ) from None
    rows = _rows(table)
    if not rows or all(isinstance(row, Mapping) for row in rows):
        return pandas.DataFrame(rows, dtype=object)
    try:
        cells = np.array(rows, dtype=object)
    except ValueError:
        raise UserError("table: rows of different lengths; allowed: an array [clients, criteria]") from None
    if cells.ndim == 1 and len(named) == 1:
        cells = cells[:, None]
    if cells.ndim != 2 or cells.shape[1] != len(named):
        raise UserError(
            f"table: an array of shape {cells.shape}; allowed: ({len(rows)}, {len(named)}), a column for each "
            f"criterion of the rule: {', '.join(named)}"
        )
    return pandas.DataFrame(cells, columns=list(named))


def _rows(table: Any) -> list[Any]:
    if not isinstance(table, str | bytes):
        with suppress(TypeError, RuntimeError):
            return list(table)
    raise UserError(
        f"table: got {brief(table)}; allowed: a mapping of clients to measures, a frame, an array, rows, or a CSV"
    )


_WORDS = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}


def _checked(
    clients: Sequence[object], criteria: Sequence[str], rows: Sequence[Sequence[Any]], places: Sequence[str] = ()
) -> Measures:
    """Return a table as measures; `places` are where its rows stand, for error lines."""
    if not len(clients) or not criteria:
        raise UserError("table: is empty; allowed: at least one client with one measure")
    values: dict[str, list[float]] = {}
    for place, client, row in zip(places or _counted(len(clients)), clients, rows, strict=True):
        name = str(client)
        # Frames have marks of several kinds for a cell without a value.
        if not name.strip() or (not isinstance(client, str) and name in ("None", "nan", "<NA>", "NaT")):
            raise UserError(f"{place}: the client has no name; allowed: a name for each client")
        place = f"{place}, client {brief(name)}"
        if name in values:
            raise UserError(f"{place}: stands there twice; allowed: each client once")
        values[name] = [
            number(f"{place}, {criterion}", _WORDS.get(str(cell).lower(), cell))
            for criterion, cell in zip(criteria, row, strict=True)
        ]
    return Measures(tuple(values), tuple(criteria), np.array(list(values.values())))


def _counted(rows: int) -> list[str]:
    return [f"table: row {row}" for row in range(1, rows + 1)]


def number(where: str, cell: object, most: float = LARGEST_REAL) -> float:
    """Return a measure as a number; `where` names it where it is none, or out of range."""
    allowed = f"allowed: a number from 0 to {f'{most:g}'.replace('+', '')}"
    try:
        # Of a complex number NumPy would take the real part, with a warning.
        value = float("complex" if isinstance(cell, complex | np.complexfloating) else cast("float", cell))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise UserError(f"{where}: got {brief(cell)}; {allowed}") from None
    if not 0 <= value <= most:
        raise UserError(f"{where}: got {value:g}; {allowed}")
    return value


def read_table(path: Path) -> Measures:
    """Read a CSV of clients; each fault is named with its line."""
    header, rows = read_csv(path, str(path))
    if len(header) == 1 and any(mark in header[0] for mark in ";\t|"):
        raise UserError(
            f"{path}: the header {brief(header[0])} has no commas; allowed: commas between cells, a point in numbers "
            "(not the semicolons, tabs or decimal commas of some spreadsheets)"
        )
    if not rows or len(header) < 2:
        raise UserError(
            f"{path}: holds no table; allowed: a header with a client column and criteria, then a row per client"
        )
    if all(_is_number(name) for name in header[1:]):
        raise UserError(f"{path}: the first line {brief(','.join(header))} holds numbers; allowed: a header of names")
    own = next((name for name in header if name.lower() == CLIENT), None)
    if own is None and all(_is_number(cells[header[0]]) for _, cells in rows):
        raise UserError(
            f"{path}: has no column 'client', and '{header[0]}' holds numbers, not names; allowed: a column 'client'"
        )
    named = own or header[0]
    criteria = [name for name in header if name != named]
    places = [f"{path}, line {line}" for line, _ in rows]
    cells = [[row[name] for name in criteria] for _, row in rows]
    return _checked([row[named] for _, row in rows], criteria, cells, places)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
