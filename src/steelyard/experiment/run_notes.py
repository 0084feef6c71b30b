"""What a run records beside its rounds: how its clients compute, what is open to lies, versions, why it stopped."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from steelyard import __version__
from steelyard.base.errors import UserError
from steelyard.base.logs import logger
from steelyard.base.processor import made_by
from steelyard.experiment.guarantees import guarantee_notes
from steelyard.privacy.settings import PrivacySettings
from steelyard.rounds.progress import weighed_one
from steelyard.rounds.state import Federation, RoundRecord, Snapshot, States
from steelyard.runs.store import Store
from steelyard.weighing.rule import trust_warnings

if TYPE_CHECKING:
    from steelyard.clients.protocol import Clients

_log = logger(__name__)

_LIBRARIES = ("torch", "numpy", "scipy", "scikit-learn", "pydantic", "safetensors", "flwr")


def run_facts(
    federations: Sequence[Federation], clients: Clients, privacy: PrivacySettings | None = None
) -> dict[str, str]:
    """Return what a reader of the run should know: how the clients work, and what in the rules is open to lies."""
    facts = dict(clients.describe())
    rules = [federation.rule for federation in federations]
    notes = [facts.get("notes", ""), *trust_warnings(rules)]
    if privacy is not None:
        notes += guarantee_notes(privacy, [name for rule in rules for name in rule.names])
    text = "; ".join(note for note in notes if note)
    return {**facts, "notes": text} if text else facts


class RunRecorder:
    """A recorder that also writes down, with the first round, how the clients compute: a resume must do the same.

    It says, once, that a round weighed one client: such rounds look like any other, and compare nothing.
    """

    def __init__(
        self, store: Store, federations: Sequence[Federation], clients: Clients, privacy: PrivacySettings | None = None
    ) -> None:
        self._store, self._federations, self._clients, self._privacy = store, federations, clients, privacy
        self._noted = self._warned = False

    def commit(
        self, round: int, records: Sequence[RoundRecord], states: States, snapshot: Snapshot, *, last: bool
    ) -> None:
        # What is noted of clients elsewhere may change with every round; of simulated ones it does not.
        if round > 0 and (not self._noted or self._clients.notes is not None):
            self._store.note(**run_facts(self._federations, self._clients, self._privacy))
            self._noted = True
        self._store.commit(round, records, states, snapshot, last=last)
        single = next((r for r in records if r.updates and len(r.updates.clients) == 1 and not r.kept_old), None)
        if single is not None and not self._warned:
            _log.warning(weighed_one(single.federation, round))
            self._warned = True


def why(error: BaseException) -> str:
    """Return in one line why a run stopped, for its record."""
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    line = " ".join(str(error).split())[:1000]
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"


def versions() -> dict[str, str]:
    """Return the versions and the processor that a result depends on, for the run's record."""
    found = {"python": sys.version.split()[0], "platform": platform.platform(), "steelyard": __version__}
    return {**{f"version_{name}": value for name, value in {**found, **_libraries()}.items()}, **made_by()}


@cache
def _libraries() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
