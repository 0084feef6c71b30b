"""How a federation on this machine was started; kept with the run, so that a resume does the same."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from steelyard.base import files

FOLDER = files.FLOWER
"""Folder in a run's folder with everything of Flower: the app, logs, keys, what nodes keep."""
_FILE = "launch.json"


@dataclass(frozen=True)
class Launch:
    """What `steelyard federate local` was asked for."""

    nodes: int
    tls: bool = False

    def write(self, folder: Path) -> None:
        """Keep it in a run's folder."""
        files.write(folder / FOLDER / _FILE, json.dumps(asdict(self)).encode())


_LAUNCH = TypeAdapter(Launch)


def read_launch(folder: Path) -> Launch | None:
    """Return how a run's federation was started on this machine; None for any other run."""
    try:
        return _LAUNCH.validate_json(files.read_bytes(folder / FOLDER / _FILE, longest=10_000))
    except (OSError, ValidationError):
        return None
