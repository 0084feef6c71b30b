"""The side of a node that speaks to the server."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from flwr.app import Message, RecordDict

from steelyard.clients.flower.adapter.messages import PartsLost, PartsTree, enter_run, name_message
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
    server = SimpleNamespace(connection=lambda: fleet, key=None)
    NodeLink(server, None, 0, stop)._serve()  # type: ignore[arg-type]
    assert asked[0] == 3  # It went on to ask for the next message.
    assert [line.partition(":")[0] for line in messages] == ["a message was not answered"]
    assert "ObjectPullError" in messages[0]
