"""A question on its way to other processes of a run, and their answers as they arrive."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Sequence
from time import monotonic

from steelyard.clients.ranks.wire import Content


class Receiving:
    """A question to some ranks and their answers, each awaited by a thread of its own: an end is noticed at once.

    Waiting in torch itself, this process would hear neither Ctrl-C nor the end of another rank.
    """

    def __init__(self, ranks: Sequence[int], send: Callable[[], None], receive: Callable[[int], Content]) -> None:
        self._ranks, self._send, self._receive = ranks, send, receive
        self._changed = threading.Condition()
        self._answers: dict[int, Content] = {}
        self._sent = False
        self._lost: Exception | None = None
        self._waiting = True
        self.over = threading.Event()
        """Set once all have answered, or one is lost."""
        threading.Thread(target=self._ask, name="ask", daemon=True).start()

    def waiting(self) -> list[int]:
        """Return the ranks that have not answered yet."""
        with self._changed:
            return [rank for rank in self._ranks if rank not in self._answers]

    def _ask(self) -> None:
        try:
            self._send()
        except Exception as error:
            self.give_up(error)
            return
        for rank in self._ranks:
            threading.Thread(target=self._take, args=(rank,), name=f"rank {rank}", daemon=True).start()
        with self._changed:
            self._sent = True
            if not self._ranks:
                self.over.set()
            self._changed.notify()

    def _take(self, rank: int) -> None:
        try:
            answer = self._receive(rank)
        except Exception as error:
            self.give_up(error)
            return
        with self._changed:
            self._answers[rank] = answer
            if len(self._answers) == len(self._ranks):
                self.over.set()
            self._changed.notify()

    def give_up(self, error: Exception) -> None:
        """Take note that a rank is lost; the first one counts."""
        with self._changed:
            first, self._lost = self._lost is None, self._lost or error
            self.over.set()
            self._changed.notify()
            if first and not self._waiting:
                # This process may be in the middle of a long training of its own.
                _thread.interrupt_main()

    def sent(self) -> None:
        """Wait until the question is with all of them."""
        self._until(lambda: self._sent)

    def wait(self) -> dict[int, Content]:
        """Return all answers; a rank that is lost is an error as soon as it is known."""
        self._until(lambda: len(self._answers) == len(self._ranks))
        return self._answers

    def _until(self, done: Callable[[], bool]) -> None:
        with self._changed:
            self._waiting = True
            while not done() and self._lost is None:
                self._changed.wait()
            self._waiting = False
            if self._lost is not None:
                raise self._lost

    def lost(self, seconds: float) -> Exception | None:
        """Return the first rank's loss, where there is one or comes to be one within so many seconds."""
        end = monotonic() + seconds
        with self._changed:
            while not self.over.is_set() and monotonic() < end:
                self._changed.wait(end - monotonic())
            return self._lost
