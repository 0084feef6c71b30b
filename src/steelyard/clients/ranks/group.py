"""The processes of one run: how they find each other, ask and answer, and what happens when one is gone.

They are started by torchrun, or by anything else that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Every rank
counts up while it lives, so that one that hangs is named long before it would answer.
"""

from __future__ import annotations

import _thread
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from steelyard.base.errors import MachineError, UserError, brief
from steelyard.clients.ranks.wire import Content, read, written

SILENCE = "STEELYARD_RANK_SILENCE"
"""In the environment of rank 0: seconds without a sign of life after which a rank counts as lost."""
USUAL, LEAST, MOST = 60.0, 2.0, 86_400.0


class Counters(Protocol):
    """What torch's store does that signs of life need; it answers at once."""

    def add(self, key: str, amount: int, /) -> int: ...


def silence(environment: Mapping[str, str]) -> float:
    """Return how many seconds a rank may give no sign of life."""
    text = environment.get(SILENCE) or str(USUAL)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not LEAST <= seconds <= MOST:
        raise UserError(f"{SILENCE}: got {brief(text)} in the environment; allowed: {LEAST:g} to {MOST:g} seconds")
    return seconds


class Heartbeat:
    """Counters of all ranks in the store by which they have met; a rank that is stopped does not count on."""

    def __init__(self, counters: Counters, seconds: float) -> None:
        self._counters, self.seconds = counters, seconds
        self.every = min(5.0, seconds / 4)

    def start(self, rank: int) -> None:
        """Count for a rank from now on, until its process ends."""
        threading.Thread(target=self._count, args=(rank,), name="heartbeat", daemon=True).start()

    def _count(self, rank: int) -> None:
        pause = threading.Event()
        while not pause.wait(self.every):
            try:
                self._counters.add(_key(rank), 1)
            except Exception:
                return  # the store went with rank 0: this rank hears of that where it waits for it

    def watch(self, waiting: Callable[[], Collection[int]], lost: Callable[[int], None], done: threading.Event) -> None:
        """Report a rank that is waited for and has given no sign, until `done`.

        Looks are counted, not time: where all processes were stopped together, as by a batch system, none is late.
        """
        silent: dict[int, tuple[int, int]] = {}
        while not done.wait(self.every):
            for rank in waiting():
                try:
                    count = int(self._counters.add(_key(rank), 0))
                except Exception:
                    return
                before, looks = silent.get(rank, (count, 0))
                silent[rank] = (count, looks + 1 if count == before else 0)
                if silent[rank][1] * self.every > self.seconds:
                    lost(rank)
                    return


def _key(rank: int) -> str:
    return f"steelyard/heartbeat/{rank}"


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


MEETING = timedelta(seconds=120)
"""How long processes wait for each other at the start."""
LONGEST = timedelta(hours=2)
"""How long one waits for another that lives and does not answer; one that gives no sign of life: `heartbeat`."""
NEWS = 0.5
"""Seconds in which a rank's end becomes known, where this process is asked to end because of it."""
END = "end"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher says of a process, in its environment."""
Answer = Callable[[str, Content], Content]
"""Does one command with what it is given, and returns what is asked for."""


class RankLost(MachineError):
    """A process of the run has ended or does not answer any more; what is written is kept."""


@dataclass(frozen=True)
class Place:
    """Where a process stands among all of a run, and among those of its machine."""

    rank: int
    count: int
    local_rank: int
    local_count: int

    @classmethod
    def given(cls, environment: Mapping[str, str]) -> Place | None:
        """Return the place that a launcher gave this process; None where there is no other process."""
        if environment.get("WORLD_SIZE", "1").strip() == "1" or "RANK" not in environment:
            return None
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environment.get(name):
                raise UserError(f"{name}: missing in the environment, with RANK; allowed: both, as torchrun sets them")
        _number(environment, "MASTER_PORT", None, 1, 65535)
        count = _number(environment, "WORLD_SIZE", None, 1, 1 << 16)
        rank = _number(environment, "RANK", None, 0, count - 1)
        local_count = _number(environment, "LOCAL_WORLD_SIZE", count, 1, count)
        return cls(rank, count, _number(environment, "LOCAL_RANK", rank, 0, local_count - 1), local_count)


def _number(environment: Mapping[str, str], name: str, usual: int | None, least: int, most: int) -> int:
    text = environment.get(name, "" if usual is None else str(usual))
    if not text.isdecimal() or not least <= int(text) <= most:
        raise UserError(f"{name}: got {brief(text)} in the environment; allowed: a whole number from {least} to {most}")
    return int(text)


class Ranks:
    """The processes of a run, as one of them sees them; rank 0 asks, the others answer until they are asked to end."""

    def __init__(self, place: Place, group: Any = None, heartbeat: Heartbeat | None = None) -> None:
        self.place = place
        self._group, self._heartbeat = group, heartbeat
        self.broken = False
        """True once a process was lost, or this one stopped in the middle of a question: nobody can be asked again."""

    @property
    def count(self) -> int:
        """How many processes there are."""
        return self.place.count

    def ask(
        self, command: str, contents: Mapping[int, Content], answer: Answer, common: Content = None
    ) -> dict[int, Content]:
        """Have some ranks do a command, this one too where it is named, and return their answers by rank.

        `common` goes to all of them; where it is given, every rank must be named. The first error is raised here, once
        all have answered.
        """
        others = [rank for rank in sorted(contents) if rank != self.place.rank]
        own: list[Content | Exception] = []
        receiving: Receiving | None = None
        try:
            given = {rank: contents[rank] for rank in others}
            receiving = Receiving(others, lambda: self._send_all(command, given, common), self._receive)
            self._watch(receiving)
            receiving.sent()
            if self.place.rank in contents:
                own.append(_tried(lambda: answer(command, _with(contents[self.place.rank], common))))
            answers = receiving.wait()
        except BaseException as error:
            self.broken = True
            lost = error
            if receiving is not None:
                lost = receiving.lost(NEWS) or error
                receiving.over.set()
            if isinstance(lost, RankLost) and threading.current_thread() is threading.main_thread():
                # Whoever started the ranks now ends the others too: that must not take the words away.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise lost from None
        found = dict.fromkeys(contents)
        for part in own:
            if isinstance(part, Exception):
                raise part
            found[self.place.rank] = part
        for rank in others:
            fault = answers[rank].get("fault")
            if fault is not None:
                raise (UserError if answers[rank]["user"] else RuntimeError)(f"rank {rank}: {fault}")
            found[rank] = answers[rank]["found"]
        return found

    def _watch(self, receiving: Receiving) -> None:
        """Look for signs of life of those who have not answered."""
        if (heartbeat := self._heartbeat) is None:
            return

        def lost(rank: int) -> None:
            self.broken = True
            words = f"rank {rank} of {self.count} gave no sign for {heartbeat.seconds:g} s ({SILENCE})"
            receiving.give_up(RankLost(words))

        words = (receiving.waiting, lost, receiving.over)
        threading.Thread(target=heartbeat.watch, args=words, name="watch", daemon=True).start()

    def _send_all(self, command: str, contents: Mapping[int, Content], common: Content) -> None:
        shared = None if common is None else written(common)
        for rank, content in contents.items():
            self._send(rank, [command, content, None if shared is None else shared.numel()])
        if shared is not None:
            self._carefully(None, lambda: dist.broadcast(shared, 0, group=self._group))

    def serve(self, answer: Answer) -> None:
        """Do what rank 0 asks until it says that this is the end, or is gone."""
        while True:
            command, content, shared = self._receive(0)
            if shared is not None:
                content = _with(content, self._shared(shared))
            if command == END:
                return
            try:
                reply = {"found": answer(command, content)}
            except UserError as error:
                reply = {"fault": str(error), "user": True}
            except Exception:
                reply = {"fault": f"on {socket.gethostname()}\n{traceback.format_exc()}", "user": False}
            self._send(0, reply)

    def end(self) -> None:
        """Inform the others that there is nothing more to do, unless that is out of order already."""
        if self.place.rank == 0 and not self.broken:
            try:
                for rank in range(1, self.count):
                    self._send(rank, [END, None, None])
            except RankLost:
                return

    def _send(self, rank: int, content: Content) -> None:
        message = written(content)
        for part in (torch.tensor([message.numel()]), message):
            self._carefully(rank, lambda part=part: dist.send(part, rank, group=self._group))

    def _receive(self, rank: int) -> Content:
        size = torch.zeros(1, dtype=torch.int64)
        self._carefully(rank, lambda: dist.recv(size, rank, group=self._group))
        message = torch.zeros(int(size), dtype=torch.uint8)
        self._carefully(rank, lambda: dist.recv(message, rank, group=self._group))
        return read(message)

    def _shared(self, size: int) -> Content:
        message = torch.zeros(size, dtype=torch.uint8)
        self._carefully(0, lambda: dist.broadcast(message, 0, group=self._group))
        return read(message)

    def _carefully(self, rank: int | None, do: Callable[[], object]) -> None:
        try:
            do()
        except RuntimeError as error:
            self.broken = True
            who = "one of the other ranks" if rank is None else f"rank {rank}"
            late = "imed out" in str(error)
            what = f"gave no sign for {LONGEST.total_seconds():g} s" if late else "has ended"
            raise RankLost(f"{who} of {self.count} {what}") from error


def _tried(do: Callable[[], Content]) -> Content | Exception:
    """Return what is found, or what went wrong: the answers of the others are still to be taken in."""
    try:
        return do()
    except Exception as error:
        return error


def _with(content: Content, common: Content) -> Content:
    return content if common is None else {**(content or {}), **common}


_joined: Ranks | None = None


def current() -> Ranks | None:
    """Return the ranks that this process has joined; None where it works alone."""
    return _joined


def rank_count() -> int:
    """Return how many processes share out a run of this process; 1 where it works alone."""
    return 1 if _joined is None else _joined.count


def join() -> Ranks | None:
    """Meet the other processes that a launcher has started; None where there are none.

    Afterwards the environment says nothing of them: commands that this process starts work alone.
    """
    global _joined
    place = Place.given(os.environ)
    if place is None:
        return None
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    seconds = silence(os.environ)
    try:
        store, _, _ = next(rendezvous("env://", place.rank, place.count, timeout=MEETING))
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.count, timeout=MEETING)
        group = dist.new_group(timeout=LONGEST)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0][:200]
        raise UserError(
            f"MASTER_ADDR: the {place.count} processes of the run did not meet at {where} within "
            f"{MEETING.total_seconds():g} s ({reason}); allowed: an address that all of them reach"
        ) from error
    for name in NAMES:
        os.environ.pop(name, None)
    heartbeat = Heartbeat(store, seconds)
    if place.rank:
        heartbeat.start(place.rank)
    _joined = Ranks(place, group, heartbeat)
    return _joined
