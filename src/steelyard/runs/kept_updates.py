"""Updates that a run keeps (`store.keep = "updates"`): one safetensors file for each round, whole or not there.

The tensors are the models that clients sent, what their algorithm sends beside them, and the model that the round ended
with; all else that the server was given stands as JSON in the file's metadata, so that a round can be weighed and
combined again to the same bits. Round 0 has the first model alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from pydantic import BaseModel, TypeAdapter, ValidationError, create_model

from steelyard.base import files
from steelyard.base.errors import UserError
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Failure, Updates
from steelyard.rounds.state import RoundRecord, States
from steelyard.runs.checkpoint import content_tensors, metadata_of, write_tensors
from steelyard.runs.facts import read_content

FOLDER = files.UPDATES
"""Folder of a run in which its updates lie."""
ROUNDED = torch.bfloat16
Kept = Literal["float32", "bfloat16"]
_AFTER = "after/"
"""Before the name of a federation: the model that the round ended with."""


class _Kept(BaseModel, extra="forbid", frozen=True):
    """All of a cohort's updates but their tensors and columns."""

    clients: tuple[str, ...]
    failures: tuple[Failure, ...]
    frozen: tuple[tuple[int, int], ...]
    late: dict[str, float]
    simulated: float | None


_WRITTEN: Any = {name: (one.written, ...) for name, one in Updates.columns().items() if one.kind is not np.float32}
_About = create_model("_About", __base__=_Kept, **_WRITTEN)
_TABLE: TypeAdapter[dict[str, _Kept]] = TypeAdapter(cast("Any", dict)[str, _About])


def path_of_round(folder: Path, round: int) -> Path:
    """Return where the updates of a round lie in a run's folder."""
    return folder / FOLDER / f"round-{round:06d}.safetensors"


def keep_round(folder: Path, round: int, records: Sequence[RoundRecord], states: States, keep_as: Kept) -> str:
    """Write the updates of a round of all federations, and the models that it ended with, these never rounded.

    Returns the SHA-256 of the file, for the chain.
    """
    tensors = {f"{_AFTER}{record.federation}": states[record.federation].parameters for record in records}
    about: dict[str, dict[str, object]] = {}
    for record in records:
        updates = record.updates
        if updates is None or (payload := updates.payload.dense) is None:
            continue
        models = payload.models
        tensors[f"models/{record.federation}"] = models if keep_as == "float32" else models.to(ROUNDED)
        for name, sent in updates.vectors.items():
            tensors[f"sent/{name}/{record.federation}"] = sent
        whole = {name: getattr(updates, name) for name in _Kept.model_fields if name != "frozen"}
        about[record.federation] = {**whole, "frozen": payload.frozen, **updates.write()}
    return _written(path_of_round(folder, round), tensors, about)


def _written(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, object]) -> str:
    content = write_tensors(path, tensors, {"updates": json.dumps(about, default=asdict, sort_keys=True)})
    return hashlib.sha256(content).hexdigest()


def join_kept(parts: Sequence[Path], folder: Path, round: int) -> str | None:
    """Put the files that parts of one comparison kept of a round together, as one run would have; None: none did.

    Returns the SHA-256 of the file.
    """
    tensors: dict[str, torch.Tensor] = {}
    about: dict[str, Any] = {}
    for path in (path_of_round(part, round) for part in parts):
        if files.is_file(path):
            content = read_content(path)
            tensors |= content_tensors(path, content)
            about |= json.loads(metadata_of(content).get("updates", "{}"))
    return _written(path_of_round(folder, round), tensors, about) if tensors else None


def kept_rounds(folder: Path) -> bool:
    """Whether a run's folder holds updates of any round."""
    return any(name.endswith(".safetensors") for name in files.names_in(folder / FOLDER))


@dataclass(frozen=True, eq=False)
class KeptRound:
    """What a run kept of one round, by federation."""

    updates: Mapping[str, Updates] = field(default_factory=dict[str, Updates])
    models: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """The models that the round ended with."""
    sha256: str = ""
    """Of the file."""


def read_round(folder: Path, round: int) -> KeptRound:
    """Return what was kept of a round; a file that is missing or damaged is named in the error."""
    path = path_of_round(folder, round)
    content = read_content(path)
    tensors = content_tensors(path, content)
    try:
        table = _TABLE.validate_json(metadata_of(content).get("updates", ""))
    except (ValidationError, ValueError) as error:
        raise UserError(f"{path}: not the updates that a run kept; allowed: the file as it was written") from error
    updates = {name: _updates(path, name, round, about, tensors) for name, about in table.items()}
    models = {name.removeprefix(_AFTER): each for name, each in tensors.items() if name.startswith(_AFTER)}
    return KeptRound(updates, models, hashlib.sha256(content).hexdigest())


def _updates(path: Path, name: str, round: int, about: _Kept, tensors: Mapping[str, torch.Tensor]) -> Updates:
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
        payload=DenseModels(models.to(torch.float32), about.frozen),
        failures=about.failures,
        vectors=sent,
        late=about.late,
        simulated=about.simulated,
        **Updates.read(vars(about)),
    )
