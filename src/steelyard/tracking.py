"""Sending the figures of a run to a tracker of experiments while it goes on: trackio, Weights & Biases or MLflow.

The round is stored first, and no error of a tracker stops a run. The packages are imported late, for speed of start.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field

from steelyard.base.errors import UserError
from steelyard.base.logs import logger
from steelyard.base.settings import Section

if TYPE_CHECKING:
    from steelyard.rounds.state import Recorder, RoundRecord, Snapshot, States


class TrackingSettings(Section):
    """[tracking]: where else the figures of each round go; the run folder holds everything in any case."""

    to: Literal["trackio", "wandb", "mlflow"] | None = None
    """The tracker; default: none. Each is an extra: pip install 'steelyard[wandb]'."""
    project: str = Field(default="steelyard", min_length=1, max_length=128)
    """Project (for MLflow: experiment) that the run belongs to."""
    name: str | None = Field(default=None, min_length=1, max_length=128)
    """Name of the run there; default: the name of its folder."""


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


_log = logger(__name__)


class Tracked:
    """Informs a tracker of every round after the store has it; the first error is one line, and ends it.

    Implements the loop's `Recorder`; use it around the recorder that writes the run.
    """

    def __init__(self, inner: Recorder, settings: TrackingSettings) -> None:
        self._inner, self._settings = inner, settings
        self._tracker: Tracker | None = None
        self._names: dict[str, str] = {}

    def start(self, name: str, document: Mapping[str, Any], known: str | None = None) -> str | None:
        """Begin; returns what the tracker knows the run as, to be handed back as `known` on a resume."""
        to = self._settings.to
        if to is None:
            return None
        begun: list[str] = []

        def begin() -> None:
            self._tracker = TRACKERS[to]()
            begun.append(self._tracker.start(self._settings.project, self._settings.name or name, document, known))

        self._try(begin)
        return begun[0] if begun else None

    def commit(
        self, round: int, records: Sequence[RoundRecord], states: States, snapshot: Snapshot, *, last: bool
    ) -> None:
        """Store the round, then send its figures."""
        self._inner.commit(round, records, states, snapshot, last=last)
        if self._tracker is not None:
            tracker = self._tracker
            figures = {
                f"{self._name(record.federation)}/{name}": value
                for record in records
                for name, value in figures_of(record).items()
            }
            self._try(lambda: tracker.round(round, figures))

    def end(self, *, finished: bool) -> None:
        """The run is over."""
        if self._tracker is not None:
            tracker = self._tracker
            self._try(lambda: tracker.end(finished=finished))

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._tracker = None
            reason = f"{type(error).__name__}: {error}"[:300]
            _log.warning(f"tracking.to = '{self._settings.to}' failed ({reason}); the run continues without it")

    def _name(self, federation: str) -> str:
        """Return a federation's name in letters that every tracker takes; two federations never share one."""
        if federation not in self._names:
            name = first = re.sub(r"[^A-Za-z0-9_.-]", "_", federation) or "rule"
            count = 1
            while name in self._names.values():
                count += 1
                name = f"{first}-{count}"
            self._names[federation] = name
        return self._names[federation]


def figures_of(record: RoundRecord) -> dict[str, float]:
    """Return what is worth following of one round: accuracy, the server's figures, who answered, the largest weight."""
    found: dict[str, float | None] = {
        "accuracy": record.accuracy,
        "server_accuracy": record.server_accuracy,
        "server_macro_f1": record.server_macro_f1,
        "epsilon": record.epsilon,
        "testing_rounds": float(record.tests),
        "seconds": record.seconds,
    }
    found |= {f"server_{name}": value for name, value in record.server_metrics.items() if isinstance(value, float)}
    if record.updates is not None:
        found["answered"] = float(len(record.updates.clients))
        found["left_out"] = float(len({failure.client for failure in record.updates.failures}))
    if record.weighing is not None and len(record.weighing.weights):
        found["largest_weight"] = float(record.weighing.weights.max())
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}
