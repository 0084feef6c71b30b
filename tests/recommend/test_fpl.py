"""FPL against the slow reference, by hand, and as properties."""

import math
import warnings

import numpy as np
import pytest
import torch
from tests.recommend.fpl_cases import FACTORS, ITEMS, USERS, as_lists, draw, few_histories, start
from tests.recommend.fpl_reference import add, local_update

from steelyard.recommend.fpl import (
    MODES,
    Learning,
    Mode,
    Schedule,
    changes,
    initial_table,
    initial_vector,
    local_pass,
    sent_positives,
)
from steelyard.recommend.interactions import build
from steelyard.recommend.parallel import PairRows, distinct_rows
from steelyard.recommend.sampling import Histories, Triples, user_keys

TABLE_OF_SEED_1 = [
    [0.088264294, 0.023063809, 0.0],
    [0.0036269529, -0.099476121, 0.0],
    [-0.19867136, -0.075074092, 0.0],
]
VECTOR_OF_ADA = [-0.058658075, 0.0087802792]
SENT_BY_A = [1, 2, 5, 8, 11, 12, 13, 14]


@pytest.fixture
def histories() -> Histories:
    return few_histories()


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("cohort", [[0], [2, 5, 6], list(range(USERS))])
def test_a_parallel_round_equals_the_slow_one(histories, count, share, cohort):
    """pFPL and pFPL+ and anything between, also one user alone."""
    learning = Learning(0.3, FACTORS)
    table, vectors = start(histories)
    users = np.array(cohort)
    triples, sent = draw(histories, users, count, share=share)
    done = local_pass(table, vectors[users], triples, learning)
    payload = PairRows(triples, sent, done.gradients, table, learning)
    found = payload.combine(torch.from_numpy(table.reshape(-1)), np.full(len(users), 1 / len(users)))

    q, b = as_lists(table)
    q0, b0 = as_lists(table)
    for row, user in enumerate(cohort):
        passed = dict(zip(triples.positives[row].tolist(), sent[row].tolist(), strict=True))
        pairs = list(zip(triples.positives[row].tolist(), triples.negatives[row].tolist(), strict=True))
        p, changes = local_update(q0, b0, vectors[user].tolist(), pairs, learning.rate, passed.__getitem__)
        # Found in float32, expected in float64.
        assert done.vectors[row] == pytest.approx(p, rel=1e-5, abs=1e-6)
        add(q, b, changes, learning.rate)
        assert distinct_rows(triples, sent)[row] == len(changes)
    expected = np.concatenate([np.array(q), np.array(b)[:, None]], axis=1)
    # Found in float32, expected in float64; changes that cancel leave the absolute part.
    np.testing.assert_allclose(found.numpy().reshape(-1, FACTORS + 1), expected, rtol=1e-5, atol=1e-6)


def test_one_step_by_hand():
    """One user, one triple, all numbers 1 or 0: s = σ(−(1·1 + 1·1 − 0)) with a bias gap of 1."""
    learning = Learning(0.1, 1)
    table = np.array([[1.0, 1.0], [0.0, 0.0]], dtype=np.float32)
    triples = Triples(np.array([[0]], np.int32), np.array([[1]], np.int32))
    done = local_pass(table, np.ones((1, 1), np.float32), triples, learning)
    s = 1 / (1 + math.exp(2))
    assert done.vectors[0, 0] == pytest.approx(1 + 0.1 * (s * 1 - 0.1 / 20), rel=1e-6)
    assert done.losses[0, 0] == pytest.approx(math.log(1 + math.exp(-2)), rel=1e-6)
    sent = np.ones((1, 1), dtype=bool)
    rows = PairRows(triples, sent, done.gradients, table, learning).sparse()
    assert rows.rows.tolist() == [0, 1]
    assert rows.values[0] == pytest.approx([s - 0.1 / 20, s], rel=1e-6)
    assert rows.values[1] == pytest.approx([-s, -s], rel=1e-6)


def test_start_values_are_those_of_their_seed():
    """Pinned: the same seed gives the same start in every version."""
    table = initial_table(1, 3, 2)
    assert table.dtype == np.float32
    # Single precision has seven digits; another processor may differ in the last.
    np.testing.assert_allclose(table, TABLE_OF_SEED_1, rtol=1e-6)
    vector = initial_vector(1, "ada", 2)
    assert vector.dtype == np.float32
    np.testing.assert_allclose(vector, VECTOR_OF_ADA, rtol=1e-6)
    assert initial_vector(2, "ada", 2).tolist() != vector.tolist()
    assert initial_vector(1, "ben", 2).tolist() != vector.tolist()


def test_start_values_spread_by_a_tenth_and_biases_are_zero():
    table = initial_table(7, 4000, 5)
    # 20,000 draws: five standard errors of a mean, and of a standard deviation (0.5 % each).
    assert table[:, :-1].mean() == pytest.approx(0, abs=5 * 0.1 / math.sqrt(20_000))
    assert table[:, :-1].std() == pytest.approx(0.1, rel=0.025)
    assert not table[:, -1].any()
    vector = initial_vector(7, "ada", 20_000)
    assert vector.mean() == pytest.approx(0, abs=5 * 0.1 / math.sqrt(20_000))
    assert vector.std() == pytest.approx(0.1, rel=0.025)
    assert initial_vector(7, "ada", 20_000, spread=0.3).std() == pytest.approx(0.3, rel=0.025)
    assert initial_table(7, 4000, 5, spread=0.3)[:, :-1].std() == pytest.approx(0.3, rel=0.025)


def test_decays_follow_the_rate_unless_they_are_given():
    assert Learning(0.2, 3).decays == pytest.approx((0.01, 0.01, 0.001))
    assert Learning(0.2, 3, user_decay=0.5, positive_decay=0.0, negative_decay=0.25).decays == (0.5, 0.0, 0.25)
    shrinkage = Learning(0.2, 3, user_decay=0.5, positive_decay=0.1).shrinkage()
    assert shrinkage.dtype == np.float32
    assert shrinkage.tolist() == pytest.approx([0.9, 0.9, 0.9, 1.0])


def test_changes_by_hand():
    """Two users, two triples, two factors; the decays are told apart, and biases have none."""
    learning = Learning(0.5, 2, user_decay=9.0, positive_decay=0.1, negative_decay=0.01)
    table = np.array([[1, 2, 7], [3, 4, 8], [5, 6, 9]], dtype=np.float32)
    triples = Triples(np.array([[0, 1], [2, 2]], np.int32), np.array([[2, 2], [0, 1]], np.int32))
    sent = np.array([[True, False], [True, True]])
    gradients = np.arange(1, 13, dtype=np.float32).reshape(2, 2, 3)
    found = changes(table, triples, sent, gradients, learning)
    assert (found.clients, found.rate) == (2, 0.5)
    assert found.owners.dtype == found.rows.dtype == np.int32
    assert found.values.dtype == np.float32
    # The second triple of the first user sends its negative alone.
    assert found.owners.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert found.rows.tolist() == [0, 2, 2, 2, 0, 2, 1]
    expected = [
        [1 - 0.1, 2 - 0.2, 3],
        [-1 - 0.05, -2 - 0.06, -3],
        [-4 - 0.05, -5 - 0.06, -6],
        [7 - 0.5, 8 - 0.6, 9],
        [-7 - 0.01, -8 - 0.02, -9],
        [10 - 0.5, 11 - 0.6, 12],
        [-10 - 0.03, -11 - 0.04, -12],
    ]
    np.testing.assert_allclose(found.values, expected, rtol=1e-6)


def test_a_round_by_hand_from_draws_to_the_new_table():
    """The rows that users send, summed as the server sums them, are what the slow reference makes of the table."""
    learning = Learning(0.4, FACTORS)
    histories = few_histories()
    table, vectors = start(histories)
    triples, sent = draw(histories, np.arange(USERS), 5, share=0.5)
    done = local_pass(table, vectors, triples, learning)
    rows = changes(table, triples, sent, done.gradients, learning)
    found = rows.combine(torch.from_numpy(table.reshape(-1)), np.full(USERS, 1 / USERS))
    (q, b), (q0, b0) = as_lists(table), as_lists(table)
    for user in range(USERS):
        passed = dict(zip(triples.positives[user].tolist(), sent[user].tolist(), strict=True))
        pairs = list(zip(triples.positives[user].tolist(), triples.negatives[user].tolist(), strict=True))
        _, asked = local_update(q0, b0, vectors[user].tolist(), pairs, learning.rate, passed.__getitem__)
        add(q, b, asked, learning.rate)
    expected = np.concatenate([np.array(q), np.array(b)[:, None]], axis=1)
    # Found in float32, expected in float64.
    np.testing.assert_allclose(found.numpy().reshape(-1, FACTORS + 1), expected, rtol=1e-5, atol=1e-6)


def test_a_pass_has_its_own_losses_and_may_write_to_an_array_that_it_is_given():
    """−ln σ(x̂) of each triple as it was visited: the second triple meets the vector that the first one left."""
    learning = Learning(0.5, 1, user_decay=0.2)
    table = np.array([[2.0, 0.5], [0.0, 0.0]], dtype=np.float32)
    triples = Triples(np.array([[0, 0]], np.int32), np.array([[1, 1]], np.int32))
    room = np.full((1, 2, 2), np.nan, dtype=np.float32)
    before = np.ones((1, 1), np.float32)
    done = local_pass(table, before, triples, learning, room)
    assert done.gradients is room
    assert before.tolist() == [[1.0]]
    first = 1 / (1 + math.exp(2.5))
    moved = 1 + 0.5 * (first * 2 - 0.2 * 1)
    second = 1 / (1 + math.exp(2 * moved + 0.5))
    assert room[0].tolist() == [pytest.approx([first, first]), pytest.approx([second * moved, second])]
    assert done.losses[0].tolist() == pytest.approx([math.log(1 + math.exp(-x)) for x in (2.5, 2 * moved + 0.5)])
    assert done.vectors[0, 0] == pytest.approx(moved + 0.5 * (second * 2 - 0.2 * moved))
    assert {done.vectors.dtype, done.losses.dtype} == {np.dtype(np.float32)}


def test_large_margins_neither_overflow_nor_warn():
    """x̂ = ±200: the gradient is 0 or (p, 1), the loss 0 or 200."""
    table = np.array([[200.0, 0.0], [0.0, 0.0]], dtype=np.float32)
    triples = Triples(np.array([[0], [1]], np.int32), np.array([[1], [0]], np.int32))
    with np.errstate(all="raise", under="ignore"):
        done = local_pass(table, np.ones((2, 1), np.float32), triples, Learning(0.1, 1))
    np.testing.assert_allclose(done.gradients[:, 0], [[0, 0], [1, 1]], atol=1e-30)
    np.testing.assert_allclose(done.losses[:, 0], [0, 200], atol=1e-30)


def test_a_pass_that_runs_away_is_left_to_the_server_without_a_warning():
    table = np.full((2, 2), 3e38, dtype=np.float32)
    table[1] = -3e38
    triples = Triples(np.array([[0, 0]], np.int32), np.array([[1, 1]], np.int32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = local_pass(table, np.ones((1, 1), np.float32), triples, Learning(1e6, 1))
    assert not np.isfinite(done.vectors).all()


def test_only_own_items_move_the_vector_where_some_are_decoys():
    learning = Learning(0.3, FACTORS)
    histories = few_histories()
    table, vectors = start(histories)
    triples, _ = draw(histories, np.arange(USERS), 1)
    real = np.arange(USERS) % 2 == 0
    whole = local_pass(table, vectors, triples, learning)
    mixed = local_pass(table, vectors, Triples(triples.positives, triples.negatives, real[:, None]), learning)
    np.testing.assert_array_equal(mixed.vectors[~real], vectors[~real])
    np.testing.assert_allclose(mixed.vectors[real], whole.vectors[real], rtol=1e-6)
    np.testing.assert_array_equal(mixed.gradients, whole.gradients)
    assert whole.gradients.dtype == np.float32


def test_shares_of_all_or_nothing_need_no_draw_and_mixed_ones_do():
    keys = user_keys(1, ["a", "b"], "m")
    items = np.tile(np.arange(500, dtype=np.int32), (2, 1))
    assert sent_positives(keys, np.ones(2), items).all()
    assert not sent_positives(keys, np.zeros(2), items).any()
    mixed = sent_positives(keys, np.array([0.0, 1.0]), items)
    assert (mixed.dtype, mixed.sum(axis=1).tolist()) == (np.bool_, [0, 500])
    half = sent_positives(keys, np.array([0.5, 1.0]), items)
    assert 200 < half[0].sum() < 300
    # Pinned: which items a user sends under a persistent choice must not change between versions.
    assert np.flatnonzero(half[0])[:8].tolist() == SENT_BY_A


def test_masks_draw_each_item_once_per_key_and_persistent_ones_never_change(histories):
    users = np.arange(USERS)
    triples, sent = draw(histories, users, 300, share=0.5)
    for user in range(USERS):
        verdicts: dict[int, set[bool]] = {}
        for item, passed in zip(triples.positives[user].tolist(), sent[user].tolist(), strict=True):
            verdicts.setdefault(item, set()).add(passed)
        assert all(len(each) == 1 for each in verdicts.values())
    later, again = draw(histories, users, 300, round=99, share=0.5)
    known = {(u, i): s for u in range(USERS) for i, s in zip(triples.positives[u], sent[u], strict=True)}
    assert all(
        known.get((u, i), s) == s for u in range(USERS) for i, s in zip(later.positives[u], again[u], strict=True)
    )


def test_share_of_sent_positives_follows_each_users_own_share():
    data = build(["a"] * 2000 + ["b"] * 2000, [str(i) for i in range(2000)] * 2)
    histories = Histories.of(data)
    items = np.tile(np.arange(2000, dtype=np.int32), (2, 1))
    sent = sent_positives(user_keys(1, histories.names, "m"), np.array([0.2, 0.9]), items)
    # 2000 coins per user: a standard error of 0.009 at most, and 4.5 of them.
    assert sent.mean(axis=1) == pytest.approx([0.2, 0.9], abs=0.04)


def test_decoys_are_claimed_but_do_not_move_the_vector(histories):
    claimed = histories.with_decoys(1.0, seed=1)
    assert claimed.total == histories.total
    for user in range(USERS):
        fakes = claimed.items[claimed.starts[user + 1] - claimed.fakes[user] : claimed.starts[user + 1]]
        assert len(fakes) == min(len(histories.own(user)), ITEMS - len(histories.own(user)) - 1)
        assert not set(fakes.tolist()) & set(histories.own(user).tolist())
    again = histories.with_decoys(1.0, seed=1)
    assert np.array_equal(claimed.items, again.items)
    triples, _ = draw(claimed, np.arange(USERS), 40)
    assert triples.real is not None
    assert 0.2 < triples.real.mean() < 0.8
    table, vectors = start(histories)
    fake = Triples(triples.positives[:, :1], triples.negatives[:, :1], np.zeros((USERS, 1), dtype=bool))
    done = local_pass(table, vectors, fake, Learning(0.3, FACTORS))
    assert np.array_equal(done.vectors, vectors)
    assert np.abs(done.gradients).min(axis=(1, 2)).all()


BRAZIL = {"users": 17_473, "items": 47_270, "interactions": 599_958}


def test_brazils_communication_cost():
    """Thesis table 4.4: pFPL at π = 0.1 with 45 epochs; sFPL costs the same."""
    # The table prints five decimals.
    assert MODES["pFPL"].cost_per_epoch(**BRAZIL, share=0.1) * 45e-12 == pytest.approx(1.27623, abs=5e-6)
    assert MODES["sFPL"].cost_per_epoch(**BRAZIL, share=0.1) * 45e-12 == pytest.approx(1.27623, abs=5e-6)
    assert MODES["pFPL"].cost_per_epoch(**BRAZIL, share=1.0) * 45e-12 == pytest.approx(1.27625, abs=5e-6)


def test_the_cost_of_the_plus_modes_by_hand():
    """10 users, 40 positives, 100 items: T = 4; an epoch is 10 one-user rounds, or one round of ten users."""
    for name in ("sFPL+", "pFPL+"):
        assert MODES[name].cost_per_epoch(10, 100, 40, share=0.5) == pytest.approx(10 * (100 + 4 * 1.5))
    for name in ("sFPL", "pFPL"):
        assert MODES[name].cost_per_epoch(10, 100, 40, share=0.5) == pytest.approx(40 * (100 + 1 * 1.5))
    # 45 positives: T = 4.5 stays unrounded in the formula, and is 4 in a run, for which an epoch has 11 rounds.
    assert MODES["sFPL+"].cost_per_epoch(10, 100, 45, share=0.5) == pytest.approx(10 * (100 + 4.5 * 1.5))
    assert MODES["sFPL+"].schedule(10, 45) == Schedule(users=1, triples=4, rounds_per_epoch=11)
    assert MODES["sFPL+"].schedule(10, 45).cost_per_epoch(100, 0.5) == pytest.approx(11 * (100 + 4 * 1.5))
    assert MODES["pFPL"].schedule(10, 45).cost_per_epoch(100, 0.5) == pytest.approx(4 * 10 * (100 + 1 * 1.5))


def test_modes_are_two_flags():
    assert {
        "sFPL": Mode(one_user=True, one_triple=True),
        "sFPL+": Mode(one_user=True, one_triple=False),
        "pFPL": Mode(one_user=False, one_triple=True),
        "pFPL+": Mode(one_user=False, one_triple=False),
    } == MODES
    assert [name for name, mode in MODES.items() if mode.one_round_per_epoch()] == ["pFPL+"]
    assert not any(mode.one_round_per_epoch("tables") for mode in MODES.values())


@pytest.mark.parametrize(
    ("name", "users", "triples", "rounds"),
    [("sFPL", 1, 1, 1_000_209), ("sFPL+", 1, 166, 6025), ("pFPL", 6040, 1, 166), ("pFPL+", 6040, 166, 1)],
)
def test_an_epoch_visits_every_interaction_about_once(name, users, triples, rounds):
    """MovieLens 1M: 6,040 users, 1,000,209 positives."""
    assert MODES[name].schedule(6040, 1_000_209) == Schedule(users, triples, rounds)


def test_an_epoch_has_at_least_one_round_of_one_triple():
    assert Schedule.over(10, users=100, triples=5).rounds_per_epoch == 1
    assert MODES["pFPL+"].schedule(100, 10) == Schedule(users=100, triples=1, rounds_per_epoch=1)
