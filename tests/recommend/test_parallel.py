"""Rounds of many users at once: blocks, threads, and the sum that the server takes."""

import numpy as np
import pytest
import torch
from tests.recommend.fpl_cases import FACTORS, USERS, draw, few_histories, start

from steelyard.recommend.fpl import Learning, local_pass
from steelyard.recommend.parallel import PairRows, local_pass_in_blocks
from steelyard.recommend.sampling import Histories


@pytest.fixture
def histories() -> Histories:
    return few_histories()


def test_blocks_and_threads_do_not_change_a_bit(histories):
    learning = Learning(0.2, FACTORS)
    table, vectors = start(histories)
    triples, _ = draw(histories, np.arange(USERS), 6)
    whole = local_pass(table, vectors, triples, learning)
    parts = local_pass_in_blocks(table, vectors, triples, learning, threads=2, block=2)
    assert np.array_equal(whole.vectors, parts.vectors)
    assert np.array_equal(whole.gradients, parts.gradients)
    assert np.array_equal(whole.losses, parts.losses)


def test_weights_scale_users_and_uniform_ones_give_the_sum(histories):
    learning = Learning(0.3, FACTORS)
    table, vectors = start(histories)
    users = np.arange(USERS)
    triples, sent = draw(histories, users, 5, share=0.7)
    done = local_pass(table, vectors, triples, learning)
    payload = PairRows(triples, sent, done.gradients, table, learning)
    flat = torch.from_numpy(table.reshape(-1))
    rows = payload.sparse()
    weights = np.random.default_rng(0).dirichlet(np.ones(USERS), size=3)
    several = payload.combine(flat, weights)
    assert several.shape == (3, flat.numel())
    for each, mine in zip(several, weights, strict=True):
        # Several combinations at once may be added up in another order: float32's last bits.
        torch.testing.assert_close(payload.combine(flat, mine), each, rtol=1e-6, atol=1e-7)
        # Rows of one user and item are summed in float32 first.
        torch.testing.assert_close(rows.combine(flat, mine), each, rtol=1e-5, atol=1e-6)
        by_hand = table.astype(float).copy()
        for owner, item, value in zip(rows.owners, rows.rows, rows.values, strict=True):
            by_hand[item] += learning.rate * USERS * mine[owner] * value
        # By hand in float64, found in float32.
        np.testing.assert_allclose(each.numpy().reshape(-1, FACTORS + 1), by_hand, rtol=1e-4, atol=1e-5)


def test_divergence_selection_and_broken_numbers(histories):
    learning = Learning(0.3, FACTORS)
    table, vectors = start(histories)
    users = np.arange(USERS)
    triples, sent = draw(histories, users, 5)
    done = local_pass(table, vectors, triples, learning)
    payload = PairRows(triples, sent, done.gradients, table, learning)
    flat = torch.from_numpy(table.reshape(-1))
    one = np.zeros(USERS)
    one[4] = 1 / USERS
    moved = payload.combine(flat, one) - flat
    # The change is a difference of float32 tables, which costs a digit.
    assert payload.divergence(flat)[4] == pytest.approx(float(moved.norm()), rel=1e-4)
    few = payload.select([4, 6])
    assert few.divergence(flat) == pytest.approx(payload.divergence(flat)[[4, 6]])
    assert payload.sparse().select([4, 6]).divergence(flat) == pytest.approx(payload.divergence(flat)[[4, 6]])
    assert payload.finite().all()
    payload.gradients[3, 1, 0] = np.nan
    assert payload.finite().tolist() == [user != 3 for user in range(USERS)]
    assert payload.sparse().finite().tolist() == [user != 3 for user in range(USERS)]
    large = payload.sparse()
    large.values[:] = 2e38  # Two of them are more than float32 holds, and each is a number.
    assert large.finite().all()
