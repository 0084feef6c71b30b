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

from flwr.app import Message
from flwr.serverapp import Grid

from steelyard.clients.flower.adapter.answers import AnswerSource, FoundAnswer
from steelyard.clients.flower.adapter.messages import RunNotRunning
from steelyard.clients.flower.forms import Refused
from steelyard.clients.flower.parts import fetch, opened
from steelyard.clients.flower.superlink import RunStopped, is_passing

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
    """Looks for the answers to requests until it is stopped; make one for each exchange and call `start`."""

    def __init__(self, grid: Grid, requests: Mapping[str, PendingRequest], deadline: float, arrived: Arrived) -> None:
        self._grid, self._requests, self._deadline, self._arrived = grid, dict(requests), deadline, arrived
        self._found: queue.SimpleQueue[tuple[str, list[FoundAnswer]]] = queue.SimpleQueue()

    def start(self, stop: threading.Event) -> None:
        """Start looking, in threads that end with `stop`, with the deadline, or with the last answer."""
        source = AnswerSource.of(self._grid, _LARGEST_LOOK)
        if source is not None:
            _thread(self._look, stop, source)
            large = any(request.largest > _LARGE for request in self._requests.values())
            for _ in range(1 if large else min(_AT_ONCE, len(self._requests))):
                _thread(self._fetch, stop, source)
        else:
            for name in self._requests:
                _thread(self._watch, stop, name)

    def _watch(self, stop: threading.Event, name: str) -> None:
        """Watch one request over any grid."""
        pauses = _pauses()
        while not stop.wait(next(pauses)) and time.monotonic() < self._deadline:
            try:
                answers = list(self._grid.pull_messages([name]))
            except RunNotRunning:
                self._arrived(name, RunStopped())
                return
            except Exception as error:
                self._arrived(name, error)
                return
            if answers:
                self._arrived(name, answers)
                return

    def _look(self, stop: threading.Event, source: AnswerSource) -> None:
        """Look for the answers to all requests with one call."""
        waiting = set(self._requests)
        pauses, faults = _pauses(), 0
        while waiting and not stop.wait(next(pauses)) and time.monotonic() < self._deadline:
            try:
                found = source.look(waiting)
            except (Exception, RunNotRunning) as error:
                faults += 1
                if is_passing(error) and faults < _MOST_FAULTS:
                    continue
                for name in waiting:
                    self._arrived(name, error if isinstance(error, Exception) else RunStopped())
                return
            faults = 0
            answers: dict[str, list[FoundAnswer]] = {}
            for answer in found:
                answers.setdefault(answer.answers, []).append(answer)
            for name in sorted(waiting & set(answers)):
                waiting.discard(name)
                self._found.put((name, answers[name]))

    def _fetch(self, stop: threading.Event, source: AnswerSource) -> None:
        """Fetch the parts of single answers, whatever they turn out to be."""
        while not stop.is_set() and time.monotonic() < self._deadline:
            try:
                name, found = self._found.get(timeout=_LONGEST_PAUSE)
            except queue.Empty:
                continue
            try:
                answers: list[Message] | Exception = [self._opened(source, name, found)]
            except RunNotRunning:
                answers = RunStopped()
            except Exception as error:
                answers = error
            self._arrived(name, answers)
            del answers, found

    def _opened(self, source: AnswerSource, name: str, found: list[FoundAnswer]) -> Message:
        if len(found) > 1:
            raise Refused(f"answered {len(found)} times; allowed: once")
        (answer,) = found
        largest = self._requests[name].largest
        left = min(max(1.0, self._deadline - time.monotonic()), _MOST_PULL_SECONDS)
        try:
            contents = fetch(answer.name, answer.tree, source.part_puller(), largest, left)
        finally:  # Also where it is refused: the SuperLink need not keep it.
            source.confirm(answer.name)
        return opened(answer.name, contents, largest)


def _pauses() -> Iterator[float]:
    pause = _SHORTEST_PAUSE
    while True:
        yield pause
        pause = min(pause * _GROWTH, _LONGEST_PAUSE)


def _thread(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True, name="polling").start()
