"""Facts about the devices and users of simulated clients: `[facts]`, given by client, alike for all, or drawn by seed.

The words are those of a real node's configuration: what a node says with `device-battery=0.7` is here `battery` under
`[facts.device]`, and reaches criteria as `local.device["battery"]`. A fact about a user may also be a word, which
becomes a yes: `country = "IT"` is the fact `country=IT`, 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
from pydantic import Field, model_validator

from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.files import read_csv
from steelyard.base.marks import DataFile
from steelyard.base.randomness import generator
from steelyard.base.settings import Section

KINDS: tuple[Literal["device", "user"], ...] = ("device", "user")
CLIENT = "client"
"""The column of a file of facts that names the client."""

_DRAWS: dict[str, tuple[int, Callable[..., float]]] = {
    # name: how many numbers it takes, and the draw
    "uniform": (2, lambda chance, low, high: float(chance.uniform(low, high))),
    "normal": (2, lambda chance, mean, deviation: float(chance.normal(mean, deviation))),
    "beta": (2, lambda chance, a, b: float(chance.beta(a, b))),
    "bernoulli": (1, lambda chance, share: float(chance.random() < share)),
}
_EXAMPLES = "uniform(0.2, 1), normal(1, 0.1), beta(2, 5) or bernoulli(0.8)"


Fact = float | dict[str, float | str] | str
_WORD = re.compile(r"[^\s=;,.()<>|][^=;,()<>|]*")
"""What a fact about a user may be beside a number: a word, which a rule can name."""


def _checked(value: Any, field: str) -> Fact:
    """Check one fact: a number or a word, a table of them by client, or the name of a distribution."""
    if isinstance(value, str) and ("(" in value or ")" in value):
        _parse(value, field)
        return value
    if isinstance(value, Mapping):
        table = cast("Mapping[Any, Any]", value)
        return {str(client): _one(one, f"{field}.{client}") for client, one in table.items()}
    return _one(value, field)


def _one(value: Any, field: str) -> float | str:
    if isinstance(value, str) and field.startswith("user.") and _WORD.fullmatch(value):
        return value
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise ValueError(
            f"{field}: got {value!r}; allowed: a number, true or false, numbers by client, of a user also a word, or "
            f"{_EXAMPLES}"
        )
    return float(value)


def as_number(name: str, value: float | str) -> tuple[str, float]:
    """Return a fact under the name by which criteria find it; a word is a yes under "NAME=WORD"."""
    return (f"{name}={value}", 1.0) if isinstance(value, str) else (name, float(value))


class FactSettings(Section):
    """[facts]: what criteria about the device or the user see of simulated clients."""

    path: Annotated[Path, DataFile(with_settings=True)] | None = None
    """A CSV file, looked for from the folder of the experiment's file: a column `client`, columns such as
    device-battery or user-trust, a row for each client; an empty cell is a fact that is not known. Its cells are put
    into the tables below, so that a run records them."""
    device: dict[str, Fact] = Field(default_factory=dict)
    """Facts about devices, by name: one number for all clients, a table of numbers by client, or a distribution to draw
    from for each client by seed: uniform(low, high), normal(mean, deviation), beta(a, b), bernoulli(share)."""
    user: dict[str, Fact] = Field(default_factory=dict)
    """Facts about users, in the same way; also words, such as country = "IT"."""

    @model_validator(mode="before")
    @classmethod
    def _with_file(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        document = dict(cast("Mapping[str, Any]", given))
        path = document.pop("path", None)
        listed_in = read_facts(Path(str(path))) if path is not None else {}
        for kind in KINDS:
            own = document.get(kind, {})
            if not isinstance(own, Mapping):
                continue
            facts = cast("Mapping[str, Any]", own)
            for name in sorted(listed_in.get(kind, {}).keys() & facts.keys()):
                raise ValueError(f"{kind}.{name}: given here and in {path}; allowed: one of the two")
            inline = {name: _checked(value, f"{kind}.{name}") for name, value in facts.items()}
            document[kind] = {**inline, **listed_in.get(kind, {})}
        return document

    def of(
        self, clients: Sequence[str], seed: int, *, all_known: bool = True
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Return the facts of each client for a seed; a table that names a client that does not exist is refused.

        `all_known` says whether these are all clients there are: a node knows only its own.
        """
        if not (self.device or self.user):
            return {}
        found: dict[str, dict[str, dict[str, float]]] = {client: {kind: {} for kind in KINDS} for client in clients}
        for kind in KINDS:
            for name, fact in getattr(self, kind).items():
                if isinstance(fact, dict) and all_known:
                    _check_clients(f"facts.{kind}.{name}", cast("dict[str, object]", fact), clients)
                for client in clients:
                    value = _value(cast("Fact", fact), client, seed, f"facts/{kind}/{name}")
                    if value is not None:
                        found[client][kind] |= [as_number(name, value)]
        return found


def _check_clients(field: str, table: Mapping[str, object], clients: Sequence[str]) -> None:
    for client in table:
        if client not in clients:
            shown = listed(sorted(clients)[:3]) + (", ..." if len(clients) > 3 else "")
            raise UserError(f"{field}: no client '{client}'{nearest(client, clients)}; allowed: {shown}")


def _value(fact: Fact, client: str, seed: int, purpose: str) -> float | str | None:
    if isinstance(fact, dict):
        return fact.get(client)
    if isinstance(fact, str) and "(" in fact:
        draw, numbers = _parse(fact, purpose)
        return draw(generator(seed, client=client, purpose=purpose), *numbers)
    return fact


def _parse(text: str, field: str) -> tuple[Callable[..., float], list[float]]:
    """Read "uniform(0.2, 1)"."""
    match = re.fullmatch(r"\s*([a-z]+)\s*\(([^()]*)\)\s*", text)
    name, inside = match.groups() if match else ("", "")
    count, draw = _DRAWS.get(name, (0, None))
    try:
        numbers = [float(part) for part in inside.split(",")]
    except ValueError:
        numbers = []
    if draw is None or len(numbers) != count or not np.all(np.isfinite(numbers)) or not _possible(name, numbers):
        raise ValueError(f"{field}: got '{text}'; allowed: a number, numbers by client, or {_EXAMPLES}")
    return draw, numbers


def _possible(name: str, numbers: Sequence[float]) -> bool:
    match name:
        case "uniform":
            return numbers[0] <= numbers[1]
        case "normal":
            return numbers[1] >= 0
        case "beta":
            return min(numbers) > 0
        case _:
            return 0 <= numbers[0] <= 1


def read_facts(path: Path) -> dict[str, dict[str, dict[str, float | str]]]:
    """Read a CSV of facts: by device or user, then by the fact's name, then by client."""
    header, rows = read_csv(path, f"path: {path}")
    found: dict[str, dict[str, dict[str, float | str]]] = {kind: {} for kind in KINDS}
    wrong = [name for name in header if name != CLIENT and not name.startswith(tuple(f"{kind}-" for kind in KINDS))]
    if CLIENT not in header or wrong:
        raise UserError(
            f"path: {path} has the columns {listed(header) or 'none'}; allowed: client, and columns such as "
            "device-battery or user-trust, each once"
        )
    seen: set[str] = set()
    for number, cells in rows:
        client = cells.pop(CLIENT)
        if not client or client in seen:
            raise UserError(f"path: {path}, line {number} has the client '{client}'; allowed: a name, each once")
        seen.add(client)
        for column, cell in cells.items():
            if cell:
                kind, _, name = column.partition("-")
                where = f"path: {path}, line {number}, {column}"
                found[kind].setdefault(name, {})[client] = told_fact(cell, where, kind)
    return found


def told_fact(cell: str, where: str, kind: str) -> float | str:
    """Return a fact of a device or a user from text: a number, yes or no, of a user also a word."""
    try:
        value = float(cell)
    except ValueError:
        value = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}.get(cell.lower(), math.nan)
        if kind == "user" and math.isnan(value) and _WORD.fullmatch(cell):
            return cell
    if not math.isfinite(value):
        raise ValueError(f"{where}: got '{cell}'; allowed: a number, yes or no, of a user also a word")
    return value
