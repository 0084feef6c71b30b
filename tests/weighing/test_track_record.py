"""TR: the cumulative sum by hand, what is remembered, and how often honest clients are hit."""

from __future__ import annotations

import numpy as np
import pytest

from steelyard.update_payloads import ServerTest
from steelyard.weighing.track_record import LIMIT, MEMORY, SLACK, after, cosines_with_others, track_record
from steelyard.weighing.view import CohortView

NAMES = tuple("abcde")
UPDATES = np.array([[1.0, 0.0], [1.0, 0.1], [1.0, -0.1], [1.0, 0.2], [-1.0, 0.0]])


def view(updates: np.ndarray, memory: object = None, clients: tuple[str, ...] = NAMES) -> CohortView:
    return CohortView(
        samples=np.ones(len(updates), np.int64),
        divergence_of=lambda: np.linalg.norm(updates, axis=1),
        validation_of=lambda: ServerTest(np.zeros(0), np.zeros((0, 0))),
        gram_of=lambda: updates @ updates.T,
        clients=clients,
        memory={} if memory is None else {MEMORY: memory},
    )


def test_a_round_adds_the_deviations_below_the_middle_less_the_slack() -> None:
    # Middle 0.4; below it by −0.1, 0, −0.2, 0.1, 0.8; the median of their sizes is 0.1, so z = below / 0.14826.
    sums = after(np.array([0.0, 3.0, 0.0, 0.0, 1.0]), np.array([0.5, 0.4, 0.6, 0.3, -0.4]))
    odd = np.array([-0.1, 0.0, -0.2, 0.1, 0.8]) / 0.14826
    expected = np.clip(np.array([0.0, 3.0, 0.0, 0.0, 1.0]) + odd - SLACK, 0.0, 2 * LIMIT)
    assert sums == pytest.approx(expected)
    assert sums[4] == pytest.approx(1.0 + 0.8 / 0.14826 - SLACK)


def test_who_agrees_like_all_others_is_not_odd() -> None:
    assert after(np.array([1.0, 4.0, 0.0]), np.full(3, 0.7)).tolist() == [0.0, 4.0 - SLACK, 0.0]
    assert after(np.zeros(0), np.zeros(0)).tolist() == []


def test_the_cosine_with_the_others_clips_those_who_shout() -> None:
    updates = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, -1000.0]])
    # Of the first two, each sees the other and a third of length 1; the third sees (1, 1).
    found = cosines_with_others(updates @ updates.T)
    assert found == pytest.approx([0.0, -(0.5**0.5), -(0.5**0.5)])


def test_alarms_come_over_rounds_are_remembered_by_client_and_end() -> None:
    memory: object = None
    flags: list[list[float]] = []
    for _ in range(2):
        now = view(UPDATES, memory)
        flags.append(track_record(now).tolist())
        memory = now.remembered[MEMORY]
    assert flags[-1] == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert memory["e"] == 2 * LIMIT  # type: ignore[index]
    # Of another cohort, only who is in it changes; e behaves and comes back in the third round.
    honest = np.array([[1.0, 0.0], [1.0, 0.1], [1.0, 0.0]])
    back: list[float] = []
    for _ in range(3):
        now = view(honest, memory, ("a", "b", "e"))
        back.append(track_record(now)[2])
        memory = now.remembered[MEMORY]
    assert back == [0.0, 0.0, 1.0]
    assert set(memory) == set(NAMES)  # type: ignore[call-overload]


def test_honest_clients_whose_rounds_are_normal_are_hardly_ever_hit() -> None:
    chance = np.random.default_rng(4)
    sums, hits = np.zeros(20), 0
    for _ in range(2000):
        sums = after(sums, chance.normal(0.3, 0.1, 20))
        hits += int((sums > LIMIT).sum())
    assert hits <= 10  # of 40,000 rounds
