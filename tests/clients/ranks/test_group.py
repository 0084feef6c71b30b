"""Ranks: the place that a launcher gives each, how clients are shared out, what is sent, and who is still alive."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.clients.ranks.one_process import travelled
from tests.kit import assert_refused

from steelyard.clients.local import ComputeSettings
from steelyard.clients.local.hardware import threads_of
from steelyard.clients.ranks.engine import SLACK, on_rank, share_out
from steelyard.clients.ranks.group import Heartbeat, Place, current, join, rank_count, silence

MET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_the_place_is_that_of_the_launcher_and_one_alone_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **MET}
    assert Place.given(given) == Place(5, 8, 1, 4)
    assert Place.given({"RANK": "1", "WORLD_SIZE": "2", **MET}) == Place(1, 2, 1, 2)
    for alone in ({}, {"WORLD_SIZE": "1", "RANK": "0", **MET}, {"WORLD_SIZE": "4", **MET}):
        assert Place.given(alone) is None
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (join(), current(), rank_count()) == (None, None, 1)


def test_threads_and_memory_are_shared_out_and_what_is_given_stays() -> None:
    cpu = ComputeSettings(device="cpu")
    halved = on_rank(cpu, Place(1, 4, 1, 2))
    assert halved.threads == max(1, threads_of(cpu) // 2)
    assert halved.memory_gb is not None
    assert halved.device == "cpu"
    given = ComputeSettings(device="cpu", threads=3, memory_gb=2.0, engine="loop")
    assert on_rank(given, Place(1, 4, 1, 2)) == given


@pytest.mark.parametrize(
    ("read", "given", "field", "value"),
    [
        (Place.given, {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR", "missing"),
        (Place.given, {"RANK": "0", "WORLD_SIZE": "2", **MET, "MASTER_PORT": "abc"}, "MASTER_PORT", "'abc'"),
        (Place.given, {"RANK": "-1", "WORLD_SIZE": "2", **MET}, "RANK", "'-1'"),
        (Place.given, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3", **MET}, "LOCAL_WORLD_SIZE", "'3'"),
        (Place.given, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x", **MET}, "LOCAL_RANK", "'x'"),
        *((silence, {"STEELYARD_RANK_SILENCE": text}, "STEELYARD_RANK_SILENCE", text) for text in ("x", "1", "nan")),
    ],
)
def test_nonsense_in_the_environment_is_named(read: Any, given: dict[str, str], field: str, value: str) -> None:
    assert_refused(lambda: read(given), f"{field}: ", value)


@st.composite
def jobs_of_tasks(draw: st.DrawFn) -> list[dict[int, int]]:
    """The steps of each job, by task; jobs are numbered through."""
    counts = iter(range(1000))
    tasks = draw(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=40), min_size=1, max_size=4))
    return [{next(counts): steps for steps in task} for task in tasks]


@given(jobs_of_tasks(), st.integers(1, 5))
def test_every_job_is_trained_once_and_no_rank_has_much_more_than_its_part(
    steps: list[dict[int, int]], ranks: int
) -> None:
    shares, of_job = share_out(steps, ranks), {job: count for task in steps for job, count in task.items()}
    assert len(shares) == ranks
    assert sorted(job for mine in shares for job in mine) == sorted(of_job)
    assert all(mine == sorted(mine) for mine in shares)
    # Longest first is at most a longest unit above an even share; whole federations are taken only within SLACK of it.
    longest = max(sum(of_job[job] for job in mine) for mine in shares)
    assert longest <= SLACK * (sum(of_job.values()) / ranks + max(of_job.values()))


def test_whole_federations_go_to_one_rank_each_where_that_takes_hardly_longer() -> None:
    assert share_out([{0: 5, 1: 5}, {2: 6, 3: 4}], 2) == [[0, 1], [2, 3]]
    assert share_out([{0: 5, 1: 5}, {2: 1, 3: 1}], 2) == [[0, 2], [1, 3]]


NUMBERS = arrays.arrays(
    dtype=st.sampled_from(["<f4", "<f8", "<i8", "|b1", "|u1"]),
    shape=arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
WORDS = st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats() | st.text(max_size=8)
CONTENTS = st.recursive(
    WORDS | NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(CONTENTS)
def test_what_is_sent_arrives(content: Any) -> None:
    np.testing.assert_equal(travelled(content), content)


@given(NUMBERS)
def test_arrays_keep_their_kind(numbers: np.ndarray) -> None:
    found = travelled(numbers)
    assert (found.dtype, found.shape, found.tobytes()) == (numbers.dtype, numbers.shape, numbers.tobytes())


def test_tensors_and_large_arrays_arrive_too() -> None:
    large = torch.arange(600_000, dtype=torch.float32).reshape(2, -1)
    for sent in (large, large[:, :3], large.T[:5], large[:0]):
        found = travelled({"sent": sent})["sent"]
        assert found.shape == sent.shape
        assert torch.equal(found, sent)


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
    assert watched(heartbeat, [1], 0.1) == []
    assert counters["steelyard/heartbeat/1"] > 0


def test_a_store_that_is_gone_ends_both_sides() -> None:
    before = set(threading.enumerate())
    heartbeat = Heartbeat(Gone(), 0.1)
    heartbeat.start(1)
    assert watched(heartbeat, [1], 60) == []
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()
