"""A recorder that also informs a tracker: the round is stored first, and no error of a tracker stops a run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from steelyard.base.logs import logger
from steelyard.rounds.state import Recorder, RoundRecord, Snapshot, States
from steelyard.tracking.settings import TrackingSettings
from steelyard.tracking.trackers import TRACKERS, Tracker

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
            _log.warning(f"tracking.to = '{self._settings.to}' failed ({reason}); the run goes on without it")

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
