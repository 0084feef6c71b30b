"""Updates that a run keeps (`store.keep = "updates"`): one safetensors file for each round, whole or not there.

The tensors are the models that clients sent, what their algorithm sends beside them, and the model that the round ended
with; all else that the server was given stands as JSON in the file's metadata, so that a round can be weighed and
combined again to the same bits. Round 0 has the first model alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from steelyard.base import files
from steelyard.base.errors import UserError
from steelyard.messages.payloads import Counts, DenseModels, Floats
from steelyard.messages.updates import Failure, Updates
from steelyard.rounds.state import RoundRecord, States
from steelyard.runs.checkpoint import NAMED, metadata_of, read_content, read_tensors, write_tensors

FOLDER = files.UPDATES
"""Folder of a run in which its updates lie."""
ROUNDED = torch.bfloat16
Kept = Literal["float32", "bfloat16"]
_AFTER = "after/"
"""Before the name of a federation: the model that the round ended with."""

_Number = Annotated[float, Field(allow_inf_nan=True)]


class _About(BaseModel, extra="forbid", frozen=True):
    """All of a cohort's updates but their tensors."""

    clients: tuple[str, ...]
    samples: list[int]
    criteria: dict[str, list[_Number]]
    losses: list[_Number]
    failures: tuple[Failure, ...]
    frozen: tuple[tuple[int, int], ...]
    bytes_sent: list[int] | None
    steps: list[int] | None
    first_losses: list[_Number] | None
    label_counts: list[list[int]] | None
    listening: list[list[_Number]] | None
    late: dict[str, float]
    simulated: float | None


_TABLE = TypeAdapter(dict[str, _About])


def path_of_round(folder: Path, round: int) -> Path:
    """Return where the updates of a round lie in a run's folder."""
    return folder / FOLDER / f"round-{round:06d}.safetensors"


def keep_round(folder: Path, round: int, records: Sequence[RoundRecord], states: States, keep_as: Kept) -> None:
    """Write the updates of a round of all federations, and the models that it ended with, these never rounded."""
    tensors = {f"{_AFTER}{record.federation}": states[record.federation].parameters for record in records}
    about: dict[str, dict[str, object]] = {}
    for record in records:
        updates = record.updates
        if updates is None or not isinstance(updates.payload, DenseModels):
            continue
        models = updates.payload.models
        tensors[f"models/{record.federation}"] = models if keep_as == "float32" else models.to(ROUNDED)
        for name, sent in updates.vectors.items():
            tensors[f"sent/{name}/{record.federation}"] = sent
        about[record.federation] = {
            name: getattr(updates.payload if name == "frozen" else updates, name) for name in _About.model_fields
        }
    write_tensors(path_of_round(folder, round), tensors, {"updates": json.dumps(about, default=_plain)})


def join_kept(parts: Sequence[Path], folder: Path) -> None:
    """Put the files that parts of one comparison kept together, a file for each round, as one run would have."""
    names = {name for part in parts for name in files.names_in(part / FOLDER) if NAMED.fullmatch(name)}
    for name in sorted(names):
        tensors: dict[str, torch.Tensor] = {}
        about: dict[str, Any] = {}
        for path in (part / FOLDER / name for part in parts):
            if files.is_file(path):
                tensors |= read_tensors(path)
                about |= json.loads(metadata_of(read_content(path)).get("updates", "{}"))
        write_tensors(folder / FOLDER / name, tensors, {"updates": json.dumps(about)})


def _plain(value: Counts | Floats | Failure) -> object:
    """Return what JSON does not know in its words."""
    return asdict(value) if isinstance(value, Failure) else value.tolist()


def kept_rounds(folder: Path) -> bool:
    """Whether a run's folder holds updates of any round."""
    return any(name.endswith(".safetensors") for name in files.names_in(folder / FOLDER))


@dataclass(frozen=True, eq=False)
class KeptRound:
    """What a run kept of one round, by federation."""

    updates: Mapping[str, Updates]
    models: Mapping[str, torch.Tensor]
    """The models that the round ended with."""


def read_round(folder: Path, round: int) -> KeptRound:
    """Return what was kept of a round; a file that is missing or damaged is named in the error."""
    path = path_of_round(folder, round)
    tensors = read_tensors(path)
    try:
        table = _TABLE.validate_json(metadata_of(read_content(path)).get("updates", ""))
    except (ValidationError, ValueError) as error:
        raise UserError(f"{path}: not the updates that a run kept; allowed: the file as it was written") from error
    updates = {name: _updates(path, name, round, about, tensors) for name, about in table.items()}
    models = {name.removeprefix(_AFTER): each for name, each in tensors.items() if name.startswith(_AFTER)}
    return KeptRound(updates, models)


def _updates(path: Path, name: str, round: int, about: _About, tensors: Mapping[str, torch.Tensor]) -> Updates:
    models = tensors.get(f"models/{name}")
    if models is None or models.dim() != 2 or len(models) != len(about.clients):
        raise UserError(f"{path}: no updates of {name}; allowed: the file as it was written")

    # Sorted: safetensors names what a file holds in another order each time.
    sent: dict[str, torch.Tensor] = {}
    for key in sorted(tensors):
        kind, _, place = key.partition("/")
        vector, _, federation = place.partition("/")
        if (kind, federation) == ("sent", name):
            sent[vector] = tensors[key]
    return Updates(
        federation=name,
        round=round,
        clients=about.clients,
        samples=np.array(about.samples, dtype=np.int64),
        criteria={key: np.array(values, dtype=np.float64) for key, values in about.criteria.items()},
        losses=np.array(about.losses, dtype=np.float64),
        payload=DenseModels(models.to(torch.float32), about.frozen),
        failures=about.failures,
        bytes_sent=_counts(about.bytes_sent),
        steps=_counts(about.steps),
        first_losses=_floats(about.first_losses),
        label_counts=_counts(about.label_counts),
        vectors=sent,
        listening=_floats(about.listening),
        late=about.late,
        simulated=about.simulated,
    )


def _counts(values: list[int] | list[list[int]] | None) -> Counts | None:
    return None if values is None else np.array(values, dtype=np.int64)


def _floats(values: list[float] | list[list[float]] | None) -> Floats | None:
    return None if values is None else np.array(values, dtype=np.float64)
