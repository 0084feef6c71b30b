"""Who holds connections open does not keep others out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("uvicorn")

import uvicorn

from steelyard.federate import bounded
from steelyard.federate.bounded import BoundedLoop, BoundedProtocol

CALL = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def application(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(0.6 if scope["path"] == "/slow" else 0.0)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def against_server(play: Any) -> None:
    """Run a play against a server of this process; its argument opens a connection."""

    async def main() -> None:
        config = uvicorn.Config(application, http=BoundedProtocol, ws="none", log_level="critical", lifespan="off")
        config.load()
        state = uvicorn.Server(config).server_state
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: BoundedProtocol(config, state, {}), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(20):
            await play(lambda: asyncio.open_connection("127.0.0.1", port))
        server.close()

    with asyncio.Runner(loop_factory=BoundedLoop) as runner:
        runner.run(main())


async def ended(reader: asyncio.StreamReader) -> bool:
    """Whether the server ends a connection within five seconds without a word."""
    try:
        return await asyncio.wait_for(reader.read(), 5) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nhost:"])
def test_a_connection_without_a_whole_head_is_ended(monkeypatch: pytest.MonkeyPatch, begun: bytes):
    monkeypatch.setattr(bounded, "HEAD_SECONDS", 0.2)

    async def play(connect: Any) -> None:
        reader, writer = await connect()
        writer.write(begun)
        assert await ended(reader)

    against_server(play)


def test_after_a_call_too_and_a_call_that_is_being_answered_is_not_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounded, "HEAD_SECONDS", 0.2)

    async def play(connect: Any) -> None:
        reader, writer = await connect()
        writer.write(CALL.replace(b"/ ", b"/slow "))
        assert b" 204 " in await reader.readuntil(b"\r\n\r\n")  # It took three times as long as a head may.
        writer.write(b"GET / HTT")
        assert await ended(reader)

    against_server(play)


def test_one_address_has_so_many_connections_and_gets_them_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounded, "MOST_FROM_ONE", 3)

    async def play(connect: Any) -> None:
        held = [await connect() for _ in range(3)]
        await asyncio.sleep(0.1)
        one_more, _ = await connect()
        assert await ended(one_more)
        held[0][1].close()
        await asyncio.sleep(0.2)
        reader, writer = await connect()
        writer.write(CALL)
        assert b" 204 " in await reader.readuntil(b"\r\n\r\n")

    against_server(play)
