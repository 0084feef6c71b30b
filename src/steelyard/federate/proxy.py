"""The only way in from outside: a TLS-terminating proxy in front of a SuperLink that listens on loopback alone.

Flower serves nodes, run submission and app runtimes on one port, and asks whoever submits a run for nothing. So the
SuperLink never gets a public port. The proxy has one, and passes on nothing but the calls that a node needs, and those
only when they are signed with a key of the register; everything else is refused before its body is read. Calls of
nodes that wait for a message are held here; the SuperLink is asked once for all of them who has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from steelyard.base import files
from steelyard.base.errors import printable, without_controls
from steelyard.base.logs import logger
from steelyard.clients.flower.calls import FLOWER_HEADER, PROTOBUF, Answer, NotReached, Posts
from steelyard.clients.flower.news import (
    CLOCK_HEADER,
    LOOK_SECONDS,
    NEWS,
    VERSION_HEADER,
    WAIT_HEADER,
    News,
    seconds_to_hold,
)
from steelyard.clients.flower.parts import LARGEST_PART, LARGEST_TREE
from steelyard.clients.flower.register import Entry, RegisterFile
from steelyard.clients.flower.signatures import KEY_HEADER, Callers
from steelyard.federate.queue import ServerFolder

_log = logger(__name__)

_LONGEST_VERSION = 40
_MOST_KINDS = 200
"""Refusals that are counted apart; whatever comes beyond them is counted together."""
_LINES_AT_ONCE = 20
"""Lines about refusals that are printed in one interval; the rest is counted."""
_OTHERS = ("others", "calls of further kinds")
_INTERVAL = 60.0


@dataclass
class Contact:
    """What the proxy knows of one node."""

    last: str
    """When it last called."""
    clock: float
    """By how many seconds its clock is ahead of ours; behind where negative."""
    steelyard: str
    flower: str


class Contacts:
    """The nodes that called since this server started, by key."""

    def __init__(self) -> None:
        self._known: dict[str, Contact] = {}
        self._drifted: set[str] = set()
        self._written = ""

    def heard(self, entry: Entry, headers: Mapping[str, str]) -> None:
        """Note a call that was signed with a registered key."""
        said = (printable(headers.get(header, ""))[:_LONGEST_VERSION] for header in (VERSION_HEADER, FLOWER_HEADER))
        ahead = _seconds(headers.get(CLOCK_HEADER, ""))
        self._known[entry.key] = Contact(datetime.now(UTC).isoformat(timespec="seconds"), ahead, *said)
        if ahead and entry.key not in self._drifted:
            self._drifted.add(entry.key)
            where = "ahead of" if ahead > 0 else "behind"
            _log.warning(f"the clock of {entry.name} is {abs(ahead):.0f} s {where} ours; it is let in")

    def still_there(self, keys: Iterable[str]) -> None:
        """Note that calls of these nodes are being held: no node makes another one meanwhile."""
        for key in keys:
            if key in self._known:
                self._known[key].last = datetime.now(UTC).isoformat(timespec="seconds")

    def write(self, file: Path) -> None:
        """Write what is known, where it changed."""
        text = json.dumps({key: asdict(contact) for key, contact in list(self._known.items())})
        if text != self._written:
            files.write(file, text.encode())
            self._written = text


def _seconds(text: str) -> float:
    try:
        return float(text) if abs(float(text)) < 1e9 else 0.0
    except ValueError:
        return 0.0


class RefusalLog:
    """Prints refusals so that a log can neither be filled from outside nor falls silent.

    The first of a kind is printed at once; all others are counted, and once a minute the counts are printed.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._known: set[tuple[str, str]] = set()
        """Kinds of the minute before: of these the counts are enough."""
        self._lines = _LINES_AT_ONCE
        self._begun = time.monotonic()

    def note(self, caller: str, what: str) -> None:
        """Note one refused call."""
        kind = (caller, what)
        if kind not in self._counts and len(self._counts) >= _MOST_KINDS:
            kind = _OTHERS
        if kind not in self._counts and kind not in self._known and self._lines:
            self._lines -= 1
            self._counts[kind] = 0
            _log.error(f"refused {caller}: {what}")
        else:
            self._counts[kind] += 1

    def report(self) -> None:
        """Print the counts of a minute that has passed."""
        if time.monotonic() - self._begun < _INTERVAL:
            return
        counted, self._counts = self._counts, Counter()
        self._known, self._lines, self._begun = set(counted), _LINES_AT_ONCE, time.monotonic()
        often = [(kind, count) for kind, count in counted.most_common() if count]
        for (caller, what), count in often[:_LINES_AT_ONCE]:
            _log.error(f"refused {caller} {count} more times in a minute: {what}")
        if rest := often[_LINES_AT_ONCE:]:
            calls = sum(count for _, count in rest)
            _log.error(f"refused {calls} further calls of {len(rest)} kinds in a minute")


_AT_ONCE = 32
"""Calls that are passed on at the same time; more of them wait."""


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
_PULL = "/v1/fleet/pull-messages"
PARTS = frozenset({"/v1/fleet/pull-object", "/v1/fleet/push-object"})
"""The calls that carry a part of a message; all others are small."""
LARGEST = LARGEST_PART + (64 << 10)
_LARGEST_OTHER = LARGEST_TREE + (64 << 10)
_LARGEST_NEWS = 8 << 20
"""Most bytes of an answer without a part: the news of all nodes, whose keys have three hundred each."""
_PARTS_AT_ONCE = 4
"""Parts of one key that are passed on at the same time, to bound what lies in memory; more of them wait."""
_TOLERANCE = 310.0
"""Seconds by which a signature may be old or its clock wrong; Flower itself allows 305."""
_CALL_SECONDS = 300.0
"""Longest that one call may take, its body and its answer included."""

_TEXT, _DONE = "text/plain; charset=utf-8", 200

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
        self._superlink, self._home = Posts(upstream, authority.read_bytes(), _AT_ONCE), home
        self._threads = ThreadPoolExecutor(_AT_ONCE)
        self._register = RegisterFile(home.register)
        self._callers = Callers(lambda key: key in self._register.now().entries)
        self._polls = HeldPolls()
        self._contacts, self._refusals = Contacts(), RefusalLog()
        self._turns: dict[str, asyncio.Semaphore] = {}

    def report(self) -> None:
        """Write down what was heard of nodes, and how much was refused; call it again and again."""
        self._contacts.still_there(list(self._polls.held.values()))
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
            self._listener = asyncio.create_task(self._polls.listen(self._post))
            await send({"type": "lifespan.startup.complete"})
        self._listener.cancel()
        self._superlink.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The bytes of the request line, not the decoded path: nothing is to be read in two ways.
        path = bytes(scope.get("raw_path") or b"").split(b"?")[0].decode("latin-1")
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            if path not in ALLOWED or scope["method"] != "POST":
                raise Refusal(403, f"{scope['method']} {path[:80]}")
            caller = self._caller(headers)
            self._contacts.heard(caller, headers)
            async with self._turn_of(path, caller):
                body = await self._body(headers, receive, LARGEST if path in PARTS else _LARGEST_OTHER)

                async def ask() -> Answer:
                    return await self._ask(path, headers, body)

                seconds = seconds_to_hold(headers.get(WAIT_HEADER, ""))
                if path == _PULL and seconds:
                    answer = await self._polls.hold(headers[KEY_HEADER], caller, seconds, receive, ask)
                else:
                    answer = await ask()
                await _answer(send, answer.status, answer.content, answer.headers.get("content-type", PROTOBUF))
        except Refusal as refusal:
            self._refusals.note(str((scope.get("client") or ("unknown", 0))[0]), without_controls(refusal.what))
            await _answer(send, refusal.status, f"refused: {refusal.what}")

    def _caller(self, headers: dict[str, str]) -> Entry:
        """Return the registered node that a call is from; raises `Refusal` where no signature shows it."""
        try:
            line, age = self._callers.of(headers)
        except ValueError as error:
            raise Refusal(401, str(error)) from None
        if abs(age) > _TOLERANCE:
            raise Refusal(401, "a signature of another time; is a clock wrong?")
        return self._register.now().entries[line]

    def _turn_of(self, path: str, caller: Entry) -> contextlib.AbstractAsyncContextManager[Any]:
        """Return what a call waits for before its body is read: a key that sends much waits for itself alone."""
        if path not in PARTS:
            return contextlib.nullcontext()
        return self._turns.setdefault(caller.key, asyncio.Semaphore(_PARTS_AT_ONCE))

    async def _ask(self, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """Pass a call on to the SuperLink."""
        passed = ("accept", "content-type")
        kept = {name: value for name, value in headers.items() if name.startswith("flwr-") or name in passed}
        try:
            return await self._post(path, body, kept)
        except NotReached:
            return Answer(503, b"the server is not ready; try again", {"content-type": _TEXT})

    async def _post(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        post = partial(self._superlink.post, path, body, headers, LARGEST if path in PARTS else _LARGEST_NEWS)
        return await asyncio.get_running_loop().run_in_executor(self._threads, post)

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


class HeldPolls:
    """Calls of nodes that wait for a message; use `hold` for each of them, while `listen` runs."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        """Nodes with a call that is held: the key as it signs, and as the register has it."""
        self._news = News()
        self._nothing: dict[str, int] = {}
        """For each node, up to which news we know that nothing waits for it."""
        self._hears = False

    async def listen(self, post: Callable[[str, bytes, dict[str, str]], Awaitable[Answer]]) -> None:
        """Ask the SuperLink again and again for whom messages have come; whose calls are held, it takes for alive."""
        after, said = 0, 0.0
        while True:
            due = time.monotonic() - said > LOOK_SECONDS / 2
            said = time.monotonic() if due else said
            try:
                asked = {"after": after, "alive": list(self.held) if due else []}
                answer = await post(NEWS, json.dumps(asked).encode(), {"content-type": "application/json"})
                if answer.status != _DONE:
                    raise ValueError(answer.status)
                found = json.loads(answer.content)
            except (NotReached, ValueError):
                # Nobody is held by what we may have missed: every call is passed on until we hear again.
                self._hears = False
                self._nothing.clear()
                await asyncio.sleep(1.0)
                continue
            self._hears, after = True, found["serial"]
            self._news.note(found["names"])

    async def hold(
        self, name: str, caller: Entry, seconds: float, receive: Receive, ask: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """Return a node's message once there is one; no message after so many seconds, or where the node is gone."""
        deadline, gone = time.monotonic() + seconds, asyncio.ensure_future(receive())
        try:
            while True:
                if not self._hears or self._news.last(name) > self._nothing.get(name, -1):
                    before = self._news.serial
                    answer = await ask()
                    if answer.status != 200 or answer.content:
                        self._nothing.pop(name, None)
                        return answer
                    self._nothing[name] = before
                left = deadline - time.monotonic()
                if left <= 0 or gone.done() or not self._hears:
                    return Answer(200, b"")
                self.held[name] = caller.key
                await self._news.wait(name, self._nothing.get(name, 0), min(left, LOOK_SECONDS))
        except asyncio.CancelledError:  # The server ends.
            return Answer(200, b"")
        finally:
            self.held.pop(name, None)
            gone.cancel()


async def _answer(send: Send, status: int, content: str | bytes, media: str = _TEXT) -> None:
    body = content.encode() if isinstance(content, str) else content
    headers = [(b"content-type", media.encode("latin-1")), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
