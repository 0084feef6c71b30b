"""What a run notes beside its rounds: how its clients compute, what is open to lies, versions, and why it stopped."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from steelyard import __version__
from steelyard.clients.protocol import NotingClients
from steelyard.errors import UserError
from steelyard.experiment.description import Description
from steelyard.experiment.promising import promise_notes
from steelyard.rounds.progress import say, weighed_one
from steelyard.rounds.state import RoundRecord, RoundState
from steelyard.runs.store import Store
from steelyard.weighing.rule import criteria_of
from steelyard.weighing.trust import warnings

if TYPE_CHECKING:
    from torch import Tensor

    from steelyard.clients.protocol import Clients

_LIBRARIES = ("torch", "numpy", "scipy", "scikit-learn", "pydantic", "safetensors", "flwr")


def told(experiment: Description, clients: Clients) -> dict[str, str]:
    """Return what a reader of the run should know: how the clients work, and what in the rules is open to lies."""
    facts = dict(clients.describe())
    rules = [(settings, criteria_of([settings])) for settings in experiment.rules().values()]
    notes = [facts.get("notes", ""), *warnings(rules)]
    if experiment.privacy is not None:
        names = [name for rule in experiment.rules().values() for name in rule.criteria]
        notes += promise_notes(experiment.privacy, names)
    text = "; ".join(note for note in notes if note)
    return {**facts, "notes": text} if text else facts


class Noting:
    """A recorder that also writes down, with the first round, how the clients compute: a resume must do the same.

    It says, once, that a round weighed one client: such rounds look like any other, and compare nothing.
    """

    def __init__(self, store: Store, experiment: Description, clients: Clients) -> None:
        self._store, self._experiment, self._clients, self._noted = store, experiment, clients, False
        self._warned = False

    def commit(
        self,
        round: int,
        records: Sequence[RoundRecord],
        states: Mapping[str, RoundState],
        snapshot: Callable[[], Mapping[str, Tensor]],
        *,
        last: bool,
    ) -> None:
        # What is noted of clients elsewhere may change with every round; of simulated ones it does not.
        if round > 0 and (not self._noted or isinstance(self._clients, NotingClients)):
            self._store.note(**told(self._experiment, self._clients))
            self._noted = True
        self._store.commit(round, records, states, snapshot, last=last)
        single = next((r for r in records if r.updates and len(r.updates.clients) == 1 and not r.kept_old), None)
        if single is not None and not self._warned:
            say(weighed_one(single.federation, round))
            self._warned = True


def why(error: BaseException) -> str:
    """Return in one line why a run stopped, for its record."""
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    line = " ".join(str(error).split())[:1000]
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"


def versions() -> dict[str, str]:
    """Return the versions that a result depends on, for the run's record."""
    found = {"python": sys.version.split()[0], "platform": platform.platform(), "steelyard": __version__}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {f"version_{name}": value for name, value in found.items()}
