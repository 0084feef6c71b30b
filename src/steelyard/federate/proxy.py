"""The only way in from outside: a TLS-terminating proxy in front of a SuperLink that listens on loopback alone.

Flower serves nodes, run submission and app runtimes on one port, and asks whoever submits a run for nothing. So the
SuperLink never gets a public port. The proxy has one, and passes on nothing but the calls that a node needs, and those
only when they are signed with a key of the register; everything else is refused before its body is read.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import ssl
from base64 import b64decode
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from steelyard.clients.flower.parts import LARGEST_PART, LARGEST_TREE
from steelyard.clients.flower.register import Entry, RegisterFile, bare
from steelyard.errors import without_controls
from steelyard.federate.contacts import Contacts, RefusalLog
from steelyard.federate.server_folder import ServerFolder

ALLOWED = frozenset(
    f"/v1/fleet/{call}"
    for call in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "pull-object",
        "push-object",
        "confirm-message-received",
    )
)
"""The paths that are passed on. Registering and unregistering keys is not among them: that is done on the server.
Nor is fetching an app: a node runs the one that is installed there."""
PARTS = frozenset({"/v1/fleet/pull-object", "/v1/fleet/push-object"})
"""The calls that carry a part of a message; all others are small."""
LARGEST = LARGEST_PART + (64 << 10)
_LARGEST_OTHER = LARGEST_TREE + (64 << 10)
_PARTS_AT_ONCE = 4
"""Parts of one key that are passed on at the same time, to bound what lies in memory; more of them wait."""
_HEADERS = ("flwr-public-key", "flwr-timestamp", "flwr-signature")
_TOLERANCE = 310.0
"""Seconds by which a signature may be old or its clock wrong; Flower itself allows 305."""
_CALL_SECONDS = 300.0
"""Longest that one call may take, its body and its answer included."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Refusal(Exception):
    """A call is not passed on."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status, self.what = status, what


class NodeProxy:
    """An ASGI application that passes the calls of registered nodes on to a SuperLink; serve it with uvicorn and TLS.

    `upstream` is the SuperLink on loopback, `authority` the certificate by which it is known.
    """

    def __init__(self, upstream: str, authority: Path, home: ServerFolder) -> None:
        self._upstream, self._authority, self._home = upstream, authority, home
        self._keys = RegisteredKeys(home.register)
        self._client: httpx.AsyncClient | None = None
        self._contacts, self._refusals = Contacts(), RefusalLog()
        self._room: dict[str, asyncio.Semaphore] = {}

    def report(self) -> None:
        """Write down what was heard of nodes, and how much was refused; call it again and again."""
        self._contacts.write(self._home.contacts)
        self._refusals.report()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection event of the server that runs us."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            with contextlib.suppress(TimeoutError):  # uvicorn ends the connection of a call without an answer.
                async with asyncio.timeout(_CALL_SECONDS):
                    await self._pass_on(scope, receive, send)
        else:  # A websocket: closed before it opens.
            await send({"type": "websocket.close"})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "lifespan.shutdown":
            trusted = ssl.create_default_context(cafile=str(self._authority))
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
            self._client = httpx.AsyncClient(verify=trusted, timeout=60.0, limits=limits, trust_env=False)
            await send({"type": "lifespan.startup.complete"})
        if self._client is not None:
            await self._client.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The bytes of the request line, not the decoded path: nothing is to be read in two ways.
        path = bytes(scope.get("raw_path") or b"").split(b"?")[0].decode("latin-1")
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            if path not in ALLOWED or scope["method"] != "POST":
                raise Refusal(403, f"{scope['method']} {path[:80]}")
            caller = self._keys.caller(headers)
            self._contacts.heard(caller, headers)
            async with self._room_for(path, caller):
                body = await self._body(headers, receive, LARGEST if path in PARTS else _LARGEST_OTHER)
                await self._forward(path, headers, body, send)
        except Refusal as refusal:
            self._refusals.note(str((scope.get("client") or ("unknown", 0))[0]), without_controls(refusal.what))
            await _answer(send, refusal.status, f"refused: {refusal.what}")

    def _room_for(self, path: str, caller: Entry) -> contextlib.AbstractAsyncContextManager[Any]:
        """Return what a call waits for before its body is read: a key that sends much waits for itself alone."""
        if path not in PARTS:
            return contextlib.nullcontext()
        return self._room.setdefault(caller.key, asyncio.Semaphore(_PARTS_AT_ONCE))

    async def _forward(self, path: str, headers: dict[str, str], body: bytes, send: Send) -> None:
        assert self._client is not None
        passed = ("accept", "content-type")
        kept = {name: value for name, value in headers.items() if name.startswith("flwr-") or name in passed}
        try:
            answer = await self._client.post(f"{self._upstream}{path}", content=body, headers=kept)
        except httpx.HTTPError:
            await _answer(send, 503, "the server is not ready; try again")
        else:
            media = answer.headers.get("content-type", "application/octet-stream")
            await _answer(send, answer.status_code, answer.content, media)

    async def _body(self, headers: dict[str, str], receive: Receive, largest: int) -> bytes:
        declared = headers.get("content-length", "0")
        if not declared.isdigit() or int(declared) > largest:
            raise Refusal(413, "a call larger than any node makes")
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                return b""
            parts.append(event.get("body", b""))
            size += len(parts[-1])
            if size > largest:
                raise Refusal(413, "a call larger than any node makes")
            more = event.get("more_body", False)
        return b"".join(parts)


class RegisteredKeys:
    """The keys of a register file; use `caller` on every call."""

    def __init__(self, file: Path) -> None:
        self._file = RegisterFile(file)

    def caller(self, headers: dict[str, str]) -> Entry:
        """Return the registered node that a call is from; raises `Refusal` where no signature shows it."""
        if any(name not in headers for name in _HEADERS):
            raise Refusal(401, "a call without a signature")
        _, stamp, signature = (headers[name] for name in _HEADERS)
        try:
            key, line = _key(headers)
            entry = self._file.now().entries.get(line)
            if not isinstance(key, ec.EllipticCurvePublicKey) or entry is None:
                raise Refusal(401, "a key that is not registered")
            age = (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds()
            key.verify(b64decode(signature, validate=True), stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
        except (ValueError, TypeError, UnicodeError, binascii.Error, UnsupportedAlgorithm, InvalidSignature):
            raise Refusal(401, "a signature that does not hold") from None
        if abs(age) > _TOLERANCE:
            raise Refusal(401, "a signature of another time; is a clock wrong?")
        return entry


def _key(headers: dict[str, str]) -> tuple[object, str]:
    """Return the key that a call names, and the one line that stands for it in the register."""
    key = serialization.load_pem_public_key(b64decode(headers[_HEADERS[0]], validate=True))
    line = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    return key, bare(line)


async def _answer(send: Send, status: int, content: str | bytes, media: str = "text/plain; charset=utf-8") -> None:
    body = content.encode() if isinstance(content, str) else content
    headers = [(b"content-type", media.encode("latin-1")), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
