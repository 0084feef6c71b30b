"""Who holds connections to a server open, and for how long: nobody without a key must keep nodes out.

As a process, Flower's SuperLink, closed to other accounts: python -m steelyard.federate.connections SOCKET PARTS
OPTIONS. Whoever reaches a SuperLink may start a run there, and a run is a programme that runs as whoever started the
SuperLink. On loopback that is every account of the machine. So a connection of another account is ended before it is
read; the system knows whose each is. PARTS is a folder for the parts of messages, emptied at the start; "" keeps them
in memory.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from steelyard.base.logs import logger, show
from steelyard.clients.flower.adapter.superlink import run_superlink

MOST_FROM_ONE = 500
"""Connections from one address; a hospital's nodes may well share one."""
HEAD_SECONDS = 15.0
"""How long a connection may go without the whole head of a call, and how long a TLS handshake may take."""
_MOST_FILES = 8192


class BoundedProtocol(H11Protocol):
    """HTTP as uvicorn speaks it, which by itself waits for ever for the rest of a call's head; hand it to uvicorn.

    It is the one of uvicorn's two protocols that bounds the size of headers.
    """

    _open: ClassVar[Counter[str]] = Counter()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count a connection; one too many from an address is ended at once."""
        super().connection_made(transport)
        self._address = str((transport.get_extra_info("peername") or ("unknown",))[0])
        self._open[self._address] += 1
        self._look_later: asyncio.TimerHandle | None = None
        if self._open[self._address] > MOST_FROM_ONE:
            transport.abort()
        else:
            self._look(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it as gone."""
        self._open[self._address] -= 1
        if self._open[self._address] <= 0:
            del self._open[self._address]
        if self._look_later is not None:
            self._look_later.cancel()
        super().connection_lost(exc)

    def _look(self, before: object) -> None:
        """End the connection where no call began since the last look and none is being answered."""
        call: Any = self.cycle
        if call is not None and not call.response_complete:
            call = self  # It is being answered; the proxy itself bounds how long that takes.
        elif call is before:
            self.transport.abort()
            return
        self._look_later = self.loop.call_later(HEAD_SECONDS, self._look, call)


class BoundedLoop(asyncio.SelectorEventLoop):
    """An event loop whose servers end TLS handshakes that dawdle; uvicorn has no setting for it."""

    async def create_server(self, *arguments: Any, **options: Any) -> asyncio.Server:  # type: ignore[override]
        """Listen, as any loop does."""
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = HEAD_SECONDS
        return await super().create_server(*arguments, **options)


def allow_many_files() -> None:
    """Let this process hold as many connections as its bounds speak of; the usual limit of 1024 files is soft."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_log = logger(__name__)

Address = tuple[str, int]

_TABLE = Path("/proc/net/tcp")
_DRAIN_SECONDS = 2
_IDLE_SECONDS = 75
"""How long an unused connection stays open: a new one costs a handshake and a look at whose it is."""
_TRIES = 3
"""The table changes while it is read, and a line may be missed."""


class OwnProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """HTTP as uvicorn speaks it, with processes of our own account only."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Look whose it is; another account's is ended at once."""
        super().connection_made(transport)
        peer, here = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self._own = is_own(peer, here)
        if not self._own:
            _log.error("refused: a connection of another account of this machine")
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read on, unless it was ended: TLS may have unpacked some already."""
        if self._own:
            super().data_received(data)


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


def main() -> None:
    """Run it until a signal ends it."""
    show()
    listener, folder = socket.socket(fileno=int(sys.argv.pop(1))), sys.argv.pop(1)
    parts = Path(folder) if folder else None
    if parts is not None:
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(mode=0o700)
    allow_many_files()

    def run(app: Any, **options: Any) -> None:
        kept = {name: value for name, value in options.items() if name not in ("host", "port", "reload", "workers")}
        # A line for each call would fill the disk; a call that is held must not hold up the end.
        kept |= {"access_log": False, "timeout_graceful_shutdown": _DRAIN_SECONDS, "timeout_keep_alive": _IDLE_SECONDS}
        uvicorn.Server(uvicorn.Config(app, http=OwnProtocol, **kept)).run(sockets=[listener])

    run_superlink(run, parts)


if __name__ == "__main__":
    main()
