"""The calls of which a round consists, answered by Flower's own handlers without the layers of its web application.

One call costs a SuperLink some fifteen milliseconds of a core, nearly all of them in the layers between its server and
its handlers. Signatures, tokens, answers and errors are the same here, by Flower's own functions.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64decode
from collections.abc import Callable
from inspect import signature
from typing import Any

from flwr.supercore.constant import TASK_TOKEN_HEADER
from flwr.supercore.dependencies.task import authenticate_task
from flwr.supercore.error import http_error_translator
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES, ProtobufTranslationMiddleware
from flwr.superlink.routers.fleet.node_auth import authenticate_node
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from steelyard.clients.flower.news import (
    ANYBODY,
    KEY_HEADER,
    LOOK_SECONDS,
    NEWS,
    SIGN_OF_LIFE_SECONDS,
    WAIT_HEADER,
    News,
    seconds_to_hold,
)

_PULL = "/v1/fleet/pull-messages"
_PARTS = ("push-object", "pull-object", "confirm-message-received", "push-messages", "pull-messages")
_HANDLERS: dict[str, Callable[..., Any]] = {
    f"/v1/{side}/{call}": getattr(handlers, call.replace("-", "_"))
    for side, handlers, calls in (
        ("fleet", fleet_handlers, (*_PARTS, "send-node-heartbeat")),
        ("runtime", runtime_handlers, (*_PARTS, "get-nodes")),
    )
    for call in calls
}


class DirectCalls:
    """An ASGI application around a SuperLink's: it answers frequent calls itself, and holds calls for messages."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._news = News()
        self._loop: asyncio.AbstractEventLoop | None = None

    def note(self, names: list[str]) -> None:
        """Say that messages have come for these nodes; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._news.note, names)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one connection event of the server that runs us."""
        self._loop = asyncio.get_running_loop()
        path = scope.get("path", "")
        posted = scope["type"] == "http" and scope["method"] == "POST"
        if posted and (path in _HANDLERS or path == NEWS):
            request = Request({**scope, "app": self._app}, receive)
            response = await http_error_translator(request, self._inform if path == NEWS else self._answer)
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        translation: Any = ProtobufTranslationMiddleware
        translation._check_request_media_type(request)
        asked = translation._parse_request(await request.body(), PROTOBUF_REQUEST_TYPES["POST", path])
        request.state.protobuf_request = asked
        given = {"request": asked, "state": self._state, "store": self._state.object_store}
        if path.startswith("/v1/fleet/"):
            authenticate_node(request)
        else:
            given["task"] = authenticate_task(request, request.headers.get(TASK_TOKEN_HEADER), self._state)
        handler = _HANDLERS[path]
        wanted = {name: given[name] for name in signature(handler).parameters}
        hold = seconds_to_hold(request.headers.get(WAIT_HEADER, "")) if path == _PULL else 0.0
        answer = await self._held(request, lambda: handler(**wanted), hold) if hold else handler(**wanted)
        return Response(answer.SerializeToString(), media_type=PROTOBUF_MEDIA_TYPE)

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
