"""The vectorised FPL against the slow one, by hand, and as properties."""

import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from steelyard.recommend.fpl import (
    MODES,
    Learning,
    Mode,
    Schedule,
    initial_table,
    initial_vector,
    local_pass,
    sent_positives,
)
from steelyard.recommend.interactions import build
from steelyard.recommend.parallel import PairRows, distinct_rows, local_pass_in_blocks
from steelyard.recommend.sampling import Histories, Triples, draw_triples, round_keys, user_keys
from steelyard.recommend.sequential import independent_groups, sequential_rounds

sys.path.insert(0, str(Path(__file__).parent))
from fpl_reference import add, local_update

USERS, ITEMS, FACTORS = 9, 14, 4


@pytest.fixture
def histories() -> Histories:
    random = np.random.default_rng(5)
    pairs = [(u, i) for u in range(USERS) for i in range(ITEMS) if random.random() < 0.3 or i == u]
    return Histories.of(
        build([f"u{u}" for u, _ in pairs], [str(i) for _, i in pairs], all_items=[str(i) for i in range(ITEMS)])
    )


def start(histories: Histories, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    table = initial_table(seed, histories.catalogue, FACTORS)
    table[:, -1] = np.random.default_rng(seed).normal(size=histories.catalogue)
    return table, np.stack([initial_vector(seed, name, FACTORS) for name in histories.names])


def as_lists(table):
    return table[:, :-1].astype(float).tolist(), table[:, -1].astype(float).tolist()


def draw(histories, places, count, round=3, seed=1, share=1.0):
    triples = draw_triples(histories, places, round_keys(user_keys(seed, histories.names, "t")[places], round), count)
    sent = sent_positives(user_keys(seed, histories.names, "m")[places], np.full(len(places), share), triples.positives)
    return triples, sent


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("cohort", [[0], [2, 5, 6], list(range(USERS))])
def test_a_parallel_round_equals_the_slow_one(histories, count, share, cohort):
    """pFPL and pFPL+ and anything between, also one user alone."""
    learning = Learning(0.3, FACTORS)
    table, vectors = start(histories)
    places = np.array(cohort)
    triples, sent = draw(histories, places, count, share=share)
    done = local_pass(table, vectors[places], triples, learning)
    payload = PairRows(triples, sent, done.gradients, table, learning)
    found = payload.combine(torch.from_numpy(table.reshape(-1)), np.full(len(places), 1 / len(places)))

    q, b = as_lists(table)
    q0, b0 = as_lists(table)
    for row, place in enumerate(cohort):
        passed = dict(zip(triples.positives[row].tolist(), sent[row].tolist(), strict=True))
        pairs = list(zip(triples.positives[row].tolist(), triples.negatives[row].tolist(), strict=True))
        p, changes = local_update(q0, b0, vectors[place].tolist(), pairs, learning.rate, passed.__getitem__)
        assert done.vectors[row] == pytest.approx(p, rel=1e-5, abs=1e-6)
        add(q, b, changes, learning.rate)
        assert distinct_rows(triples, sent)[row] == len(changes)
    expected = np.concatenate([np.array(q), np.array(b)[:, None]], axis=1)
    np.testing.assert_allclose(found.numpy().reshape(-1, FACTORS + 1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 5])
def test_turns_equal_rounds_of_one_user_each(histories, count):
    """sFPL and sFPL+: 60 rounds of a random user, each on the table that the last one left."""
    learning = Learning(0.3, FACTORS)
    table, vectors = start(histories)
    visitors = np.random.default_rng(2).integers(USERS, size=60)
    keys = round_keys(user_keys(1, histories.names, "t")[visitors], np.arange(60))
    triples = draw_triples(histories, visitors, keys, count)
    sent = sent_positives(keys, np.full(60, 0.6), triples.positives)

    q, b = as_lists(table)
    own = vectors.astype(float).tolist()
    for turn, user in enumerate(visitors.tolist()):
        passed = dict(zip(triples.positives[turn].tolist(), sent[turn].tolist(), strict=True))
        pairs = list(zip(triples.positives[turn].tolist(), triples.negatives[turn].tolist(), strict=True))
        own[user], changes = local_update(q, b, own[user], pairs, learning.rate, passed.__getitem__)
        add(q, b, changes, learning.rate)

    sequential_rounds(table, vectors, visitors, triples, sent, learning)
    np.testing.assert_allclose(vectors, own, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(table[:, :-1], q, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(table[:, -1], b, rtol=1e-4, atol=1e-5)


def test_turns_of_one_step_share_nothing():
    users = np.array([0, 1, 0, 2])
    triples = Triples(np.array([[0], [2], [4], [2]], np.int32), np.array([[1], [3], [5], [6]], np.int32))
    assert independent_groups(users, triples).tolist() == [0, 0, 1, 1]


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


def test_blocks_and_threads_do_not_change_a_bit(histories):
    learning = Learning(0.2, FACTORS)
    table, vectors = start(histories)
    triples, _ = draw(histories, np.arange(USERS), 6)
    whole = local_pass(table, vectors, triples, learning)
    parts = local_pass_in_blocks(table, vectors, triples, learning, threads=2, block=2)
    assert np.array_equal(whole.vectors, parts.vectors)
    assert np.array_equal(whole.gradients, parts.gradients)
    assert np.array_equal(whole.losses, parts.losses)


def test_negatives_are_never_the_users_own_and_draws_do_not_depend_on_company(histories):
    places = np.arange(USERS)
    triples, _ = draw(histories, places, 400)
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


def test_masks_draw_each_item_once_per_key_and_persistent_ones_never_change(histories):
    places = np.arange(USERS)
    triples, sent = draw(histories, places, 300, share=0.5)
    for user in range(USERS):
        verdicts: dict[int, set[bool]] = {}
        for item, passed in zip(triples.positives[user].tolist(), sent[user].tolist(), strict=True):
            verdicts.setdefault(item, set()).add(passed)
        assert all(len(each) == 1 for each in verdicts.values())
    later, again = draw(histories, places, 300, round=99, share=0.5)
    known = {(u, i): s for u in range(USERS) for i, s in zip(triples.positives[u], sent[u], strict=True)}
    assert all(
        known.get((u, i), s) == s for u in range(USERS) for i, s in zip(later.positives[u], again[u], strict=True)
    )


def test_share_of_sent_positives_follows_each_users_own_share():
    data = build(["a"] * 2000 + ["b"] * 2000, [str(i) for i in range(2000)] * 2)
    histories = Histories.of(data)
    items = np.tile(np.arange(2000, dtype=np.int32), (2, 1))
    sent = sent_positives(user_keys(1, histories.names, "m"), np.array([0.2, 0.9]), items)
    assert sent.mean(axis=1) == pytest.approx([0.2, 0.9], abs=0.04)


def test_weights_scale_users_and_uniform_ones_give_the_sum(histories):
    learning = Learning(0.3, FACTORS)
    table, vectors = start(histories)
    places = np.arange(USERS)
    triples, sent = draw(histories, places, 5, share=0.7)
    done = local_pass(table, vectors, triples, learning)
    payload = PairRows(triples, sent, done.gradients, table, learning)
    flat = torch.from_numpy(table.reshape(-1))
    rows = payload.sparse()
    weights = np.random.default_rng(0).dirichlet(np.ones(USERS), size=3)
    several = payload.combine(flat, weights)
    assert several.shape == (3, flat.numel())
    for each, mine in zip(several, weights, strict=True):
        torch.testing.assert_close(payload.combine(flat, mine), each)
        torch.testing.assert_close(rows.combine(flat, mine), each, rtol=1e-5, atol=1e-6)
        by_hand = table.astype(float).copy()
        for owner, item, value in zip(rows.owners, rows.rows, rows.values, strict=True):
            by_hand[item] += learning.rate * USERS * mine[owner] * value
        np.testing.assert_allclose(each.numpy().reshape(-1, FACTORS + 1), by_hand, rtol=1e-4, atol=1e-5)


def test_divergence_selection_and_broken_numbers(histories):
    learning = Learning(0.3, FACTORS)
    table, vectors = start(histories)
    places = np.arange(USERS)
    triples, sent = draw(histories, places, 5)
    done = local_pass(table, vectors, triples, learning)
    payload = PairRows(triples, sent, done.gradients, table, learning)
    flat = torch.from_numpy(table.reshape(-1))
    one = np.zeros(USERS)
    one[4] = 1 / USERS
    moved = payload.combine(flat, one) - flat
    assert payload.divergence(flat)[4] == pytest.approx(float(moved.norm()), rel=1e-4)
    few = payload.select([4, 6])
    assert few.divergence(flat) == pytest.approx(payload.divergence(flat)[[4, 6]])
    assert payload.sparse().select([4, 6]).divergence(flat) == pytest.approx(payload.divergence(flat)[[4, 6]])
    assert payload.finite().all()
    payload.gradients[3, 1, 0] = np.nan
    assert payload.finite().tolist() == [user != 3 for user in range(USERS)]
    assert payload.sparse().finite().tolist() == [user != 3 for user in range(USERS)]


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


def test_modes_are_two_flags():
    assert {
        "sFPL": Mode(one_user=True, one_triple=True),
        "sFPL+": Mode(one_user=True, one_triple=False),
        "pFPL": Mode(one_user=False, one_triple=True),
        "pFPL+": Mode(one_user=False, one_triple=False),
    } == MODES
    assert [name for name, mode in MODES.items() if mode.one_round_per_epoch] == ["pFPL+"]


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
