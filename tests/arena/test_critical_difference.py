"""Ranks and the critical difference, held to the table of Demšar (2006, Table 5a)."""

from __future__ import annotations

import math

import pytest

from steelyard.arena.critical_difference import critical_difference, mean_ranks

DEMSAR = {2: 1.960, 3: 2.343, 4: 2.569, 5: 2.728, 6: 2.850, 7: 2.949, 8: 3.031, 9: 3.102, 10: 3.164}


def test_the_highest_is_first_and_equal_ones_share_a_rank() -> None:
    assert mean_ranks([[0.9, 0.8, 0.7], [0.5, 0.6, 0.6]]) == [2.0, 1.75, 2.25]


@pytest.mark.parametrize("rules", [2, 5, 9])
def test_the_critical_difference_is_the_published_one(rules: int) -> None:
    expected = DEMSAR[rules] * math.sqrt(rules * (rules + 1) / (6 * 14))
    assert critical_difference(rules, 14) == pytest.approx(expected, abs=2e-3)


def test_too_little_has_none() -> None:
    assert critical_difference(9, 2) is None
    assert critical_difference(1, 10) is None
