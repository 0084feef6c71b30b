"""A node's signed calls, the SuperLink's handlers, what it keeps, and the news for which calls are held."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.message_pb2 import Message as Pulled
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.superlink.main import create_app
from tests.federate.accounts import pem, signed

from steelyard.clients.flower import calls
from steelyard.clients.flower.calls import Answer, CallRefused, FleetConnection, NotReached, SignedCalls
from steelyard.clients.flower.internals import enter_run, stores
from steelyard.clients.flower.news import LONGEST_HOLD, LOOK_SECONDS, NEWS, WAIT_HEADER, seconds_to_hold
from steelyard.clients.flower.parts import LARGEST_TREE, MessageParts, group_of, take_apart
from steelyard.clients.flower.superlink import DirectCalls, NodeMessages, PartsInFiles


@pytest.fixture
def apart() -> MessageParts:
    enter_run(1, 7)
    return take_apart(Message(RecordDict({"form": ConfigRecord({"json": "text"})}), 7, "train.task", ttl=9.0))


def test_parts_lie_in_files_until_nobody_needs_them(apart: MessageParts, tmp_path: Path):
    store, tree = PartsInFiles(tmp_path), ObjectTree.FromString(apart.tree)
    assert sorted(store.preregister(1, tree)) == sorted(apart.parts)
    assert {store.get(name) for name in apart.parts} == {b""}  # Announced, not there.
    for name, part in apart.parts.items():
        store.put(name, part)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == apart.parts
    assert sum(len(entry.content) for entry in store.store.values()) == 0  # Nothing of it in memory.
    assert store.get("0" * 64) is None
    store.delete(tree.object_id)
    assert list(tmp_path.iterdir()) == []


def test_no_name_that_somebody_sends_removes_another_file(tmp_path: Path):
    (tmp_path / "parts").mkdir()
    other = tmp_path / "register.json"
    other.write_text("keys")
    store = PartsInFiles(tmp_path / "parts")
    store.delete("../register.json")
    assert store.get("../register.json") is None
    with pytest.raises(Exception, match=r"pre-registered|hash"):
        store.put("../register.json", b"mine")
    assert other.read_text() == "keys"


def test_a_node_sends_no_more_than_its_message_allows(monkeypatch: pytest.MonkeyPatch, messages: list[str]):
    base = stores()[0]
    question = SimpleNamespace(metadata=SimpleNamespace(dst_node_id=7, group_id=group_of(3, 10)))
    monkeypatch.setattr(
        base, "__init__", lambda self, *_: self.__dict__.update(nodes={}, message_ins_store={"asked": question})
    )
    monkeypatch.setattr(base, "store_message_and_object_tree", lambda self, message, tree, session: (True, []))
    monkeypatch.setattr(base, "store_object", lambda self, run, session, name, content: True)
    monkeypatch.setattr(base, "delete_messages", lambda self, names: None)
    state = NodeMessages(None, None, lambda _: None)
    announced = [state.store_message_and_object_tree(message_to(1, "asked"), "tree", f"push-{n}") for n in range(21)]
    assert announced == [(True, [])] * 20 + [(False, [])]
    assert state.store_object(1, "push-0", "a", b"123456")
    assert state.store_object(1, "push-1", "a", b"123456")  # Sent again, as after a lost call: no more room is taken.
    assert not state.store_object(1, "push-2", "b", b"12345")
    assert not state.store_object(1, "push-3", "c", b"12345")
    assert state.store_object(1, "push-3", "d", b"1234")
    assert not state.store_object(1, "", "e", b"")
    assert messages == ["node 7: its answer is larger than what was asked for; the rest is not kept"]
    state.delete_messages({"asked"})
    assert state.store_object(1, "push-3", "f", b"0" * 100)  # A push that is over; Flower itself refuses it.


def message_to(node: int, answers: str = "") -> Any:
    return SimpleNamespace(metadata=SimpleNamespace(dst_node_id=node, reply_to_message_id=answers))


PULL = "/v1/fleet/pull-messages"


class SuperLink:
    """Flower's own application with one node that is registered, in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FLWR_DATABASE", ":flwr-in-memory:")
        self.plain: Any = create_app()
        self.direct = DirectCalls(self.plain)
        self.state = self.plain.state.linkstate_factory.state()
        self.key = ec.generate_private_key(ec.SECP384R1())
        self.pem = pem(self.key)
        self.name = b64encode(self.pem).decode()
        self.node = self.state.create_node("owner", "owner", self.pem, 0)

    def headers(self, **more: str) -> dict[str, str]:
        return {**signed(self.key), **more}

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
        ("/v1/fleet/pull-object", part, superlink.headers()),
        ("/v1/runtime/pull-messages", b"", {"content-type": "application/protobuf"}),
        ("/v1/fleet/register-node", b"", {}),  # Not one of ours: passed through.
    ]

    async def ask(client: httpx.AsyncClient) -> list[tuple[int, bytes]]:
        answers = [await client.post(path, content=body, headers=headers) for path, body, headers in calls]
        return [(answer.status_code, answer.content) for answer in answers]

    found = superlink.play(superlink.direct, ask)
    assert found == superlink.play(superlink.plain, ask)
    assert [status for status, _ in found[:4]] == [200, 401, 401, 401]


def test_a_call_for_a_message_is_held_until_there_is_one(superlink: SuperLink, monkeypatch: pytest.MonkeyPatch):
    there: list[Pulled] = []
    looks: list[Any] = []

    def look(request: Any, state: Any) -> PullMessagesResponse:
        looks.append(request)
        return PullMessagesResponse(messages_list=there)

    monkeypatch.setitem(superlink.direct._handlers, PULL, (PullMessagesRequest, look))
    pull = PullMessagesRequest(node=Node(node_id=superlink.node)).SerializeToString()

    async def wait(client: httpx.AsyncClient) -> bytes:
        empty = await client.post(PULL, content=pull, headers=superlink.headers(**{WAIT_HEADER: "0.05"}))
        assert empty.content == b""
        looks.clear()
        held = asyncio.create_task(
            client.post(PULL, content=pull, headers=superlink.headers(**{WAIT_HEADER: "20"}), timeout=60)
        )
        while not looks:
            await asyncio.sleep(0.001)
        assert not held.done()
        assert superlink.state.nodes[superlink.node].online_until > time.time() + 10  # It is a sign of life.
        there.append(Pulled())
        superlink.direct.note([superlink.name])
        return (await asyncio.wait_for(held, LOOK_SECONDS)).content

    content = superlink.play(superlink.direct, wait)
    assert PullMessagesResponse.FromString(content).messages_list == there


def test_the_proxy_asks_once_for_all_and_keeps_alive_whose_calls_it_holds(superlink: SuperLink):
    def is_alive() -> bool:
        return superlink.state.nodes[superlink.node].online_until > time.time() + 10

    async def ask(client: httpx.AsyncClient) -> list[dict[str, Any]]:
        async def news(after: int, alive: list[str]) -> dict[str, Any]:
            return (await client.post(NEWS, json={"after": after, "alive": alive}, timeout=60)).json()

        waiting = asyncio.create_task(news(0, [superlink.name, b64encode(b"a stranger").decode()]))
        while not is_alive():
            await asyncio.sleep(0.001)
        superlink.direct.note([superlink.name])
        first = await waiting
        superlink.direct.note(["other"])
        return [first, await news(first["serial"], [])]

    first, second = superlink.play(superlink.direct, ask)
    assert (first["names"], second["names"]) == ([superlink.name], ["other"])
    assert is_alive()


@pytest.mark.parametrize(("text", "seconds"), [("", 0.0), ("20", 20.0), ("1e9", LONGEST_HOLD), ("nan", 0.0)])
def test_a_call_is_held_as_long_as_it_allows_and_never_for_ever(text: str, seconds: float):
    assert seconds_to_hold(text) == seconds


def called(path: str, answer: Callable[[dict[str, str]], Answer], stop: Any = None) -> tuple[SignedCalls, Answer]:
    """Make one call of a node, whose headers `answer` gets, and return what came back."""
    made = SignedCalls("x:1", None, ec.generate_private_key(ec.SECP384R1()), stop or threading.Event())
    made.posts.post = lambda path, content, headers, largest: answer(dict(headers))  # type: ignore[method-assign]
    return made, made._send(f"/v1/fleet/{path}", b"1", 100)


@pytest.mark.parametrize("path", ["pull-object", "push-object", "confirm-message-received"])
@pytest.mark.parametrize("fault", [503, NotReached("no route")])
def test_a_call_in_the_middle_of_a_task_is_repeated(path: str, fault: Any):
    faults, stamps = [fault, fault], list[str]()

    def answer(headers: dict[str, str]) -> Answer:
        stamps.append(headers["flwr-signature"])
        found = faults.pop() if faults else 200
        if isinstance(found, Exception):
            raise found
        return Answer(found, b"")

    unhurried = SimpleNamespace(is_set=lambda: False, wait=lambda seconds: None)
    assert called(path, answer, unhurried)[1].status == 200
    assert len(set(stamps)) == 3  # Each try is signed anew.


def test_other_calls_and_a_server_that_stays_busy_are_left_to_the_caller(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(calls.time, "monotonic", lambda: now[0])
    stop = SimpleNamespace(is_set=lambda: False, wait=lambda seconds: now.__setitem__(0, now[0] + seconds))
    assert called("pull-messages", lambda _: Answer(503, b""), stop)[1].status == 503
    assert now == [0.0]
    assert called("push-object", lambda _: Answer(503, b""), stop)[1].status == 503
    assert 30 < now[0] < 40


@pytest.mark.parametrize("ahead", [-6, 6, 900])
def test_a_clock_that_is_wrong_is_noticed_and_the_servers_is_used(ahead: int, monkeypatch: pytest.MonkeyPatch):
    true = datetime(2026, 1, 2, 3, 4, 5, 500_000, tzinfo=UTC)
    monkeypatch.setattr(calls, "now", lambda: true + timedelta(seconds=ahead))

    def answer(headers: dict[str, str]) -> Answer:
        age = (true - datetime.fromisoformat(headers["flwr-timestamp"])).total_seconds()
        return Answer(200 if -5 < age < 5 else 401, b"", {"date": format_datetime(true, usegmt=True)})

    made, response = called("activate-node", answer)
    assert response.status == 200
    assert abs(made.ahead - ahead) <= 1


BAD_ANSWERS: dict[str, tuple[int, dict[str, str], bytes, str]] = {
    "/v1/fleet/activate-node": (200, {"content-encoding": "gzip"}, b"1", "packed"),
    "/v1/fleet/deactivate-node": (302, {"location": "http://elsewhere"}, b"", "elsewhere"),
    "/v1/fleet/pull-messages": (200, {}, bytes(LARGEST_TREE + (64 << 10) + 1), "more than"),
    "/v1/fleet/send-node-heartbeat": (200, {}, b"\xff", "cannot be read"),
    "/v1/fleet/register-node": (409, {}, b"not\x1b[31m you", "not [31m you"),
}


def test_no_answer_is_taken_that_is_packed_larger_than_it_can_be_or_from_elsewhere():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, headers, content, _ = BAD_ANSWERS[self.path]
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    fleet = FleetConnection(
        f"127.0.0.1:{server.server_port}", None, ec.generate_private_key(ec.SECP384R1()), threading.Event()
    )
    tried: list[Callable[[], Any]] = [
        lambda: fleet.activate(10.0),
        fleet.deactivate,
        fleet.next_message,
        lambda: fleet.send_heartbeat(10.0),
        fleet.register,
    ]
    try:
        for call, (status, _, _, words) in zip(tried, BAD_ANSWERS.values(), strict=True):
            with pytest.raises(CallRefused if status == 409 else NotReached, match=re.escape(words)):
                call()
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(NotReached, match="refused"):
        fleet.deactivate()
