"""Flower's SuperLink, closed to other accounts: python -m steelyard.federate.own_superlink SOCKET OPTIONS...

Whoever reaches a SuperLink may start a run there, and a run is a programme that runs as whoever started the SuperLink.
On loopback that is every account of the machine. So a connection of another account is ended before it is read.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
import sys
from types import SimpleNamespace
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

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

    # Flower has no setting for how its server is made. The package names a function as it names this module.
    superlink: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    superlink.uvicorn = SimpleNamespace(run=run)
    superlink.flower_superlink()


if __name__ == "__main__":
    main()
