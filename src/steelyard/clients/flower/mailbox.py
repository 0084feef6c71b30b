"""Requests to nodes over Flower's grid and their answers, with a deadline of our own; what the SuperLink does to a run.

Flower's own wait is silent and long: a dead node is noticed after a minute, a message lives for hours, and its
`pull_messages` fetches the parts of all answers in turn: one whose parts never arrive, or do not parse, takes the
others with it. Asking after each request alone costs a call per node and look. So we look for all of them at once and
fetch what is there one by one, a few at a time, each within its own bounds.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from steelyard.base.errors import UserError
from steelyard.clients.flower.calls import AnswerSource, FoundAnswer
from steelyard.clients.flower.internals import ErrorCode, RunNotRunning
from steelyard.clients.flower.parts import fetch, group_of, opened
from steelyard.clients.flower.register import REGISTER
from steelyard.clients.flower.wire import Refused, clean, reading_one_answer, unreadable
from steelyard.messages.updates import Failure

_LEAST_FREE = 1 << 20
"""Bytes; with less, the SuperLink cannot take a message."""
_FAULT = 500


class RunStopped(UserError):
    """The SuperLink no longer runs this run; nothing more can be asked."""

    asked: ClassVar[tuple[Path, str] | None] = None
    """A file, and what it says of the end of this process's run where it is there."""

    def __init__(self, otherwise: str = "the SuperLink stopped this run (`flwr stop`?)") -> None:
        super().__init__(self.asked[1] if self.asked is not None and self.asked[0].exists() else otherwise)


class SuperLinkFault(UserError):
    """The SuperLink does not do what it is asked; the run stops and can be resumed."""


@contextmanager
def reaching_superlink() -> Generator[None]:
    """Turn what the SuperLink does wrong into one line; use it around every call that a run cannot do without."""
    try:
        yield
    except RunNotRunning:
        raise RunStopped from None
    except Exception as error:
        check_disk(error)
        words = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise SuperLinkFault(f"the SuperLink does not take messages any more: {words}") from error


def is_passing(error: BaseException) -> bool:
    """Whether an error of the SuperLink may be gone at the next try; Flower tries all others again by itself."""
    return getattr(getattr(error, "response", None), "status_code", 0) == _FAULT


def check_disk(cause: BaseException | None = None) -> None:
    """Raise where the disk of the server's folder is full, in which the SuperLink keeps parts of messages.

    Use it where something failed that a full disk would explain: a message was not taken, or nobody has answered.
    """
    register = os.environ.get(REGISTER)
    folder = Path(register or "").parent
    try:
        full = bool(register) and shutil.disk_usage(folder).free < _LEAST_FREE
    except OSError:
        return
    if full:
        words = f"{folder}: No space left on device"
        raise SuperLinkFault(f"the SuperLink does not take messages any more: {words}") from cause


_SHORTEST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.05, 0.25, 1.3
"""Seconds between looks: quick answers are found quickly, and long work is not asked after all the time."""
_AT_ONCE, _LARGE = 4, 16 << 20
"""Answers that are fetched side by side, to keep the line busy; large ones one by one, for memory."""
_MOST_PULL_SECONDS = 300.0
_MOST_FAULTS = 40
"""Looks in a row at which the SuperLink may fail, about ten seconds, before all answers are given up."""

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
        source = AnswerSource.of(self._grid)
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
        return _content_of(request, name, answer)
    except Exception as error:
        return unreadable(error)


def _content_of(request: Request, name: str, answer: list[Message]) -> RecordDict | str:
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


_ERRORS = {
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "its ClientApp could not be loaded",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "raised an error",
    ErrorCode.MESSAGE_UNAVAILABLE: "its answer is no longer available",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its answer is no longer available",
    ErrorCode.NODE_UNAVAILABLE: "its node is gone",
    ErrorCode.INVALID_FAB: "its node refused to run this app",
    ErrorCode.CLIENT_APP_CRASHED: "its ClientApp died",
}
"""Flower's errors in words that say what they mean for the round."""
_WITH_REASON = (ErrorCode.UNKNOWN, ErrorCode.CLIENT_APP_RAISED_EXCEPTION)


def _error_words(error: Any) -> str:
    words = _ERRORS.get(error.code, f"failed with code {error.code}")
    if error.code == ErrorCode.NODE_UNAVAILABLE:
        return Gone(words)
    # Flower writes <class 'ValueError'>:<'text'>; the class's name and the text are what a reader wants.
    reason = (error.reason or "").replace("<class '", "").replace("'>:<'", ": ").removesuffix("'>")
    return clean(f"{words}: {reason}" if reason and error.code in _WITH_REASON else words)


_RESTING = "its node was silent and has not answered since"
_AWAY = "no connected node holds this client"


class NodeAnswer(Protocol):
    """What one node answered: of some clients, and why not of others."""

    @property
    def failures(self) -> Sequence[Failure]: ...


AnswerT = TypeVar("AnswerT", bound=NodeAnswer)


@dataclass(frozen=True, eq=False)
class Errand(Generic[AnswerT]):
    """Work for some clients: one message to each node that holds some of them, and how its answer is read."""

    kind: str
    round: int
    clients: Sequence[str]
    write: Callable[[int, tuple[str, ...]], RecordDict]
    """From a node, and those of the clients that live there, to its message."""
    read: Callable[[int, tuple[str, ...], RecordDict], AnswerT]
    """From the same, and the content of the answer, to what was answered; raises `Refused`."""
    largest: Callable[[int], int]
    """Most bytes that an honest answer for so many clients has."""


@dataclass(frozen=True, eq=False)
class Answers(Generic[AnswerT]):
    """What came back of one errand."""

    parts: list[AnswerT] = field(default_factory=list[AnswerT])
    failures: list[Failure] = field(default_factory=list[Failure])


class Homes(Protocol):
    """Where clients live, and who is silent: the roster."""

    def holder(self, client: str) -> int | None: ...

    def is_resting(self, node: int) -> bool: ...

    def heard(self, node: int, *, answered: bool) -> None: ...


class Exchange:
    """Asks the nodes that hold some clients; a client without a proper answer is a failure with its reason."""

    def __init__(self, roster: Homes, sender: RequestSender) -> None:
        self._roster, self._sender = roster, sender
        self.all_gone = False
        """Whether no node at all was there any more when the last exchange ended."""

    def group(self, clients: Sequence[str], failures: list[Failure]) -> dict[int, tuple[str, ...]]:
        """Return who is to be asked where; a client whose node is away or silent is left out, with the reason."""
        homes = {client: self._roster.holder(client) for client in clients}
        awake = {node for node in homes.values() if node is not None and not self._roster.is_resting(node)}
        groups: dict[int, list[str]] = {}
        for client, node in homes.items():
            if node is None:
                failures.append(Failure(client, _AWAY))
            elif awake and node not in awake:  # Where all are silent, there is nobody else to ask.
                failures.append(Failure(client, _RESTING))
            else:
                groups.setdefault(node, []).append(client)
        return {node: tuple(sorted(groups[node])) for node in sorted(groups)}

    def ask(self, errands: Sequence[Errand[AnswerT]], seconds: float) -> list[Answers[AnswerT]]:
        """Send all messages, read what comes back, and put the blame where an answer is missing or refused."""
        answers = [Answers[AnswerT]() for _ in errands]
        places = [
            (errand, found, node, asked)
            for errand, found in zip(errands, answers, strict=True)
            for node, asked in self.group(errand.clients, found.failures).items()
        ]
        requests = [
            Request(node, errand.kind, errand.write(node, asked), errand.round, errand.largest(len(asked)))
            for errand, _, node, asked in places
        ]

        def take(index: int, content: RecordDict) -> AnswerT | str:
            # Each answer is read as it arrives and let go of, so that not all of them lie in memory at once.
            errand, _, node, asked = places[index]
            try:
                with reading_one_answer():
                    return errand.read(node, asked, content)
            except Refused as refusal:
                return str(refusal)

        received = self._sender.ask(requests, seconds, read=take)
        self.all_gone = bool(received) and all(isinstance(answer, Gone) for answer in received)
        for (_, found, node, asked), answer in zip(places, received, strict=True):
            # A node that sends nonsense or an error is there; one that is silent may not be.
            self._roster.heard(node, answered=not isinstance(answer, Silence))
            if isinstance(answer, str):
                found.failures.extend(Failure(client, clean(answer)) for client in asked)
            else:
                found.failures.extend(answer.failures)
                found.parts.append(answer)
        return answers
