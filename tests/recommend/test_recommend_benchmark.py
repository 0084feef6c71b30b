"""What makes an epoch of pFPL+ quick and small: compiled loops, no call of Python for single triples, a gigabyte.

How long it takes beside implicit's BPR is measured by `python -m benchmarks.recommend`.
"""

import subprocess
import sys
import threading
from collections import Counter
from types import FrameType

import numpy as np
import pytest
from benchmarks.recommend import Ours
from tests.recommend.test_golden_lists import shared
from tests.warm import ROOT, command_environment

from steelyard.recommend.interactions import Interactions


def calls_of_an_epoch(ours: Ours) -> int:
    """Count the functions of Python and of C that one epoch calls, in all its threads."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        found[event] += 1

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        ours.epoch()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return found["call"] + found["c_call"]


def taken(users: int, each: int) -> Interactions:
    """A table in which each user took so many of 2,000 items."""
    names = (np.array([f"{number:04d}" for number in range(count)]) for count in (users, 2000))
    items = np.argsort(np.random.default_rng(0).random((users, 2000)), axis=1)[:, :each]
    return Interactions(*names, np.repeat(np.arange(users), each), items.ravel(), np.ones(users * each))


def test_an_epoch_calls_nothing_for_single_triples() -> None:
    pytest.importorskip("numba")
    calls: dict[int, int] = {}
    for each in (400, 800):
        ours = Ours(taken(300, each))
        assert (ours.clients.engine.name, ours.rounds, ours.epoch_triples) == ("compiled", 1, 300 * each)
        ours.epoch()
        calls[each] = calls_of_an_epoch(ours)
    # Threads take triples in blocks, of which there are more then.
    assert calls[800] - calls[400] < 300 * 400 / 100
    assert 0 < calls[400] < 300 * 10


@pytest.mark.slow
def test_three_epochs_of_all_ratings_take_less_than_a_gigabyte() -> None:
    shared("movielens_1m/ratings.dat.gz")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recommend", "--memory"],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 100 < float(done.stdout) < 1000
