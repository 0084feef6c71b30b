"""The processes of one run: how they find each other, ask and answer, and what happens when one is gone.

They are started by torchrun, or by anything else that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from steelyard.base.errors import MachineError, UserError, brief
from steelyard.clients.ranks.heartbeat import SILENCE, Heartbeat, silence
from steelyard.clients.ranks.receiving import Receiving
from steelyard.clients.ranks.wire import Arriving, Content, Packed

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
        packed = Packed(common)
        for rank, content in contents.items():
            self._send(rank, Packed([command, content, common is not None]))
            if common is not None:
                self._send(rank, packed, large=False)
        for part in packed.large:
            self._carefully(None, lambda part=part: dist.broadcast(part, 0, group=self._group))

    def serve(self, answer: Answer) -> None:
        """Do what rank 0 asks until it says that this is the end, or is gone."""
        while True:
            command, content, more = self._receive(0)
            if more:
                content = _with(content, self._receive(0, shared=True))
            if command == END:
                return
            try:
                reply = {"found": answer(command, content)}
            except UserError as error:
                reply = {"fault": str(error), "user": True}
            except Exception:
                reply = {"fault": f"on {socket.gethostname()}\n{traceback.format_exc()}", "user": False}
            self._send(0, Packed(reply))

    def end(self) -> None:
        """Inform the others that there is nothing more to do, unless that is out of order already."""
        if self.place.rank == 0 and not self.broken:
            try:
                for rank in range(1, self.count):
                    self._send(rank, Packed([END, None, False]))
            except RankLost:
                return

    def _send(self, rank: int, packed: Packed, *, large: bool = True) -> None:
        sizes = torch.tensor([packed.head.numel(), packed.words])
        for part in (sizes, packed.head, *(packed.large if large else ())):
            self._carefully(rank, lambda part=part: dist.send(part, rank, group=self._group))

    def _receive(self, rank: int, *, shared: bool = False) -> Content:
        sizes = torch.zeros(2, dtype=torch.int64)
        self._carefully(rank, lambda: dist.recv(sizes, rank, group=self._group))
        head = torch.zeros(int(sizes[0]), dtype=torch.uint8)
        self._carefully(rank, lambda: dist.recv(head, rank, group=self._group))
        arriving = Arriving(head, int(sizes[1]))
        for part in arriving.large:
            if shared:
                self._carefully(rank, lambda part=part: dist.broadcast(part, 0, group=self._group))
            else:
                self._carefully(rank, lambda part=part: dist.recv(part, rank, group=self._group))
        return arriving.content()

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
