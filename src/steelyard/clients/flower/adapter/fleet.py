"""A node's calls to its server in Flower's fleet protocol: signed with the node's key, bounded, repeated if need be."""

from __future__ import annotations

import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, cast

import httpx
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.common.constant import TIMESTAMP_HEADER
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
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import push_object_contents_from_iterable
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supernode.fleet_http_client import FleetHttpClient

from steelyard import __version__
from steelyard.clients.flower.adapter.messages import MessageParts, PartsTree
from steelyard.clients.flower.news import CLOCK_HEADER, VERSION_HEADER, WAIT_HEADER
from steelyard.clients.flower.parts import LARGEST_PART, LARGEST_TREE

_PARTS = "/pull-object"
_HEAD = 64 << 10


def bound_answers(client: object, largest: int = LARGEST_TREE + _HEAD) -> None:
    """Let a client of Flower's take no more from one call than a part of a message, or `largest` bytes of all else.

    Answers that are packed (a few MB may unpack to gigabytes) and such that send us elsewhere are not taken at all.
    """
    found: httpx.Client = cast(Any, client)._client
    inner: Any = found
    if not isinstance(inner._transport, _Bounded):
        inner._transport = _Bounded(inner._transport, largest)
        inner._mounts = {url: one and _Bounded(one, largest) for url, one in inner._mounts.items()}


class _Bounded(httpx.BaseTransport):
    def __init__(self, inner: httpx.BaseTransport, largest: int) -> None:
        self._inner, self._largest = inner, largest

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.headers["accept-encoding"] = "identity"
        response = self._inner.handle_request(request)
        packed = response.headers.get("content-encoding", "identity") != "identity"
        if packed or response.is_redirect:
            response.close()
            what = "is packed" if packed else "sends us elsewhere"
            raise httpx.ReadError(f"an answer that {what}; allowed: a plain one", request=request)
        most = LARGEST_PART + _HEAD if request.url.path.endswith(_PARTS) else self._largest
        response.stream = _BoundedStream(cast(httpx.SyncByteStream, response.stream), most, request)
        return response

    def close(self) -> None:
        self._inner.close()


class _BoundedStream(httpx.SyncByteStream):
    def __init__(self, inner: httpx.SyncByteStream, largest: int, request: httpx.Request) -> None:
        self._inner, self._largest, self._request = inner, largest, request

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for piece in self._inner:
            size += len(piece)
            if size > self._largest:
                raise httpx.ReadError(f"an answer of more than {self._largest} bytes", request=self._request)
            yield piece

    def close(self) -> None:
        self._inner.close()


_REPEATED = ("pull-object", "push-object", "confirm-message-received")
"""Calls in the middle of a task: to give up one of them is to give up the task. Who makes the others tries again."""
_REPEAT_SECONDS, _FIRST_PAUSE, _LONGEST_PAUSE = 30.0, 0.2, 2.0
_UNAUTHORIZED, _BUSY = 401, 503
_HOLD_SECONDS = 20.0
"""How long our call for a message may be held where there is none."""
_COARSE_SECONDS, _LEAST_DRIFT = 2.0, 3.0
"""The server writes whole seconds, and looks at its clock once a second, later where it is busy."""


class SignedCalls:
    """Signs each call with a node's key and the time; for a client of Flower's.

    A SuperLink refuses signatures from more than five seconds ahead of its clock. So the time is the server's, as its
    answers give it. A call in the middle of a task is repeated for a while, but not once `stop` is set.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey, stop: threading.Event) -> None:
        self._key, self._stop = key, stop
        pem = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        self._public = b64encode(pem).decode("ascii")
        self.ahead = 0.0
        """By how many seconds our clock is ahead of the server's; 0 where they agree."""

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Send one call; Flower's client asks for this method."""
        before = self.ahead
        response = self._patiently(context, call_next)
        if response.status_code == _UNAUTHORIZED and self.ahead != before:
            response = self._patiently(context, call_next)
        return response

    def _patiently(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        deadline, pause = time.monotonic() + _REPEAT_SECONDS, _FIRST_PAUSE
        repeated = context.request.url.path.endswith(_REPEATED)
        while True:
            # Who is to stop waits for no server: it may be gone for good, as where one process killed both.
            last = not repeated or self._stop.is_set() or time.monotonic() > deadline
            try:
                response = self._send(context, call_next)
                if last or response.status_code != _BUSY:
                    return response
            except httpx.ConnectError:
                if last:
                    raise
            self._stop.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _send(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        stamp = (local_time() - timedelta(seconds=self.ahead)).isoformat()
        signature = self._key.sign(stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
        context.request.headers.update(
            {
                FLEET_HTTP_PUBLIC_KEY_HEADER: self._public,
                TIMESTAMP_HEADER: stamp,
                FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode("ascii"),
                CLOCK_HEADER: f"{self.ahead:g}",
                VERSION_HEADER: __version__,
                WAIT_HEADER: f"{_HOLD_SECONDS:g}",
            }
        )
        begun = local_time()
        response = call_next(context)
        self._learn(response.headers.get("date", ""), begun)
        return response

    def _learn(self, date: str, begun: datetime) -> None:
        """Compare clocks: the server wrote its time between our call and its answer, however long that took."""
        try:
            theirs = parsedate_to_datetime(date)
            least = (begun - theirs).total_seconds() - _COARSE_SECONDS
            most = (local_time() - theirs).total_seconds()
        except (ValueError, TypeError):
            return
        if not least <= self.ahead <= most:
            ahead = 0.0 if least <= 0 <= most else round((least + most) / 2)
            self.ahead = float(ahead) if abs(ahead) >= _LEAST_DRIFT else 0.0


def local_time() -> datetime:
    """Return the time of this machine's clock."""
    return datetime.now(UTC)


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
