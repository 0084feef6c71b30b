"""What the program is doing just now, in words: work says it, and whoever shows progress asks for it.

Nothing is shown here but the steps in a log (`--verbose`); without anyone who asks, it costs a list entry.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from steelyard.logs import logger

_log = logger(__name__)
_now_doing: list[tuple[str, float]] = []


@contextmanager
def doing(what: str) -> Generator[None]:
    """Say what the work inside is; use it around anything that may take more than a few seconds."""
    _log.debug(what)
    entry = (what, time.monotonic())
    _now_doing.append(entry)
    try:
        yield
    finally:
        # Work in several threads may end in any order: each takes back its own word.
        _now_doing.remove(entry)


def current() -> tuple[str, float] | None:
    """Return what is being done, the widest word first, and since when (`time.monotonic`) its innermost part."""
    entries = list(_now_doing)
    return (": ".join(what for what, _ in entries), entries[-1][1]) if entries else None
