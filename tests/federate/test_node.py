"""A node: its file, the side that speaks to the server, the side that works, and what its clients keep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from hypothesis import given
from hypothesis import strategies as st
from tests.kit import assert_refused

from steelyard.base.errors import UserError
from steelyard.clients.flower.calls import CallRefused, NotReached
from steelyard.clients.flower.internals import enter_run
from steelyard.clients.flower.parts import PartsLost, name_message
from steelyard.clients.node import NodeConfig
from steelyard.federate import node
from steelyard.federate.client_app import NodeStates
from steelyard.federate.node import NodeLink
from steelyard.federate.workers import WorkerDied, Workers, WorkersSpec, is_running
from steelyard.runs.checkpoint import write_tensors


def link(
    next_message: Callable[[], list[Any]], stop: Any, activate: Callable[[float], int] = lambda seconds: 7, **more: Any
) -> NodeLink:
    """Return the link of a node whose server answers as the test says."""
    fleet = SimpleNamespace(
        next_message=next_message,
        activate=activate,
        deactivate=lambda: None,
        close=lambda: None,
        send_heartbeat=lambda seconds: None,
        node=7,
        ahead=0.0,
        **more,
    )
    return NodeLink(SimpleNamespace(connection=lambda stop: fleet, key="key"), None, 0, stop)  # type: ignore[arg-type]


def joins(*answers: Any, **more: Any) -> int:
    """Answer all calls for a message, the last when the node is told to stop; return how often it joined."""
    left, joined, stop = list(answers), list[float](), threading.Event()

    def next_message() -> list[Any]:
        found = left.pop(0)
        if not left:
            stop.set()
        if isinstance(found, Exception):
            raise found
        return found

    def activate(seconds: float) -> int:
        joined.append(seconds)
        return 7

    link(next_message, stop, activate, **more).run()
    assert left == []
    return len(joined)


def test_a_message_whose_parts_never_arrive_does_not_end_a_node(messages: list[str]):
    enter_run(1, 7)
    message = Message(RecordDict(), 7, "train", ttl=0.2)
    name_message(message, "m")

    def lost(name: str) -> bytes:
        raise PartsLost("not there")

    joins([(message, ObjectTree(object_id="m"))], [], [], part_puller=lambda run: lost, confirm=lambda *_: None)
    (line,) = [line for line in messages if line.startswith("a message was not answered")]
    assert "PartsLost: not there" in line


def refused(status: int = 401) -> CallRefused:
    return CallRefused(status, "no")


def test_a_server_that_started_anew_is_joined_again():
    assert joins([], refused(), [], refused(), []) == 3


@given(st.lists(st.sampled_from(["late", "given up"]), max_size=8))
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
        if fault:
            clock.append(clock[-1] + 40.0)
            known_until.append(clock[-1] + 30.0)
            raise NotReached("timed out") if fault == "late" else refused(503)
        joined.append(clock[-1])
        return 7

    made = link(list, stop, activate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steelyard.federate.node.time", SimpleNamespace(monotonic=lambda: clock[-1]))
        made.run()
    assert len(joined) == 1


def test_a_key_that_another_node_uses_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("steelyard.federate.node._FORGOTTEN_SECONDS", 0.1)

    def activate(seconds: float) -> int:
        raise refused(412)

    assert_refused(link(list, threading.Event(), activate).run, "used by no other node")


@pytest.mark.parametrize("words", ["_ssl.c:989: The handshake timed out", "EOF occurred in violation of protocol"])
def test_a_server_without_time_for_a_handshake_is_called_again(words: str, messages: list[str]):
    joins(NotReached(words), [])
    assert [line for line in messages if line.endswith("trying again")]


@pytest.mark.parametrize("words", ["CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER"])
def test_another_server_is_not_called_again(words: str):
    assert_refused(lambda: joins(NotReached(f"[SSL: {words}] (_ssl.c:1006)"), []), "ca: the server is not")


def test_a_node_whose_call_is_held_leaves_without_waiting_for_it():
    stop, held, let_go = threading.Event(), threading.Event(), threading.Event()

    def next_message() -> list[Any]:
        held.set()
        let_go.wait(60)
        return []

    made = link(next_message, stop)
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    assert held.wait(60)
    assert made.is_waiting
    stop.set()
    made.leave()  # It comes back, though the call is still held.
    let_go.set()
    thread.join(60)
    assert not thread.is_alive()


def test_what_speaks_to_the_server_never_loads_torch():
    code = "import steelyard.federate.node, sys; print([name for name in ('torch', 'pandas') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
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


def test_workers_remember_in_a_folder_that_outlives_them_but_not_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hidden sums that were opened are remembered; a `state` folder of the owner's comes first."""
    seen: list[NodeConfig] = []

    def workers(spec: WorkersSpec) -> Any:
        seen.extend(map(NodeConfig.read, spec.configs))
        assert all(config.memory and config.memory.parent.is_dir() for config in seen)
        raise UserError("enough seen")

    monkeypatch.setattr(node, "Workers", workers)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(UserError, match="enough"):
        node.run_nodes([], [{"client": "a"}, {"client": "b"}])
    memories = {config.memory for config in seen if config.memory}
    assert len(memories) == 2
    assert not any(memory.parent.exists() for memory in memories)


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
    assert NodeStates(state, "run-a", "other", 2).before(9) == {}
    fresh = NodeStates(RecordDict(), "run-a", "fed", 2, tmp_path)  # A SuperNode that was started anew.
    assert fresh.before(9)["own"].tolist() == [4.0]
    assert NodeStates(RecordDict(), "run-b", "fed", 2, tmp_path).before(9) == {}
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    write_tensors(file, {"0": torch.ones(1)})
    assert_refused(lambda: NodeStates(RecordDict(), "run-a", "fed", 2, tmp_path), "node config state", file)


def test_another_run_leaves_nothing_of_the_one_before_in_the_node_state():
    node = RecordDict()
    NodeStates(node, "run-a", "one", 2).keep(1, {"own": torch.ones(1)})
    NodeStates(node, "run-a", "two/about", 2).keep(1, {"own": torch.ones(1)})
    assert len(node) == 4
    assert NodeStates(node, "run-a", "one", 2).before(2)["own"].tolist() == [1.0]
    NodeStates(node, "run-b", "three", 2)
    assert not node


def test_paths_of_a_node_file_are_meant_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "x.npz").touch()
    (tmp_path / "node.toml").write_text('server = "h:1"\ninsecure = true\nclient = "a"\ndata = "x.npz"\nstate = "/s"\n')
    server, config = node.read_node(tmp_path / "node.toml")
    assert (server.address, server.authority) == ("h:1", None)
    assert config == {"client": "a", "data": str(tmp_path / "x.npz"), "state": "/s"}
