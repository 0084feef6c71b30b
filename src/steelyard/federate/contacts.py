"""What the proxy hears of nodes: last contact, clock, versions; and what it refuses, in a log that cannot be filled."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from steelyard.base import files
from steelyard.base.errors import printable
from steelyard.base.logs import logger
from steelyard.clients.flower.adapter.signed_calls import CLOCK_HEADER, VERSION_HEADER
from steelyard.clients.flower.register import Entry

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
