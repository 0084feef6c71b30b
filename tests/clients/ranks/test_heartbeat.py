"""Ranks that count on live; one that does not is named, and all that were stopped together are not."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from steelyard.clients.ranks.heartbeat import Heartbeat, silence
from steelyard.errors import UserError


class Counters(Counter[str]):
    """A store in this process."""

    def add(self, key: str, amount: int, /) -> int:
        self[key] += amount
        return self[key]


class Gone:
    """A store whose process has ended."""

    def add(self, key: str, amount: int, /) -> int:
        raise RuntimeError("connection closed")


def watched(heartbeat: Heartbeat, ranks: list[int], seconds: float) -> list[int]:
    """Return the ranks that are named within so many seconds."""
    lost: list[int] = []
    over = threading.Event()
    timer = threading.Timer(seconds, over.set)
    timer.start()
    heartbeat.watch(lambda: ranks, lost.append, over)
    timer.cancel()
    return lost


def test_the_rank_that_gives_no_sign_is_named() -> None:
    heartbeat = Heartbeat(Counters(), 0.4)
    heartbeat.start(1)
    assert watched(heartbeat, [1, 2], 60) == [2]


def test_ranks_that_count_on_are_not_lost() -> None:
    counters = Counters()
    heartbeat = Heartbeat(counters, 10.0)
    heartbeat.every = 0.01
    heartbeat.start(1)
    assert watched(heartbeat, [1], 0.5) == []
    assert counters["steelyard/heartbeat/1"] > 0


def test_a_store_that_is_gone_ends_both_sides() -> None:
    before = set(threading.enumerate())
    heartbeat = Heartbeat(Gone(), 0.1)
    heartbeat.start(1)
    assert watched(heartbeat, [1], 60) == []
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("text", ["x", "1", "-5", "nan", "inf", "1e9"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"^STEELYARD_RANK_SILENCE: got '.*' in the environment; allowed: 2 to 86400 s"):
        silence({"STEELYARD_RANK_SILENCE": text})


def test_a_minute_is_usual() -> None:
    assert silence({}) == silence({"STEELYARD_RANK_SILENCE": ""}) == 60
    assert silence({"STEELYARD_RANK_SILENCE": "7.5"}) == 7.5
