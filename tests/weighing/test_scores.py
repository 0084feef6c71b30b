"""Scores against the numbers of the papers, against slow references, and their properties on random input."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import UserError
from steelyard.weighing import scores
from steelyard.weighing.rule import Rule, WeighingSettings
from steelyard.weighing.weights import to_weights

ALICE_BOB = np.array([[0.9, 0.2, 0.4], [0.1, 0.8, 0.5]])
CRITERIA = ("DS", "CD", "IS")
unit = st.floats(0, 1, allow_nan=False)
rows = st.integers(1, 5).flatmap(lambda m: st.lists(unit, min_size=m, max_size=m))


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


def test_mean_of_alice_and_bob() -> None:
    found = rule("mean").score(ALICE_BOB)
    # Written with six decimals.
    assert found == pytest.approx([0.5, 0.466667], abs=5e-7)
    assert to_weights(found)[0][0] == pytest.approx(0.517241, abs=5e-7)


def test_the_papers_example_and_its_slip() -> None:
    assert scores.prioritized(np.array([0.5, 0.8, 0.9])) == pytest.approx(1.26)
    # Paper 003 prints 1.82 for this one; the formula gives 0.9 + 0.72 + 0.36.
    assert scores.prioritized(np.array([0.9, 0.8, 0.5])) == pytest.approx(1.98)


@given(rows)
def test_prioritized_equals_the_papers_loops(values: list[float]) -> None:
    assert scores.prioritized(np.array(values)) == pytest.approx(prioritized_by_the_paper(values), abs=1e-12)


@given(rows, st.data())
def test_prioritized_is_monotone_and_cut_by_a_zero(values: list[float], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(values) - 1))
    base = float(scores.prioritized(np.array(values)))
    higher = list(values)
    higher[position] = data.draw(st.floats(values[position], 1))
    assert scores.prioritized(np.array(higher)) >= base - 1e-12
    cut = list(values)
    cut[position] = 0.0
    # A 0 at position j cuts everything after it: f_m = f_{j−1}.
    assert scores.prioritized(np.array(cut)) == pytest.approx(prioritized_by_the_paper(values[:position]), abs=1e-12)


@pytest.mark.parametrize("m", [1, 2, 5])
def test_bounds_of_prioritized(m: int) -> None:
    assert scores.prioritized(np.zeros(m)) == 0
    assert scores.prioritized(np.ones(m)) == m


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


def test_choquet_with_an_additive_capacity_is_the_weighted_mean() -> None:
    additive = {"two_additive": {"DS": 0.5, "CD": 0.3, "IS": 0.2}}
    found = rule("choquet", capacity=additive).score(ALICE_BOB)
    assert found == pytest.approx(rule("weighted-mean", weights=(0.5, 0.3, 0.2)).score(ALICE_BOB))


def test_two_additive_pairs() -> None:
    capacity = {"two_additive": {"singles": {"DS": 0.5, "CD": 0.5, "IS": 0.3}, "pairs": {"DS,CD": -0.3}}}
    # μ({DS,CD}) = .7, μ({DS,IS}) = .8, μ(all) = 1; Alice sorted: CD .2, IS .4, DS .9.
    expected = 0.2 * 1.0 + 0.2 * 0.8 + 0.5 * 0.5
    assert rule("choquet", capacity=capacity).score(ALICE_BOB)[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "m", "weights"),
    [
        ("all", 3, [0, 0, 1]),
        ("most", 3, [1 / 15, 2 / 3, 4 / 15]),
        ("at least half", 4, [0.5, 0.5, 0, 0]),
        ("as_many_as_possible", 4, [0, 0, 0.5, 0.5]),
        ("0,1", 4, [0.25] * 4),
    ],
)
def test_quantifiers(name: str, m: int, weights: list[float]) -> None:
    found = scores.quantifier_weights(scores.quantifier_bounds(name), m)
    assert found == pytest.approx(weights, abs=1e-12)
    assert math.isclose(sum(found), 1)


@pytest.mark.parametrize("text", ["at-least-half", "At Least_half", " at  least half "])
def test_quantifiers_can_be_written_in_several_ways(text: str) -> None:
    assert scores.quantifier_bounds(text) == (0.0, 0.5)


def test_weights_of_criteria_and_ranks_are_shares() -> None:
    values = np.array([[[0.2, 0.4], [0.6, 0.0]]])
    assert scores.weighted_mean((1, 3))(values) == pytest.approx(np.array([[0.35, 0.15]]))
    assert scores.owa((1, 3))(values) == pytest.approx(np.array([[0.25, 0.15]]))
    assert scores.power(2)(values) == pytest.approx(np.array([[0.0064, 0.0]]))
    assert scores.product(values) == pytest.approx(np.array([[0.08, 0.0]]))
    assert scores.mean(values) == pytest.approx(np.array([[0.3, 0.3]]))


def test_choquet_scores_any_number_of_axes() -> None:
    capacity = {frozenset(): 0.0, frozenset({0}): 0.25, frozenset({1}): 0.5, frozenset({0, 1}): 1.0}
    # .2 of both and .2 more of the second; the first alone has .6.
    found = scores.choquet(capacity)(np.array([[[0.2, 0.4], [0.6, 0.0]]]))
    assert found == pytest.approx(np.array([[0.2 + 0.2 * 0.5, 0.6 * 0.25]]))


def test_owa_sorts_from_largest() -> None:
    assert rule("owa", weights=(1, 0, 0)).score(ALICE_BOB) == pytest.approx([0.9, 0.8])
    assert rule("owa", quantifier="all").score(ALICE_BOB) == pytest.approx([0.2, 0.1])


def test_power_of_one_criterion_is_adafeds() -> None:
    settings = WeighingSettings(criteria=("VP",), score="power", power=3)
    assert Rule(settings).score(np.array([[0.5], [0.9]])) == pytest.approx([0.125, 0.729])


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"score": "prioritized", "priority": "DS>CD"}, "priority"),
        ({"score": "prioritized", "priority": "DS>CD>IS>DS"}, "priority"),
        ({"score": "prioritized", "priority": "DS>CD>XX"}, "XX"),
        ({"score": "mean", "weights": (1, 2, 3)}, "weights"),
        ({"score": "weighted-mean"}, "weights"),
        ({"score": "weighted-mean", "weights": (1, 2)}, "weights"),
        ({"score": "weighted-mean", "weights": (0, 0, 0)}, "weights"),
        ({"score": "weighted-mean", "weights": (1, -1, 1)}, "weights"),
        ({"score": "owa"}, "quantifier"),
        ({"score": "owa", "quantifier": "mots"}, "did you mean 'most'"),
        ({"score": "owa", "quantifier": "0.8,0.3"}, "quantifier"),
        ({"score": "choquet"}, "capacity"),
        ({"score": "choquet", "capacity": {"DS": 0.3}}, "{CD}"),
        ({"score": "choquet", "capacity": {**CAPACITY, "DS,CD": 0.35}}, "monotone"),
        ({"score": "choquet", "capacity": {**CAPACITY, "DS,CD,IS": 0.9}}, "allowed: 1"),
        ({"score": "choquet", "capacity": {**CAPACITY, "XX": 0.9}}, "XX"),
        ({"score": "choquet", "capacity": {**CAPACITY, "DS": "much"}}, "number"),
        ({"score": "power", "power": 0}, "power"),
    ],
)
def test_wrong_parameters_are_named(parameters: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word.replace("{", r"\{")):
        WeighingSettings.model_validate({"criteria": CRITERIA, **parameters})


def test_a_user_error_is_a_value_error_so_that_pydantic_reports_it() -> None:
    assert issubclass(UserError, ValueError)


def test_a_score_that_is_none_is_named_with_the_nearest() -> None:
    with pytest.raises(UserError) as found:
        scores.checked_name("prodct")
    assert str(found.value).startswith("score: got 'prodct' (did you mean 'product'?); allowed: ")
    assert scores.checked_name("owa") == "owa"
