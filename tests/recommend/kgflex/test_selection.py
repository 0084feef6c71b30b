"""Information gain and which features a user keeps."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.recommend.fpl_cases import few_histories
from tests.recommend.kgflex.kgflex_cases import FEATURES, LIMITS, few_features, sets_of
from tests.recommend.kgflex.kgflex_reference import entropy, selected

from steelyard.randomness import stream_keys
from steelyard.recommend.interactions import build as interactions
from steelyard.recommend.kgflex.selection import draw_others, feature_gain, information_gain, select
from steelyard.recommend.knowledge.features import build
from steelyard.recommend.sampling import Histories


def test_alternatives_to_information_gain_by_hand():
    # Two of hers and two others; one of hers has the feature: IG .311278, and a quarter of the four have it.
    quarter = -0.25 * math.log2(0.25) - 0.75 * math.log2(0.75)
    assert feature_gain("ratio", 1, 0, 2, 2) == pytest.approx(0.311278 / quarter, abs=5e-7)
    # Gini: 1/2 before; after it 0 for the one and 2·(1/3)·(2/3) for the three.
    assert feature_gain("gini", 1, 0, 2, 2) == pytest.approx(0.5 - 0.75 * 4 / 9, abs=5e-7)
    for criterion in ("information", "ratio", "gini"):
        found = feature_gain(criterion, np.array([2, 1, 2, 0]), np.array([0, 1, 2, 0]), 2, 2)
        assert found == pytest.approx([0.5 if criterion == "gini" else 1.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("positives", "negatives", "gain"), [(2, 0, 1), (1, 0, 0.311278), (1, 1, 0), (2, 2, 0), (0, 0, 0), (0, 2, 1)]
)
def test_the_numbers_of_example_6_3(positives: int, negatives: int, gain: float):
    assert information_gain(positives, negatives, 2, 2) == pytest.approx(gain, abs=5e-7)


@given(
    st.integers(1, 50).flatmap(
        lambda liked: st.tuples(st.just(liked), st.integers(0, liked), st.integers(1, 50)).flatmap(
            lambda first: st.tuples(st.just(first), st.integers(0, first[2]))
        )
    )
)
def test_a_gain_lies_between_nothing_and_the_entropy_and_does_not_know_which_side_is_which(case):
    (liked, positives, others), negatives = case
    gain = float(information_gain(positives, negatives, liked, others))
    assert 0 <= gain <= entropy(liked, others) + 1e-12
    assert gain == pytest.approx(float(information_gain(negatives, positives, others, liked)), abs=1e-12)
    # Having a feature and lacking it say the same.
    assert gain == pytest.approx(
        float(information_gain(liked - positives, others - negatives, liked, others)), abs=1e-12
    )
    assert (gain == 0) is (positives * others == negatives * liked)


def test_others_are_as_many_as_hers_never_hers_and_drawn_by_her_own_stream():
    histories = few_histories()
    users = np.arange(histories.users)
    keys = stream_keys(7, 0, histories.names, "x")
    others = draw_others(histories, users, keys)
    left = histories.catalogue - histories.sizes
    assert others.sum(axis=1).tolist() == np.minimum(histories.sizes, left).tolist()
    assert not (others & histories.seen(users)).any()
    alone = draw_others(histories, users[4:5], keys)
    assert np.array_equal(alone[0], others[4])
    twice = draw_others(histories, users, keys, ratio=2.0)
    assert twice.sum(axis=1).tolist() == np.minimum(2 * histories.sizes, left).tolist()
    # Who draws more draws the same first.
    assert not (others & ~twice).any()
    assert not np.array_equal(draw_others(histories, users, stream_keys(8, 0, histories.names, "x")), others)


@pytest.mark.parametrize("limits", [LIMITS, (100, 100), (2,), (0, 3)])
def test_the_selection_is_the_slow_one(limits: tuple[int, ...]):
    histories, features = few_histories(), few_features()
    found = select(histories, features, 5, limits)
    keys = stream_keys(5, 0, histories.names, "kgflex others")
    others = draw_others(histories, np.arange(histories.users), keys)
    assert found.total == FEATURES
    for user in range(histories.users):
        expected = selected(
            histories.own(user).tolist(),
            np.flatnonzero(others[user]).tolist(),
            sets_of(features),
            features.hops.tolist(),
            limits,
        )
        mine = found.entries(user)
        assert dict(zip(found.features[mine].tolist(), found.weights[mine].tolist(), strict=True)) == pytest.approx(
            expected, rel=1e-6
        )
        assert found.features[mine].tolist() == sorted(expected)


def test_blocks_of_users_change_nothing(monkeypatch: pytest.MonkeyPatch):
    histories, features = few_histories(), few_features()
    whole = select(histories, features, 5, LIMITS)
    monkeypatch.setattr("steelyard.recommend.kgflex.selection._CELLS", 2 * FEATURES)
    parts = select(histories, features, 5, LIMITS)
    for name in ("starts", "features", "weights"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))


def test_a_user_with_nearly_every_item_and_one_whose_items_have_no_features():
    """The first has fewer others than items, the second has no features at all."""
    table = interactions(["a", "a", "a", "b"], ["0", "1", "2", "3"])
    histories = Histories.of(table)
    features = build(np.array([0, 1, 2]), np.array([0, 0, 1]), 4, ["x", "y"])
    found = select(histories, features, 1)
    # Of a's three items and one other, x is on two of hers: 0.8113 − ½·0 − ½·1.
    assert found.sizes.tolist() == [2, 0]
    assert found.weights[0] == pytest.approx(0.8112781 - 0.5, abs=1e-6)


def test_more_others_weigh_no_more_than_as_many():
    """With four others per item, half of which have a feature, the counts are those of one other with half of it."""
    table = interactions(["a"] + ["b"] * 4, ["0", "1", "2", "3", "4"])
    histories = Histories.of(table)
    features = build(np.array([0, 1, 2]), np.array([0, 0, 0]), 5, ["x"])
    found = select(histories, features, 1, ratio=4.0)
    assert found.weights[0] == pytest.approx(float(information_gain(1, 0.5, 1, 1)), abs=1e-6)
    assert found.sizes[0] == 1
