"""VSM against numbers computed by hand, and items that nobody has taken."""

from __future__ import annotations

import math

import numpy as np
import pytest

from steelyard.errors import UserError
from steelyard.recommend.baselines import recommend
from steelyard.recommend.baselines.vsm import tf_idf, vsm
from steelyard.recommend.interactions import build
from steelyard.recommend.knowledge import features

PAIRS = np.array([(0, 0), (0, 1), (1, 0), (2, 1), (2, 2), (3, 0), (3, 2)])
"""Four items of three features: war (items 0, 1, 3), drama (0, 2), short (2, 3); a fifth item has none."""
KNOWN = features.build(PAIRS[:, 0], PAIRS[:, 1], 5, ["war", "drama", "short"])


def test_tf_idf_by_hand() -> None:
    war, rest = math.log(4 / 3), math.log(4 / 2)
    first = math.hypot(war, rest)
    expected = [
        [war / first, rest / first, 0],
        [1, 0, 0],
        [0, math.sqrt(0.5), math.sqrt(0.5)],
        [war / first, 0, rest / first],
        [0, 0, 0],
    ]
    assert tf_idf(KNOWN).toarray() == pytest.approx(np.array(expected))


def test_the_cosine_of_a_user_and_an_item() -> None:
    train = build(["u", "u", "v"], ["0", "1", "4"], all_items=list("01234"))
    scores = vsm(train, KNOWN)(np.array([0, 1]))
    items = tf_idf(KNOWN).toarray()
    profile = items[0] + items[1]
    cosine = items @ profile / np.linalg.norm(profile)
    assert scores[0] == pytest.approx(cosine)
    # An item without features is like nothing, and makes no profile.
    assert scores[0, 4] == 0
    assert scores[1].tolist() == [0] * 5


def test_an_item_that_nobody_took_is_ranked_by_its_features() -> None:
    train = build(["u", "v"], ["1", "2"], all_items=list("01234"))
    lists, _ = recommend("vsm", train, 2, features=KNOWN)
    # u took a war film: 0 and 3 are war films too, alike far, so the smaller id comes first.
    assert lists[0].tolist() == [0, 3]
    assert set(lists[1].tolist()) == {0, 3}


def test_features_must_be_given() -> None:
    with pytest.raises(UserError, match="baseline: vsm needs features of items; allowed: with --knowledge EXPERIMENT"):
        recommend("vsm", build(["u"], ["1"]), 2)


def test_a_feature_of_every_item_weighs_nothing() -> None:
    every = features.build(np.arange(3), np.zeros(3, dtype=np.int64), 3, ["film"])
    assert tf_idf(every).toarray().tolist() == [[0], [0], [0]]
