"""The one reader of a run's database: every value is of its column's type, and every JSON text of its shape.

Types come from the tables as `schema` declares them. Whatever is not as a run writes it is `Damaged`.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    PositiveInt,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from steelyard.base.errors import brief
from steelyard.runs.checks import Damaged

_CHUNK = 10_000
_ROW = 4
"""Bytes that a row takes at the least."""
LARGEST_FIGURE = 1e200
"""No figure of a run comes near, and sums of such figures are still numbers."""
_LARGEST = 10**12
"""No count of ours comes near; seeds are no counts."""


class _Settings(BaseModel, extra="allow", strict=True):
    """What readers ask of a rule's settings; the rest may be anything."""

    criteria: list[str]
    score: str = "prioritized"
    power: float | None = None
    priority: str | None = None
    normalise: str = "share"
    loss: dict[str, Any] | None = None
    trained_by: str = "clients"

    @model_validator(mode="after")
    def _ordered(self) -> _Settings:
        named = [name.strip() for name in (self.priority or "").split(">") if name.strip()]
        if len(set(self.criteria)) < len(self.criteria) or not set(named) <= set(self.criteria):
            raise ValueError("criteria and priority do not fit")
        return self


class _Loss(BaseModel, extra="forbid", strict=True):
    name: str = "auto"
    class_weights: list[float] | None = None
    shape: float | None = None
    scale: float | None = None


def _known(metrics: dict[str, float | list[float]]) -> dict[str, float | list[float]]:
    for name, value in metrics.items():
        if any(abs(one) > LARGEST_FIGURE for one in (value if isinstance(value, list) else [value])):
            raise ValueError(f"{name} is beyond {LARGEST_FIGURE:g}")
        if isinstance(value, list) != (name == "f1") and name in ("f1", "mape", "mae", "rmse"):
            raise ValueError(f"{name} is of another kind")
    return metrics


_Seed = Annotated[str, StringConstraints(pattern=r"^\d{1,19}$")]
_Words = TypeAdapter(dict[str, str])
_SHAPES: Mapping[tuple[str, str], TypeAdapter[Any]] = {
    ("federations", "settings"): TypeAdapter(_Settings),
    ("rounds", "tried"): TypeAdapter(list[tuple[str, float | None]]),
    ("rounds", "zero_criteria"): TypeAdapter(list[str]),
    ("rounds", "loss"): TypeAdapter(_Loss),
    ("rounds", "server_metrics"): TypeAdapter(Annotated[dict[str, float | list[float]], AfterValidator(_known)]),
    ("evaluations", "metrics"): TypeAdapter(list[str]),
    # Of the facts in `info`, by key.
    ("info", "seeds"): TypeAdapter(list[int]),
    ("info", "rounds"): TypeAdapter(int),
    ("info", "flaws"): TypeAdapter(dict[_Seed, dict[str, list[str]]]),
    ("info", "labels"): TypeAdapter(dict[_Seed, dict[str, list[int]]]),
    ("info", "report_rows"): TypeAdapter(dict[_Seed, int]),
    ("info", "tested"): TypeAdapter(dict[_Seed, Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]]),
    ("info", "personal"): TypeAdapter(list[str]),
    ("info", "measured_by"): _Words,
    ("info", "trust"): TypeAdapter(dict[str, dict[str, str]]),
    ("info", "code_files"): _Words,
    ("info", "data"): TypeAdapter(dict[_Seed, dict[str, str]]),
}
_KINDS: Mapping[str, tuple[type, str]] = {
    "INTEGER": (int, "whole number from 0 on"),
    "REAL": (float, "number"),
    "TEXT": (str, "text"),
    "BLOB": (bytes, "column of numbers"),
}
_COLUMNS = (
    'SELECT m.name, c.name, c.type, c."notnull", c.pk FROM sqlite_master m JOIN pragma_table_info(m.name) c '
    "WHERE m.type = 'table'"
)
_FRAMES = {int: "int64", float: "float64", str: "str", bytes: "object"}
_NamedT = TypeVar("_NamedT")


@dataclass(frozen=True)
class _Column:
    kind: type
    words: str
    may_lack: bool


@cache
def declared(schema: str) -> Mapping[str, Mapping[str, _Column]]:
    """Return the columns of each table that statements make, by name, in their order."""
    found: dict[str, dict[str, _Column]] = {}
    with closing(sqlite3.connect(":memory:")) as model:
        model.executescript(schema)
        for table, name, kind, needed, key in model.execute(_COLUMNS):
            found.setdefault(table, {})[name] = _Column(*_KINDS[kind], not (needed or key))
    return found


class Reader(sqlite3.Connection):
    """A connection to a database that may be anybody's; ask it through `rows` and `info`."""

    size = 1 << 20
    """Bytes of the database: no table holds more."""
    schema = ""

    def rows(self, table: str, columns: Sequence[str], where: str = "", *values: int | str) -> list[tuple[Any, ...]]:
        """Return columns of one table, each value of its column's type; what is not finite is unknown (None)."""
        cursor = self.execute(f"SELECT {', '.join(columns)} FROM {table} {where}", values)
        found: list[tuple[Any, ...]] = []
        left = self.size
        while part := cursor.fetchmany(_CHUNK):
            found += part
            left -= sum(len(value) for row in part for value in row if isinstance(value, str | bytes))
            if left < 0 or len(found) * _ROW > self.size:
                raise Damaged(f"{table} holds more than its file does")
        kinds = declared(self.schema)[table]
        checked = [
            _check(table, name, kinds[name], column)
            for name, column in zip(columns, zip(*found, strict=True), strict=False)
        ]
        return list(zip(*checked, strict=True))

    def kinds(self, table: str, columns: Sequence[str]) -> dict[str, str]:
        """Return the columns of a data frame: by name, what pandas calls their type."""
        kinds = declared(self.schema)[table]
        return {name: _FRAMES[kinds[name].kind] for name in columns}

    def info(self) -> dict[str, str]:
        """Return the facts about a run; those that are JSON hold what their key says."""
        found = dict(self.rows("info", ("key", "value"), "ORDER BY key"))
        for key, text in found.items():
            _check_shape("info", key, text)
        return found

    def check_tables(self) -> None:
        """Read what a writer takes over from a database as it is: every value of its type, no table without end."""
        for table in _TAKEN_OVER:
            self.rows(table, tuple(declared(self.schema)[table]))

    def federations(self) -> dict[int, tuple[str, int]]:
        """Return the rule and the seed of each federation by its number."""
        found = {key: (rule, seed) for key, rule, seed in self.rows("federations", _FEDERATION, "ORDER BY id")}
        if len(set(found.values())) < len(found):
            raise Damaged("federations: a rule and a seed come twice")
        return found


_FEDERATION = ("id", "rule", "seed")
_TAKEN_OVER = ("clients", "federations", "failures", "untested", "ended", "chain", "checkpoints")
NEWEST = "WHERE federation = ? ORDER BY round DESC LIMIT 1"
"""For `rows`: the newest round of a federation alone, at the end of the primary key."""


def known(names: Mapping[int, _NamedT], key: int, what: str) -> _NamedT:
    """Return what a number stands for in another table; one that is not there is damage."""
    if key not in names:
        raise Damaged(f"{what} number {key} is not in its table")
    return names[key]


def _check(table: str, name: str, column: _Column, values: tuple[Any, ...]) -> Sequence[Any]:
    allowed = {column.kind, type(None)} if column.may_lack else {column.kind}
    if not set(map(type, values)) <= allowed:
        wrong = next(value for value in values if type(value) not in allowed)
        raise Damaged(f"{table}, {name}: {brief(wrong)} is no {column.words}")
    if column.kind is float and any(value is not None and LARGEST_FIGURE < abs(value) < math.inf for value in values):
        raise Damaged(f"{table}, {name}: holds a number beyond {LARGEST_FIGURE:g}")
    if column.kind is float and not all(value is None or math.isfinite(value) for value in values):
        if not column.may_lack:
            raise Damaged(f"{table}, {name}: holds a number that is not finite")
        values = tuple(value if value is not None and math.isfinite(value) else None for value in values)
    most = 2**63 if name == "seed" else _LARGEST
    if column.kind is int and not all(value is None or 0 <= value <= most for value in values):
        wrong = next(value for value in values if value is not None and not 0 <= value <= most)
        raise Damaged(f"{table}, {name}: {wrong} is no {column.words}")
    if (table, name) in _SHAPES:
        for text in set(values) - {None}:
            _check_shape(table, name, text)
    return values


def _check_shape(table: str, name: str, text: str) -> None:
    """Refuse a JSON text of another shape than its column's, or fact's; readers then need not look again."""
    shape = _SHAPES.get((table, name))
    if shape is None:
        return
    try:
        json.loads(text)  # what readers use is pickier than pydantic: long numbers, depth
        shape.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Damaged(f"{table}, {name}: {where and where + ': '}{first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{table}, {name} holds no JSON ({error})") from None
