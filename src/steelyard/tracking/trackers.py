"""The trackers: one small interface, one class for each package. The packages are imported late, for speed of start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from steelyard.base.errors import UserError
from steelyard.tracking.settings import TrackingSettings

PARAMETER = 500
"""Longest value of a parameter that every version of MLflow takes."""
BATCH = 100
"""Parameters that MLflow takes in one call."""


class Tracker(Protocol):
    """What a run sends to a tracker; implement these three and name the class in `TRACKERS` to add one."""

    def start(self, project: str, name: str, settings: Mapping[str, Any], known: str | None) -> str:
        """Begin, or go on with the run that the tracker knows as `known`; returns what it is known as."""
        ...

    def round(self, round: int, figures: Mapping[str, float]) -> None:
        """Take the figures of one round, by name."""
        ...

    def end(self, *, finished: bool) -> None:
        """The run is over: finished, or stopped and perhaps resumed later."""
        ...


class Trackio:
    """trackio: local first, files under the user's cache; `trackio show` opens them."""

    def __init__(self) -> None:
        self._package: Any = import_module("trackio")

    def start(self, project: str, name: str, settings: Mapping[str, Any], known: str | None) -> str:
        """Begin a run; trackio knows runs by their name."""
        resume = "never" if known is None else "allow"
        self._package.init(project=project, name=known or name, config=dict(settings), resume=resume)
        return known or name

    def round(self, round: int, figures: Mapping[str, float]) -> None:
        """Log the figures at this step."""
        self._package.log(dict(figures), step=round)

    def end(self, *, finished: bool) -> None:
        """Flush and close."""
        self._package.finish()


class Wandb:
    """Weights & Biases; WANDB_MODE=offline keeps everything on this machine."""

    def __init__(self) -> None:
        self._package: Any = import_module("wandb")
        self._run: Any = None

    def start(self, project: str, name: str, settings: Mapping[str, Any], known: str | None) -> str:
        """Begin a run; wandb knows runs by an id."""
        resume = None if known is None else "allow"
        self._run = self._package.init(project=project, name=name, config=dict(settings), id=known, resume=resume)
        return str(self._run.id)

    def round(self, round: int, figures: Mapping[str, float]) -> None:
        """Log the figures at this step."""
        self._run.log(dict(figures), step=round)

    def end(self, *, finished: bool) -> None:
        """Mark the run as finished, or as failed where it was stopped."""
        self._run.finish(exit_code=0 if finished else 1)


class MLflow:
    """MLflow; MLFLOW_TRACKING_URI says where its records are."""

    def __init__(self) -> None:
        self._package: Any = import_module("mlflow")

    def start(self, project: str, name: str, settings: Mapping[str, Any], known: str | None) -> str:
        """Begin a run in the experiment of the project's name; its settings are parameters by dotted name."""
        self._package.set_experiment(project)
        run = self._package.start_run(run_id=known, run_name=None if known else name)
        if known is None:
            parameters = list(flat(settings).items())
            for first in range(0, len(parameters), BATCH):
                self._package.log_params(dict(parameters[first : first + BATCH]))
        return str(run.info.run_id)

    def round(self, round: int, figures: Mapping[str, float]) -> None:
        """Log the figures at this step."""
        self._package.log_metrics(dict(figures), step=round)

    def end(self, *, finished: bool) -> None:
        """Mark the run as finished, or as killed where it was stopped."""
        self._package.end_run(status="FINISHED" if finished else "KILLED")


TRACKERS: Mapping[str, type[Trackio] | type[Wandb] | type[MLflow]] = {
    "trackio": Trackio,
    "wandb": Wandb,
    "mlflow": MLflow,
}


def check(settings: TrackingSettings) -> None:
    """Refuse a tracker whose package is missing, before any work starts."""
    if settings.to is not None and not _there(settings.to):
        raise UserError(
            f"tracking.to: got '{settings.to}', and the package {settings.to} is not installed; allowed: "
            f"pip install 'steelyard[{settings.to}]', or no tracker"
        )


def _there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ValueError, ImportError):
        return False


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Return nested settings as text by dotted name, names and texts cut to what MLflow takes."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{name}.")
        else:
            found[re.sub(r"[^A-Za-z0-9_. /-]", "_", f"{before}{name}")] = str(value)[:PARAMETER]
    return found
