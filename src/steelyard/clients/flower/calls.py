"""Calls to a SuperLink in Flower's protocol: protocol buffers over HTTP, within bounds, a node's signed by its key.

A server is not trusted with a node's memory: no answer is taken that is larger than it can be, packed (a few MB may
unpack to gigabytes), or sends us elsewhere.
"""

from __future__ import annotations

import re
import ssl
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from typing import Any, NamedTuple
from urllib.request import getproxies, proxy_bypass

import urllib3
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from urllib3.exceptions import HTTPError

from steelyard import __version__
from steelyard.base.errors import without_controls
from steelyard.clients.flower.internals import CONTROL, FLEET, PullAppMessagesRequest, message_from_proto
from steelyard.clients.flower.news import CLOCK_HEADER, VERSION_HEADER, WAIT_HEADER
from steelyard.clients.flower.parts import (
    LARGEST_PART,
    LARGEST_TREE,
    MessageParts,
    PartsLost,
    PartsNotTaken,
    PartsTree,
    Pull,
    at_once,
)
from steelyard.clients.flower.signatures import now, pem, signed

PROTOBUF = "application/protobuf"
"""The type of what calls send, and of their answers."""
FLOWER_HEADER = "flwr-package-version"
"""The header with the version of Flower."""
_CALL_SECONDS = 30.0
_HEAD = 64 << 10
_LARGEST = {"PullObject": LARGEST_PART + _HEAD}
"""Most bytes of the answers that carry a part; all others are small."""
_AT_ONCE = 4


class CallError(Exception):
    """A call has no answer that can be used."""


class NotReached(CallError):
    """The server was not reached, or what came is no answer of a SuperLink's."""


class CallRefused(CallError):
    """The server refused a call."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words or f"status {status}")
        self.status = status


class Answer(NamedTuple):
    """What came back."""

    status: int
    content: bytes
    headers: Mapping[str, str] = {}


class Posts:
    """Sends a server what is posted to it, from any number of threads; `post` raises `NotReached`.

    `authority` is the certificate by which it is known; None: without TLS.
    """

    def __init__(self, address: str, authority: bytes | None, at_once: int = _AT_ONCE) -> None:
        scheme, host = "http" if authority is None else "https", address.rpartition(":")[0]
        self._url = f"{scheme}://{address}"
        options: dict[str, Any] = {"maxsize": at_once, "timeout": _CALL_SECONDS, "retries": False}
        if authority is not None:
            options["ssl_context"] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            options["ssl_context"].load_verify_locations(cadata=authority.decode("ascii"))
        near = host in ("localhost", "127.0.0.1", "[::1]") or proxy_bypass(host)
        between = None if near else getproxies().get(scheme)
        self._pool = urllib3.ProxyManager(between, **options) if between else urllib3.PoolManager(**options)

    def post(self, path: str, content: bytes, headers: Mapping[str, str], largest: int) -> Answer:
        """Return the answer to a call, of at most so many bytes."""
        try:
            response: Any = self._pool.urlopen(
                *("POST", self._url + path),
                body=content,
                headers={**headers, "accept-encoding": "identity"},
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
            try:
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise NotReached("an answer that is packed; allowed: a plain one")
                if 300 <= response.status < 400:
                    raise NotReached("an answer that sends us elsewhere; allowed: a plain one")
                found = response.read(largest + 1)
                if len(found) > largest:
                    raise NotReached(f"an answer of more than {largest} bytes")
            except BaseException:
                response.close()
                raise
            response.release_conn()
        except HTTPError as error:
            # What went wrong comes last; before it stands, where there is one, whose connection it was.
            raise NotReached(str(error).rpartition("): ")[2]) from error
        return Answer(response.status, found, response.headers)

    def close(self) -> None:
        """End all connections."""
        self._pool.clear()


class Calls:
    """Calls of one service of a SuperLink: `call` any of its methods by name, from any thread."""

    def __init__(self, service: Any, address: str, authority: bytes | None, component: str) -> None:
        self._service, self.posts = service, Posts(address, authority)
        self._headers = {
            "content-type": PROTOBUF,
            "accept": PROTOBUF,
            "flwr-package-name": "flwr",
            FLOWER_HEADER: version("flwr"),
            "flwr-component-name": component,
        }

    def asked(self, method: str, **fields: Any) -> Any:
        """Return what a call sends, with these fields."""
        return _request(self._service, method, **fields)

    def call(self, method: str, asked: Any = None, **fields: Any) -> Any:
        """Return the answer to a call; raises `CallRefused`, or `NotReached`."""
        content = (asked or self.asked(method, **fields)).SerializeToString()
        words = re.sub("(?<!^)(?=[A-Z])", "-", method).lower()
        path = f"/v1/{self._service.name.lower()}/{words}"
        answer = self._send(path, content, _LARGEST.get(method, LARGEST_TREE + _HEAD))
        if answer.status != _DONE:
            said = without_controls(answer.content.decode("utf-8", "replace"), " ")
            raise CallRefused(answer.status, " ".join(said.split())[:200])
        try:
            return GetMessageClass(self._service.methods_by_name[method].output_type).FromString(answer.content)
        except DecodeError:
            raise NotReached("its answer cannot be read") from None

    def _send(self, path: str, content: bytes, largest: int) -> Answer:
        return self.posts.post(path, content, self._headers, largest)


class SuperLinkControl:
    """Registers nodes' keys with a SuperLink on this machine, and ends its runs; calls raise `CallError`."""

    def __init__(self, address: str, authority: bytes | None) -> None:
        self._calls = Calls(CONTROL, address, authority, "flwr CLI")

    def register(self, key: str, name: str) -> None:
        """Make a public key, a line as in its .pub file, known under a name."""
        public: Any = serialization.load_ssh_public_key(key.encode())
        self._calls.call("RegisterNode", public_key=pem(public), name=name)

    def stop(self, run: int) -> None:
        """Stop the run of this number; its server app notices when it next speaks to the SuperLink."""
        self._calls.call("StopRun", run_id=run)

    def ended(self, run: int) -> str | None:
        """Return how the run of this number ended, in Flower's words; None while it has not."""
        found = self._calls.call("ListRuns", run_id=run).run_dict
        status = found[run].status if run in found else None
        return f"{status.sub_status}: {status.details}" if status is not None and status.status == "finished" else None


_REPEATED = ("pull-object", "push-object", "confirm-message-received")
"""Calls in the middle of a task: to give up one of them is to give up the task. Who makes the others tries again."""
_REPEAT_SECONDS, _FIRST_PAUSE, _LONGEST_PAUSE = 30.0, 0.2, 2.0
_DONE, _UNAUTHORIZED, _BUSY = 200, 401, 503
_HOLD_SECONDS = 20.0
"""How long our call for a message may be held where there is none."""
_COARSE_SECONDS, _LEAST_DRIFT = 2.0, 3.0
"""The server writes whole seconds, and looks at its clock once a second, later where it is busy."""


class SignedCalls(Calls):
    """A node's calls, each signed with its key and the time.

    A SuperLink refuses signatures from more than five seconds ahead of its clock. So the time is the server's, as its
    answers give it. A call in the middle of a task is repeated for a while, but not once `stop` is set.
    """

    def __init__(
        self, address: str, authority: bytes | None, key: ec.EllipticCurvePrivateKey, stop: threading.Event
    ) -> None:
        super().__init__(FLEET, address, authority, "SuperNode")
        self._key, self._stop = key, stop
        self.public = pem(key.public_key())
        self.ahead = 0.0
        """By how many seconds our clock is ahead of the server's; 0 where they agree."""

    def _send(self, path: str, content: bytes, largest: int) -> Answer:
        before = self.ahead
        answer = self._patiently(path, content, largest)
        wrong_time = answer.status == _UNAUTHORIZED and self.ahead != before
        return self._patiently(path, content, largest) if wrong_time else answer

    def _patiently(self, path: str, content: bytes, largest: int) -> Answer:
        deadline, pause = time.monotonic() + _REPEAT_SECONDS, _FIRST_PAUSE
        while True:
            # Who is to stop waits for no server: it may be gone for good, as where one process killed both.
            last = not path.endswith(_REPEATED) or self._stop.is_set() or time.monotonic() > deadline
            try:
                answer = self._signed(path, content, largest)
                if last or answer.status != _BUSY:
                    return answer
            except NotReached:
                if last:
                    raise
            self._stop.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _signed(self, path: str, content: bytes, largest: int) -> Answer:
        begun = now()
        words = {CLOCK_HEADER: f"{self.ahead:g}", VERSION_HEADER: __version__, WAIT_HEADER: f"{_HOLD_SECONDS:g}"}
        words |= signed(self._key, begun - timedelta(seconds=self.ahead))
        answer = self.posts.post(path, content, {**self._headers, **words}, largest)
        self._learn(answer.headers.get("date", ""), begun)
        return answer

    def _learn(self, date: str, begun: datetime) -> None:
        """Compare clocks: the server wrote its time between our call and its answer, however long that took."""
        try:
            theirs = parsedate_to_datetime(date)
            least = (begun - theirs).total_seconds() - _COARSE_SECONDS
            most = (now() - theirs).total_seconds()
        except (ValueError, TypeError):
            return
        if not least <= self.ahead <= most:
            ahead = 0.0 if least <= 0 <= most else round((least + most) / 2)
            self.ahead = float(ahead) if abs(ahead) >= _LEAST_DRIFT else 0.0


@dataclass(frozen=True)
class Announced:
    """An answer that the server knows of; its parts are still to be sent."""

    session: str
    wanted: frozenset[str]
    """The parts that the server does not have yet."""


class FleetConnection:
    """One node's connection to its server; `activate` comes first. Calls raise `CallError`.

    None is repeated once `stop` is set.
    """

    def __init__(
        self, address: str, authority: bytes | None, key: ec.EllipticCurvePrivateKey, stop: threading.Event
    ) -> None:
        self._calls = SignedCalls(address, authority, key, stop)
        self.node = 0
        """The server's number for this node; 0 before it is activated."""

    @property
    def ahead(self) -> float:
        """By how many seconds our clock is ahead of the server's, behind where negative; 0 where they agree."""
        return self._calls.ahead

    def register(self) -> None:
        """Make the key known, where a server lets anybody in."""
        self._calls.call("RegisterNode", public_key=self._calls.public)

    def unregister(self) -> None:
        """Make the key unknown again."""
        self._calls.call("UnregisterNode", node_id=self.node)

    def activate(self, seconds: float) -> int:
        """Join, with a sign of life every so many seconds; returns the server's number for this node."""
        answer = self._calls.call("ActivateNode", public_key=self._calls.public, heartbeat_interval=seconds)
        self.node = int(answer.node_id)
        return self.node

    def deactivate(self) -> None:
        """Leave."""
        self._calls.call("DeactivateNode", node_id=self.node)

    def send_heartbeat(self, seconds: float) -> None:
        """Give a sign of life; the next one comes in so many seconds."""
        self._calls.call("SendNodeHeartbeat", node=self._node, heartbeat_interval=seconds)

    def next_message(self) -> list[tuple[Message, PartsTree]]:
        """Return the next message without its content, with the names of its parts; an empty list where none is."""
        found = self._calls.call("PullMessages", node=self._node)
        if not found.messages_list:
            return []
        head = found.messages_list[0]
        head.ClearField("content")  # What it says comes in parts, which are counted.
        head.content.SetInParent()
        return [(message_from_proto(head), found.message_object_trees[0])]

    def part_puller(self, run: int) -> Pull:
        """Return what fetches one part of a message of a run, by name."""
        return lambda name: _part(self._calls.call("PullObject", node=self._node, run_id=run, object_id=name))

    def confirm(self, run: int, name: str) -> None:
        """Say that a message has arrived, so that the server need not keep it."""
        self._calls.call("ConfirmMessageReceived", node=self._node, run_id=run, message_object_id=name)

    def announce(self, answer: MessageParts, seconds: float) -> Announced:
        """Report an answer to the server, which took so many seconds."""
        asked = self._calls.asked("PushMessages", node=self._node, clientapp_runtime_list=[seconds])
        asked.messages_list.add().MergeFromString(answer.head)
        asked.message_object_trees.add().MergeFromString(answer.tree)
        found = self._calls.call("PushMessages", asked)
        return Announced(found.session_id, frozenset(found.objects_to_push))

    def push_parts(self, run: int, answer: MessageParts, announced: Announced) -> None:
        """Send the parts of an answer that the server wants; raises `PartsNotTaken` where it refuses one."""

        def push(name: str) -> None:
            where = {"node": self._node, "run_id": run, "session_id": announced.session}
            found = self._calls.call("PushObject", **where, object_id=name, object_content=answer.parts[name])
            if not found.stored:
                raise PartsNotTaken(f"the server did not take part {name[:16]}")

        at_once(push, sorted(announced.wanted & answer.parts.keys()), _AT_ONCE)

    def close(self) -> None:
        """End the connection."""
        self._calls.posts.close()

    @property
    def _node(self) -> dict[str, int]:
        return {"node_id": self.node}


class FoundAnswer(NamedTuple):
    """An answer that lies on the SuperLink: its name, which message it answers, and the names of its parts."""

    name: str
    answers: str
    tree: PartsTree


class AnswerSource:
    """The answers behind a server app's grid, fetched by its own client: looked for at once, taken one by one."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid

    @classmethod
    def of(cls, grid: Grid) -> AnswerSource | None:
        """Return what looks for answers behind a grid; None where it is no SuperLink over HTTP."""
        return cls(grid) if hasattr(grid, "_runtime_client") else None

    def look(self, names: Iterable[str]) -> list[FoundAnswer]:
        """Return the answers that are there to the messages of these names; none of them is fetched."""
        found = self._client.PullMessages(PullAppMessagesRequest(message_ids=sorted(names)))
        return [
            FoundAnswer(message.metadata.message_id, message.metadata.reply_to_message_id, tree)
            for message, tree in zip(found.messages_list, found.message_object_trees, strict=True)
        ]

    def part_puller(self) -> Pull:
        """Return what fetches one part of an answer, by name."""
        return lambda name: _part(self._client.PullObject(self._asked("PullObject", object_id=name)))

    def confirm(self, name: str) -> None:
        """Say that an answer has arrived, so that the SuperLink need not keep it."""
        self._client.ConfirmMessageReceived(self._asked("ConfirmMessageReceived", message_object_id=name))

    def _asked(self, method: str, **fields: str) -> Any:
        return _request(FLEET, method, node=self._grid.node, run_id=self._grid.run.run_id, **fields)

    @property
    def _client(self) -> Any:
        return self._grid._runtime_client


def _request(service: Any, method: str, **fields: Any) -> Any:
    return GetMessageClass(service.methods_by_name[method].input_type)(**fields)


def _part(answer: Any) -> bytes | None:
    """Return a part that was asked for; None where it has not arrived yet."""
    if not answer.object_found:
        raise PartsLost("a part of a message is not on the server any more")
    return bytes(answer.object_content) if answer.object_available else None
