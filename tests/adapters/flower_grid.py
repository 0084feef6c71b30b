"""A grid in this process: real messages of Flower's, answered by functions in place of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from steelyard.clients.flower.adapter.messages import enter_run

Arrays = Mapping[str, NDArray[Any]]
Client = Callable[[dict[str, NDArray[Any]]], tuple[Arrays, Mapping[str, float]] | str]
"""From the model that was sent to a model and metrics, or to the reason of an error."""


def record(arrays: Arrays) -> ArrayRecord:
    """Return arrays as Flower sends them."""
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def asked(node: int, arrays: Arrays, kind: str = "train") -> Message:
    """Return what a server sends to a node."""
    enter_run(1, 1)
    return Message(RecordDict({"arrays": record(arrays)}), dst_node_id=node, message_type=kind)


def answered(message: Message, arrays: Arrays, metrics: Mapping[str, Any]) -> Message:
    """Return what the node answers."""
    enter_run(1, message.metadata.dst_node_id)
    content = RecordDict({"arrays": record(arrays), "metrics": MetricRecord(dict(metrics))})
    return Message(content, reply_to=message)


class Nodes:
    """The part of Flower's grid that strategies use."""

    def __init__(self, clients: Mapping[int, Client]) -> None:
        self.clients = clients

    def get_node_ids(self) -> list[int]:
        enter_run(1, 1)
        return sorted(self.clients)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return [self._answer(message) for message in messages]

    def _answer(self, message: Message) -> Message:
        (sent,) = message.content.array_records.values()
        found = self.clients[message.metadata.dst_node_id]({name: array.numpy() for name, array in sent.items()})
        if isinstance(found, str):
            enter_run(1, message.metadata.dst_node_id)
            return Message(Error(code=1, reason=found), reply_to=message)
        return answered(message, *found)
