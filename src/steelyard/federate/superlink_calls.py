"""The proxy's calls to its SuperLink, over connections that are kept.

Every call of every node is passed on here, and a general HTTP client takes longer for it than all the rest of the
proxy. This one knows a single server, which is ours, and speaks as much HTTP/1.1 as that needs.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_SECONDS = 60.0
_KEPT_SECONDS = 30.0
"""How long an unused connection is kept; the SuperLink itself keeps it longer, so that none ends under a call."""
_MOST_KEPT = 100
_JOINED = 64 << 10
"""Bytes up to which head and body are sent together; a larger body is not copied."""

_BYTES = "application/octet-stream"


class Answer(NamedTuple):
    """What goes back to a caller."""

    status: int
    content: bytes
    media: str = "application/protobuf"


class _Line(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: float


class SuperLinkCalls:
    """Calls to a SuperLink at host:port, known by the certificate `authority`; use it within one event loop."""

    def __init__(self, address: str, authority: Path) -> None:
        self._address = address
        self._trusted = ssl.create_default_context(cafile=str(authority))
        self._kept: list[_Line] = []

    async def post(self, path: str, content: bytes, headers: Mapping[str, str]) -> Answer:
        """Return the SuperLink's answer to a call; raises `OSError` where there is none."""
        async with asyncio.timeout(_SECONDS):
            line = await self._line()
            try:
                lines = [f"POST {path} HTTP/1.1", f"host: {self._address}", f"content-length: {len(content)}"]
                lines += [f"{name}: {value}" for name, value in headers.items()]
                head = "\r\n".join([*lines, "", ""]).encode("latin-1")
                if len(content) <= _JOINED:
                    line.writer.write(head + content)
                else:
                    line.writer.write(head)
                    line.writer.write(content)
                await line.writer.drain()
                answer = await _answer(line.reader)
            except (EOFError, ValueError, asyncio.LimitOverrunError) as error:
                line.writer.transport.abort()
                raise ConnectionError(f"no answer of a SuperLink: {error}") from error
            except BaseException:  # Whoever comes next on this connection would read our answer.
                line.writer.transport.abort()
                raise
            if len(self._kept) < _MOST_KEPT:
                self._kept.append(line._replace(used=time.monotonic()))
            else:
                line.writer.close()
            return answer

    def close(self) -> None:
        """End all connections."""
        while self._kept:
            self._kept.pop().writer.close()

    async def _line(self) -> _Line:
        """Return a connection: the one that was used last, so that those which are not needed grow old."""
        while self._kept and (self._kept[0].reader.at_eof() or time.monotonic() - self._kept[0].used > _KEPT_SECONDS):
            self._kept.pop(0).writer.close()
        while self._kept:
            line = self._kept.pop()
            if not line.reader.at_eof():
                return line
            line.writer.close()
        host, _, port = self._address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=self._trusted)
        return _Line(reader, writer, time.monotonic())


async def _answer(reader: asyncio.StreamReader) -> Answer:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    if "content-length" not in fields:
        raise ValueError("an answer that does not say how long it is")
    content = await reader.readexactly(int(fields["content-length"]))
    return Answer(int(first.split(" ")[1]), content, fields.get("content-type", _BYTES))
