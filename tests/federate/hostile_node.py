"""Nodes that answer with little on the wire and gigabytes in memory: python hostile_node.py ADDRESS CLIENT HOW..."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id, get_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.task_identity import TaskIdentity

from steelyard.clients.flower.forms import INTRODUCE, TRAIN, IntroductionForm
from steelyard.clients.flower.wire import content
from steelyard.federate.node_link import NodeLink, Server

PIECE, TIMES = 100_000, 20_000
"""Bytes of one piece, and how often it is named: 2 GB."""


def lists() -> RecordDict:
    """A form of a million empty lists."""
    return RecordDict({"form": ConfigRecord({"json": "[" + "[]," * 10**6 + "[]]"}), "arrays": ArrayRecord({})})


def pieces(kind: str) -> RecordDict:
    """An answer whose array is one piece; `bomb` names it many times."""
    array = Array("float32", (1, 3), "numpy.ndarray", np.zeros(PIECE // 4, dtype="f4").tobytes())
    form = json.dumps({"protocol": 2})
    key = "models" if kind == TRAIN else "right"
    return RecordDict({"form": ConfigRecord({"json": form}), "arrays": ArrayRecord({key: array})})


def bomb(message: Any) -> tuple[Any, ObjectTree, dict[str, bytes]]:
    """Return a message in parts whose array names its one piece TIMES times; the parts' names are made anew."""
    message.metadata.__dict__["_message_id"] = message.object_id
    parts = {name: nested.deflate() for name, nested in get_all_nested_objects(message).items()}
    tree, renamed = get_object_tree(message), dict[bytes, bytes]()
    made: dict[str, bytes] = {}
    for name, body in parts.items():  # Children come first.
        head, _, rest = body.partition(b"\x00")
        kind, children, _ = head.split(b" ")
        if kind == b"Array":
            rest = json.dumps({**json.loads(rest), "arraychunk_ids": [0] * TIMES}, separators=(",", ":")).encode()
        for old, new in renamed.items():
            children, rest = children.replace(old, new), rest.replace(old, new)
        body = b" ".join([kind, children, str(len(rest)).encode()]) + b"\x00" + rest
        renamed[name.encode()] = get_object_id(body).encode()
        made[get_object_id(body)] = body
    written = tree.SerializeToString()
    for old, new in renamed.items():
        written = written.replace(old, new)
    message.metadata.__dict__["_message_id"] = renamed[message.object_id.encode()].decode()
    return message_to_proto(remove_content_from_message(message)), ObjectTree.FromString(written), made


class Hostile(NodeLink):
    def __init__(self, address: str, client: str, how: str) -> None:
        super().__init__(Server(address), None, 0, threading.Event())  # type: ignore[arg-type]
        self.client, self.how = client, how

    def _serve(self) -> None:
        while not self._stop.wait(0.1):
            found = self._client.PullMessages(PullMessagesRequest(node=self._node))
            if found.messages_list:
                self.send(message_from_proto(found.messages_list[0]))

    def send(self, asked: Message) -> None:
        assert self._node is not None
        run, kind = asked.metadata.run_id, asked.metadata.message_type
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run, 1, self._node.node_id
        introduces = kind == INTRODUCE
        if introduces and self.how == "pieces":
            about: dict[str, int | list[int]] = {"features": [1, 8, 8], "classes": 10}
            answer = content(IntroductionForm(version="x", clients=[self.client], about=about), {})
        else:
            answer = lists() if self.how == "lists" else pieces(kind)
        reply: Any = Message(answer, reply_to=asked)
        if introduces or self.how == "lists":
            reply.metadata.__dict__["_message_id"] = reply.object_id
            parts = {name: nested.deflate() for name, nested in get_all_nested_objects(reply).items()}
            bare, tree = message_to_proto(remove_content_from_message(reply)), get_object_tree(reply)
        else:
            bare, tree, parts = bomb(reply)
        request = PushMessagesRequest(node=self._node, messages_list=[bare], message_object_trees=[tree])
        pushed = self._client.PushMessages(request)
        push = make_push_object_fn_protobuf(self._client.PushObject, self._node, run, pushed.session_id)
        with contextlib.suppress(ObjectPushError):  # The server may have refused it already.
            for name in pushed.objects_to_push:
                push(name, parts[name])
        print(f"sent {sum(map(len, parts.values()))} bytes to {kind}", flush=True)


if __name__ == "__main__":
    for way in sys.argv[3:]:
        threading.Thread(target=Hostile(sys.argv[1], sys.argv[2], way).run, daemon=True).start()
    time.sleep(600)
