from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from steelyard.weighing.rule import Rule, WeighingSettings
from steelyard.weighing.weights import normalise, to_weights

sizes = arrays(np.float64, st.integers(1, 40), elements=st.integers(0, 5000).map(float))


def test_each_criterion_sums_to_one() -> None:
    normalised, zero = normalise(np.array([[1.0, 2.0], [3.0, 2.0]]))
    assert normalised == pytest.approx(np.array([[0.25, 0.5], [0.75, 0.5]]))
    assert not zero.any()


def test_an_all_zero_criterion_says_nothing_and_is_flagged() -> None:
    rule = Rule(WeighingSettings(criteria=("DS", "LD")))
    weighing = rule.weigh(np.array([[1.0, 0.0], [3.0, 0.0]]))
    assert weighing.all_zero == ("LD",)
    assert weighing.normalised[:, 1] == pytest.approx([0.5, 0.5])
    assert weighing.weights == pytest.approx([0.25, 0.75])
    assert not weighing.uniform


def test_all_zero_scores_give_uniform_weights_and_are_flagged() -> None:
    rule = Rule(WeighingSettings(criteria=("DS", "LD"), score="product"))
    weighing = rule.weigh(np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
    assert weighing.uniform
    assert weighing.weights == pytest.approx([1 / 3] * 3)


@given(sizes)
def test_ds_alone_is_fedavg_to_the_last_bit(counts: np.ndarray) -> None:
    if counts.sum() == 0:
        counts = counts + 1
    for score in ("prioritized", "mean", "product", "power"):
        weighing = Rule(WeighingSettings(criteria=("DS",), score=score)).weigh(counts[:, None])  # type: ignore[arg-type]
        assert np.array_equal(weighing.weights, counts / counts.sum())


@given(arrays(np.float64, (7, 3), elements=st.floats(0, 1e6)))
def test_weights_are_shares(raw: np.ndarray) -> None:
    weighing = Rule(WeighingSettings(criteria=("DS", "LD", "MD"))).weigh(raw)
    assert weighing.weights.min() >= 0
    assert weighing.weights.sum() == pytest.approx(1)


@given(arrays(np.float64, (5, 3), elements=st.floats(0.01, 10)), st.permutations(range(3)))
def test_candidates_equal_weighing_with_each_order(raw: np.ndarray, order: list[int]) -> None:
    rule = Rule(WeighingSettings(criteria=("DS", "LD", "MD")))
    normalised, _ = normalise(raw)
    found = rule.candidates(normalised, [order, (0, 1, 2)])
    assert np.array_equal(found[0], rule.weigh(raw, order).weights)
    assert np.array_equal(found[1], rule.weigh(raw).weights)


def test_zero_rows_stay_without_weight() -> None:
    weights, uniform = to_weights(np.array([0.0, 2.0, 2.0]))
    assert weights == pytest.approx([0, 0.5, 0.5])
    assert not uniform


@given(arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 4)), elements=st.floats(0, 1e6)))
def test_every_criterion_becomes_shares_in_the_same_proportion(raw: np.ndarray) -> None:
    normalised, zero = normalise(raw)
    assert zero.tolist() == [not column.any() for column in raw.T]
    # 1e-9: a sum of up to six shares, each rounded to 16 digits.
    assert normalised.sum(axis=0) == pytest.approx(np.ones(raw.shape[1]), rel=1e-9)
    for column, shares, silent in zip(raw.T, normalised.T, zero, strict=True):
        expected = np.full(len(column), 1 / len(column)) if silent else column / column.sum()
        assert np.array_equal(shares, expected)


@given(arrays(np.float64, (5, 2), elements=st.integers(1, 1000).map(float)), st.sampled_from([0.5, 2.0, 1024.0]))
def test_the_unit_of_a_criterion_does_not_matter(raw: np.ndarray, factor: float) -> None:
    # Powers of two change no digit, so the shares are the same to the last bit.
    assert np.array_equal(normalise(raw)[0], normalise(raw * np.array([factor, 1.0]))[0])


@given(arrays(np.float64, st.tuples(st.integers(1, 3), st.integers(1, 6)), elements=st.floats(0, 100)))
def test_weights_of_several_orders_are_those_of_each(scores: np.ndarray) -> None:
    together, uniform = to_weights(scores)
    alone = [to_weights(row) for row in scores]
    assert np.array_equal(together, np.stack([weights for weights, _ in alone]))
    assert uniform == any(flag for _, flag in alone)
    # 1e-9: as above.
    assert together.sum(axis=1) == pytest.approx(np.ones(len(scores)), rel=1e-9)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6), st.randoms())
def test_weights_follow_the_clients_when_they_change_seats(scores: list[float], chance) -> None:
    order = list(range(len(scores)))
    chance.shuffle(order)
    weights, _ = to_weights(np.array(scores))
    moved, _ = to_weights(np.array(scores)[order])
    # A sum in another order may round differently in the last digit.
    assert moved == pytest.approx(weights[order], rel=1e-12)


def test_scores_that_sum_to_one_stay_to_the_last_bit_and_others_do_not() -> None:
    near = np.array([0.1, 0.2, 0.7 + 5e-13])
    assert np.array_equal(to_weights(near)[0], near)
    far = np.array([0.1, 0.2, 0.7 + 5e-12])
    assert not np.array_equal(to_weights(far)[0], far)


def test_a_cohort_of_nobody_has_no_weights() -> None:
    normalised, zero = normalise(np.zeros((0, 2)))
    assert normalised.shape == (0, 2)
    assert zero.tolist() == [True, True]
    weights, uniform = to_weights(np.zeros(0))
    assert (weights.shape, uniform) == ((0,), True)


def test_normalising_by_the_best_and_by_rank_by_hand() -> None:
    raw = np.array([[10.0, 0.0], [40.0, 0.0], [40.0, 0.0], [20.0, 0.0]])
    best, zero = normalise(raw, "max")
    np.testing.assert_array_equal(best, [[0.25, 1.0], [1.0, 1.0], [1.0, 1.0], [0.5, 1.0]])
    assert zero.tolist() == [False, True]
    ranks, _ = normalise(raw, "rank")
    np.testing.assert_array_equal(ranks[:, 0], [0.25, 0.875, 0.875, 0.5])
    np.testing.assert_array_equal(ranks[:, 1], np.ones(4))


@pytest.mark.parametrize(("how", "alone"), [("share", 1.0), ("max", 1.0), ("rank", 1.0)])
def test_normalising_one_client_nobody_and_values_below_1(how: Any, alone: float) -> None:
    for value in (0.0, 0.25):
        assert normalise(np.array([[value]]), how)[0].tolist() == [[alone]]
    found, zero = normalise(np.zeros((0, 2)), how)
    assert (found.shape, zero.tolist()) == ((0, 2), [True, True])
    small, expected = (
        np.array([[0.25, 8.0, 0.0], [0.75, 2.0, 0.0], [0.5, 6.0, 0.0], [0.5, 0.0, 0.0]]),
        {
            "share": [[0.125, 0.5, 0.25], [0.375, 0.125, 0.25], [0.25, 0.375, 0.25], [0.25, 0.0, 0.25]],
            "max": [[1 / 3, 1.0, 1.0], [1.0, 0.25, 1.0], [2 / 3, 0.75, 1.0], [2 / 3, 0.0, 1.0]],
            "rank": [[0.25, 1.0, 1.0], [1.0, 0.5, 1.0], [0.625, 0.75, 1.0], [0.625, 0.25, 1.0]],
        },
    )
    assert normalise(small, how)[0].tolist() == expected[how]
    assert to_weights(np.array([0.0]))[0].tolist() == [1.0]


@pytest.mark.parametrize("how", ["max", "rank"])
def test_only_the_share_fades_as_the_cohort_grows(how: str) -> None:
    """With 1,000 clients the second criterion still tells two clients apart that are equal in the first."""
    raw = np.ones((1000, 2))
    raw[0, 1] = 0.1
    ratios = {}
    for each in ("share", how):
        values, _ = normalise(raw, each)  # type: ignore[arg-type]
        scores = np.cumprod(values, axis=1).sum(axis=1)
        ratios[each] = scores[0] / scores[1]
    assert ratios["share"] > 0.999
    assert ratios[how] < 0.7  # max: (1 + .1)/(1 + 1); rank: ties stand in the middle, (1 + .001)/(1 + .5)
