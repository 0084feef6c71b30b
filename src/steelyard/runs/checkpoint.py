"""Checkpoints: the states of all federations as tensors (`tensor_files`) and one JSON text, with a checksum."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from steelyard.base.errors import UserError, printable
from steelyard.messages.updates import LossState
from steelyard.rounds.state import RoundState, States
from steelyard.runs.tensor_files import CLIENTS, FOLDER, Loaded, check_name, load_all, read_content
from steelyard.weighing.priorities import OrderState

KEPT = 2
"""Checkpoints that a run keeps: the newest, and the one before it in case the newest turns out damaged."""
_NEWEST = "SELECT round, file, states, checksum FROM checkpoints ORDER BY round DESC LIMIT ?"
MODELS = "models/"
SERVER = "server/"
"""How the names of tensors begin that an algorithm's server keeps; the name of the tensor and the federation follow."""


def checksum(content: bytes, text: str) -> str:
    """Return the SHA-256 of a checkpoint's file and its JSON text together."""
    return hashlib.sha256(content + b"\0" + text.encode()).hexdigest()


def pack(states: States, clients: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
    """Split states into tensors (models, what clients keep) and JSON (everything else)."""
    tensors = {MODELS + name: state.parameters for name, state in states.items()}
    tensors |= {CLIENTS + name: tensor for name, tensor in clients.items()}
    for name, state in states.items():
        tensors |= {f"{SERVER}{kept}/{name}": tensor for kept, tensor in state.tensors.items()}
    rest = {
        name: {
            "round": state.round,
            "loss": asdict(state.loss),
            "orders": asdict(state.orders),
            "finished": state.finished,
            "memory": state.memory,
            "ended": state.ended,
        }
        for name, state in states.items()
    }
    return tensors, json.dumps(rest)


def without_models(states: States) -> dict[str, RoundState]:
    """Return states whose models are empty, for runs that keep none."""
    return {name: replace(state, parameters=state.parameters[:0]) for name, state in states.items()}


class _Rest(BaseModel, extra="forbid", frozen=True):
    """Everything of a state but its model, as `pack` writes it."""

    round: int = Field(ge=0)
    loss: LossState
    orders: OrderState
    finished: bool
    memory: dict[str, Any]
    ended: str = ""


_RESTS = TypeAdapter(dict[str, _Rest])


def unpack(tensors: Mapping[str, torch.Tensor], text: str) -> tuple[dict[str, RoundState], dict[str, torch.Tensor]]:
    """Put states together again from tensors and JSON; the inverse of `pack`. ValueError: the JSON is of another make.

    It is checked field by field, since a resume may be asked to accept a checkpoint that was changed.
    """
    try:
        rests = _RESTS.validate_python(json.loads(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    states: dict[str, RoundState] = {}
    for name, rest in rests.items():
        model = tensors.get(MODELS + name)
        if model is None or model.dim() != 1 or not model.is_floating_point():
            raise ValueError(f"no model of {name!r}")
        kept = {
            key.removeprefix(SERVER).partition("/")[0]: tensor
            for key, tensor in tensors.items()
            if key.startswith(SERVER) and key.removeprefix(SERVER).partition("/")[2] == name
        }
        fields = (rest.loss, rest.orders, rest.finished, rest.memory, rest.ended, kept)
        states[name] = RoundState(rest.round, model, *fields)
    kept = {name.removeprefix(CLIENTS): tensor for name, tensor in tensors.items() if name.startswith(CLIENTS)}
    return states, kept


@dataclass(frozen=True, eq=False)
class Restored:
    """What a run goes on from: the states after `round`, and what had to be passed over to get there."""

    round: int = -1
    """-1: nothing to go on from, the run begins with its first model."""
    states: dict[str, RoundState] = field(default_factory=dict[str, RoundState])
    kept: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    problems: tuple[str, ...] = ()
    loaded: Loaded = field(default_factory=Loaded)
    """All of its tensors, and the files that they were found in."""


def last_checkpoint(connection: sqlite3.Connection, folder: Path) -> Restored:
    """Return the last checkpoint of a run; a damaged one is named in the error. For readers: nothing is passed over."""
    rows = _listed(connection)
    return _read(folder, *rows[0]) if rows else Restored()


def kept_checkpoints(connection: sqlite3.Connection, folder: Path) -> Iterator[tuple[int, Restored | UserError]]:
    """Yield the rounds of a run's checkpoints, the newest first, each with what it holds or what is wrong with it."""
    for row in _listed(connection):
        try:
            yield row[0], _read(folder, *row)
        except UserError as error:
            yield row[0], error


def restore(connection: sqlite3.Connection, folder: Path, *, accept: bool = False) -> Restored:
    """Return the newest checkpoint that is sound: where the last one is damaged, the one before.

    With none left that is sound, `accept` goes on from one whose checksum is wrong, or begins anew.
    """
    rows = _listed(connection)
    problems: list[str] = []
    for strict in (True, False) if accept else (True,):
        for row in rows:
            try:
                found = _read(folder, *row, strict=strict)
            except UserError as error:
                problems.append(str(error))
            else:
                return replace(found, problems=tuple(problems))
    if rows and not accept:
        raise UserError(
            f"{problems[0]}; no other checkpoint is sound; allowed: the file as it was, or `steelyard resume {folder} "
            "--accept-changes`, which uses what can be read or begins again"
        )
    return Restored(problems=tuple(problems))


def _listed(connection: sqlite3.Connection) -> list[tuple[int, str, str, str]]:
    # A run keeps two; a database with more rows is not one of ours, and the newest are enough of it.
    return connection.execute(_NEWEST, (KEPT + 1,)).fetchall()


def _read(folder: Path, round: int, file: str, text: str, wanted: str, *, strict: bool = True) -> Restored:
    check_name(folder / FOLDER, file)
    path = folder / FOLDER / file
    content = read_content(path)
    if strict and checksum(content, str(text)) != wanted:
        raise UserError(f"{path}: not the checkpoint that was written: its checksum differs")
    loaded = load_all(folder, file, content, strict=strict)
    try:
        states, kept = unpack(loaded.tensors, text)
    except (ValueError, TypeError) as error:
        what = next(iter(error.errors(include_url=False))) if isinstance(error, ValidationError) else None
        reason = str(error) if what is None else f"{'.'.join(map(str, what['loc']))}: {what['msg']}"
        raise UserError(f"{path}: the states that belong to it cannot be read: {printable(reason)}") from error
    return Restored(round, states, kept, loaded=loaded)
