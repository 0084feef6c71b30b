"""Whose a connection on loopback is: every account of a machine reaches its ports, and the system knows which did."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

Address = tuple[str, int]

_TABLE = Path("/proc/net/tcp")
_TRIES = 3
"""The table changes while it is read, and a line may be missed."""


def is_own(peer: Address, here: Address) -> bool:
    """Whether the other end of a connection belongs to our account, or to root; True where the system cannot tell."""
    return not _TABLE.exists() or owner_of(peer, here) in (os.geteuid(), 0)


def owner_of(peer: Address, here: Address) -> int | None:
    """Return the account at the other end of a connection on this machine; None where nobody holds it any more."""
    wanted = [_written(peer), _written(here)]
    for _ in range(_TRIES):
        for line in _TABLE.read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if words[1:3] == wanted:
                # Without an inode it is closed already, and the system says root of everybody's.
                return int(words[7]) if words[9] != "0" else None
    return None


def _written(address: Address) -> str:
    host, port = address
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
