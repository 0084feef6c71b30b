"""A node: its file, the side that speaks to the server, the side that works, and what its clients keep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from flwr.app import Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from tests.kit import assert_refused

from steelyard.clients.flower.adapter.messages import PartsLost, PartsTree, enter_run, name_message
from steelyard.errors import UserError
from steelyard.federate import node
from steelyard.federate.node_link import NodeLink
from steelyard.federate.node_state import NodeStates
from steelyard.federate.node_workers import WorkerDied, Workers, WorkersSpec
from steelyard.federate.processes import is_running
from steelyard.runs.tensor_files import write_tensors


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


def link(
    next_message: Callable[[], list[Any]],
    stop: threading.Event,
    activated: list[float],
    activate: Callable[[float], int] | None = None,
) -> NodeLink:
    """Return the link of a node whose server answers as the test says."""

    def join(seconds: float) -> int:
        activated.append(seconds)
        return 7

    fleet = SimpleNamespace(
        next_message=next_message, activate=activate or join, deactivate=lambda: None, close=lambda: None
    )
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


@given(st.lists(st.sampled_from(["late", "given up", "handshake"]), max_size=8))
def test_a_node_joins_however_often_a_busy_server_gave_no_answer(faults: list[str]) -> None:
    """A server that 50 nodes call at once takes calls after their nodes gave up: the next finds the node connected.

    Its proxy gives up too, and answers 503 to a call that the SuperLink took.
    """
    clock, known_until, joined = [1000.0], [0.0], list[float]()

    def waited(seconds: float) -> bool:
        clock.append(clock[-1] + seconds)
        return bool(joined)

    stop: Any = SimpleNamespace(is_set=lambda: bool(joined), wait=waited)

    def activate(_: float) -> int:
        if clock[-1] < known_until[-1]:
            raise refused(412)
        fault = faults.pop() if faults else ""
        if fault in ("late", "given up"):
            clock.append(clock[-1] + 40.0)
            known_until.append(clock[-1] + 30.0)
            raise httpx.ReadTimeout("timed out") if fault == "late" else refused(503)
        if fault == "handshake":
            raise httpx.ConnectTimeout("_ssl.c:989: The handshake operation timed out")
        joined.append(clock[-1])
        return 7

    made = link(list, stop, [], activate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steelyard.federate.node_link.time", SimpleNamespace(monotonic=lambda: clock[-1]))
        made.run()
    assert len(joined) == 1


def test_a_key_that_another_node_uses_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("steelyard.federate.node_link._FORGOTTEN_SECONDS", 0.1)

    def activate(seconds: float) -> int:
        raise refused(412)

    made = link(list, threading.Event(), [], activate)
    with pytest.raises(UserError, match="does no other node use it"):
        made.run()


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


def test_what_speaks_to_the_server_never_loads_torch():
    code = "import steelyard.federate.node, sys; print([name for name in ('torch', 'pandas') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_worker_of_a_single_node_is_no_copy_and_one_that_died_is_replaced(nodes: int):
    workers = Workers(WorkersSpec([{"client": "a"}] * nodes))
    try:
        first = workers.worker(0)
        assert (first.pid == workers.pid) == (nodes == 1)
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            first.ask(b"work", 60)
        assert first.gone
        second = workers.worker(0)
        assert second.pid != first.pid
        assert not second.gone
    finally:
        workers.close()
    assert not is_running(workers.pid)


def test_node_states_roll_back_and_outlive_the_node(tmp_path: Path):
    state = RecordDict()
    kept = NodeStates(state, "run-a", "fed", 2, tmp_path)
    assert kept.before(1) == {}
    for round in (1, 2, 4):
        kept.keep(round, {"own": torch.tensor([float(round)])})
    again = NodeStates(state, "run-a", "fed", 2)
    assert again.before(5)["own"].tolist() == [4.0]
    assert again.before(4)["own"].tolist() == [2.0]
    assert again.before(2) == {}  # Only the last two are kept.
    again.keep(3, {"own": torch.tensor([30.0])})  # A resumed run repeats: what came after is dropped.
    assert again.before(9)["own"].tolist() == [30.0]
    assert NodeStates(state, "run-b", "fed", 2).before(9) == {}
    assert NodeStates(state, "run-a", "other", 2).before(9) == {}
    fresh = NodeStates(RecordDict(), "run-a", "fed", 2, tmp_path)  # A SuperNode that was started anew.
    assert fresh.before(9)["own"].tolist() == [4.0]
    assert NodeStates(RecordDict(), "run-b", "fed", 2, tmp_path).before(9) == {}
    empty = RecordDict()
    NodeStates(empty, "run-a", "fed", 2).keep(1, {})
    assert not empty


def test_another_run_leaves_nothing_of_the_one_before_in_the_node_state():
    node = RecordDict()
    NodeStates(node, "run-a", "one", 2).keep(1, {"own": torch.ones(1)})
    NodeStates(node, "run-a", "two/about", 2).keep(1, {"own": torch.ones(1)})
    assert len(node) == 4
    assert NodeStates(node, "run-a", "one", 2).before(2)["own"].tolist() == [1.0]
    NodeStates(node, "run-b", "three", 2)
    assert not node


def test_a_file_of_another_make_is_named(tmp_path: Path):
    NodeStates(RecordDict(), "run", "fed", 2, tmp_path).keep(1, {"own": torch.ones(1)})
    (file,) = tmp_path.iterdir()
    write_tensors(file, {"0": torch.ones(1)})
    with pytest.raises(UserError, match=r"node config state: .* is not a file of states of this version"):
        NodeStates(RecordDict(), "run", "fed", 2, tmp_path)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('server = "here"\nclient = "a"\n', ("server", "'here'")),
        ('server = "h:1"\nclient = "a"\n', ("ca", "None")),
        ('server = "h:1"\ninsecure = true\nclient = "a"\nalow = "x"\n', ("alow", "'allow'")),
        ('server = "h:1"\ninsecure = true\n', ("got no clients",)),
        ("server = ", ("not TOML",)),
    ],
)
def test_a_wrong_node_file_is_named(tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "node.toml").write_text(text)
    assert_refused(lambda: node.read_node(tmp_path / "node.toml"), *parts)


def test_paths_of_a_node_file_are_meant_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "x.npz").touch()
    (tmp_path / "node.toml").write_text('server = "h:1"\ninsecure = true\nclient = "a"\ndata = "x.npz"\nstate = "/s"\n')
    server, config = node.read_node(tmp_path / "node.toml")
    assert (server.address, server.authority) == ("h:1", None)
    assert config == {"client": "a", "data": str(tmp_path / "x.npz"), "state": "/s"}
