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
