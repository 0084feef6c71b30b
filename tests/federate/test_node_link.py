"""The side of a node that speaks to the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr")

from flwr.app import Message, RecordDict

from steelyard.clients.flower.adapter.messages import PartsLost, PartsNotTaken, PartsTree, enter_run, name_message
from steelyard.errors import UserError
from steelyard.federate import node
from steelyard.federate.node_link import NodeLink


def test_a_message_whose_parts_never_arrive_does_not_end_a_node(messages: list[str]):
    stop, asked = threading.Event(), [0]
    enter_run(1, 7)
    message = Message(RecordDict(), 7, "train", ttl=0.2)
    name_message(message, "m")

    def next_message() -> list[tuple[Message, PartsTree]]:
        asked[0] += 1
        if asked[0] == 3:
            stop.set()
        return [(message, PartsTree(object_id="m"))] if asked[0] == 1 else []

    def lost(name: str) -> bytes:
        raise PartsLost(name, "not there")

    fleet = SimpleNamespace(next_message=next_message, part_puller=lambda run: lost, confirm=lambda *_: None)
    server = SimpleNamespace(connection=lambda stop: fleet, key=None)
    NodeLink(server, None, 0, stop)._serve()  # type: ignore[arg-type]
    assert asked[0] == 3  # It went on to ask for the next message.
    assert [line.partition(":")[0] for line in messages] == ["a message was not answered"]
    assert "ObjectPullError" in messages[0]


def test_an_answer_that_the_server_does_not_take_does_not_end_a_node(
    messages: list[str], monkeypatch: pytest.MonkeyPatch
):
    stop, found = threading.Event(), [[("message", "tree")], []]

    def next_message() -> list[Any]:
        if len(found) == 1:
            stop.set()
        return found.pop(0)

    def not_taken(*_: object) -> None:
        raise PartsNotTaken("part", 1, "session")

    monkeypatch.setattr(NodeLink, "_answer", not_taken)
    link(next_message, stop, []).run()
    assert found == []  # It went on to ask for the next message.
    assert [line.partition(":")[0] for line in messages if "answered" in line] == ["a message was not answered"]


def link(next_message: Callable[[], list[Any]], stop: threading.Event, activated: list[float]) -> NodeLink:
    """Return the link of a node whose server answers as the test says."""

    def activate(seconds: float) -> int:
        activated.append(seconds)
        return 7

    fleet = SimpleNamespace(next_message=next_message, activate=activate, deactivate=lambda: None, close=lambda: None)
    fleet.node, fleet.ahead, fleet.send_heartbeat = 7, 0.0, lambda seconds: None
    return NodeLink(SimpleNamespace(connection=lambda stop: fleet, key="key"), None, 0, stop)  # type: ignore[arg-type]


def refused(status: int = 401) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://server")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(status, text="no", request=request))


def test_a_server_that_started_anew_is_joined_again():
    stop, asked, activated = threading.Event(), [0], list[float]()

    def next_message() -> list[Any]:
        asked[0] += 1
        if asked[0] in (2, 4):
            raise refused()
        if asked[0] == 5:
            stop.set()
        return []

    link(next_message, stop, activated).run()
    assert (asked[0], len(activated)) == (5, 3)


def test_a_node_whose_call_was_taken_without_an_answer_waits_until_it_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    """A busy server takes a call for joining after the node gave up on it: the next call finds the node connected."""
    seconds = [1000.0]
    monkeypatch.setattr("steelyard.federate.node_link.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    stop, told = threading.Event(), iter(["late", "connected", "free"])

    def next_message() -> list[Any]:
        stop.set()
        return []

    made, activated = link(next_message, stop, []), list[str]()

    def activate(_: float) -> int:
        activated.append(next(told))
        if activated[-1] == "late":
            seconds[0] += 40.0
            raise httpx.ReadTimeout("timed out")
        if activated[-1] == "connected":
            raise refused(412)
        return 7

    monkeypatch.setattr(made._fleet, "activate", activate)
    made.run()
    assert activated == ["late", "connected", "free"]


def test_a_key_that_another_node_uses_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("steelyard.federate.node_link._FORGOTTEN_SECONDS", 0.1)
    made = link(list, threading.Event(), [])

    def activate(seconds: float) -> int:
        raise refused(412)

    monkeypatch.setattr(made._fleet, "activate", activate)
    with pytest.raises(UserError, match="does no other node use it"):
        made.run()


def test_a_node_that_is_refused_right_after_it_joined_ends():
    stop, activated = threading.Event(), list[float]()

    def next_message() -> list[Any]:
        raise refused()

    with pytest.raises(UserError, match="the server refuses this node: no"):
        link(next_message, stop, activated).run()
    assert len(activated) == 1


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectTimeout("_ssl.c:989: The handshake operation timed out"),
        httpx.ConnectError("EOF occurred in violation of protocol (_ssl.c:1006)"),
    ],
)
def test_a_server_without_time_for_a_handshake_is_called_again(error: httpx.TransportError, messages: list[str]):
    stop, asked = threading.Event(), [0]

    def next_message() -> list[Any]:
        asked[0] += 1
        if asked[0] == 1:
            raise error
        stop.set()
        return []

    link(next_message, stop, []).run()
    assert asked[0] == 2
    assert [line for line in messages if line.endswith("trying again")]


@pytest.mark.parametrize(
    "words",
    [
        "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:1006)",
        "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)",
    ],
)
def test_another_server_is_not_called_again(words: str):
    def next_message() -> list[Any]:
        raise httpx.ConnectError(words)

    with pytest.raises(UserError, match="ca: the server is not the one that it should be"):
        link(next_message, threading.Event(), []).run()


def test_an_empty_answer_that_came_at_once_is_not_asked_for_again_at_once():
    """A server that holds no calls is not to be asked all the time; one that holds them is asked again at once."""
    stop, times = threading.Event(), list[float]()

    def next_message() -> list[Any]:
        times.append(time.monotonic())
        if len(times) == 4:
            stop.set()
        time.sleep(0.0 if len(times) < 3 else 0.4)
        return []

    link(next_message, stop, []).run()
    assert times[1] - times[0] >= 0.1
    assert times[2] - times[1] >= 0.13
    assert times[3] - times[2] < 0.4 + 0.1


def test_a_node_whose_call_is_held_leaves_without_waiting_for_it():
    stop, held, let_go = threading.Event(), threading.Event(), threading.Event()

    def next_message() -> list[Any]:
        held.set()
        let_go.wait(60)
        return []

    made = link(next_message, stop, [])
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    assert held.wait(60)
    assert made.is_waiting
    stop.set()
    begun = time.monotonic()
    made.leave()
    assert time.monotonic() - begun < 30
    let_go.set()
    thread.join(60)
    assert not made.is_waiting
    assert not thread.is_alive()


def test_a_node_at_work_that_takes_long_leaves_all_the_same(monkeypatch: pytest.MonkeyPatch):
    """Its worker may train for hours, and whoever presses Ctrl-C would wait for it."""
    handlers: dict[object, Callable[[], None]] = {}
    made = SimpleNamespace(
        SIGINT="ctrl-c", SIGTERM="end", signal=lambda number, handler: handlers.update({number: handler})
    )
    monkeypatch.setattr(node, "signal", made)
    monkeypatch.setattr(node, "_LEAVING_SECONDS", 0.3)
    monkeypatch.setattr(node, "Workers", lambda spec: SimpleNamespace(close=lambda: told.append("closed")))
    told, killed, begun = list[str](), threading.Event(), time.monotonic()

    class Working:
        is_waiting = False

        def __init__(self, *_: object) -> None:
            pass

        def run(self) -> None:
            handlers["ctrl-c"]()
            assert killed.wait(60)

        def leave(self) -> None:
            told.append("left")
            killed.set()

    monkeypatch.setattr(node, "NodeLink", Working)
    node.run_nodes([SimpleNamespace()], [{}])  # type: ignore[list-item]
    assert told == ["left", "closed"]
    assert 0.3 < time.monotonic() - begun < 30
