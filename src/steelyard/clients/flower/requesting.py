"""Sending requests to nodes over Flower's grid and collecting the answers, with a deadline of our own.

Flower's own wait is silent and long: a dead node is noticed after a minute, a message lives for hours, and reading one
answer whose parts never arrive blocks the reading of all others. So `polling` looks for answers in its own way.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from steelyard.clients.flower.adapter.messages import ERRORS, GONE, RAISED
from steelyard.clients.flower.checks import clean, unreadable
from steelyard.clients.flower.forms import Refused
from steelyard.clients.flower.parts import group_of
from steelyard.clients.flower.polling import AnswerPoller, PendingRequest
from steelyard.clients.flower.superlink import RunStopped, check_disk, reaching_superlink

Read = Callable[[int, RecordDict], Any]
"""Reads the content of the answer to the request at an index; a text that it returns is why it cannot be used."""

_LONGEST_WAIT, _STILL_SECONDS = 1.0, 5.0
"""Seconds of one wait for answers, and by how many it is too long: a laptop was closed, or the process stopped."""
NOT_WAITED_FOR = "was not waited for"
"""The answer of a node where enough others had answered."""


class Silence(str):
    """Why there is no answer: the node said nothing in time."""

    __slots__ = ()


class Gone(str):
    """Why there is no answer: the node is not connected any more, or this machine itself was away."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Request:
    """One message to one node."""

    node: int
    kind: str
    content: RecordDict
    round: int
    largest: int
    """Most bytes that an honest answer has; a larger one is not read."""


class RequestSender:
    """Sends requests over one grid; use `ask` for every exchange with nodes."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def ask(
        self,
        requests: Sequence[Request],
        seconds: float,
        enough: int | None = None,
        read: Read | None = None,
        failed: Callable[[int, str], object] | None = None,
    ) -> list[Any]:
        """Return for each request the content of its answer, or why there is none; takes at most `seconds`.

        With `enough`, nobody else is waited for once so many have given a proper answer. With `read`, each content is
        read as it arrives and let go of, and what `read` returned stands in its place; `failed` hears of every other
        answer as it arrives.
        """
        begun = time.monotonic()
        deadline = begun + seconds
        results: list[Any] = [None] * len(requests)
        arrived: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        sent = self._send(requests, seconds)
        sending = time.monotonic() - begun
        index_of = {name: index for index, name in enumerate(sent) if name}
        for index, name in enumerate(sent):
            if not name:
                results[index] = Gone("the SuperLink did not take the message: its node is gone")

        def take(name: str, answer: list[Message] | Exception) -> None:
            index = index_of[name]
            try:
                result: Any = _judge(requests[index], name, answer)
                if failed and isinstance(result, str):
                    failed(index, result)
                arrived.put((index, read(index, result) if read and not isinstance(result, str) else result))
            except Exception as error:
                arrived.put((index, error))

        stop = threading.Event()
        outstanding = {name: PendingRequest(name, requests[index].largest) for name, index in index_of.items()}
        AnswerPoller(self.grid, outstanding, deadline, take).start(stop)
        try:
            slept = self._collect(results, arrived, len(index_of), deadline, enough)
            if sending >= seconds:  # Nobody had any time to answer.
                slept += sending
        finally:
            stop.set()
        if requests and all(result is None or isinstance(result, str) for result in results):
            check_disk()  # Then no answer is kept, and no node is to blame.
        late: str = Silence(f"no answer within {seconds:g} s")
        if time.monotonic() < deadline:
            late = NOT_WAITED_FOR
        elif slept:
            late = Gone(f"no answer within {seconds:g} s, for {slept:.0f} s of which the server itself stood still")
        return [late if result is None else result for result in results]

    def _collect(
        self,
        results: list[Any],
        arrived: queue.SimpleQueue[tuple[int, Any]],
        waiting: int,
        deadline: float,
        enough: int | None,
    ) -> float:
        """Take what arrives; returns for how many seconds this process itself stood still meanwhile."""
        good, slept = 0, 0.0
        while waiting and good != enough and (left := deadline - (now := time.monotonic())) > 0:
            try:
                index, result = arrived.get(timeout=min(left, _LONGEST_WAIT))
            except queue.Empty:
                late = time.monotonic() - now - _LONGEST_WAIT
                slept += late if late > _STILL_SECONDS else 0.0
                continue
            if isinstance(result, RunStopped):
                raise result
            waiting -= 1
            results[index] = unreadable(result) if isinstance(result, Exception) else result
            good += not isinstance(results[index], str)
        return slept

    def _send(self, requests: Sequence[Request], seconds: float) -> list[str]:
        # A message that outlives its round would only keep the node busy with work that nobody wants.
        messages = [
            Message(one.content, one.node, one.kind, ttl=seconds, group_id=group_of(one.round, one.largest))
            for one in requests
        ]
        with reaching_superlink():
            names = list(self.grid.push_messages(messages)) if messages else []
        return [name or "" for name in names] if len(names) == len(requests) else [""] * len(requests)


def _judge(request: Request, name: str, answer: list[Message] | Exception) -> RecordDict | str:
    """Return the content of the one answer to this request, or what is wrong with it."""
    if isinstance(answer, Exception):
        if isinstance(answer, RunStopped):
            raise answer
        return str(answer) if isinstance(answer, Refused) else unreadable(answer)
    try:
        return _opened(request, name, answer)
    except Exception as error:
        return unreadable(error)


def _opened(request: Request, name: str, answer: list[Message]) -> RecordDict | str:
    if len(answer) > 1:
        return f"answered {len(answer)} times; allowed: once"
    message = answer[0]
    if message.metadata.reply_to_message_id != name:
        return "answered another message"
    if message.has_error():
        return _error_words(message.error)
    if message.metadata.src_node_id != request.node:
        return f"answered as node {message.metadata.src_node_id}; asked node {request.node}"
    if message.metadata.message_type != request.kind:
        return clean(f"answered with {message.metadata.message_type!r}; allowed: {request.kind!r}")
    return message.content


def _error_words(error: Any) -> str:
    words = ERRORS.get(error.code, f"failed with code {error.code}")
    if error.code == GONE:
        return Gone(words)
    # Flower writes <class 'ValueError'>:<'text'>; the class's name and the text are what a reader wants.
    reason = (error.reason or "").replace("<class '", "").replace("'>:<'", ": ").removesuffix("'>")
    return clean(f"{words}: {reason}" if reason and error.code in (0, RAISED) else words)
