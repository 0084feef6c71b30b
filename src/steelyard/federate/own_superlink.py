"""Flower's SuperLink, closed to other accounts: python -m steelyard.federate.own_superlink SOCKET OPTIONS...

Whoever reaches a SuperLink may start a run there, and a run is a programme that runs as whoever started the SuperLink.
On loopback that is every account of the machine. So a connection of another account is ended before it is read.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from steelyard.clients.flower.adapter.superlink import run_superlink
from steelyard.federate.accounts import is_own


class OwnProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """HTTP as uvicorn speaks it, with processes of our own account only."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Look whose it is; another account's is ended at once."""
        super().connection_made(transport)
        peer, here = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self._own = is_own(peer, here)
        if not self._own:
            print("steelyard: refused: a connection of another account of this machine", flush=True)
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read on, unless it was ended: TLS may have unpacked some already."""
        if self._own:
            super().data_received(data)


def main() -> None:
    """Run it until it is told to end."""
    listener = socket.socket(fileno=int(sys.argv.pop(1)))

    def run(app: Any, **options: Any) -> None:
        kept = {name: value for name, value in options.items() if name not in ("host", "port", "reload", "workers")}
        uvicorn.Server(uvicorn.Config(app, http=OwnProtocol, **kept)).run(sockets=[listener])

    run_superlink(run)


if __name__ == "__main__":
    main()
