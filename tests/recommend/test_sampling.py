"""What is drawn on the devices."""

import math
from collections import Counter

import numpy as np
import pytest
from tests.recommend.fpl_cases import USERS, draw, few_histories

from steelyard.recommend.interactions import build
from steelyard.recommend.sampling import Histories


@pytest.fixture
def histories() -> Histories:
    return few_histories()


def test_negatives_are_never_the_users_own_and_draws_do_not_depend_on_company(histories):
    users = np.arange(USERS)
    triples, _ = draw(histories, users, 400)
    for user in range(USERS):
        assert set(triples.positives[user].tolist()) == set(histories.own(user).tolist())
        assert not set(triples.negatives[user].tolist()) & set(histories.own(user).tolist())
        alone, _ = draw(histories, np.array([user]), 400)
        assert np.array_equal(alone.positives[0], triples.positives[user])
        assert np.array_equal(alone.negatives[0], triples.negatives[user])
        fewer, _ = draw(histories, np.array([user]), 11)
        assert np.array_equal(fewer.negatives[0], triples.negatives[user, :11])


def test_draws_are_even():
    data = build(["a"] * 3, ["0", "1", "2"], all_items=[str(i) for i in range(8)])
    histories = Histories.of(data)
    triples, _ = draw(histories, np.array([0]), 30_000)
    for drawn, expected in ((triples.positives, 3), (triples.negatives, 5)):
        counts = Counter(drawn[0].tolist())
        assert len(counts) == expected
        assert max(counts.values()) - min(counts.values()) < 6 * math.sqrt(30_000 / expected)


def test_a_user_with_all_items_but_one_still_finds_her_negative():
    data = build(["a"] * 499, [str(i) for i in range(499)], all_items=[str(i) for i in range(500)])
    triples, _ = draw(Histories.of(data), np.array([0]), 5)
    assert triples.negatives.tolist() == [[499] * 5]
