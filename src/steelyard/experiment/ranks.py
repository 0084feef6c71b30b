"""Running a command on several processes: rank 0 runs it, the others do their share of what it asks."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from steelyard.base.errors import UserError
from steelyard.clients.local import SimulationServer
from steelyard.clients.ranks.group import RankLost, Ranks, join
from steelyard.clients.ranks.share import Share, own_versions
from steelyard.clients.ranks.wire import Content
from steelyard.experiment.loading import build


def among_ranks(lead: Callable[[], NoReturn], refuse: Callable[[str], NoReturn]) -> NoReturn:
    """Run a command as one of the processes that a launcher started, and end; rank 0 alone says anything."""
    silent = os.environ.get("RANK") != "0"
    if silent:
        _say_nothing()
    try:
        ranks = join()
    except UserError as error:
        if silent:
            sys.exit(2)
        refuse(str(error))
    if ranks is None:
        lead()
    if ranks.place.rank:
        _follow(ranks)
    _leave(ranks, _led(lead, ranks))


def _led(lead: Callable[[], NoReturn], ranks: Ranks) -> int:
    def ended(number: int, frame: object) -> None:
        # Once a rank is lost its launcher ends all others: what is wrong is said first.
        if not ranks.broken:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, ended)
    try:
        lead()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def _leave(ranks: Ranks, code: int) -> NoReturn:
    ranks.end()
    if ranks.broken:
        # Threads still wait for answers that will never come: Python would wait for torch's in turn.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _say_nothing() -> None:
    """Leave all words to rank 0."""
    ours = logging.getLogger("steelyard")
    ours.addHandler(logging.NullHandler())
    ours.propagate = False
    warnings.simplefilter("ignore")


def _follow(ranks: Ranks) -> NoReturn:
    """Do what rank 0 asks; when it is gone, end too."""
    # Ctrl-C reaches every process of a terminal: rank 0 decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ranks.serve(Follower().answer)
    except RankLost:
        os._exit(1)
    sys.exit(0)


class Follower:
    """A rank that builds what rank 0 describes, one experiment after another, and works on it."""

    def __init__(self) -> None:
        self._share: Share | None = None

    def answer(self, command: str, content: Content) -> Content:
        """Do one command of rank 0."""
        if command == "assemble":
            self._assemble(content["experiment"], content["versions"])
            return None
        if command == "release":
            if self._share is not None:
                self._share.simulation.close()
            self._share = None
            return None
        assert self._share is not None, command
        return self._share.answer(command, content)

    def _assemble(self, document: Mapping[str, Any], wanted: Mapping[str, str]) -> None:
        for name, own in own_versions().items():
            if own != wanted[name]:
                raise UserError(f"{name}: {own} here, {wanted[name]} on rank 0; allowed: the same on all ranks")
        _, server = build(document, "experiment").assemble()
        assert isinstance(server, SimulationServer)
        self._share = Share(server.clients, server)
