"""What is known of nodes: what the proxy hears of them and what it refuses, and how each stands for an operator."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypedDict

from steelyard.base import files
from steelyard.base.errors import UserError, printable
from steelyard.base.logs import logger
from steelyard.clients.flower.news import CLOCK_HEADER, VERSION_HEADER
from steelyard.clients.flower.register import Entry, read_register
from steelyard.federate.server_folder import ServerFolder, read_json, runs_of
from steelyard.runs.database import reading

_log = logger(__name__)

_FLOWER_VERSION = "flwr-package-version"
_LONGEST_VERSION = 40
_MOST_KINDS = 200
"""Refusals that are counted apart; whatever comes beyond them is counted together."""
_LINES_AT_ONCE = 20
"""Lines about refusals that are printed in one interval; the rest is counted."""
_OTHERS = ("others", "calls of further kinds")
_INTERVAL = 60.0


@dataclass
class Contact:
    """What the proxy knows of one node."""

    last: str
    """When it last called."""
    clock: float
    """By how many seconds its clock is ahead of ours; behind where negative."""
    steelyard: str
    flower: str


class Contacts:
    """The nodes that called since this server started, by key."""

    def __init__(self) -> None:
        self._known: dict[str, Contact] = {}
        self._drifted: set[str] = set()
        self._written = ""

    def heard(self, entry: Entry, headers: Mapping[str, str]) -> None:
        """Note a call that was signed with a registered key."""
        said = (printable(headers.get(header, ""))[:_LONGEST_VERSION] for header in (VERSION_HEADER, _FLOWER_VERSION))
        ahead = _seconds(headers.get(CLOCK_HEADER, ""))
        self._known[entry.key] = Contact(datetime.now(UTC).isoformat(timespec="seconds"), ahead, *said)
        if ahead and entry.key not in self._drifted:
            self._drifted.add(entry.key)
            where = "ahead of" if ahead > 0 else "behind"
            _log.warning(f"the clock of {entry.name} is {abs(ahead):.0f} s {where} ours; it is let in")

    def still_there(self, keys: Iterable[str]) -> None:
        """Note that calls of these nodes are being held: no node makes another one meanwhile."""
        for key in keys:
            if key in self._known:
                self._known[key].last = datetime.now(UTC).isoformat(timespec="seconds")

    def write(self, file: Path) -> None:
        """Write what is known, where it changed."""
        text = json.dumps({key: asdict(contact) for key, contact in list(self._known.items())})
        if text != self._written:
            files.write(file, text.encode())
            self._written = text


def _seconds(text: str) -> float:
    try:
        return float(text) if abs(float(text)) < 1e9 else 0.0
    except ValueError:
        return 0.0


class RefusalLog:
    """Prints refusals so that a log can neither be filled from outside nor falls silent.

    The first of a kind is printed at once; all others are counted, and once a minute the counts are printed.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._known: set[tuple[str, str]] = set()
        """Kinds of the minute before: of these the counts are enough."""
        self._lines = _LINES_AT_ONCE
        self._begun = time.monotonic()

    def note(self, caller: str, what: str) -> None:
        """Note one refused call."""
        kind = (caller, what)
        if kind not in self._counts and len(self._counts) >= _MOST_KINDS:
            kind = _OTHERS
        if kind not in self._counts and kind not in self._known and self._lines:
            self._lines -= 1
            self._counts[kind] = 0
            _log.error(f"refused {caller}: {what}")
        else:
            self._counts[kind] += 1

    def report(self) -> None:
        """Print the counts of a minute that has passed."""
        if time.monotonic() - self._begun < _INTERVAL:
            return
        counted, self._counts = self._counts, Counter()
        self._known, self._lines, self._begun = set(counted), _LINES_AT_ONCE, time.monotonic()
        often = [(kind, count) for kind, count in counted.most_common() if count]
        for (caller, what), count in often[:_LINES_AT_ONCE]:
            _log.error(f"refused {caller} {count} more times in a minute: {what}")
        if rest := often[_LINES_AT_ONCE:]:
            calls = sum(count for _, count in rest)
            _log.error(f"refused {calls} further calls of {len(rest)} kinds in a minute")


_CONNECTED_SECONDS = 20.0
"""A node calls every few seconds or has a call held; Flower takes one for gone after twenty."""


class NodeDocument(TypedDict):
    """How a registered node stands."""

    name: str
    clients: list[str]
    status: Literal["connected", "away"]
    last: str | None
    """When it last called."""
    clock: float | None
    """Seconds that its clock is ahead."""
    steelyard: str | None
    flower: str | None
    refused: str | None


def nodes_of(server: ServerFolder) -> list[NodeDocument]:
    """Return what is known of each registered node: its last contact, clock, versions, and what it last refused."""
    contacts, served = read_json(server.contacts), server.is_served()
    faults = _last_faults(server)
    found: list[NodeDocument] = []
    for entry in read_register(server.register).entries.values():
        contact = contacts.get(entry.key, {})
        last = contact.get("last")
        found.append(
            {
                "name": entry.name,
                "clients": list(entry.clients),
                "status": "connected" if served and last and _age(last) < _CONNECTED_SECONDS else "away",
                "last": last,
                "clock": contact.get("clock"),
                "steelyard": contact.get("steelyard"),
                "flower": contact.get("flower"),
                "refused": _fault(entry, faults),
            }
        )
    return found


def _age(moment: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()


def _fault(entry: Entry, faults: tuple[dict[str, str], list[str]]) -> str | None:
    """Return the last fault of a node's clients, or else why the node was not admitted."""
    by_client, lines = faults
    own = [by_client[client] for client in entry.clients if client in by_client]
    refusal = re.compile(rf"steelyard: ((round \d+: )?node {re.escape(entry.name)} was not admitted: .*)")
    noted = [found[1] for line in lines if (found := refusal.fullmatch(line))]
    return next(iter([*own[::-1], *noted[::-1]]), None)


def _last_faults(server: ServerFolder) -> tuple[dict[str, str], list[str]]:
    """Return why clients were last left out in the newest run, and what its log says; it may still wait for nodes."""
    newest = next((run for run in reversed(runs_of(server)) if run.started), None)
    if newest is None:
        return {}, []
    try:
        lines = newest.log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return _faults(newest.out), lines


def _faults(folder: Path) -> dict[str, str]:
    query = (
        "SELECT c.name, f.round, f.reason FROM (SELECT * FROM untested UNION ALL SELECT * FROM failures) f "
        "JOIN clients c ON c.id = f.client ORDER BY f.round"
    )
    try:
        with reading(folder) as connection:
            rows = connection.execute(query).fetchall()
    except UserError:
        return {}
    return {name: f"round {round}: {why}" for name, round, why in rows}
