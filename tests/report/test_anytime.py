"""The test that may be looked at after every seed: how often it is wrong, also after a search, and what it sees."""

from __future__ import annotations

import math

import numpy as np
import pytest

from steelyard.report.anytime import anytime_equivalence_p, anytime_p, spent
from steelyard.report.statistics import ALPHA, paired_p

SEEDS = 40


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "rows of a test set", "ties"])
def test_of_a_thousand_comparisons_without_a_difference_one_in_twenty_is_decided_at_most(kind: str) -> None:
    """Looked at after every one of 40 seeds. The bound is exact, so only the noise of 1,000 draws may be added."""
    draws = np.random.default_rng(32)
    shape = (2, 1000, SEEDS)
    made = {
        "normal": lambda: draws.normal(0.9, 0.02, shape),
        "heavy tails": lambda: draws.standard_t(2, shape),
        "rows of a test set": lambda: draws.binomial(400, 0.9, shape) / 400,
        "ties": lambda: draws.integers(0, 2, shape).astype(float),
    }[kind]()
    wrong = sum(anytime_p(row.tolist()) <= ALPHA for row in made[0] - made[1])
    assert wrong / 1000 <= ALPHA


def test_a_t_test_looked_at_after_every_seed_is_wrong_far_more_often() -> None:
    """The control: what the sequential test is for."""
    draws = np.random.default_rng(32)
    rows = draws.normal(0, 0.02, (300, SEEDS)).tolist()
    wrong = sum(any((paired_p(row[:n]) or 1.0) <= ALPHA for n in range(3, SEEDS + 1)) for row in rows)
    assert wrong / 300 > 0.15


def test_after_a_search_over_a_hundred_candidates_held_out_seeds_are_right() -> None:
    """A thousand searches: the best of 100 equal candidates by five seeds, then judged by seeds that it never saw."""
    draws = np.random.default_rng(7)
    wrong = lucky = 0
    for _ in range(1000):
        seen = draws.normal(0, 0.02, (100, 5))
        best = int(seen.mean(axis=1).argmax())
        lucky += (paired_p(seen[best].tolist()) or 1.0) <= ALPHA
        wrong += anytime_p(draws.normal(0, 0.02, SEEDS).tolist()) <= ALPHA
    assert lucky / 1000 > 0.3, "the seeds of the search call many of these winners better"
    assert wrong / 1000 <= ALPHA


def test_a_hundred_candidates_that_all_open_the_held_out_seeds_share_one_level() -> None:
    draws = np.random.default_rng(11)
    rows = draws.normal(0, 0.02, (200, 100, SEEDS))
    wrong = sum(
        any(anytime_p(row.tolist()) <= spent(ALPHA, number) for number, row in enumerate(search, 1)) for search in rows
    )
    assert wrong / 200 <= ALPHA
    assert math.fsum(spent(ALPHA, number) for number in range(1, 10_000)) <= ALPHA


def test_a_difference_is_seen_and_its_p_never_rises() -> None:
    draws = np.random.default_rng(3)
    rows = draws.normal(0.02, 0.02, (200, SEEDS)).tolist()
    assert sum(anytime_p(row) <= 0.005 for row in rows) / 200 > 0.9
    found = [anytime_p(rows[0][:n]) for n in range(SEEDS + 1)]
    assert found[0] == 1.0
    assert found == sorted(found, reverse=True)
    assert anytime_p(rows[0]) == anytime_p([-value for value in rows[0]])


def test_equality_is_shown_within_the_margin_only() -> None:
    draws = np.random.default_rng(5)
    inside = draws.normal(0, 0.005, (100, SEEDS)).tolist()
    at_the_edge = draws.normal(0.01, 0.01, (1000, SEEDS)).tolist()
    assert sum(anytime_equivalence_p(row, 0.01) <= 0.005 for row in inside) / 100 > 0.9
    assert sum(anytime_equivalence_p(row, 0.01) <= ALPHA for row in at_the_edge) / 1000 <= ALPHA


def test_differences_that_are_all_the_same_or_none_decide_as_coins_would() -> None:
    assert anytime_p([]) == anytime_p([0.0] * 20) == 1.0
    assert 2.0**-12 < anytime_p([0.01] * 12) < 0.002
    assert anytime_equivalence_p([0.0] * 12, 0.01) < 0.001
