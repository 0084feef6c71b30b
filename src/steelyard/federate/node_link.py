"""The side of a node that speaks to the server: fetches messages, has them answered, sends the answers.

It speaks Flower's fleet protocol and nothing else. No app that a server sends is ever fetched, let alone run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
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
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, push_object_contents_from_iterable
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from steelyard.clients.flower.forms import Refused
from steelyard.clients.flower.parts import LARGEST_MESSAGE, fetch
from steelyard.clients.flower.transport import bound_answers
from steelyard.errors import UserError, without_controls
from steelyard.federate.frames import read_frame, write_frame
from steelyard.federate.node_workers import Worker, WorkerDied, Workers

ResultT = TypeVar("ResultT")

DIED = 8
RAISED = 2
"""Flower's codes for a ClientApp that died, and for one that raised an error."""
_HEARTBEAT_SECONDS = 10.0
_SHORTEST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.1, 1.0, 1.3
_LONGEST_WAIT = 10.0
_GRACE_SECONDS = 5.0
_MOST_PULL_SECONDS = 600.0
_UNAUTHORIZED, _PRECONDITION = 401, 412
_FORGOTTEN_SECONDS = 35.0


@dataclass(frozen=True)
class Server:
    """Where the server is, how it is known, and by which key we are known to it."""

    address: str
    authority: Path | None = None
    """ca.pem; None: no TLS."""
    key: Path | None = None
    """The node's private key; None: a key for this start only, where the server lets anybody in."""

    def client(self) -> tuple[FleetHttpClient, ec.EllipticCurvePublicKey]:
        """Return a client of the fleet protocol that signs every call."""
        private = ec.generate_private_key(ec.SECP384R1()) if self.key is None else read_private_key(self.key)
        try:
            authority = None if self.authority is None else self.authority.read_bytes()
        except OSError as error:
            raise UserError(f"ca: {self.authority} cannot be read: {error.strerror}; allowed: ca.pem") from error
        public = private.public_key()
        signing = [RuntimeVersionHttpInterceptor(component_name="SuperNode"), NodeAuthHttpInterceptor(private, public)]
        client = FleetHttpClient.from_server_address(self.address, authority is None, authority, signing)
        bound_answers(client)
        return client, public


def read_private_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Return a node's private key; anything else is refused."""
    try:
        key = serialization.load_ssh_private_key(file.read_bytes(), password=None)
    except OSError as error:
        raise UserError(f"key: {file} cannot be read: {error.strerror}; allowed: a node's private key") from error
    except Exception:
        raise UserError(f"key: {file} is not a private key; allowed: what `steelyard federate key` made") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"key: {file} is of another kind; allowed: what `steelyard federate key` made")
    return key


class NodeLink:
    """One node's life: join, answer messages until `stop` is set, leave. Call `run` in a thread of its own."""

    def __init__(self, server: Server, workers: Workers, number: int, stop: threading.Event) -> None:
        self._client, self._public = server.client()
        self._own_key = server.key is None
        self._workers, self._number, self._stop = workers, number, stop
        self._worker: Worker | None = None
        self._node: Node | None = None
        self._told = False

    def run(self) -> None:
        """Take part until told to stop; raises `UserError` where the server does not want this node."""
        try:
            self._join()
            if self._node is None:
                return
            beat = threading.Thread(target=self._beat, daemon=True, name=f"heartbeat-{self._number}")
            beat.start()
            print(f"steelyard: node {self._number} is connected", flush=True)
            self._serve()
        finally:
            self._leave()

    def _join(self) -> None:
        key = self._public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        if self._own_key:
            try:
                self._call(lambda: self._client.RegisterNode(RegisterNodeFleetRequest(public_key=key)))
            except httpx.HTTPStatusError as error:
                raise UserError(f"the server refuses a node without a key: {_words(error.response)}") from None
        request = ActivateNodeRequest(public_key=key, heartbeat_interval=_HEARTBEAT_SECONDS)
        # A node that was killed counts as connected for a while, and one key is one node: started again, it waits.
        deadline = time.monotonic() + _FORGOTTEN_SECONDS
        while not self._stop.is_set():
            try:
                joined = self._call(lambda: self._client.ActivateNode(request))
            except httpx.HTTPStatusError as error:
                if error.response.status_code != _PRECONDITION or time.monotonic() > deadline:
                    raise UserError(
                        f"the server refuses this node: {_words(error.response)}; is its key registered, and does no "
                        "other node use it?"
                    ) from None
                self._stop.wait(1.0)
            else:
                self._node = None if joined is None else Node(node_id=joined.node_id)
                return

    def _leave(self) -> None:
        if self._worker is not None:
            self._worker.end()
        with contextlib.suppress(httpx.HTTPError, RuntimeError, ValueError):
            if self._node is not None:
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))
                if self._own_key:
                    self._client.UnregisterNode(UnregisterNodeFleetRequest(node_id=self._node.node_id))
        self._client.close()

    def _beat(self) -> None:
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=_HEARTBEAT_SECONDS)
        while not self._stop.wait(_HEARTBEAT_SECONDS / 2):
            with contextlib.suppress(httpx.HTTPError, RuntimeError, ValueError):
                self._client.SendNodeHeartbeat(request)

    def _serve(self) -> None:
        pause = _SHORTEST_PAUSE
        request = PullMessagesRequest(node=self._node)
        while not self._stop.is_set():
            found = self._call(lambda: self._client.PullMessages(request))
            if found is None:
                return
            if not found.messages_list:
                self._stop.wait(pause)
                pause = min(pause * _GROWTH, _LONGEST_PAUSE)
                continue
            pause = _SHORTEST_PAUSE
            try:
                asked = found.messages_list[0]
                asked.ClearField("content")  # What it says comes in parts, which are counted.
                asked.content.SetInParent()
                self._answer(message_from_proto(asked), found.message_object_trees[0])
            except (httpx.HTTPError, ValueError, RuntimeError, ObjectPullError) as error:
                # The run was stopped, or the answer is too late: there will be another message.
                print(f"steelyard: a message was not answered: {type(error).__name__}: {error}"[:300], flush=True)

    def _answer(self, message: Message, tree: ObjectTree) -> None:
        assert self._node is not None
        begun, run, name = time.monotonic(), message.metadata.run_id, message.metadata.message_id
        pull = make_pull_object_fn_protobuf(self._client.PullObject, self._node, run)
        seconds = min(message.metadata.ttl, _MOST_PULL_SECONDS)  # Flower's own bound is two hours.
        confirm = make_confirm_message_received_fn_protobuf(self._client.ConfirmMessageReceived, self._node, run)
        try:
            parts = fetch(name, tree, pull, LARGEST_MESSAGE, seconds, at_once=2)
        except Refused as refusal:
            print(f"steelyard: node {self._number}: a message was refused: {refusal}", flush=True)
            confirm(name)
            bare, reply_tree, pieces = _error(message, RAISED, f"refused: {refusal}")
        else:
            confirm(name)
            frame = write_frame({"message": name, "run": run, "node": self._node.node_id}, parts)
            del parts
            bare, reply_tree, pieces = self._worked(frame, message)
        request = PushMessagesRequest(
            node=self._node,
            messages_list=[bare],
            message_object_trees=[reply_tree],
            clientapp_runtime_list=[time.monotonic() - begun],
        )
        pushed = self._call(lambda: self._client.PushMessages(request))
        if pushed is None:
            return
        wanted = set(pushed.objects_to_push)
        push = make_push_object_fn_protobuf(self._client.PushObject, self._node, run, pushed.session_id)
        push_object_contents_from_iterable(((key, piece) for key, piece in pieces.items() if key in wanted), push)

    def _worked(self, frame: bytes, message: Message) -> tuple[MessageProto, ObjectTree, dict[str, bytes]]:
        """Have a message answered by the worker; one that hangs or dies is replaced for the next message."""
        try:
            if self._worker is None or self._worker.gone:
                self._worker = self._workers.worker(self._number)
            _, pieces = read_frame(self._worker.ask(frame, message.metadata.ttl + _GRACE_SECONDS))
        except (WorkerDied, TimeoutError, UserError) as fault:
            print(f"steelyard: node {self._number}: its worker {type(fault).__name__} {fault}", flush=True)
            if self._worker is not None:
                self._worker.end()
                self._worker = None
            code = DIED if isinstance(fault, WorkerDied) else RAISED
            return _error(message, code, "" if code == DIED else f"{type(fault).__name__}: {fault}")
        bare = MessageProto.FromString(pieces.pop("message"))
        return bare, ObjectTree.FromString(pieces.pop("tree")), pieces

    def _call(self, call: Callable[[], ResultT]) -> ResultT | None:
        """Call the server, and again while it is away; None once we are to stop."""
        wait = 0.5
        while not self._stop.is_set():
            try:
                result = call()
            except httpx.HTTPStatusError as error:
                # Other refusals concern one call only, such as one of a run that has ended.
                if error.response.status_code == _UNAUTHORIZED:
                    raise UserError(f"the server refuses this node: {_words(error.response)}") from None
                if error.response.status_code < 500:
                    raise
                self._tell(f"the server answers {error.response.status_code}")
            except httpx.TransportError as error:
                if any(word in str(error).lower() for word in ("certificate", "ssl")):
                    raise UserError(f"ca: the server is not the one that it should be: {error}") from None
                self._tell(f"the server is not reached: {error}")
            except ValueError as error:
                self._tell(f"the server's answer cannot be read: {error}")
            else:
                self._told = False
                return result
            self._stop.wait(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
        return None

    def _tell(self, line: str) -> None:
        if not self._told:
            self._told = True
            print(f"steelyard: node {self._number}: {line}; trying again", flush=True)


def _error(message: Message, code: int, reason: str) -> tuple[MessageProto, ObjectTree, dict[str, bytes]]:
    TaskIdentity.run_id, TaskIdentity.task_id = message.metadata.run_id, 1
    TaskIdentity.node_id = message.metadata.dst_node_id
    reply: Any = Message(Error(code, reason), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    pieces = {name: nested.deflate() for name, nested in get_all_nested_objects(reply).items()}
    return message_to_proto(remove_content_from_message(reply)), get_object_tree(reply), pieces


def _words(response: httpx.Response) -> str:
    return " ".join(without_controls(response.text, " ").split())[:200] or f"status {response.status_code}"
