"""Who opened the held-out seeds of a suite here: each candidate after the first is held to a stricter level.

A hundred candidates that each had 5 % would give five lucky ones. So the n-th has 5 %/(n(n + 1)): all together have
5 %, however many come. The list lies with the user, not with a run; whoever removes it deceives nobody but themselves.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from steelyard.base import files
from steelyard.base.errors import UserError

OPENED = "opened.json"


def state_folder() -> Path:
    """Return where the list lies: $STEELYARD_STATE, else steelyard/ in the user's folder for state."""
    given = os.environ.get("STEELYARD_STATE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "steelyard"


def opening(suite: str, candidate: Mapping[str, Any]) -> int:
    """Return which candidate opens the held-out seeds of a suite, counted from 1, and note it; the same has its number.

    `candidate` is its description, with code by its content.
    """
    path = state_folder() / OPENED
    digest = hashlib.sha256(json.dumps(candidate, sort_keys=True).encode()).hexdigest()
    mine = _read(path).get(suite, [])
    if digest not in mine:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.open_lock(path.with_suffix(".lock")) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # two that open at once must not get one number
                found = _read(path)
                mine = found.setdefault(suite, [])
                if digest not in mine:
                    mine.append(digest)
                    files.write(path, f"{json.dumps(found, indent=1)}\n".encode())
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written: {error.strerror}; allowed: a writable folder (STEELYARD_STATE)"
            ) from error
    return mine.index(digest) + 1


def _read(path: Path) -> dict[str, list[str]]:
    try:
        found: Any = json.loads(files.read_bytes(path, 10_000_000))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__}); allowed: the file as it was") from None
    lists = cast("dict[str, Any]", found).values() if isinstance(found, dict) else [None]
    if not all(isinstance(each, list) for each in lists):
        raise UserError(f"{path}: holds something else than who opened which seeds; allowed: the file as it was")
    return cast("dict[str, list[str]]", found)
