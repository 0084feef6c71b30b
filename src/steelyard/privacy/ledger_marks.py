"""How far a ledger had come, for those who check it later: a chain of rounds, a node. Loads no scipy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.base import files

FILE = files.LEDGER
"""The ledger's file in a run's folder."""


@dataclass(frozen=True)
class Mark:
    """How far a ledger had come, and what stood in it: its first bytes, and their SHA-256 in hexadecimal digits."""

    bytes: int
    sha256: str


def first_difference(path: Path, marks: Sequence[Mark]) -> tuple[int, str] | None:
    """Return the place of the first mark that a ledger's file does not bear out, and how; None where it bears out all.

    Marks come in the order of their bytes. What follows the last is not looked at: a ledger is ahead of the rounds that
    were written, never behind them.
    """
    try:
        content = files.read_bytes(path)
    except FileNotFoundError:
        content = None
    except OSError as error:
        return 0, f"cannot be read ({error.strerror}), and could be"
    hashed, done = hashlib.sha256(), 0
    for place, mark in enumerate(marks):
        if mark.bytes and content is None:
            return place, "is gone, and was there"
        held = content or b""
        if len(held) < mark.bytes:
            return place, f"has {len(held):,} bytes, and had {mark.bytes:,}"
        hashed.update(held[done : mark.bytes])
        done = mark.bytes
        if hashed.hexdigest() != mark.sha256:
            return place, "no longer holds the charges that it held"
    return None
