"""Rounds of one user each, done many at a time."""

import numpy as np
import pytest
from tests.recommend.fpl_cases import FACTORS, USERS, as_lists, few_histories, start
from tests.recommend.fpl_reference import add, local_update

from steelyard.recommend.fpl import Learning, sent_positives
from steelyard.recommend.sampling import Histories, Triples, draw_triples, round_keys, user_keys
from steelyard.recommend.sequential import ahead, independent_groups, sequential_rounds


@pytest.fixture
def histories() -> Histories:
    return few_histories()


@pytest.mark.parametrize("count", [1, 5])
def test_groups_equal_rounds_of_one_user_each(histories, count):
    """sFPL and sFPL+: 60 rounds of a random user, each on the table that the last one left."""
    learning = Learning(0.3, FACTORS)
    table, vectors = start(histories)
    visitors = np.random.default_rng(2).integers(USERS, size=60)
    keys = round_keys(user_keys(1, histories.names, "t")[visitors], np.arange(60))
    triples = draw_triples(histories, visitors, keys, count)
    sent = sent_positives(keys, np.full(60, 0.6), triples.positives)

    q, b = as_lists(table)
    own = vectors.astype(float).tolist()
    for index, user in enumerate(visitors.tolist()):
        passed = dict(zip(triples.positives[index].tolist(), sent[index].tolist(), strict=True))
        pairs = list(zip(triples.positives[index].tolist(), triples.negatives[index].tolist(), strict=True))
        own[user], changes = local_update(q, b, own[user], pairs, learning.rate, passed.__getitem__)
        add(q, b, changes, learning.rate)

    sequential_rounds(table, vectors, visitors, triples, sent, learning)
    # Sixty rounds in float32 against the same in float64.
    np.testing.assert_allclose(vectors, own, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(table[:, :-1], q, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(table[:, -1], b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_done_ahead_comes_in_order_one_item_ahead_and_its_mistakes_too(threads: int):
    begun = list[int]()

    def work(item: int) -> int:
        begun.append(item)
        if item == 5:
            raise ValueError("five")
        return 10 * item

    assert list(ahead(work, [], threads)) == []
    found = ahead(work, [3, 4, 5], threads)
    assert [next(found), next(found)] == [30, 40]
    with pytest.raises(ValueError, match="five"):
        next(found)
    assert begun == [3, 4, 5]


def test_rounds_of_one_group_share_nothing():
    users = np.array([0, 1, 0, 2])
    triples = Triples(np.array([[0], [2], [4], [2]], np.int32), np.array([[1], [3], [5], [6]], np.int32))
    assert independent_groups(users, triples).tolist() == [0, 0, 1, 1]
