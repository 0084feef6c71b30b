"""How a federation on this machine was started; kept with the run, so that a resume does the same."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = "flower"
"""Folder in a run's folder with everything of Flower: the app, logs, keys, what nodes keep."""
_FILE = "launch.json"


@dataclass(frozen=True)
class Launch:
    """What `steelyard federate local` was asked for."""

    nodes: int
    tls: bool = False

    def write(self, folder: Path) -> None:
        """Keep it in a run's folder."""
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        (folder / FOLDER / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_launch(folder: Path) -> Launch | None:
    """Return how a run's federation was started on this machine; None for any other run."""
    try:
        return Launch(**json.loads((folder / FOLDER / _FILE).read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError, TypeError):
        return None
