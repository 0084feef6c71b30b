"""Checkpoints: the states of all federations as tensors in a safetensors file and one JSON text, with a checksum.

A checkpoint's file holds what has changed. Its metadata hold a table of the older files that it needs: their SHA-256,
and which of the clients' tensors are in which. An older file stays as long as a checkpoint that is kept names it.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from steelyard.base import files
from steelyard.base.errors import UserError, brief, printable
from steelyard.messages.updates import LossState
from steelyard.proof.signing import model_digest
from steelyard.rounds.state import Best, RoundState, States
from steelyard.runs.facts import BestRound, check_name, checksum, read_checkpoint, read_content
from steelyard.weighing.order import OrderState

FOLDER = files.CHECKPOINTS
"""Folder of checkpoint files in a run's folder."""
CLIENTS = "clients/"
"""How the names of tensors begin that clients keep; only these are left where they are."""
MOST_FILES = 32
"""Older files that a checkpoint names at most."""
LEAST_LIVE = 0.25
"""An older file of whose clients' tensors less than this share is needed gives them to the new one."""
_OLDER = "older"


class _Older(BaseModel, extra="forbid", frozen=True, strict=True):
    """What a checkpoint says of an older file."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0)
    keys: list[str]


_TABLE = TypeAdapter(dict[str, _Older])


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Write a safetensors file so that it is there whole or not at all, and return its bytes."""
    content = tensors_content(tensors, metadata)
    files.write(path, content)
    return content


def tensors_content(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a safetensors file."""
    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, metadata)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file; a damaged one is named in the error."""
    return content_tensors(path, read_content(path))


def content_tensors(path: Path, content: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors in the bytes of a safetensors file; a damaged one is named in the error."""
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from error


def metadata_of(content: bytes) -> dict[str, str]:
    """Return the texts by name that a safetensors file holds beside its tensors; it has been read as tensors before."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]).get("__metadata__", {})


def _older(path: Path, content: bytes) -> dict[str, _Older]:
    """Return the older files that a checkpoint's file names; it has been read as tensors before."""
    try:
        found = _TABLE.validate_json(metadata_of(content).get(_OLDER, "{}"))
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not a readable checkpoint: its table of older files is damaged") from error
    for name in found:
        check_name(path.parent, name)
    return found


@dataclass(frozen=True)
class _Stored:
    """A file that was written: its SHA-256, its bytes, and how many of them are clients' tensors."""

    sha256: str
    size: int
    bytes: int

    @classmethod
    def of(cls, content: bytes, tensors: Mapping[str, torch.Tensor]) -> _Stored:
        """Return what is remembered of a file."""
        kept = sum(tensor.nbytes for key, tensor in tensors.items() if key.startswith(CLIENTS))
        return cls(hashlib.sha256(content).hexdigest(), len(content), kept)


@dataclass(frozen=True, eq=False)
class Loaded:
    """The tensors of a checkpoint, and in which of its files each was found."""

    file: str = ""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    places: Mapping[str, str] = field(default_factory=dict[str, str])
    stored: Mapping[str, _Stored] = field(default_factory=dict[str, _Stored])


def load_all(folder: Path, file: str, content: bytes, *, strict: bool = True) -> Loaded:
    """Return all tensors of a checkpoint, given the bytes of its own file, of the older files that it names too.

    An older file that is not as it was written is refused; without `strict` its tensors are taken as they are.
    """
    path = folder / FOLDER / file
    tensors = content_tensors(path, content)
    places = dict.fromkeys(tensors, file)
    stored = {file: _Stored.of(content, tensors)}
    for name, entry in _older(path, content).items():
        where = folder / FOLDER / name
        inner = read_content(where, entry.size if strict else None)
        if strict and hashlib.sha256(inner).hexdigest() != entry.sha256:
            raise UserError(f"{where}: not the checkpoint that was written: its checksum differs")
        held = content_tensors(where, inner)
        stored[name] = _Stored.of(inner, held)
        for key in entry.keys:
            if key not in held:
                raise UserError(f"{where}: not the checkpoint that was written: {brief(key)} is missing")
            if key not in tensors:
                tensors[key], places[key] = held[key], name
    return Loaded(file, tensors, places, stored)


@dataclass(frozen=True, eq=False)
class _Held:
    """A client's tensor that some file holds already."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    file: str

    @classmethod
    def of(cls, tensor: torch.Tensor, file: str) -> _Held | None:
        """Return it, or None for a tensor that torch keeps no version of: whether it changes cannot be known."""
        return None if tensor.is_inference() else cls(weakref.ref(tensor), tensor._version, file)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is this very one, not written into since."""
        return self.tensor() is tensor and tensor._version == self.version


class TensorFiles:
    """Writes the tensors of one run's checkpoints, and remembers which file holds which of the clients'.

    Whoever keeps tensors for clients never writes into one that is held, but puts a new one in its place: the same
    object is the same numbers. A tensor that is another object each time is written each time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._held: dict[str, _Held] = {}
        self._stored: dict[str, _Stored] = {}
        self._named: dict[str, frozenset[str]] = {}

    def start_from(self, loaded: Loaded) -> None:
        """Go on from a checkpoint that was read: what its clients go on with unchanged is not written again."""
        self._stored = dict(loaded.stored)
        self._held = self._remembered(loaded.tensors, loaded.places)
        self._named = {loaded.file: frozenset(loaded.stored) - {loaded.file}}

    def write(self, file: str, tensors: Mapping[str, torch.Tensor], *, whole: bool = False) -> bytes:
        """Write a checkpoint's file, whole or with what has changed since the last one, and return its bytes."""
        left = {} if whole else self._left_in_place(tensors)
        table: dict[str, list[str]] = {}
        for key, name in left.items():
            table.setdefault(name, []).append(key)
        stored = self._stored
        older = {
            name: {"sha256": stored[name].sha256, "size": stored[name].size, "keys": keys}
            for name, keys in table.items()
        }
        changed = {key: tensor for key, tensor in tensors.items() if key not in left}
        content = write_tensors(self._folder / file, changed, {_OLDER: json.dumps(older)} if older else None)
        self._stored = {name: self._stored[name] for name in table} | {file: _Stored.of(content, changed)}
        self._held = self._remembered(tensors, dict.fromkeys(changed, file) | left)
        self._named[file] = frozenset(table)
        return content

    def keep(
        self, round: int, tensors: Mapping[str, torch.Tensor], text: str, *, whole: bool
    ) -> tuple[int, str, str, int, str]:
        """Write a round's file; returns what the database holds of the checkpoint, all but the chain's head."""
        file = f"round-{round:06d}.safetensors"
        content = self.write(file, tensors, whole=whole)
        return round, file, text, len(content), checksum(content, text)

    @staticmethod
    def _remembered(tensors: Mapping[str, torch.Tensor], places: Mapping[str, str]) -> dict[str, _Held]:
        mine = {key: _Held.of(tensor, places[key]) for key, tensor in tensors.items() if key.startswith(CLIENTS)}
        return {key: held for key, held in mine.items() if held is not None}

    def _left_in_place(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Return which tensors need not be written, each with the older file that holds it."""
        same = {
            key: held.file
            for key, held in self._held.items()
            if (mine := tensors.get(key)) is not None and held.holds(mine)
        }
        live: Counter[str] = Counter()
        for key, name in same.items():
            live[name] += tensors[key].nbytes
        emptied = {name for name, size in live.items() if size < LEAST_LIVE * self._stored[name].bytes}
        others = sorted(live.keys() - emptied, key=lambda name: (live[name], name))
        if len(others) > MOST_FILES:
            emptied |= set(others[: len(others) - MOST_FILES // 2])
        return {key: name for key, name in same.items() if name not in emptied}

    def needed(self, file: str) -> frozenset[str]:
        """Return the older files that a checkpoint's file names; one that cannot be read is an error."""
        if file not in self._named:
            path = self._folder / file
            content = read_content(path)
            content_tensors(path, content)
            self._named[file] = frozenset(_older(path, content))
        return self._named[file]


KEPT = 2
"""Checkpoints that a run keeps: the newest, and the one before it in case the newest turns out damaged."""
_NEWEST = "SELECT round, file, states, size, checksum FROM checkpoints ORDER BY round DESC LIMIT ?"
_MODEL = "SELECT model FROM digests d JOIN federations f ON f.id = d.federation WHERE f.name = ? AND d.round = ?"
MODELS = "models/"
BEST = "best/"
"""How the names of the models of best rounds begin."""
SERVER = "server/"
"""How the names of tensors begin that an algorithm's server keeps; the name of the tensor and the federation follow."""


def pack(states: States, clients: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
    """Split states into tensors (models, what clients keep) and JSON (everything else)."""
    tensors = {MODELS + name: state.parameters for name, state in states.items()}
    tensors |= {CLIENTS + name: tensor for name, tensor in clients.items()}
    for name, state in states.items():
        tensors |= {f"{SERVER}{kept}/{name}": tensor for kept, tensor in state.tensors.items()}
        tensors |= {BEST + name: state.best.parameters} if state.best is not None else {}
    return tensors, json.dumps({name: _rest(state) for name, state in states.items()}, default=asdict)


def _rest(state: RoundState) -> dict[str, Any]:
    rest = {key: getattr(state, key) for key in _Rest.model_fields if key != "best"}
    if state.best is not None:
        rest["best"] = {"round": state.best.round, "score": state.best.score}
    return rest


def without_models(states: States) -> dict[str, RoundState]:
    """Return states whose models are empty, for runs that keep none."""
    return {name: replace(state, parameters=state.parameters[:0], best=None) for name, state in states.items()}


class _Rest(BaseModel, extra="forbid", frozen=True):
    """Everything of a state but its model, as `pack` writes it."""

    round: int = Field(ge=0)
    loss: LossState
    orders: OrderState
    finished: bool
    memory: dict[str, Any]
    ended: str = ""
    best: BestRound | None = None


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
        model = _flat(tensors, MODELS, name)
        chosen = rest.best
        best = None if chosen is None else Best(chosen.round, chosen.score, _flat(tensors, BEST, name))
        kept = {
            key.removeprefix(SERVER).partition("/")[0]: tensor
            for key, tensor in tensors.items()
            if key.startswith(SERVER) and key.removeprefix(SERVER).partition("/")[2] == name
        }
        others = {key: value for key, value in rest if key != "best"}
        states[name] = RoundState(parameters=model, tensors=kept, best=best, **others)
    kept = {name.removeprefix(CLIENTS): tensor for name, tensor in tensors.items() if name.startswith(CLIENTS)}
    return states, kept


def _flat(tensors: Mapping[str, torch.Tensor], kind: str, name: str) -> torch.Tensor:
    model = tensors.get(kind + name)
    if model is None or model.dim() != 1 or not model.is_floating_point():
        raise ValueError(f"no model of {name!r}")
    return model


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

    def models(self, db: sqlite3.Connection) -> Iterator[tuple[str, int, bool]]:
        """Yield each model that is kept: its federation, its round, and whether its digest is the chain's."""
        for name, state in self.states.items():
            for round, model in state.models:
                yield name, round, db.execute(_MODEL, (name, round)).fetchone() == (model_digest(model),)


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


def _listed(connection: sqlite3.Connection) -> list[tuple[int, str, str, int, str]]:
    # A run keeps two; a database with more rows is not one of ours, and the newest are enough of it.
    return connection.execute(_NEWEST, (KEPT + 1,)).fetchall()


def _read(folder: Path, round: int, file: str, text: str, size: int, wanted: str, *, strict: bool = True) -> Restored:
    content = read_checkpoint(folder, file, str(text), size, wanted, strict=strict)
    loaded = load_all(folder, file, content, strict=strict)
    try:
        states, kept = unpack(loaded.tensors, text)
    except (ValueError, TypeError) as error:
        what = next(iter(error.errors(include_url=False))) if isinstance(error, ValidationError) else None
        reason = str(error) if what is None else f"{'.'.join(map(str, what['loc']))}: {what['msg']}"
        path = folder / FOLDER / file
        raise UserError(f"{path}: the states that belong to it cannot be read: {printable(reason)}") from error
    return Restored(round, states, kept, loaded=loaded)
