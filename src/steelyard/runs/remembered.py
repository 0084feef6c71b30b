"""A chain that was found whole is not computed again for every report, as long as nobody has written to its files.

What was found is kept in the user's cache folder, never in the run's: whoever can change a run could change that, too.
It holds for the very files (device, inode, size, times) that were read. `st_ctime` is set by the system at every write
and cannot be set back, so that a changed run is computed again. `steelyard verify`, `resume` and all that goes on from
a run never ask here.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from steelyard.base import files
from steelyard.base.files import cache_folder
from steelyard.runs.chain_check import Checked

WORTH = 0.5
"""Seconds that a look at a chain must take to be remembered."""
FINE, COARSE = 0.1, 2.0
"""Seconds since the last write: within a tick of a file system's clock, or a second of it, two have the same time."""
Stamp = list[list[int]]


def stamp(folder: Path) -> Stamp | None:
    """Return which files a look at a chain reads, and their state; None while a run is being written, or on Windows."""
    if os.name == "nt":
        return None  # st_ctime is when the file was made
    if any(_state(folder / f"{files.DATABASE}{ending}")[2:3] > [0] for ending in ("-wal", "-journal")):
        return None
    database = _state(folder / files.DATABASE)
    return [database, _state(folder / files.LEDGER)] if database else None


def _state(path: Path) -> list[int]:
    try:
        at = path.stat()
    except OSError:
        return []
    return [at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns]


def remembered(folder: Path) -> Checked | None:
    """Return what was found of a run whose files are as they were then; None where it has to be computed."""
    now = stamp(folder)
    if now is None:
        return None
    try:
        known = json.loads(_path(folder).read_text(encoding="utf-8"))
        head, round, ledger = known["head"], known["round"], known["ledger"]
        if known["stamp"] != now or type(head) is not str or type(round) is not int or type(ledger) is not bool:
            return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return Checked(head, round, "", ledger)


def remember(folder: Path, before: Stamp | None, found: Checked, seconds: float) -> None:
    """Keep what a look has found, given the files' state before it; a chain with a problem is never kept."""
    if before is None or found.problem or seconds < WORTH or before != stamp(folder):
        return
    begun = time.time() - seconds
    if any(begun - at / 1e9 < (FINE if at % 10**9 else COARSE) for state in before for at in state[3:]):
        return
    path = _path(folder)
    kept = {"stamp": before, "head": found.head, "round": found.round, "ledger": found.ledger}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, json.dumps(kept).encode())
    except OSError:
        return  # a cache that cannot be written is no error


def _path(folder: Path) -> Path:
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()
    return cache_folder() / "chains" / f"{name}.json"
