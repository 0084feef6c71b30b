"""Scores against the papers' numbers and slow references, their properties; capacities in every form of writing one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit import assert_refused

from steelyard.base.errors import UserError
from steelyard.weighing import scores
from steelyard.weighing.rule import Rule, WeighingSettings
from steelyard.weighing.scores import TOLERANCE, checked_capacity, from_table, read_capacity, subsets, two_additive
from steelyard.weighing.weights import to_weights

ALICE_BOB = np.array([[0.9, 0.2, 0.4], [0.1, 0.8, 0.5]])
CRITERIA = ("DS", "CD", "IS")
unit = st.floats(0, 1, allow_nan=False)
rows = st.integers(1, 5).flatmap(lambda m: st.lists(unit, min_size=m, max_size=m))
AB = ("A", "B")
NOTHING, A, B, BOTH = (frozenset[int](), frozenset({0}), frozenset({1}), frozenset({0, 1}))


def prioritized_by_the_paper(values: list[float]) -> float:
    """f_m(c) = Σ_i Π_{j≤i} c_(j), written as two loops."""
    total = 0.0
    for i in range(len(values)):
        term = 1.0
        for j in range(i + 1):
            term *= values[j]
        total += term
    return total


def choquet_by_levels(values: list[float], capacity: dict[frozenset[int], float]) -> float:
    """The Choquet integral as ∫ μ({i : c_i ≥ t}) dt, summed over the steps of t."""
    steps = sorted({0.0, *values})
    total = 0.0
    for low, high in itertools.pairwise(steps):
        total += (high - low) * capacity[frozenset(i for i, value in enumerate(values) if value >= high)]
    return total


def rule(score: str, **parameters: object) -> Rule:
    return Rule(WeighingSettings.model_validate({"criteria": CRITERIA, "score": score, **parameters}))


@pytest.mark.parametrize(
    ("priority", "alice", "bob", "weight"),
    [
        ("DS>CD>IS", 1.152, 0.220, 0.839650),
        ("DS>IS>CD", 1.332, 0.190, 0.875164),
        ("CD>DS>IS", 0.452, 0.920, 0.329446),
        ("CD>IS>DS", 0.352, 1.240, 0.221106),
        ("IS>DS>CD", 0.832, 0.590, 0.585091),
        ("IS>CD>DS", 0.552, 0.940, 0.369973),
    ],
)
def test_alice_and_bob(priority: str, alice: float, bob: float, weight: float) -> None:
    found = rule("prioritized", priority=priority).score(ALICE_BOB)
    assert found == pytest.approx([alice, bob], abs=1e-12)
    # The weights are written with six decimals.
    assert to_weights(found)[0][0] == pytest.approx(weight, abs=5e-7)


def test_the_papers_example_and_its_slip() -> None:
    assert scores.prioritized(np.array([0.5, 0.8, 0.9])) == pytest.approx(1.26)
    # Paper 003 prints 1.82 for this one; the formula gives 0.9 + 0.72 + 0.36.
    assert scores.prioritized(np.array([0.9, 0.8, 0.5])) == pytest.approx(1.98)
    # Written with six decimals.
    found = rule("mean").score(ALICE_BOB)
    assert found == pytest.approx([0.5, 0.466667], abs=5e-7)
    assert to_weights(found)[0][0] == pytest.approx(0.517241, abs=5e-7)


@given(rows)
def test_prioritized_equals_the_papers_loops(values: list[float]) -> None:
    assert scores.prioritized(np.array(values)) == pytest.approx(prioritized_by_the_paper(values), abs=1e-12)
    # A 0 at a position cuts everything after it: f_m = f_{j−1}.
    cut = [*values, 0.0, 1.0]
    assert scores.prioritized(np.array(cut)) == pytest.approx(prioritized_by_the_paper(values), abs=1e-12)


CAPACITY = {"DS": 0.3, "CD": 0.4, "IS": 0.2, "DS,CD": 0.8, "DS,IS": 0.5, "CD,IS": 0.6, "DS,CD,IS": 1.0}


ALL_RULES = [
    rule("prioritized", priority="IS>CD>DS"),
    rule("mean"),
    rule("weighted-mean", weights=(1, 2, 3)),
    rule("owa", weights=(0.2, 0.3, 0.5)),
    rule("owa", quantifier="most"),
    rule("choquet", capacity=CAPACITY),
    rule("product"),
    rule("power", power=2.5),
]


@pytest.mark.parametrize("tested", ALL_RULES, ids=lambda r: r.settings.score)
@given(values=st.lists(unit, min_size=3, max_size=3), position=st.integers(0, 2), up=unit)
def test_every_score_is_monotone_and_zero_at_zero(tested: Rule, values: list[float], position: int, up: float) -> None:
    low = np.array(values)
    high = low.copy()
    high[position] = max(low[position], up)
    assert tested.score(high) >= tested.score(low) - 1e-9
    assert tested.score(np.zeros(3)) == 0


@given(st.lists(unit, min_size=3, max_size=3))
def test_choquet_equals_the_integral_over_levels(values: list[float]) -> None:
    capacity = {frozenset(CRITERIA.index(name) for name in key.split(",")): value for key, value in CAPACITY.items()}
    found = float(rule("choquet", capacity=CAPACITY).score(np.array(values)))
    assert found == pytest.approx(choquet_by_levels(values, capacity), abs=1e-9)


@pytest.mark.parametrize(
    ("name", "m", "weights"),
    [
        ("all", 3, [0, 0, 1]),
        ("most", 3, [1 / 15, 2 / 3, 4 / 15]),
        ("at least half", 4, [0.5, 0.5, 0, 0]),
        ("as_many_as_possible", 4, [0, 0, 0.5, 0.5]),
    ],
)
def test_quantifiers(name: str, m: int, weights: list[float]) -> None:
    found = scores.quantifier_weights(scores.quantifier_bounds(name), m)
    assert found == pytest.approx(weights, abs=1e-12)
    assert scores.quantifier_bounds("0.25, 0.5") == (0.25, 0.5)


def test_weights_of_criteria_and_ranks_are_shares() -> None:
    values = np.array([[[0.2, 0.4], [0.6, 0.0]]])
    assert scores.weighted_mean("ab", (1, 3))(values) == pytest.approx(np.array([[0.35, 0.15]]))
    assert scores.owa("ab", (1, 3), None)(values) == pytest.approx(np.array([[0.25, 0.15]]))
    assert scores.power("ab", 2)(values) == pytest.approx(np.array([[0.0064, 0.0]]))
    assert scores.product(values) == pytest.approx(np.array([[0.08, 0.0]]))
    assert scores.mean(values) == pytest.approx(np.array([[0.3, 0.3]]))


def test_a_capacity_can_be_written_in_several_ways() -> None:
    assert subsets(0) == [frozenset()]
    assert subsets(2) == [NOTHING, A, B, BOTH]
    table = {"A": 0.25, "B": 0.5}
    expected = {NOTHING: 0.0, A: 0.25, B: 0.5, BOTH: 1.0}
    assert from_table(table, AB) == read_capacity(table, AB) == read_capacity({"capacity": table}, AB) == expected
    for key in ("A+B", "A|B", "{A, B}", "( B ,A )"):
        assert from_table({**table, key: 1.0}, AB) == expected
    assert two_additive({"A": 0.5, "B": 0.25}, {"A,B": 0.25}, AB) == {NOTHING: 0.0, A: 0.5, B: 0.25, BOTH: 1.0}
    masses = {"A": 0.25, "B": 0.75}
    expected = {NOTHING: 0.0, A: 0.25, B: 0.75, BOTH: 1.0}
    assert (
        read_capacity({"two_additive": masses}, AB)
        == read_capacity({"two_additive": {"singles": masses}}, AB)
        == expected
    )


@pytest.mark.parametrize(
    ("document", "parts"),
    [
        ({"A": 0.5, "Bb": 0.5}, ("'Bb'", "did you mean 'B'")),
        ({"": 0.1, "A": 0.5, "B": 0.5}, ("empty set", 0.1)),
        ({"A": 0.5, "B": 0.5, "A,B": 0.9}, ("{A,B}", 0.9)),
        ({"B": 0.5}, ("no value for {A}",)),
        ({"A": 1.5, "B": 0.5}, ("{A,B} has 1.0", "1.5 of its part {A}")),
        ({"two_additive": {"singles": {}, "pairs": 3}}, ("'pairs'",)),
        ({"A": True}, ("'A'", "true")),
        ({"A": "much"}, ("'A'", "'much'")),
    ],
)
def test_a_capacity_that_is_none_is_one_line(document: dict[str, object], parts: tuple[object, ...]) -> None:
    assert_refused(lambda: read_capacity(document, AB), "capacity", *parts)


def test_masses_of_three_criteria_are_refused() -> None:
    assert_refused(lambda: two_additive({"A": 0.5}, {"A,B,C": 0.5}, ("A", "B", "C")), "capacity", "{A,B,C}")


def test_rounding_is_no_fault_and_more_is() -> None:
    # Capacities written with few digits or summed from masses miss 0, 1 and monotony by rounding errors.
    checked_capacity({NOTHING: TOLERANCE, A: 0.5, B: 0.5, BOTH: 1.0}, AB)
    checked_capacity({A: 0.5, B: 0.5, BOTH: 1 - TOLERANCE / 2}, AB)
    checked_capacity({A: 1.0, B: 0.5}, AB)  # equal worth of a part and the whole is monotone
    for wrong in ({NOTHING: 2 * TOLERANCE}, {BOTH: 1 - 2 * TOLERANCE}, {A: 1.0 + 2 * TOLERANCE}):
        with pytest.raises(UserError):
            checked_capacity({A: 0.5, B: 0.5, BOTH: 1.0, **wrong}, AB)
