"""What a SuperLink keeps: parts of messages in files, and news of messages that are whole."""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict

from steelyard.clients.flower.adapter import link_state
from steelyard.clients.flower.adapter.link_state import NodeMessages, PartsInFiles
from steelyard.clients.flower.adapter.messages import MessageParts, PartsTree, enter_run, take_apart
from steelyard.clients.flower.parts import LARGEST_MESSAGE, group_of, largest_answer


@pytest.fixture
def apart() -> MessageParts:
    enter_run(1, 7)
    return take_apart(Message(RecordDict({"form": ConfigRecord({"json": "text"})}), 7, "train.task", ttl=9.0))


def test_parts_lie_in_files_until_nobody_needs_them(apart: MessageParts, tmp_path: Path):
    store, tree = PartsInFiles(tmp_path), PartsTree.FromString(apart.tree)
    assert sorted(store.preregister(1, tree)) == sorted(apart.parts)
    assert {store.get(name) for name in apart.parts} == {b""}  # Announced, not there.
    for name, part in apart.parts.items():
        store.put(name, part)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == apart.parts
    assert {name: store.get(name) for name in apart.parts} == apart.parts
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


def test_a_part_that_the_disk_does_not_take_has_not_arrived(apart: MessageParts, tmp_path: Path):
    store, tree = PartsInFiles(tmp_path / "gone"), PartsTree.FromString(apart.tree)
    store.preregister(1, tree)
    with pytest.raises(OSError, match="gone"):
        store.put(tree.object_id, apart.parts[tree.object_id])
    assert store.get(tree.object_id) == b""


def test_a_message_is_news_once_all_parts_of_its_push_are_there(monkeypatch: pytest.MonkeyPatch):
    base = link_state.InMemoryLinkState
    missing = {"m1": ["m1", "model"], "m2": ["m2", "model"], "answer": ["answer"]}

    def announced(self: object, message: Any, tree: str, session: str) -> tuple[bool, list[str]]:
        return True, missing[tree]

    held = {"nodes": {7: key(b"7"), 8: key(b"8")}, "message_ins_store": {}}
    monkeypatch.setattr(base, "__init__", lambda self, *_: self.__dict__.update(held))
    monkeypatch.setattr(base, "store_message_and_object_tree", announced)
    monkeypatch.setattr(base, "store_object", lambda self, run, session, name, content: content != b"refused")
    noted: list[list[str]] = []
    state = NodeMessages(None, None, noted.append)
    state.store_message_and_object_tree(message_to(7), "m1", "push")
    state.store_message_and_object_tree(message_to(8), "m2", "push")
    state.store_message_and_object_tree(message_to(1, "m1"), "answer", "other")  # A node's answer is no news.
    for name in ("m1", "model", "answer"):
        state.store_object(1, "other" if name == "answer" else "push", name, b"part")
    state.store_object(1, "push", "m2", b"refused")
    assert noted == []
    state.store_object(1, "push", "m2", b"part")
    assert noted == [[b64encode(b"7").decode(), b64encode(b"8").decode()]]


def test_a_node_sends_no_more_than_its_message_allows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    base = link_state.InMemoryLinkState
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
    assert [record.message for record in caplog.records] == [
        "node 7: its answer is larger than what was asked for; the rest is not kept"
    ]
    state.delete_messages({"asked"})
    assert state.store_object(1, "push-3", "f", b"0" * 100)  # A push that is over; Flower itself refuses it.


def test_a_server_app_has_time_to_start_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch):
    base, begun = link_state.InMemoryLinkState, datetime(2026, 11, 17, tzinfo=UTC)
    record = SimpleNamespace(active_until=begun + timedelta(seconds=30))
    monkeypatch.setattr(base, "__init__", lambda self, *_: setattr(self, "task_token_store", {4: record}))
    monkeypatch.setattr(base, "claim_task", lambda self, task: "token" if task == 4 else None)
    state = NodeMessages(None, None, lambda _: None)
    assert (state.claim_task(4), state.claim_task(5)) == ("token", None)
    assert record.active_until == begun + timedelta(seconds=150)


@pytest.mark.parametrize("group", ["", "3", "3:", "3:many"])
def test_a_message_that_says_nothing_of_its_answer_has_the_bound_of_any_message(group: str):
    assert largest_answer(group) == LARGEST_MESSAGE


def key(content: bytes) -> SimpleNamespace:
    return SimpleNamespace(public_key=content)


def message_to(node: int, answers: str = "") -> Any:
    return SimpleNamespace(metadata=SimpleNamespace(dst_node_id=node, reply_to_message_id=answers))
