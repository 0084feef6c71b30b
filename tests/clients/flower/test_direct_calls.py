"""Frequent calls go to Flower's handlers directly: same answers, same refusals; calls for messages are held."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.message_pb2 import Message, PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.superlink.main import create_app

from steelyard.clients.flower.adapter import direct_calls
from steelyard.clients.flower.adapter.direct_calls import DirectCalls
from steelyard.clients.flower.news import NEWS, WAIT_HEADER

PULL = "/v1/fleet/pull-messages"


class SuperLink:
    """Flower's own application with one node that is registered, in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FLWR_DATABASE", ":flwr-in-memory:")
        self.plain: Any = create_app()
        self.direct = DirectCalls(self.plain)
        self.state = self.plain.state.linkstate_factory.state()
        self.key = ec.generate_private_key(ec.SECP384R1())
        form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        self.pem = self.key.public_key().public_bytes(*form)
        self.name = b64encode(self.pem).decode()
        self.node = self.state.create_node("owner", "owner", self.pem, 0)

    def headers(self, **more: str) -> dict[str, str]:
        stamp = datetime.now(UTC).isoformat()
        signature = b64encode(self.key.sign(stamp.encode(), ec.ECDSA(hashes.SHA256()))).decode()
        signed = {"flwr-public-key": self.name, "flwr-timestamp": stamp, "flwr-signature": signature}
        return {"content-type": "application/protobuf", **signed, **more}

    def play(self, app: Any, calls: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
                return await calls(client)

        return asyncio.run(run())


@pytest.fixture
def superlink(monkeypatch: pytest.MonkeyPatch) -> SuperLink:
    return SuperLink(monkeypatch)


def test_answers_and_refusals_are_flowers_own(superlink: SuperLink):
    pull = PullMessagesRequest(node=Node(node_id=superlink.node)).SerializeToString()
    elsewhere = PullMessagesRequest(node=Node(node_id=superlink.node + 1)).SerializeToString()
    stale = superlink.headers(**{"flwr-timestamp": "2020-01-01T00:00:00+00:00"})
    part = PullObjectRequest(node=Node(node_id=superlink.node), run_id=5, object_id="0" * 64).SerializeToString()
    calls: list[tuple[str, bytes, dict[str, str]]] = [
        (PULL, pull, superlink.headers()),
        (PULL, pull, {"content-type": "application/protobuf"}),
        (PULL, elsewhere, superlink.headers()),
        (PULL, pull, stale),
        (PULL, pull, superlink.headers(**{"content-type": "application/json"})),
        (PULL, b"\xff\xff", superlink.headers()),
        ("/v1/fleet/pull-object", part, superlink.headers()),
        ("/v1/runtime/pull-messages", b"", {"content-type": "application/protobuf"}),
        ("/v1/runtime/get-nodes", b"", {"content-type": "application/protobuf", "flwr-task-token": "guess"}),
        ("/v1/fleet/register-node", b"", {}),  # Not one of ours: passed through.
    ]

    async def ask(client: httpx.AsyncClient) -> list[tuple[int, bytes]]:
        answers = [await client.post(path, content=body, headers=headers) for path, body, headers in calls]
        return [(answer.status_code, answer.content) for answer in answers]

    found = superlink.play(superlink.direct, ask)
    assert found == superlink.play(superlink.plain, ask)
    assert [status for status, _ in found[:4]] == [200, 401, 401, 401]


def test_a_call_for_a_message_is_held_until_there_is_one(superlink: SuperLink, monkeypatch: pytest.MonkeyPatch):
    there: list[Message] = []

    def look(request: Any, state: Any) -> PullMessagesResponse:
        return PullMessagesResponse(messages_list=there)

    monkeypatch.setitem(direct_calls._HANDLERS, PULL, look)
    pull = PullMessagesRequest(node=Node(node_id=superlink.node)).SerializeToString()

    async def wait(client: httpx.AsyncClient) -> tuple[bytes, float, bytes]:
        empty = await client.post(PULL, content=pull, headers=superlink.headers(**{WAIT_HEADER: "0.05"}))
        begun = time.monotonic()
        held = asyncio.create_task(
            client.post(PULL, content=pull, headers=superlink.headers(**{WAIT_HEADER: "20"}), timeout=60)
        )
        await asyncio.sleep(0.3)
        assert not held.done()
        assert superlink.state.nodes[superlink.node].online_until > time.time() + 10  # It is a sign of life.
        there.append(Message())
        superlink.direct.note([superlink.name])
        return empty.content, time.monotonic() - begun, (await held).content

    empty, seconds, content = superlink.play(superlink.direct, wait)
    assert empty == b""
    assert PullMessagesResponse.FromString(content).messages_list == there
    assert seconds < direct_calls.LOOK_SECONDS


def test_the_proxy_asks_once_for_all_and_keeps_alive_whose_calls_it_holds(superlink: SuperLink):
    async def ask(client: httpx.AsyncClient) -> list[dict[str, Any]]:
        async def news(after: int, alive: list[str]) -> dict[str, Any]:
            return (await client.post(NEWS, json={"after": after, "alive": alive}, timeout=60)).json()

        waiting = asyncio.create_task(news(0, [superlink.name, b64encode(b"a stranger").decode()]))
        await asyncio.sleep(0.2)
        superlink.direct.note([superlink.name])
        first = await waiting
        superlink.direct.note(["other"])
        return [first, await news(first["serial"], [])]

    first, second = superlink.play(superlink.direct, ask)
    assert (first["names"], second["names"]) == ([superlink.name], ["other"])
    assert superlink.state.nodes[superlink.node].online_until > time.time() + 10
