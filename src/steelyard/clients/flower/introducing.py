"""Asking nodes who they are, in the background: one that hangs holds up neither rounds nor the others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

from flwr.app import RecordDict

from steelyard.clients.flower import wire
from steelyard.clients.flower.forms import INTRODUCE, AskForm
from steelyard.clients.flower.introductions import LARGEST_INTRODUCTION
from steelyard.clients.flower.requesting import Request, RequestSender

_ASK_AGAIN_SECONDS, _LONGEST_PAUSE = 5.0, 600.0


class Introducing:
    """Asks nodes to introduce themselves, and keeps their answers until somebody listens; `seconds` is their time."""

    def __init__(self, sender: RequestSender, seconds: float, experiment: str) -> None:
        self.seconds = seconds
        self.asked: set[int] = set()
        """Nodes whose answer is still to come."""
        self._sender = sender
        self._question = AskForm(experiment=experiment)
        self._later: dict[int, tuple[float, float]] = {}
        """When a node may be asked again, and the pause before that."""
        self._answers: queue.SimpleQueue[tuple[int, RecordDict | str]] = queue.SimpleQueue()

    def ask(self, nodes: set[int], round: int) -> set[int]:
        """Ask those of some nodes who have not been asked and are not to be left alone yet; returns whom."""
        now = time.monotonic()
        asked = nodes - self.asked - {node for node, (when, _) in self._later.items() if when > now}
        if asked:
            self.asked |= asked
            threading.Thread(target=self._ask, args=(sorted(asked), round), daemon=True, name="introductions").start()
        return asked

    def answers(self, seconds: float) -> Iterator[tuple[int, RecordDict | str]]:
        """Return what nodes have said of themselves; waits for the first of them so long, and for no other."""
        while True:
            try:
                node, answer = self._answers.get(timeout=seconds) if seconds > 0 else self._answers.get_nowait()
            except queue.Empty:
                return
            seconds = 0.0
            self.asked.discard(node)
            yield node, answer

    def leave_alone(self, node: int) -> None:
        """Ask a node later, after a pause that is twice the one before."""
        pause = min(2 * self._later.get(node, (0.0, _ASK_AGAIN_SECONDS / 2))[1], _LONGEST_PAUSE)
        self._later[node] = (time.monotonic() + pause, pause)

    def welcome(self, node: int) -> None:
        """Forget that a node was to be left alone."""
        self._later.pop(node, None)

    def _ask(self, nodes: list[int], round: int) -> None:
        question, heard = wire.content(self._question, {}), set[int]()
        requests = [Request(node, INTRODUCE, question, round, LARGEST_INTRODUCTION) for node in nodes]

        def take(index: int, answer: RecordDict | str) -> RecordDict | str:
            heard.add(nodes[index])
            self._answers.put((nodes[index], answer))
            return answer

        try:
            answers = self._sender.ask(requests, self.seconds, read=take, failed=take)
        except Exception as error:
            answers = [f"could not be asked: {type(error).__name__}"] * len(nodes)
        for node, answer in zip(nodes, answers, strict=True):
            if node not in heard:
                self._answers.put((node, answer))
