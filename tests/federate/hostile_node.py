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
from flwr.supercore.inflatable.inflatable_object import get_object_id

from steelyard.clients.flower.adapter.messages import (
    MessageParts,
    PartsNotTaken,
    enter_run,
    take_apart,
)
from steelyard.clients.flower.forms import INTRODUCE, PROTOCOL, TRAIN, IntroductionForm
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
    form = json.dumps({"protocol": PROTOCOL})
    key = "models" if kind == TRAIN else "right"
    return RecordDict({"form": ConfigRecord({"json": form}), "arrays": ArrayRecord({key: array})})


def bomb(message: Any) -> MessageParts:
    """Return a message in parts whose array names its one piece TIMES times; the parts' names are made anew."""
    apart, renamed = take_apart(message), dict[bytes, bytes]()
    made: dict[str, bytes] = {}
    for name, body in apart.parts.items():  # Children come first.
        head, _, rest = body.partition(b"\x00")
        kind, children, _ = head.split(b" ")
        if kind == b"Array":
            rest = json.dumps({**json.loads(rest), "arraychunk_ids": [0] * TIMES}, separators=(",", ":")).encode()
        for old, new in renamed.items():
            children, rest = children.replace(old, new), rest.replace(old, new)
        body = b" ".join([kind, children, str(len(rest)).encode()]) + b"\x00" + rest
        renamed[name.encode()] = get_object_id(body).encode()
        made[get_object_id(body)] = body
    head, tree = apart.head, apart.tree
    for old, new in renamed.items():  # Names are all of one length.
        head, tree = head.replace(old, new), tree.replace(old, new)
    return MessageParts(head, tree, made)


class Hostile(NodeLink):
    def __init__(self, address: str, client: str, how: str) -> None:
        super().__init__(Server(address), None, 0, threading.Event())  # type: ignore[arg-type]
        self.client, self.how = client, how

    def _serve(self) -> None:
        while not self._stop.wait(0.1):
            for asked, _ in self._fleet.next_message():
                self.send(asked)

    def send(self, asked: Message) -> None:
        run, kind = asked.metadata.run_id, asked.metadata.message_type
        enter_run(run, self._fleet.node)
        introduces = kind == INTRODUCE
        if introduces and self.how == "pieces":
            about: dict[str, int | list[int]] = {"features": [1, 8, 8], "classes": 10}
            answer = content(IntroductionForm(version="x", clients=[self.client], about=about), {})
        else:
            answer = lists() if self.how == "lists" else pieces(kind)
        reply: Any = Message(answer, reply_to=asked)
        apart = take_apart(reply) if introduces or self.how == "lists" else bomb(reply)
        announced = self._fleet.announce(apart, 0.0)
        with contextlib.suppress(PartsNotTaken):  # The server may have refused it already.
            self._fleet.push_parts(run, apart, announced)
        print(f"sent {sum(map(len, apart.parts.values()))} bytes to {kind}", flush=True)


if __name__ == "__main__":
    for way in sys.argv[3:]:
        threading.Thread(target=Hostile(sys.argv[1], sys.argv[2], way).run, daemon=True).start()
    time.sleep(600)
