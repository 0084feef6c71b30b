"""The side of a node that speaks to the server."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import Metadata, ObjectTree, PullObjectResponse
from flwr.proto.node_pb2 import Node

from steelyard.federate import node_link
from steelyard.federate.node_link import NodeLink


def test_a_message_whose_parts_never_arrive_does_not_end_a_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    stop, asked = threading.Event(), [0]

    def pull_messages(request: Any) -> PullMessagesResponse:
        asked[0] += 1
        if asked[0] == 3:
            stop.set()
        if asked[0] > 1:
            return PullMessagesResponse()
        metadata = Metadata(run_id=1, message_id="m", dst_node_id=7, ttl=0.2, message_type="train")
        tree = ObjectTree(object_id="m")
        return PullMessagesResponse(messages_list=[MessageProto(metadata=metadata)], message_object_trees=[tree])

    client = SimpleNamespace(
        PullMessages=pull_messages,
        PullObject=lambda request: PullObjectResponse(object_found=True, object_available=False),
        ConfirmMessageReceived=lambda request: None,
    )
    server = SimpleNamespace(client=lambda: (client, None), key=None)
    link = NodeLink(server, None, 0, stop)  # type: ignore[arg-type]
    monkeypatch.setattr(node_link, "message_from_proto", lambda proto: SimpleNamespace(metadata=proto.metadata))
    link._node = Node(node_id=7)
    link._serve()
    assert asked[0] == 3  # It went on to ask for the next message.
    assert "a message was not answered: ObjectPullError" in capsys.readouterr().out
