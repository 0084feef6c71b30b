"""From raw measures to weights: normalised, divided, of a client alone, and fitted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.kit import assert_refused

from steelyard.weighing.fitted import FitSettings, fit_weights, one_step
from steelyard.weighing.rule import Rule, WeighingSettings, own_cap, weigh_alone
from steelyard.weighing.weights import normalise, to_weights

sizes = arrays(np.float64, st.integers(1, 40), elements=st.integers(0, 5000).map(float))


@given(sizes)
def test_ds_alone_is_fedavg_to_the_last_bit(counts: np.ndarray) -> None:
    if counts.sum() == 0:
        counts = counts + 1
    for score in ("prioritized", "mean", "product", "power"):
        weighing = Rule(WeighingSettings(criteria=("DS",), score=score)).weigh(counts[:, None])  # type: ignore[arg-type]
        assert np.array_equal(weighing.weights, counts / counts.sum())


@given(arrays(np.float64, (5, 3), elements=st.floats(0.01, 10)), st.permutations(range(3)))
def test_candidates_equal_weighing_with_each_order(raw: np.ndarray, order: list[int]) -> None:
    rule = Rule(WeighingSettings(criteria=("DS", "LD", "MD"), max_weight=0.4))
    found = rule.candidates(normalise(raw)[0], [order, (0, 1, 2)])
    assert np.array_equal(found, [rule.weigh(raw, order).weights, rule.weigh(raw).weights])


@given(arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 4)), elements=st.floats(0, 1e6)))
def test_every_criterion_becomes_shares_in_the_same_proportion(raw: np.ndarray) -> None:
    normalised, zero = normalise(raw)
    assert zero.tolist() == [not column.any() for column in raw.T]
    # 1e-9: a sum of up to six shares, each rounded to 16 digits.
    assert normalised.sum(axis=0) == pytest.approx(np.ones(raw.shape[1]), rel=1e-9)
    for column, shares in zip(raw.T, normalised.T, strict=True):
        assert shares * column.sum() == pytest.approx(column, rel=1e-9)


def test_scores_that_sum_to_one_stay_to_the_last_bit_and_others_do_not() -> None:
    near = np.array([0.1, 0.2, 0.7 + 5e-13])
    assert np.array_equal(to_weights(near)[0], near)
    far = np.array([0.1, 0.2, 0.7 + 5e-12])
    assert not np.array_equal(to_weights(far)[0], far)
    weights, uniform = to_weights(np.zeros(0))
    assert (weights.shape, uniform) == ((0,), True)
    assert to_weights(np.array([0.0]))[0].tolist() == [1.0]


@pytest.mark.parametrize("how", ["share", "max", "rank"])
def test_normalising_one_client_nobody_and_values_below_1(how: Any) -> None:
    assert normalise(np.array([[0.25]]), how)[0].tolist() == [[1.0]]
    found, zero = normalise(np.zeros((0, 2)), how)
    assert (found.shape, zero.tolist()) == ((0, 2), [True, True])
    small, expected = (
        np.array([[0.25, 0.0], [0.75, 0.0], [0.5, 0.0], [0.5, 0.0]]),
        {
            "share": [[0.125, 0.25], [0.375, 0.25], [0.25, 0.25], [0.25, 0.25]],
            "max": [[1 / 3, 1.0], [1.0, 1.0], [2 / 3, 1.0], [2 / 3, 1.0]],
            "rank": [[0.25, 1.0], [1.0, 1.0], [0.625, 1.0], [0.625, 1.0]],
        },
    )
    assert normalise(small, how)[0].tolist() == expected[how]


def alone(**fields: object) -> Rule:
    return Rule(WeighingSettings.model_validate({"max_shares": 2.0, **fields}))


def test_a_typical_client_gets_its_share_and_nobody_more_than_the_cap() -> None:
    # m = 10, ĉ = 100: 100 samples are 1/10, 50 are 1/20, 1,000 would be 1 and are cut at 2/10.
    found = weigh_alone(alone(), np.array([[100.0], [50.0], [1000.0], [0.0]]), np.array([100.0]), 10.0)
    assert found.weights == pytest.approx([0.1, 0.05, 0.2, 0.0])
    # Divided by the best a value counts up to the reference.
    found = weigh_alone(alone(normalise="max"), np.array([[50.0], [400.0]]), np.array([100.0]), 10.0)
    assert found.weights == pytest.approx([0.05, 0.1])


def test_a_prioritized_rule_by_hand_in_both_orders() -> None:
    # c = (2, 1/2)·1/2: f = c1 + c1·c2 = 1 + 0.25; a typical client has f(1/2, 1/2) = 0.75, so w = 1.25/(2·0.75), m = 2.
    made = alone(criteria=("DS", "LD"), max_shares=None, max_weight=1.0)
    raw, references = np.array([[200.0, 5.0]]), np.array([100.0, 10.0])
    assert weigh_alone(made, raw, references, 2.0).weights == pytest.approx([1.25 / 1.5])
    # With LD first: c = (1/4, 1): f = 0.25 + 0.25 = 0.5 against 0.75.
    found = weigh_alone(made, raw, references, 2.0, (1, 0))
    assert found.weights == pytest.approx([0.5 / 1.5])
    assert found.scores == pytest.approx([0.5])
    assert found.raw.tolist() == raw.tolist()
    assert found.normalised == pytest.approx(np.array([[1.0, 0.25]]))
    assert (found.criteria, found.all_zero, found.uniform) == (("DS", "LD"), (), False)


@given(
    raw=arrays(np.float64, (4, 2), elements=st.floats(0, 1e4)),
    other=arrays(np.float64, (3, 2), elements=st.floats(0, 1e4)),
    normalise=st.sampled_from(["share", "max"]),
    score=st.sampled_from(["prioritized", "mean", "product"]),
)
def test_no_other_client_moves_a_weight(raw: np.ndarray, other: np.ndarray, normalise: str, score: str) -> None:
    made = alone(criteria=("DS", "LD"), normalise=normalise, score=score)
    references = np.array([120.0, 4.0])
    single = weigh_alone(made, raw[:1], references, 8.0).weights[0]
    among = weigh_alone(made, np.concatenate([raw[:1], other]), references, 8.0).weights[0]
    assert single == among
    assert 0 <= single <= own_cap(made, 8.0)


def test_the_cap_is_the_smaller_of_the_two() -> None:
    assert own_cap(alone(max_weight=0.15), 10.0) == pytest.approx(0.15)
    assert own_cap(alone(max_shares=None, max_weight=0.3), 10.0) == pytest.approx(0.3)
    assert_refused(lambda: own_cap(alone(max_shares=None), 10.0), "max_weight", "missing")
    flat = alone(score="power", power=1000.0)  # 0.1^1000 is 0
    assert_refused(lambda: weigh_alone(flat, np.ones((1, 1)), np.ones(1), 10.0), "weighing.score", "typical client")


def test_one_step_by_hand() -> None:
    """Two clients, slopes 0 and ln 2 / rate: the second one's weight is halved before the division."""
    settings = FitSettings(rate=2.0)
    found = one_step(np.array([0.5, 0.5]), np.array([0.5, 0.5]), np.array([0.0, np.log(2) / 2]), settings)
    np.testing.assert_allclose(found, [2 / 3, 1 / 3], rtol=1e-15)
    start = np.array([0.4, 0.6])
    # A slope without sense moves nothing.
    np.testing.assert_array_equal(one_step(start, start, np.array([0.0, np.nan]), FitSettings()), start)
    # Nor does any, where nobody has weight.
    assert one_step(np.zeros(2), start, np.array([0.0, 1.0]), FitSettings()).tolist() == [0.0, 0.0]
    # Nor do slopes that are all alike, however steep.
    np.testing.assert_allclose(one_step(start, start, np.full(2, -1e4), FitSettings()), start, rtol=1e-15)


def test_shrinking_goes_back_towards_the_start() -> None:
    start = np.array([0.9, 0.1])
    plain = one_step(np.array([0.2, 0.8]), start, np.zeros(2), FitSettings(shrink=0.25))
    np.testing.assert_allclose(plain, [0.375, 0.625], rtol=1e-15)


def quadratic(models: np.ndarray, wanted: np.ndarray):
    """L(Θ) = ½‖Θ − Θ*‖²: its slope in the weights is ⟨Θ(w) − Θ*, Θ_i⟩."""
    return lambda weights: [models @ (mine @ models - wanted) for mine in weights]


def test_it_finds_the_weights_that_made_the_model() -> None:
    chance = np.random.default_rng(0)
    models, hidden = chance.normal(size=(4, 30)), np.array([0.7, 0.3, 0.0, 0.0])
    start = np.full(4, 0.25)
    # Beside another cohort that takes fewer steps.
    settings, slopes = [FitSettings(steps=400, rate=0.02), FitSettings(steps=1)], quadratic(models, hidden @ models)
    found, other = fit_weights([start, start], slopes, settings)
    assert np.abs(found - hidden).max() < 0.02  # exponentiated gradient only nears the border of the simplex
    np.testing.assert_allclose(other, one_step(start, start, slopes([start])[0], settings[1]), rtol=1e-12)
