"""Messages as Flower carries them: in parts that name each other, with a head and a tree of the parts' names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.recorddict_pb2 import ConfigRecordValue
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError, pull_objects
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity

PartsTree = ObjectTree
"""The names of a message's parts, as a tree."""
PartsLost = ObjectPullError
"""Parts of a message did not arrive."""
PartsNotTaken = ObjectPushError
"""The SuperLink did not take parts of a message."""
RunNotRunning = RunNotRunningException
"""The SuperLink does not run this run any more. Not an Exception in Flower."""
TEXT_TAG = ConfigRecordValue.STRING_FIELD_NUMBER << 3 | 2
"""The first byte of a text among the values of a ConfigRecord."""
RAISED, DIED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.CLIENT_APP_CRASHED
GONE = ErrorCode.NODE_UNAVAILABLE
ERRORS = {
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "its ClientApp could not be loaded",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "raised an error",
    ErrorCode.MESSAGE_UNAVAILABLE: "its answer is no longer available",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its answer is no longer available",
    ErrorCode.NODE_UNAVAILABLE: "its node is gone",
    ErrorCode.INVALID_FAB: "its node refused to run this app",
    ErrorCode.CLIENT_APP_CRASHED: "its ClientApp died",
}
"""Flower's errors in words that say what they mean for the round."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds before a part that has not arrived yet is asked for again, the first time and at most.

A message is there before its parts, so this happens in every round. Flower's own pauses are a second at first and ten
in the end, which is longer than the work itself where models are small.
"""


@dataclass(frozen=True)
class MessageParts:
    """A message as it is sent."""

    head: bytes
    """The message without its content."""
    tree: bytes
    parts: dict[str, bytes]


def enter_run(run: int, node: int) -> None:
    """Say on behalf of which run and node this process makes messages; Flower makes none without."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, node, 1


def take_apart(message: Message) -> MessageParts:
    """Return a message in parts, named after its content."""
    made: Any = message
    name_message(message, made.object_id)
    with no_object_id_recompute():
        tree = get_object_tree(made).SerializeToString()
        head = message_to_proto(remove_content_from_message(made)).SerializeToString()
        return MessageParts(head, tree, {name: part.deflate() for name, part in get_all_nested_objects(made).items()})


def error_parts(asked: Message, code: int, reason: str) -> MessageParts:
    """Return the answer to a message that could not be answered."""
    enter_run(asked.metadata.run_id, asked.metadata.dst_node_id)
    return take_apart(Message(Error(code, reason), reply_to=asked))


def name_message(message: Message, name: str) -> None:
    """Give a message its name, which Flower itself sets when it sends one."""
    message.metadata.__dict__["_message_id"] = name


def part_names(tree: PartsTree) -> list[str]:
    """Return the names of all parts of a message, each once."""
    return list(dict.fromkeys(nested.object_id for nested in iterate_object_tree(tree)))


def pull_parts(names: Sequence[str], pull: Callable[[str], bytes], at_once: int, seconds: float) -> dict[str, bytes]:
    """Fetch parts, so many at the same time; raises `PartsLost` where one has not arrived after so many seconds."""
    return pull_objects(
        *(list(names), pull),
        max_concurrent_pulls=at_once,
        max_time=seconds,
        initial_backoff=_FIRST_PAUSE,
        backoff_cap=_LONGEST_PAUSE,
    )
