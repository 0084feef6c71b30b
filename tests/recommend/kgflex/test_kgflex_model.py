"""KGFlex held to its equations one feature at a time: which features a user keeps, passes, batches, explanations."""

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.recommend.fpl_cases import ITEMS, draw, few_histories
from tests.recommend.kgflex.kgflex_cases import (
    FACTORS,
    FEATURES,
    LIMITS,
    entropy,
    few_features,
    few_known,
    local_update,
    of_user,
    score,
    selected,
    sets_of,
)

from steelyard.base.randomness import stream_keys
from steelyard.recommend.compiled import draw_triples
from steelyard.recommend.fpl import Learning
from steelyard.recommend.histories import Histories, Triples
from steelyard.recommend.interactions import build as interactions
from steelyard.recommend.kgflex import model
from steelyard.recommend.kgflex.clients import central_epoch, local_pass
from steelyard.recommend.kgflex.model import Knowledge, initial_features, initial_views, scores
from steelyard.recommend.kgflex.selection import draw_others, feature_gain, information_gain, select
from steelyard.recommend.knowledge.features import build

LEARNING = Learning(0.4, FACTORS)


@pytest.fixture
def case() -> tuple[Histories, Knowledge, np.ndarray, np.ndarray]:
    """Users, what is known, a table with biases that are not 0, and the users' first views."""
    histories, knowledge = few_known()
    table = 7 * initial_features(1, FEATURES, FACTORS)
    table[:, -1] = np.random.default_rng(1).normal(size=FEATURES)
    return histories, knowledge, table, 7 * initial_views(1, histories.names, knowledge.selection, FACTORS)


# ---------------------------------------------------------------- information gain, and which features a user keeps


def test_alternatives_to_information_gain_by_hand():
    # Two of hers and two others; one of hers has the feature: IG .311278, and a quarter of the four have it.
    quarter = -0.25 * math.log2(0.25) - 0.75 * math.log2(0.75)
    assert feature_gain("ratio", 1, 0, 2, 2) == pytest.approx(0.311278 / quarter, abs=5e-7)
    # Gini: 1/2 before; after it 0 for the one and 2·(1/3)·(2/3) for the three.
    assert feature_gain("gini", 1, 0, 2, 2) == pytest.approx(0.5 - 0.75 * 4 / 9, abs=5e-7)


@given(st.integers(1, 50), st.integers(1, 50), st.data())
def test_a_gain_lies_between_nothing_and_the_entropy_and_does_not_know_which_side_is_which(liked, others, data):
    positives, negatives = data.draw(st.integers(0, liked)), data.draw(st.integers(0, others))
    gain = float(information_gain(positives, negatives, liked, others))
    assert 0 <= gain <= entropy(liked, others) + 1e-12
    assert (gain == 0) is (positives * others == negatives * liked)
    # Having a feature and lacking it say the same.
    for again in ((negatives, positives, others, liked), (liked - positives, others - negatives, liked, others)):
        assert float(information_gain(*again)) == pytest.approx(gain, abs=1e-12)


def test_others_are_as_many_as_hers_never_hers_and_drawn_by_her_own_stream():
    histories = few_histories()
    users = np.arange(histories.users)
    keys = stream_keys(7, 0, histories.names, "x")
    left = histories.catalogue - histories.sizes
    others, twice = (draw_others(histories, users, keys, ratio=ratio) for ratio in (1.0, 2.0))
    for drawn, ratio in ((others, 1), (twice, 2)):
        assert drawn.sum(axis=1).tolist() == np.minimum(ratio * histories.sizes, left).tolist()
        assert not (drawn & histories.seen(users)).any()
    # Who draws more draws the same first, whoever else draws.
    assert not (others & ~twice).any()
    assert np.array_equal(draw_others(histories, users[4:5], keys)[0], others[4])


@pytest.mark.parametrize("limits", [LIMITS, (100, 100), (2,), (0, 3)])
def test_the_selection_is_the_slow_one(limits: tuple[int, ...]):
    histories, features = few_histories(), few_features()
    found = select(histories, features, 5, limits)
    others = draw_others(histories, np.arange(histories.users), stream_keys(5, 0, histories.names, "kgflex others"))
    for user in range(histories.users):
        mine, theirs = histories.own(user).tolist(), np.flatnonzero(others[user]).tolist()
        expected = selected(mine, theirs, sets_of(features), features.hops.tolist(), limits)
        entries = found.entries(user)
        assert found.features[entries].tolist() == sorted(expected)
        assert found.weights[entries] == pytest.approx([expected[f] for f in sorted(expected)], rel=1e-6)


def test_more_others_than_items_weigh_no_more():
    # With four others per item, half of which have a feature, the counts are those of one other with half of it.
    histories = Histories.of(interactions(["a"] + ["b"] * 4, ["0", "1", "2", "3", "4"]))
    found = select(histories, build(np.array([0, 1, 2]), np.array([0, 0, 0]), 5, ["x"]), 1, ratio=4.0)
    assert found.sizes[0] == 1
    assert found.weights[0] == pytest.approx(float(information_gain(1, 0.5, 1, 1)), abs=1e-6)


# ---------------------------------------------------------------- scores and passes


def test_scores_are_those_of_equation_6_12_and_reasons_add_up_to_them(case):
    _, knowledge, table, views = case
    users, of = np.array([5, 0, 7]), sets_of(knowledge.items)
    found = scores(table, views, knowledge, users)
    for row, user in enumerate(users.tolist()):
        k, p = of_user(knowledge, views, user)
        expected = [score(k, p, table[:, :-1], table[:, -1], of[item]) for item in range(ITEMS)]
        assert found[row] == pytest.approx(expected, abs=1e-5)
        for item in range(ITEMS):
            reasons = model.reasons(table, views, knowledge, user, item)
            parts = [each.gain * (each.personal + each.common) for each in reasons]
            assert sum(parts) == pytest.approx(expected[item], abs=1e-5)
            assert {each.feature for each in reasons} == of[item] & k.keys()
            assert parts == sorted(parts, key=abs, reverse=True)
            assert sum(abs(each.share) for each in reasons) == pytest.approx(1 if reasons else 0)
    assert (found[:, -1] == 0).all()  # the item without features


@pytest.mark.parametrize(
    ("share", "decoys", "decays"),
    [(1.0, False, ()), (0.4, True, (0.3, 0.2, 0.1))],
)
def test_a_pass_is_that_of_the_equations(case, share: float, decoys: bool, decays: tuple[float, ...]):
    _, knowledge, table, views = case
    learning = Learning(0.4, FACTORS, *decays)
    users, of = np.array([8, 0, 3, 5]), sets_of(knowledge.items)
    triples, sent = draw(case[0], users, 12, share=share)
    real = np.random.default_rng(2).random(triples.positives.shape) < (0.6 if decoys else 2)
    if decoys:
        triples = Triples(triples.positives, triples.negatives, real)
    own = 0.8 if decoys else 0.4  # the step of users' own vectors
    found = local_pass(table, views, knowledge, users, triples, sent, learning, own_rate=own)
    sends = defaultdict(dict)
    for owner, row, values in zip(found.changes.owners, found.changes.rows, found.changes.values, strict=True):
        assert int(row) not in sends[int(owner)]
        sends[int(owner)][int(row)] = values.tolist()
    for row, user in enumerate(users.tolist()):
        pairs = [(of[i], of[j]) for i, j in zip(triples.positives[row], triples.negatives[row], strict=True)]
        after, changes, margins = local_update(
            *(*of_user(knowledge, views, user), table, pairs, own),
            *(sent[row].tolist(), real[row].tolist(), learning.decays),
        )
        mine = knowledge.selection.entries(user)
        moved = found.vectors[np.isin(found.entries, np.arange(mine.start, mine.stop))]
        # Twelve steps in float32, on numbers below 4.
        np.testing.assert_allclose(moved, [after[f] for f in sorted(after)], atol=5e-6)
        assert sends[row].keys() == changes.keys()
        for feature, values in changes.items():
            assert sends[row][feature] == pytest.approx(values, abs=5e-6)
        assert found.losses[row] == pytest.approx(np.logaddexp(0, -np.array(margins)), abs=1e-5)
    assert found.changes.clients == len(users)


# ---------------------------------------------------------------- central training


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, Triples]]:
    """The users and triples that central training draws, epoch by epoch."""
    found: list[tuple[np.ndarray, Triples]] = []

    def noted(histories, users, keys, count):
        found.append((users, draw_triples(histories, users, keys, count)))
        return found[-1][1]

    monkeypatch.setattr("steelyard.recommend.kgflex.clients.draw_triples", noted)
    return found


def test_a_batch_adds_up_what_each_triple_alone_would_change(case, drawn):
    """An epoch that is one batch: one step of all its triples from the parameters before it."""
    histories, knowledge, table, views = case
    learning, everyone = Learning(0.2, FACTORS, 0.03, 0.02, 0.01), np.arange(histories.users)
    moved = views.copy()
    given = (knowledge, histories, everyone, learning)
    new, losses = central_epoch(table, moved, *given, batch=1000, seed=1, epoch=1, own_rate=0.5)
    of, wanted_table, wanted_views = sets_of(knowledge.items), table.astype(float), views.astype(float)
    ((users, triples),) = drawn
    told = defaultdict(list)
    for user, (i,), (j,) in zip(users.tolist(), triples.positives, triples.negatives, strict=True):
        after, changes, margins = local_update(
            *(*of_user(knowledge, views, user), table, [(of[i], of[j])]),
            *(0.2, [True], [True], learning.decays),
        )
        mine = knowledge.selection.entries(user)
        wanted_views[mine] += (np.array([after[f] for f in sorted(after)]) - views[mine]) * 0.5 / 0.2
        for feature, change in changes.items():
            wanted_table[feature] += 0.2 * np.array(change)
        told[user].append(np.logaddexp(0, -margins[0]))
    # Some forty steps in float32, each on numbers below 4.
    np.testing.assert_allclose(new, wanted_table, atol=2e-5)
    np.testing.assert_allclose(moved, wanted_views, atol=2e-5)
    assert np.abs(new - table).max() > 0.01
    for user in range(histories.users):
        assert losses[user] == pytest.approx(np.mean(told[user] or [0.0]), abs=1e-5)


# ---------------------------------------------------------------- what a list keeps of a user's features


@pytest.mark.parametrize("top", [None, 1, 3])
def test_what_is_kept_is_counted_as_with_sets(case, top: int | None):
    histories, knowledge, *_ = case
    selection, of = knowledge.selection, sets_of(knowledge.items)
    lists = np.stack([np.random.default_rng(u).permutation(ITEMS)[:3] for u in range(histories.users)])
    lists[3] = -1
    found = model.kept(selection, model.shown(knowledge, lists), top)
    for user in range(histories.users):
        mine = selection.entries(user)
        gains = dict(zip(selection.features[mine].tolist(), selection.weights[mine].tolist(), strict=True))
        best = sorted(gains, key=lambda feature: (-gains[feature], feature))[:top]
        listed = set().union(*(of[item] for item in lists[user] if item >= 0), set())
        assert found[user] == pytest.approx(len(set(best) & listed) / len(best))
    assert found[3] == 0
