"""The proxy's own way to its SuperLink: connections are kept, and none is used for two calls at once."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from steelyard.federate import superlink_calls
from steelyard.federate.certificates import make_certificates
from steelyard.federate.superlink_calls import Answer, SuperLinkCalls

Reply = Callable[[bytes, bytes], Awaitable[bytes]]
"""What the played SuperLink says to a head and a body."""


class Played:
    """A server on loopback that counts its connections."""

    def __init__(self, tls: Path, reply: Reply) -> None:
        self.tls, self.reply, self.connections = tls, reply, 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except EOFError:
                break
            size = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
            answer = await self.reply(head, await reader.readexactly(size))
            writer.write(answer)
            if not answer:
                break
        writer.close()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder, ["127.0.0.1"])
    return folder


def play(tls: Path, reply: Reply, test: Callable[[Played, SuperLinkCalls], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        context, played = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), Played(tls, reply)
        context.load_cert_chain(tls / "server.pem", tls / "server.key")
        server = await asyncio.start_server(played, "127.0.0.1", 0, ssl=context)
        calls = SuperLinkCalls(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", tls / "ca.pem")
        await asyncio.wait_for(test(played, calls), 30)
        calls.close()
        server.close()

    asyncio.run(run())


def said(content: bytes, head: str = "HTTP/1.1 200 OK") -> bytes:
    return f"{head}\r\ncontent-type: text/plain\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


async def echo(head: bytes, body: bytes) -> bytes:
    return said(body)


def test_calls_go_over_connections_that_are_kept(tls: Path, monkeypatch: pytest.MonkeyPatch):
    async def test(played: Played, calls: SuperLinkCalls) -> None:
        for body in (b"", b"small", bytes(5 << 20)):
            assert await calls.post("/v1/call", body, {"flwr-key": "k"}) == Answer(200, body, "text/plain")
        assert played.connections == 1
        await asyncio.gather(*(calls.post("/v1/call", b"", {}) for _ in range(3)))
        assert played.connections == 3
        monkeypatch.setattr(superlink_calls, "_KEPT_SECONDS", -1.0)
        await calls.post("/v1/call", b"", {})
        assert played.connections == 4  # The three were too old.

    play(tls, echo, test)


def test_what_is_sent_is_the_call_and_its_headers(tls: Path):
    async def head_of(head: bytes, body: bytes) -> bytes:
        return said(head, "HTTP/1.1 401 Unauthorized")

    async def test(played: Played, calls: SuperLinkCalls) -> None:
        answer = await calls.post("/v1/call", b"body", {"flwr-signature": "s=="})
        first, host, *rest = answer.content.decode().split("\r\n")
        assert (answer.status, first, host[:16]) == (401, "POST /v1/call HTTP/1.1", "host: 127.0.0.1:")
        assert rest == ["content-length: 4", "flwr-signature: s==", "", ""]

    play(tls, head_of, test)


@pytest.mark.parametrize(
    "wrong", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 twohundred\r\ncontent-length: 0\r\n\r\n"]
)
def test_no_answer_is_an_error_of_the_connection_which_is_not_used_again(tls: Path, wrong: bytes):
    answers = [wrong, said(b"fine")]

    async def reply(head: bytes, body: bytes) -> bytes:
        return answers.pop(0)

    async def test(played: Played, calls: SuperLinkCalls) -> None:
        with pytest.raises(OSError, match="no answer of a SuperLink"):
            await calls.post("/v1/call", b"", {})
        assert (await calls.post("/v1/call", b"", {})).content == b"fine"
        assert played.connections == 2

    play(tls, reply, test)


def test_a_call_that_is_given_up_leaves_no_answer_for_the_next(tls: Path, monkeypatch: pytest.MonkeyPatch):
    async def late(head: bytes, body: bytes) -> bytes:
        await asyncio.sleep(1.0 if body == b"slow" else 0.0)
        return said(body)

    async def test(played: Played, calls: SuperLinkCalls) -> None:
        monkeypatch.setattr(superlink_calls, "_SECONDS", 0.3)
        with pytest.raises(TimeoutError):
            await calls.post("/v1/call", b"slow", {})
        monkeypatch.undo()
        assert (await calls.post("/v1/call", b"quick", {})).content == b"quick"

    play(tls, late, test)


def test_a_superlink_that_is_not_there_is_an_error(tls: Path):
    async def test(played: Played, calls: SuperLinkCalls) -> None:
        with pytest.raises(OSError, match="Connect call failed"):
            await SuperLinkCalls("127.0.0.1:1", tls / "ca.pem").post("/v1/call", b"", {})

    play(tls, echo, test)
