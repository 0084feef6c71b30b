"""Sending letters to nodes over Flower's grid and collecting the answers, with a deadline of our own.

Flower's own wait is silent and long: a dead node is noticed after a minute, a message lives for hours, and reading one
answer whose parts never arrive blocks the reading of all others. So every letter is watched by a thread of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from steelyard.clients.flower.checks import clean, unreadable

_POLLS_PER_SECOND = 8.0
_SHORTEST_POLL = 0.2

# flwr.common.constant.ErrorCode, in words that say what it means for the round.
_ERRORS = {
    1: "its ClientApp could not be loaded",
    2: "raised an error",
    3: "its answer is no longer available",
    4: "its answer is no longer available",
    5: "its node is gone",
    7: "its node refused to run this app",
    8: "its ClientApp died",
}


NOT_WAITED_FOR = "was not waited for"
"""The answer of a node where enough others had answered."""


class RunStopped(Exception):
    """The SuperLink no longer runs this run; nothing more can be asked."""


@dataclass(frozen=True, eq=False)
class Letter:
    """One message to one node."""

    node: int
    kind: str
    content: RecordDict
    round: int = 0


class Courier:
    """Delivers letters over one grid; use `ask` for every exchange with nodes."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def ask(self, letters: Sequence[Letter], seconds: float, enough: int | None = None) -> list[RecordDict | str]:
        """Return for each letter the content of its answer, or why there is none; takes at most `seconds`.

        With `enough`, nobody else is waited for once so many have given a proper answer.
        """
        deadline = time.monotonic() + seconds
        results: list[RecordDict | str | None] = [None] * len(letters)
        arrived: queue.SimpleQueue[tuple[int, list[Message] | Exception]] = queue.SimpleQueue()
        finished = threading.Event()
        sent = self._send(letters, seconds)
        pause = max(_SHORTEST_POLL, len(letters) / _POLLS_PER_SECOND)
        waiting = 0
        for index, name in enumerate(sent):
            if not name:
                results[index] = "the SuperLink did not take the message: its node is gone"
                continue
            watch = (index, name, pause, deadline, finished, arrived)
            threading.Thread(target=self._watch, args=watch, daemon=True, name=f"letter-{index}").start()
            waiting += 1
        try:
            good = 0
            while waiting and good != enough and (left := deadline - time.monotonic()) > 0:
                try:
                    index, answer = arrived.get(timeout=left)
                except queue.Empty:
                    break
                waiting -= 1
                result = results[index] = _judge(letters[index], sent[index], answer)
                good += not isinstance(result, str)
        finally:
            finished.set()
        late = NOT_WAITED_FOR if time.monotonic() < deadline else f"no answer within {seconds:g} s"
        return [late if result is None else result for result in results]

    def _send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
        # A message that outlives its round would only keep the node busy with work that nobody wants.
        messages = [
            Message(letter.content, letter.node, letter.kind, ttl=seconds, group_id=str(letter.round))
            for letter in letters
        ]
        names = list(self.grid.push_messages(messages)) if messages else []
        return [name or "" for name in names] if len(names) == len(letters) else [""] * len(letters)

    def _watch(
        self,
        index: int,
        name: str,
        pause: float,
        deadline: float,
        finished: threading.Event,
        arrived: queue.SimpleQueue[tuple[int, list[Message] | Exception]],
    ) -> None:
        while not finished.wait(pause) and time.monotonic() < deadline:
            try:
                answers = list(self.grid.pull_messages([name]))
            except Exception as error:
                arrived.put((index, error))
                return
            if answers:
                arrived.put((index, answers))
                return


def _judge(letter: Letter, name: str, answer: list[Message] | Exception) -> RecordDict | str:
    """Return the content of the one answer to this letter, or what is wrong with it."""
    if isinstance(answer, Exception):
        if type(answer).__name__ == "RunNotRunningException":
            raise RunStopped("the SuperLink stopped this run") from answer
        return unreadable(answer)
    try:
        return _opened(letter, name, answer)
    except Exception as error:
        return unreadable(error)


def _opened(letter: Letter, name: str, answer: list[Message]) -> RecordDict | str:
    if len(answer) > 1:
        return f"answered {len(answer)} times; allowed: once"
    message = answer[0]
    if message.metadata.reply_to_message_id != name:
        return "answered another message"
    if message.has_error():
        return _error_words(message.error)
    if message.metadata.src_node_id != letter.node:
        return f"answered as node {message.metadata.src_node_id}; asked node {letter.node}"
    if message.metadata.message_type != letter.kind:
        return clean(f"answered with {message.metadata.message_type!r}; allowed: {letter.kind!r}")
    return message.content


def _error_words(error: Any) -> str:
    words = _ERRORS.get(error.code, f"failed with code {error.code}")
    # Flower writes <class 'ValueError'>:<'text'>; the class's name and the text are what a reader wants.
    reason = (error.reason or "").replace("<class '", "").replace("'>:<'", ": ").removesuffix("'>")
    return clean(f"{words}: {reason}" if reason and error.code in (0, 2) else words)
