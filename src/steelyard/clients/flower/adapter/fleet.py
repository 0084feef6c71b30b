"""A node's calls to its server, in Flower's fleet protocol; every one of them is signed with the node's key."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.common.serde import message_from_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import push_object_contents_from_iterable
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient

from steelyard.clients.flower.adapter.messages import MessageParts, PartsTree
from steelyard.clients.flower.adapter.signed_calls import SignedCalls
from steelyard.clients.flower.adapter.transport import bound_answers


@dataclass(frozen=True)
class Announced:
    """An answer that the server knows of; its parts are still to be sent."""

    session: str
    wanted: frozenset[str]
    """The parts that the server does not have yet."""


class FleetConnection:
    """One node's connection to its server; `activate` comes first. Calls raise what httpx raises; none is repeated once
    `stop` is set.
    """

    def __init__(
        self, address: str, authority: bytes | None, key: ec.EllipticCurvePrivateKey, stop: threading.Event
    ) -> None:
        public = key.public_key()
        self._pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        self._calls = SignedCalls(key, stop)
        signing = [RuntimeVersionHttpInterceptor(component_name="SuperNode"), self._calls]
        self._client = FleetHttpClient.from_server_address(address, authority is None, authority, signing)
        bound_answers(self._client)
        self._node = Node()

    @property
    def node(self) -> int:
        """The server's number for this node; 0 before it is activated."""
        return self._node.node_id

    @property
    def ahead(self) -> float:
        """By how many seconds our clock is ahead of the server's, behind where negative; 0 where they agree."""
        return self._calls.ahead

    def register(self) -> None:
        """Make the key known, where a server lets anybody in."""
        self._client.RegisterNode(RegisterNodeFleetRequest(public_key=self._pem))

    def unregister(self) -> None:
        """Make the key unknown again."""
        self._client.UnregisterNode(UnregisterNodeFleetRequest(node_id=self.node))

    def activate(self, seconds: float) -> int:
        """Join, with a sign of life every so many seconds; returns the server's number for this node."""
        request = ActivateNodeRequest(public_key=self._pem, heartbeat_interval=seconds)
        self._node = Node(node_id=self._client.ActivateNode(request).node_id)
        return self.node

    def deactivate(self) -> None:
        """Leave."""
        self._client.DeactivateNode(DeactivateNodeRequest(node_id=self.node))

    def send_heartbeat(self, seconds: float) -> None:
        """Give a sign of life; the next one comes in so many seconds."""
        self._client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=seconds))

    def next_message(self) -> list[tuple[Message, PartsTree]]:
        """Return the next message without its content, with the names of its parts; an empty list where none is."""
        found = self._client.PullMessages(PullMessagesRequest(node=self._node))
        if not found.messages_list:
            return []
        head = found.messages_list[0]
        head.ClearField("content")  # What it says comes in parts, which are counted.
        head.content.SetInParent()
        return [(message_from_proto(head), found.message_object_trees[0])]

    def part_puller(self, run: int) -> Callable[[str], bytes]:
        """Return what fetches one part of a message of a run, by name."""
        return make_pull_object_fn_protobuf(self._client.PullObject, self._node, run)

    def confirm(self, run: int, name: str) -> None:
        """Say that a message has arrived, so that the server need not keep it."""
        make_confirm_message_received_fn_protobuf(self._client.ConfirmMessageReceived, self._node, run)(name)

    def announce(self, answer: MessageParts, seconds: float) -> Announced:
        """Report an answer to the server, which took so many seconds."""
        request = PushMessagesRequest(
            node=self._node,
            messages_list=[MessageProto.FromString(answer.head)],
            message_object_trees=[PartsTree.FromString(answer.tree)],
            clientapp_runtime_list=[seconds],
        )
        found = self._client.PushMessages(request)
        return Announced(found.session_id, frozenset(found.objects_to_push))

    def push_parts(self, run: int, answer: MessageParts, announced: Announced) -> None:
        """Send the parts of an answer that the server wants; raises `PartsNotTaken` where it refuses one."""
        push = make_push_object_fn_protobuf(self._client.PushObject, self._node, run, announced.session)
        wanted = ((name, part) for name, part in answer.parts.items() if name in announced.wanted)
        push_object_contents_from_iterable(wanted, push)

    def close(self) -> None:
        """End the connection."""
        self._client.close()
