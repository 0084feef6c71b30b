"""Connections to a web server of ours, bounded in number, in time and in the size of a call's head."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from http import HTTPStatus
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_FROM_ONE = 500
"""Connections from one address; a hospital's nodes may well share one."""
HEAD_SECONDS = 15.0
"""How long a connection may go without the whole head of a call, and how long a TLS handshake may take."""
_LINGER_SECONDS = 5.0
"""How long what a refused caller still sends is read, so that it comes to read its answer."""


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
        self._refused = False
        if self._open[self._address] > MOST_FROM_ONE:
            transport.abort()
        else:
            self._look(self)

    def data_received(self, data: bytes) -> None:
        """Read on; what comes after a refusal is let go of."""
        if not self._refused:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no call, or one whose head is too long (431), and close: at once its answer would be lost."""
        self._refused = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # In the middle of an answer there is no place for another one.
            return
        status = HTTPStatus(getattr(sys.exception(), "error_status_hint", 400))
        head = f"HTTP/1.1 {status} {status.phrase}\r\nconnection: close\r\ncontent-type: text/plain; charset=utf-8"
        self.transport.write(f"{head}\r\ncontent-length: {len(msg)}\r\n\r\n{msg}".encode("ascii"))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)

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
