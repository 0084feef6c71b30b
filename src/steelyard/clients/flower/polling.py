"""Looking for answers on a SuperLink: one question for all outstanding requests, then each answer read by itself.

Flower's `pull_messages` fetches the parts of all answers in turn: one whose parts never arrive, or do not parse, takes
the others with it. Asking after each request alone costs a call per node and look. So we look for all of them at once
and fetch what is there one by one, a few at a time, each within its own bounds.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.run import RunNotRunningException
from flwr.superlink.grid import HttpGrid

from steelyard.clients.flower.forms import Refused
from steelyard.clients.flower.parts import fetch, opened
from steelyard.clients.flower.superlink import RunStopped, is_passing
from steelyard.clients.flower.transport import bound_answers

_SHORTEST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.05, 0.25, 1.3
"""Seconds between looks: quick answers are found quickly, and long work is not asked after all the time."""
_AT_ONCE, _LARGE = 4, 16 << 20
"""Answers that are fetched side by side, to keep the line busy; large ones one by one, for memory."""
_MOST_PULL_SECONDS = 300.0
_MOST_FAULTS = 40
"""Looks in a row at which the SuperLink may fail, about ten seconds, before all answers are given up."""
_LARGEST_LOOK = 64 << 20
"""Most bytes that one look at all answers may bring; an answer's names of parts are about a thousand."""

Arrived = Callable[[str, list[Message] | Exception], None]


@dataclass(frozen=True)
class PendingRequest:
    """One request that was sent and not answered yet."""

    name: str
    """Flower's id of the message."""
    largest: int
    """Most bytes that an honest answer has; a larger one is neither fetched nor put together."""


class AnswerPoller:
    """Looks for the answers to requests until told to stop; make one for each exchange and call `start`."""

    def __init__(self, grid: Grid, requests: Mapping[str, PendingRequest], deadline: float, arrived: Arrived) -> None:
        self._grid, self._requests, self._deadline, self._arrived = grid, dict(requests), deadline, arrived
        self._found: queue.SimpleQueue[tuple[str, list[tuple[MessageProto, ObjectTree]]]] = queue.SimpleQueue()

    def start(self, stop: threading.Event) -> None:
        """Start looking, in threads that end with `stop`, with the deadline, or with the last answer."""
        if isinstance(self._grid, HttpGrid):
            bound_answers(self._client, _LARGEST_LOOK)
            _thread(self._look, stop)
            large = any(request.largest > _LARGE for request in self._requests.values())
            for _ in range(1 if large else min(_AT_ONCE, len(self._requests))):
                _thread(self._fetch, stop)
        else:
            for name in self._requests:
                _thread(self._watch, stop, name)

    def _watch(self, stop: threading.Event, name: str) -> None:
        """Watch one request over any grid."""
        pauses = _pauses()
        while not stop.wait(next(pauses)) and time.monotonic() < self._deadline:
            try:
                answers = list(self._grid.pull_messages([name]))
            except RunNotRunningException:
                self._arrived(name, RunStopped())
                return
            except Exception as error:
                self._arrived(name, error)
                return
            if answers:
                self._arrived(name, answers)
                return

    def _look(self, stop: threading.Event) -> None:
        """Look for the answers to all requests with one call."""
        waiting = set(self._requests)
        pauses, faults = _pauses(), 0
        while waiting and not stop.wait(next(pauses)) and time.monotonic() < self._deadline:
            try:
                found = self._client.PullMessages(PullAppMessagesRequest(message_ids=sorted(waiting)))
            except (Exception, RunNotRunningException) as error:
                faults += 1
                if is_passing(error) and faults < _MOST_FAULTS:
                    continue
                for name in waiting:
                    self._arrived(name, error if isinstance(error, Exception) else RunStopped())
                return
            faults = 0
            answers: dict[str, list[tuple[MessageProto, ObjectTree]]] = {}
            for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                answers.setdefault(message.metadata.reply_to_message_id, []).append((message, tree))
            for name, parts in answers.items():
                if name in waiting:
                    waiting.discard(name)
                    self._found.put((name, parts))

    def _fetch(self, stop: threading.Event) -> None:
        """Fetch the parts of single answers, whatever they turn out to be."""
        while not stop.is_set() and time.monotonic() < self._deadline:
            try:
                name, parts = self._found.get(timeout=_LONGEST_PAUSE)
            except queue.Empty:
                continue
            try:
                answers: list[Message] | Exception = [self._opened(name, parts)]
            except RunNotRunningException:
                answers = RunStopped()
            except Exception as error:
                answers = error
            self._arrived(name, answers)
            del answers, parts

    def _opened(self, name: str, parts: list[tuple[MessageProto, ObjectTree]]) -> Message:
        if len(parts) > 1:
            raise Refused(f"answered {len(parts)} times; allowed: once")
        ((message, tree),) = parts
        own, largest = message.metadata.message_id, self._requests[name].largest
        run, identity = cast(HttpGrid, self._grid).run.run_id, cast(HttpGrid, self._grid).node
        pull = make_pull_object_fn_protobuf(self._client.PullObject, identity, run)
        left = min(max(1.0, self._deadline - time.monotonic()), _MOST_PULL_SECONDS)
        try:
            contents = fetch(own, tree, pull, largest, left)
        finally:  # Also where it is refused: the SuperLink need not keep it.
            request = ConfirmMessageReceivedRequest(node=identity, run_id=run, message_object_id=own)
            self._client.ConfirmMessageReceived(request)
        return opened(own, contents, largest)

    @property
    def _client(self) -> Any:
        # Flower has no public way to look for answers without fetching them.
        return cast(Any, self._grid)._runtime_client  # pyright: ignore[reportPrivateUsage]


def _pauses() -> Iterator[float]:
    pause = _SHORTEST_PAUSE
    while True:
        yield pause
        pause = min(pause * _GROWTH, _LONGEST_PAUSE)


def _thread(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True, name="polling").start()
