"""Flower's SuperLink as a process of ours: what it keeps in memory and in files, and how it answers.

Flower's own command runs it, and has no settings for any of this. Nothing of what it keeps outlives it: keys are
registered anew at every start, and runs go on from their own folders.
"""

from __future__ import annotations

import asyncio
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from steelyard.base.logs import logger
from steelyard.clients.flower.calls import PROTOBUF
from steelyard.clients.flower.internals import handlers, stores
from steelyard.clients.flower.news import (
    ANYBODY,
    LOOK_SECONDS,
    NEWS,
    SIGN_OF_LIFE_SECONDS,
    WAIT_HEADER,
    News,
    seconds_to_hold,
)
from steelyard.clients.flower.parts import largest_answer
from steelyard.clients.flower.signatures import KEY_HEADER, Callers

_log = logger(__name__)

_START_SECONDS = 120.0
"""Seconds that a server app has for its start beyond Flower's 30: on a busy machine it needs them. Flower starts
another one where they have passed, and soon three that keep each other from starting."""
_MOST_TRIES = 20
"""How often a node may announce its answer to one message; an honest one does so again where a call was lost."""
_AGAIN_SECONDS = 1.0
"""How long after its end, at most, a SuperExec is started again."""
_PULL = "/v1/fleet/pull-messages"
_TASK_HEADER = "flwr-task-token"
_EARLY, _LATE = -5.0, 305.0
"""Seconds by which Flower lets a signature's time be ahead or old."""
_State: Any
_Parts: Any
_State, _Parts = stores()


@dataclass
class _AnswerLimit:
    """What a node may still send in answer to one message."""

    node: int
    left: int
    tries: int = _MOST_TRIES
    taken: set[str] = field(default_factory=set[str])
    """Parts that have been counted; who sends one again fills nothing."""
    full: bool = False


@dataclass
class _Push:
    """Messages that are being sent in one go."""

    nodes: list[str] = field(default_factory=list[str])
    missing: set[str] = field(default_factory=set[str])
    """Parts that have not arrived yet."""


class NodeMessages(_State):
    """Flower's state in memory, which says for which nodes a message has come once all of its parts are there.

    A node sends no more in answer to a message than the message allows, so that no node can fill the server's disk.
    """

    def __init__(self, manager: Any, store: Any, note: Callable[[list[str]], None]) -> None:
        super().__init__(manager, store)
        self._note = note
        self._pushes: dict[str, _Push] = {}
        self._limits: dict[str, _AnswerLimit] = {}
        """By message that is being answered."""
        self._answers: dict[str, str] = {}
        """Which message is answered in a push."""

    def store_message_and_object_tree(self, message: Any, object_tree: Any, session_id: str) -> tuple[bool, list[str]]:
        """Keep a message whose parts will follow."""
        if (asked := message.metadata.reply_to_message_id) and not self._has_tries(asked):
            return False, []
        stored, missing = super().store_message_and_object_tree(message, object_tree, session_id)
        node = self.nodes.get(message.metadata.dst_node_id)
        if stored and node is not None and not message.metadata.reply_to_message_id:
            push = self._pushes.setdefault(session_id, _Push())
            push.nodes.append(b64encode(node.public_key).decode("ascii"))
            push.missing.update(missing)
        if stored and asked:
            self._answers[session_id] = asked
        return stored, missing

    def store_object(self, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        """Keep a part of a message; of an answer, while there is room for it."""
        # Flower takes parts without the name of a push for any that wants them. Nobody here sends such.
        if not session_id or not self._within_limit(session_id, object_id, len(object_content)):
            return False
        stored = super().store_object(run_id, session_id, object_id, object_content)
        push = self._pushes.get(session_id)
        if stored and push is not None:
            push.missing.discard(object_id)
            if not push.missing:
                del self._pushes[session_id]
                self._note(push.nodes)
        return stored

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        """Let go of messages and of the answers to them."""
        super().delete_messages(message_ins_ids)
        if any(self._limits.pop(name, None) for name in message_ins_ids):
            self._answers = {session: name for session, name in self._answers.items() if name in self._limits}

    def claim_task(self, task_id: int) -> str | None:
        """Let a server app start, with time enough for it."""
        token = super().claim_task(task_id)
        if token is not None:
            self.task_token_store[task_id].active_until += timedelta(seconds=_START_SECONDS)
        return token

    def _has_tries(self, asked: str) -> bool:
        message = self.message_ins_store.get(asked)
        if message is None:
            return True  # Flower itself refuses such an answer.
        known = message.metadata
        limit = self._limits.setdefault(asked, _AnswerLimit(known.dst_node_id, largest_answer(known.group_id)))
        limit.tries -= 1
        return limit.tries >= 0

    def _within_limit(self, session: str, part: str, size: int) -> bool:
        limit = self._limits.get(self._answers.get(session, ""))
        if limit is None or part in limit.taken:
            return True
        if size > limit.left:
            if not limit.full:
                _log.error(f"node {limit.node}: its answer is larger than what was asked for; the rest is not kept")
            limit.full = True
            return False
        limit.left -= size
        limit.taken.add(part)
        return True


class PartsInFiles(_Parts):
    """Flower's store in memory, with the parts themselves in files: large models must not fill the memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def put(self, object_id: str, object_content: bytes) -> None:
        """Keep a part that was announced."""
        super().put(object_id, object_content)
        with self.lock_store:
            entry = self.store[object_id]
            if entry.content:
                try:
                    (self._folder / object_id).write_bytes(entry.content)
                except OSError:
                    entry.is_available = False
                    raise
                finally:
                    entry.content = b""

    def get(self, object_id: str) -> bytes | None:
        """Return a part; None where it was never announced, nothing where it has not arrived."""
        with self.lock_store:
            entry = self.store.get(object_id)
            if entry is None:
                return None
            return (self._folder / object_id).read_bytes() if entry.is_available else b""

    def delete(self, object_id: str) -> None:
        """Let go of a part, and of those that only it needs."""
        with self.lock_store:
            known = object_id in self.store  # Only such a name is a file of ours.
            super().delete(object_id)
            if known and object_id not in self.store:
                (self._folder / object_id).unlink(missing_ok=True)


class DirectCalls:
    """An ASGI application around a SuperLink's: it answers the calls of a round itself, and holds calls for messages.

    Signatures, tokens and answers are the same here, by Flower's own functions. Whatever is not as it should be goes
    through Flower's layers, which refuse it.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._news = News()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handlers, self._callers = handlers(), Callers()

    def note(self, names: list[str]) -> None:
        """Say that messages have come for these nodes; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._news.note, names)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one connection event of the server that runs us."""
        self._loop = asyncio.get_running_loop()
        path = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] != "POST" or (path not in self._handlers and path != NEWS):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        if path == NEWS:
            await (await self._inform(request))(scope, receive, send)
            return
        content = await request.body()
        try:
            answer = await self._answer(request, content)
        except Exception:
            # What Flower would refuse, and however else its functions fail: it finds that by itself, and says it.
            given = iter([{"type": "http.request", "body": content}])

            async def again() -> Any:
                return next(given, None) or await receive()

            await self._app(scope, again, send)
            return
        await Response(answer.SerializeToString(), media_type=PROTOBUF)(scope, receive, send)

    async def _answer(self, request: Request, content: bytes) -> Any:
        kind, handler = self._handlers[request.url.path]
        if request.headers.get("content-type") != PROTOBUF:
            raise ValueError("not a call")
        asked = kind.FromString(content)
        given = {"request": asked, "state": self._state, "store": self._state.object_store}
        if request.url.path.startswith("/v1/fleet/"):
            self._check(request, asked.node.node_id)
        else:
            (token,) = request.headers.getlist(_TASK_HEADER)
            given["task"] = self._state.get_task_by_token(token)
            if given["task"] is None:
                raise ValueError("no task's")
        wanted = {name: given[name] for name in signature(handler).parameters}
        hold = seconds_to_hold(request.headers.get(WAIT_HEADER, "")) if request.url.path == _PULL else 0.0
        return await self._held(request, lambda: handler(**wanted), hold) if hold else handler(**wanted)

    def _check(self, request: Request, node: int) -> None:
        """Raise where a call is not signed by the key of the node that it names."""
        caller = self._callers.of(request.headers)
        key = b64decode(request.headers[KEY_HEADER])
        if not _EARLY < caller.age < _LATE or self._state.get_node_id_by_public_key(key) != node:
            raise ValueError("another node's")

    async def _held(self, request: Request, look: Callable[[], Any], seconds: float) -> Any:
        """Look for a node's message until there is one, or its call has been held long enough."""
        deadline, name = time.monotonic() + seconds, request.headers[KEY_HEADER]
        while True:
            before = self._news.serial
            found = look()
            left = deadline - time.monotonic()
            if found.messages_list or left <= 0 or await request.is_disconnected():
                return found
            self._keep_alive([name])
            if not await self._waited(name, before, min(left, LOOK_SECONDS)):
                return found

    async def _inform(self, request: Request) -> Response:
        """Inform the proxy for which nodes messages have come since it last asked."""
        asked = await request.json()
        self._keep_alive(asked["alive"])
        await self._waited(ANYBODY, asked["after"], LOOK_SECONDS)
        return JSONResponse({"serial": self._news.serial, "names": self._news.since(asked["after"])})

    async def _waited(self, name: str, after: int, seconds: float) -> bool:
        """Wait for news; False where the SuperLink ends, and calls that are held are to be answered at once."""
        try:
            await self._news.wait(name, after, seconds)
        except asyncio.CancelledError:
            return False
        return True

    def _keep_alive(self, names: list[str]) -> None:
        """Take a call that is held for its node's sign of life."""
        for name in names:
            node = self._state.get_node_id_by_public_key(b64decode(name))
            if node is not None:
                self._state.acknowledge_node_heartbeat(node, SIGN_OF_LIFE_SECONDS)

    @property
    def _state(self) -> Any:
        return self._app.state.linkstate_factory.state()


def run_superlink(serve: Callable[..., None], parts: Path | None) -> None:
    """Run Flower's SuperLink with the options of this process's command line, its web application served by `serve`.

    With a folder, the parts of messages are kept in files there and not in memory.
    """

    def run(app: Any, **options: Any) -> None:
        direct, factory = DirectCalls(app), app.state.linkstate_factory
        if parts is not None:
            factory.objectstore_factory.store_instance = PartsInFiles(parts)
        store = factory.objectstore_factory.store()
        factory.state_instance = NodeMessages(factory.federation_manager, store, direct.note)
        threading.Thread(target=_watch, args=(app.state.superlink_lifespan,), daemon=True, name="superexec").start()
        serve(direct, **options)

    uvicorn.run = run
    (command,) = entry_points(group="console_scripts", name="flower-superlink")
    command.load()()


def _watch(lifespan: Any) -> None:
    """Start the SuperExec, which starts runs, again where it ended: Flower itself would take runs and start none."""
    while True:
        time.sleep(_AGAIN_SECONDS)
        process = lifespan.superexec_process
        code = None if process is None else process.poll()
        if code is not None and lifespan.superexec_process is process:
            _log.error(f"the SuperExec, which starts runs, ended (code {code}); it is started again")
            lifespan._start_superexec_if_needed()
