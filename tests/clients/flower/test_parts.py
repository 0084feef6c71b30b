"""Messages in parts: read back as they were, and refused before anything is put together that would be too large."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.clients.flower.flower_fakes import FakeGrid, assert_taken_back  # gives this run its papers too

from steelyard.clients.flower import mailbox
from steelyard.clients.flower import wire as packing
from steelyard.clients.flower.calls import FoundAnswer
from steelyard.clients.flower.parts import PartsTree, fetch, opened, take_apart
from steelyard.clients.flower.roster import introduction as read_introduction
from steelyard.clients.flower.wire import AskForm, IntroductionForm, Refused, content, split

LARGEST = 16 << 20


def sent(body: RecordDict | Error) -> tuple[str, PartsTree, dict[str, bytes]]:
    message: Any = Message(body, 5, "train.task") if isinstance(body, RecordDict) else None
    if message is None:
        message = Message(body, reply_to=Message(RecordDict(), 5, "train.task"))
    apart = take_apart(message)
    return message.metadata.message_id, ObjectTree.FromString(apart.tree), apart.parts


def received(body: RecordDict | Error, largest: int = LARGEST) -> Message:
    name, tree, parts = sent(body)
    return opened(name, fetch(name, tree, parts.__getitem__, largest, 5.0), largest)


@settings(max_examples=25, deadline=None)
@given(text=st.text(max_size=300), sizes=st.lists(st.integers(0, 2000), max_size=4))
def test_a_message_is_read_as_it_was_written(text: str, sizes: list[int]):
    rng = np.random.default_rng(1)
    arrays = {f"a{number}": rng.normal(size=size).astype("f4") for number, size in enumerate(sizes)}
    form, found = split(received(content(AskForm(experiment=text), arrays)).content)
    assert AskForm.read(form).experiment == text
    assert set(found) == set(arrays)
    for name, values in arrays.items():
        np.testing.assert_array_equal(packing.unpack(found[name], name, "<f4", (None,)), values)


def test_an_array_of_many_and_of_equal_pieces_is_put_together():
    values = np.zeros(4 << 20, dtype="f4")  # 16 MiB: four pieces, three of them the same.
    values[-1] = 7
    _, found = split(received(content(AskForm(), {"a": values}), 20 << 20).content)
    np.testing.assert_array_equal(packing.unpack(found["a"], "a", "<f4", (None,)), values)


def test_one_piece_named_many_times_is_refused_before_it_is_put_together(monkeypatch: pytest.MonkeyPatch):
    name, tree, parts = sent(content(AskForm(), {"a": np.zeros(200_000, dtype="f4")}))  # 0.8 MB
    _pieces(f'"arraychunk_ids": {[0] * 2_000}')(parts)  # 1.6 GB
    stop = threading.Event()
    tracemalloc.start()
    with pytest.raises(Refused, match=r"size: more than 16777216 bytes"):
        fetch(name, tree, parts.__getitem__, LARGEST, 5.0)
    with pytest.raises(Refused, match=r"size: more than 16777216 bytes"):
        opened(name, parts, LARGEST)
    heard, found = queue.SimpleQueue[object](), [FoundAnswer(name, "asked", tree)]
    source: Any = SimpleNamespace(look=lambda names: found, part_puller=lambda: parts.__getitem__, confirm=str)
    monkeypatch.setattr(mailbox, "AnswerSource", SimpleNamespace(of=lambda grid: source))
    asked, grid = {"asked": mailbox.PendingRequest("asked", LARGEST)}, FakeGrid({})
    mailbox.AnswerPoller(grid, asked, time.monotonic() + 30, lambda name, answer: heard.put(answer)).start(stop)  # type: ignore[arg-type]
    assert "size: more than 16777216 bytes" in str(heard.get(timeout=30))
    stop.set()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def test_no_more_is_fetched_than_an_answer_can_have():
    asked: list[str] = []
    name, tree, parts = sent(content(AskForm(), {f"a{n}": np.full(200_000, n, dtype="f4") for n in range(8)}))

    def pull(part: str) -> bytes:
        asked.append(part)
        return parts[part]

    with pytest.raises(Refused, match="size: more than 2000000 bytes"):
        fetch(name, tree, pull, 2_000_000, 5.0)
    assert len(asked) < len(parts)


def test_a_tree_of_too_many_names_is_refused_before_the_first_is_fetched():
    tree = ObjectTree(object_id="m", children=[ObjectTree(object_id=str(number)) for number in range(100)])
    with pytest.raises(Refused, match="size: 101 parts; allowed: at most 65"):
        fetch("m", tree, lambda part: pytest.fail("was fetched"), 1 << 20, 5.0)


def _config(body: Callable[[bytes], bytes]) -> Callable[[dict[str, bytes]], None]:
    def change(parts: dict[str, bytes]) -> None:
        for part, old in parts.items():
            if old.startswith(b"ConfigRecord "):
                new = body(old.partition(b"\x00")[2])
                parts[part] = f"ConfigRecord  {len(new)}".encode() + b"\x00" + new

    return change


def _without_its_piece(parts: dict[str, bytes]) -> None:
    parts.pop(next(name for name, body in parts.items() if body.startswith(b"ArrayChunk ")))


def _pieces(numbers: str) -> Callable[[dict[str, bytes]], None]:
    def change(parts: dict[str, bytes]) -> None:
        for part, old in parts.items():
            if old.startswith(b"Array "):
                head, _, body = old.partition(b"\x00")
                body = body.replace(b'"arraychunk_ids": [0]', numbers.encode())
                parts[part] = b" ".join([*head.split(b" ")[:2], str(len(body)).encode()]) + b"\x00" + body

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_without_its_piece, "parts: one is missing"),
        (_config(lambda body: body + body), "form: not one JSON text"),
        (_config(lambda body: body[:-1] + b"\xff"), "form: not a text"),
        (_pieces('"arraychunk_ids": [1]'), "parts: an array that names pieces which it does not have"),
        (_pieces('"arraychunk_ids": [true]'), "parts: an array that names pieces which it does not have"),
        (_pieces('"arraychunk_ids": ' + "[" * 5_000), "parts: one that is not JSON"),
        (_pieces('"arraychunk_ids": [' + "0," * 50_000 + "0]"), "size: a Array of "),
    ],
)
def test_parts_of_another_make_are_refused(change: Callable[[dict[str, bytes]], None], reason: str):
    name, _, parts = sent(content(AskForm(), {"a": np.zeros(3, dtype="f4")}))
    change(parts)
    assert_taken_back(lambda: opened(name, parts, LARGEST), reason)


@settings(max_examples=200, deadline=None)
@given(kind=st.integers(0, 5), place=st.floats(0, 1), put=st.binary(max_size=4), cut=st.integers(0, 4))
def test_whatever_bytes_a_part_holds_the_message_is_read_or_refused(kind: int, place: float, put: bytes, cut: int):
    name, _, parts = sent(content(AskForm(), {"a": np.arange(3, dtype="f4")}))
    part = list(parts)[kind]
    at = int(place * len(parts[part]))
    parts[part] = parts[part][:at] + put + parts[part][at + cut :]
    # `unreadable` makes a line of any error.
    with contextlib.suppress(Refused, ValueError, TypeError, IndexError, KeyError, DecodeError):
        assert isinstance(opened(name, parts, LARGEST), Message)


def test_an_introduction_of_ten_thousand_clients_is_taken_and_one_of_a_million_lists_is_not():
    form = IntroductionForm(version="1", clients=[f"hospital-{number:06d}-{'x' * 100}" for number in range(10_000)])
    assert len(read_introduction(content(form, {})).clients) == 10_000
    bomb = RecordDict({"form": ConfigRecord({"json": "[" + "[]," * 10**6 + "[]]"}), "arrays": packing.pack({})})
    with pytest.raises(Refused, match="once it is read"):
        read_introduction(bomb)
