"""Bounds on who holds connections to the proxy open, and for how long: nobody without a key must keep nodes out."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

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
