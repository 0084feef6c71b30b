"""All of Flower that it does not document and that a federation needs: twelve modules, each with its reason.

Nothing else of ours imports any (tests/clients/flower/test_internals.py). Flower may change them with any version, so
that a federation takes the versions that it was tried on. The calls of nodes and operators need no more than their
messages' description: `calls` speaks Flower's protocol by itself.
"""
# ruff: noqa: E402 -- a version that may have none of this is refused in one line first.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

from steelyard.clients.flower import check_version

check_version()

# What is wrong with an answer, by its code.
from flwr.common.constant import ErrorCode as ErrorCode

# The head of a message, which is sent before its parts.
from flwr.common.serde import message_from_proto as message_from_proto
from flwr.common.serde import message_to_proto as message_to_proto

# The calls of who registers nodes' keys, stops runs and asks how they ended.
from flwr.proto.control_pb2 import DESCRIPTOR as _CONTROL

# The calls of nodes.
from flwr.proto.fleet_pb2 import DESCRIPTOR as _FLEET

# One look at all answers. Flower's own grid fetches them whole and in turn: one that never comes holds up the others.
from flwr.proto.runtime_pb2 import PullAppMessagesRequest as PullAppMessagesRequest

# A message's parts, each made once; Flower's objects make theirs anew whenever somebody asks for a name.
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects as get_all_nested_objects
from flwr.supercore.inflatable.inflatable_object import get_object_tree as get_object_tree
from flwr.supercore.inflatable.inflatable_object import no_object_id_recompute as no_object_id_recompute

# What Flower's grid raises where its run was stopped. It is no Exception, so that nothing else would catch it.
from flwr.supercore.run import RunNotRunningException as _Stopped

# On behalf of which run and node a process makes messages; Flower makes none without.
from flwr.supercore.task_identity import TaskIdentity as _TaskIdentity

RunNotRunning = _Stopped
FLEET: Any = _FLEET.services_by_name["Fleet"]
CONTROL: Any = _CONTROL.services_by_name["Control"]


def enter_run(run: int, node: int) -> None:
    """Say on behalf of which run and node this process makes messages."""
    _TaskIdentity.run_id, _TaskIdentity.node_id, _TaskIdentity.task_id = run, node, 1


def stores() -> tuple[Any, Any]:
    """Return the classes of what a SuperLink keeps in memory: its state, and the parts of messages.

    Ours keep parts in files, since large models must not fill the memory, bound what a node may send in answer, and
    tell for whom a message has come. Nodes need none of it: imported late, for speed of start.
    """
    from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
    from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

    return InMemoryLinkState, InMemoryObjectStore


def handlers() -> dict[str, tuple[type[Any], Callable[..., Any]]]:
    """Return, by path, the message and the function that answer each call of which a round consists.

    A call costs a SuperLink some fifteen milliseconds of a core in the layers before these, and one or two here.
    Imported late, for speed of start.
    """
    from flwr.superlink.servicer.fleet import fleet_handlers
    from flwr.superlink.servicer.runtime import runtime_handlers

    parts = ("push-object", "pull-object", "confirm-message-received", "push-messages", "pull-messages")
    found: dict[str, tuple[type[Any], Callable[..., Any]]] = {}
    for side, module, calls in (
        ("fleet", fleet_handlers, (*parts, "send-node-heartbeat")),
        ("runtime", runtime_handlers, (*parts, "get-nodes")),
    ):
        for call in calls:
            handler = getattr(module, call.replace("-", "_"))
            found[f"/v1/{side}/{call}"] = get_type_hints(handler)["request"], handler
    return found
