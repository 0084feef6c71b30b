"""Weights that follow from a client alone: nobody else's criteria move them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from steelyard.errors import UserError
from steelyard.weighing.own import own_cap, weigh_alone
from steelyard.weighing.rule import Rule, WeighingSettings


def rule(**fields: object) -> Rule:
    return Rule(WeighingSettings.model_validate({"max_shares": 2.0, **fields}))


def test_a_typical_client_gets_its_share_and_nobody_more_than_the_cap() -> None:
    # m = 10, ĉ = 100: 100 samples are 1/10, 50 are 1/20, 1,000 would be 1 and are cut at 2/10.
    found = weigh_alone(rule(), np.array([[100.0], [50.0], [1000.0], [0.0]]), np.array([100.0]), 10.0)
    assert found.weights == pytest.approx([0.1, 0.05, 0.2, 0.0])


def test_a_prioritized_rule_by_hand() -> None:
    # c = (2, 1/2)·1/2: f = c1 + c1·c2 = 1 + 0.25; a typical client has f(1/2, 1/2) = 0.75, so w = 1.25/(2·0.75), m = 2.
    found = weigh_alone(
        rule(criteria=("DS", "LD"), max_shares=None, max_weight=1.0),
        np.array([[200.0, 5.0]]),
        np.array([100.0, 10.0]),
        2.0,
    )
    assert found.weights == pytest.approx([1.25 / 1.5])


def test_divided_by_the_best_a_value_counts_up_to_the_reference() -> None:
    found = weigh_alone(rule(normalise="max"), np.array([[50.0], [400.0]]), np.array([100.0]), 10.0)
    assert found.weights == pytest.approx([0.05, 0.1])


@given(
    raw=arrays(np.float64, (4, 2), elements=st.floats(0, 1e4)),
    other=arrays(np.float64, (3, 2), elements=st.floats(0, 1e4)),
    normalise=st.sampled_from(["share", "max"]),
    score=st.sampled_from(["prioritized", "mean", "product"]),
)
def test_no_other_client_moves_a_weight(raw: np.ndarray, other: np.ndarray, normalise: str, score: str) -> None:
    made = rule(criteria=("DS", "LD"), normalise=normalise, score=score)
    references = np.array([120.0, 4.0])
    alone = weigh_alone(made, raw[:1], references, 8.0).weights[0]
    among = weigh_alone(made, np.concatenate([raw[:1], other]), references, 8.0).weights[0]
    assert alone == among
    assert 0 <= alone <= own_cap(made, 8.0)


def test_the_cap_is_the_smaller_of_the_two() -> None:
    assert own_cap(rule(), 10.0) == pytest.approx(0.2)
    assert own_cap(rule(max_weight=0.15), 10.0) == pytest.approx(0.15)
    assert own_cap(rule(max_shares=None, max_weight=0.3), 10.0) == pytest.approx(0.3)
    with pytest.raises(UserError, match="max_weight: missing"):
        own_cap(rule(max_shares=None), 10.0)


def test_a_given_order_is_that_of_both_the_client_and_the_typical_one() -> None:
    made = rule(criteria=("DS", "LD"), max_shares=None, max_weight=1.0)
    raw, references = np.array([[200.0, 5.0]]), np.array([100.0, 10.0])
    # As above with LD first: c = (1/4, 1): f = 0.25 + 0.25 = 0.5 against 0.75.
    found = weigh_alone(made, raw, references, 2.0, (1, 0))
    assert found.weights == pytest.approx([0.5 / 1.5])
    assert found.scores == pytest.approx([0.5])
    assert found.raw.tolist() == raw.tolist()
    assert found.normalised == pytest.approx(np.array([[1.0, 0.25]]))
    assert (found.criteria, found.all_zero, found.uniform) == (("DS", "LD"), (), False)


def test_a_typical_client_that_scores_nothing_is_refused() -> None:
    made = Rule(WeighingSettings(criteria=("DS",), max_shares=2.0, score="power", power=400.0))
    with pytest.raises(UserError) as found:
        weigh_alone(made, np.ones((1, 1)), np.ones(1), 1e6)
    assert str(found.value) == (
        "weighing.score: is 0 for a typical client; allowed with privacy.central.weights = 'own': scores above 0"
    )
