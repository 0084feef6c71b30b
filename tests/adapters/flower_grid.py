"""A grid in this process: real messages of Flower's, answered by functions in place of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

try:
    from flwr.supercore.task_identity import TaskIdentity
except ImportError:  # Older versions make messages for whatever run and node.
    TaskIdentity = SimpleNamespace()

Arrays = Mapping[str, NDArray[Any]]
Client = Callable[[dict[str, NDArray[Any]]], tuple[Arrays, Mapping[str, float]] | str | None]
"""From the model that was sent to a model and metrics, to the reason of an error, or to no reply at all."""


def enter_run(run: int, node: int) -> None:
    """Make messages on behalf of a run and a node."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, node, 1


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
    """The part of Flower's grid that strategies use; a node answers when its reply is pulled."""

    def __init__(
        self, clients: Mapping[int, Client], tests: Mapping[int, Mapping[str, Any] | None] | None = None
    ) -> None:
        self.clients, self.tests = clients, dict(tests or {})
        self._sent: dict[str, Message] = {}
        self.pulls: list[int] = []
        """How many replies each call brought."""

    def get_node_ids(self) -> list[int]:
        enter_run(1, 1)
        return sorted(self.clients)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names: list[str] = []
        for message in messages:
            names.append(f"{message.metadata.message_type}-{message.metadata.dst_node_id}-{len(self.pulls)}")
            message.metadata.__dict__["_message_id"] = names[-1]
            self._sent[names[-1]] = message
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        answers = [self._answer(self._sent[name]) for name in message_ids]
        found = [message for message in answers if message is not None]
        self.pulls.append(len(found))
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        if message.metadata.message_type == "evaluate":
            enter_run(1, node)
            found = self.tests.get(node, {"num-examples": 1})
            if found is None:
                return Message(Error(code=1, reason="no rows"), reply_to=message)
            return Message(RecordDict({"metrics": MetricRecord(dict(found))}), reply_to=message)
        (sent,) = message.content.array_records.values()
        found = self.clients[node]({name: array.numpy() for name, array in sent.items()})
        if isinstance(found, str):
            enter_run(1, node)
            return Message(Error(code=1, reason=found), reply_to=message)
        return None if found is None else answered(message, *found)
