"""The local pass and the scores of KGFlex, held to the equations one feature at a time."""

from collections import defaultdict

import numpy as np
import pytest
from tests.recommend.fpl_cases import draw
from tests.recommend.kgflex.kgflex_cases import FACTORS, FEATURES, few_known, sets_of
from tests.recommend.kgflex.kgflex_reference import local_update, score

from steelyard.recommend.fpl import Learning
from steelyard.recommend.kgflex.intersections import Block
from steelyard.recommend.kgflex.local_pass import local_pass
from steelyard.recommend.kgflex.model import Knowledge, initial_features, initial_views, scores
from steelyard.recommend.sampling import Histories, Triples


def start(histories: Histories, knowledge: Knowledge) -> tuple[np.ndarray, np.ndarray]:
    """A table with biases that are not 0, and the users' first views."""
    table = initial_features(1, FEATURES, FACTORS, spread=0.7)
    table[:, -1] = np.random.default_rng(1).normal(size=FEATURES)
    return table, initial_views(1, histories.names, knowledge.selection, FACTORS, spread=0.7)


def of_user(knowledge: Knowledge, views: np.ndarray, user: int) -> tuple[dict[int, float], dict[int, list[float]]]:
    mine = knowledge.selection.entries(user)
    features = knowledge.selection.features[mine].tolist()
    weights = dict(zip(features, knowledge.selection.weights[mine].tolist(), strict=True))
    return weights, dict(zip(features, views[mine].astype(float).tolist(), strict=True))


def test_intersections_are_those_of_sets():
    histories, knowledge = few_known()
    users = np.array([6, 1, 4])
    block = Block(knowledge.selection, users, knowledge.items)
    rows, items = np.array([0, 2, 1, 2, 0]), np.array([3, 5, 13, 0, 3], dtype=np.int32)
    found = block.meet(rows, items)
    of = sets_of(knowledge.items)
    assert len(found.starts) == len(rows) + 1
    for pair, (row, item) in enumerate(zip(rows.tolist(), items.tolist(), strict=True)):
        part = slice(found.starts[pair], found.starts[pair + 1])
        mine = set(knowledge.selection.features[knowledge.selection.entries(int(users[row]))].tolist())
        assert set(knowledge.selection.features[block.own[found.entries[part]]].tolist()) == mine & of[item]
        assert (found.rows[part] == row).all()
        assert (block.owners[found.entries[part]] == row).all()
    assert histories.users == len(knowledge.selection.starts) - 1


def test_scores_are_those_of_equation_6_12():
    histories, knowledge = few_known()
    table, views = start(histories, knowledge)
    users = np.array([5, 0, 7])
    found = scores(table, views, knowledge, users)
    of = sets_of(knowledge.items)
    g, b = table[:, :-1].astype(float).tolist(), table[:, -1].astype(float).tolist()
    for row, user in enumerate(users.tolist()):
        k, p = of_user(knowledge, views, user)
        assert found[row] == pytest.approx([score(k, p, g, b, of[item]) for item in range(len(of))], abs=1e-5)
    assert np.ptp(found) > 0.1
    assert (found[:, -1] == 0).all()  # the item without features


@pytest.mark.parametrize("share", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("decoys", [False, True])
@pytest.mark.parametrize("decays", [(None, None, None), (0.3, 0.2, 0.1), (0.0, 0.0, 0.0)])
def test_a_pass_is_that_of_the_equations(share: float, decoys: bool, decays: tuple[float | None, ...]):
    histories, knowledge = few_known()
    table, views = start(histories, knowledge)
    learning = Learning(0.4, FACTORS, *decays)
    users = np.array([8, 0, 3, 5])
    triples, sent = draw(histories, users, 12, share=share)
    if decoys:
        real = np.random.default_rng(2).random(triples.positives.shape) < 0.6
        triples = Triples(triples.positives, triples.negatives, real)
    found = local_pass(table, views, knowledge, users, triples, sent, learning)
    of = sets_of(knowledge.items)
    g, b = table[:, :-1].astype(float).tolist(), table[:, -1].astype(float).tolist()
    sends = defaultdict(dict)
    for owner, row, values in zip(found.changes.owners, found.changes.rows, found.changes.values, strict=True):
        assert int(row) not in sends[int(owner)]
        sends[int(owner)][int(row)] = values.tolist()
    moved = 0.0
    for row, user in enumerate(users.tolist()):
        k, p = of_user(knowledge, views, user)
        pairs = [(of[i], of[j]) for i, j in zip(triples.positives[row], triples.negatives[row], strict=True)]
        hers = [True] * 12 if triples.real is None else triples.real[row].tolist()
        after, changes, margins = local_update(k, p, g, b, pairs, 0.4, sent[row].tolist(), hers, learning.decays)
        mine = knowledge.selection.entries(user)
        own = np.isin(found.entries, np.arange(mine.start, mine.stop))
        np.testing.assert_allclose(found.vectors[own], [after[f] for f in sorted(after)], atol=2e-6)
        assert sends[row].keys() == changes.keys()
        for feature, values in changes.items():
            assert sends[row][feature] == pytest.approx(values, abs=5e-6)
        assert found.losses[row] == pytest.approx(np.logaddexp(0, -np.array(margins)), abs=1e-5)
        moved += float(np.abs(found.vectors[own] - views[mine]).max())
    assert moved > 0.01
    assert found.changes.clients == len(users)


def test_users_own_vectors_may_take_larger_steps_than_the_shared_rows():
    histories, knowledge = few_known()
    table, views = start(histories, knowledge)
    users = np.array([3])
    triples, sent = draw(histories, users, 1)
    learning = Learning(0.4, FACTORS, 0.0, 0.0, 0.0)
    same = local_pass(table, views, knowledge, users, triples, sent, learning)
    larger = local_pass(table, views, knowledge, users, triples, sent, learning, own_rate=1.2)
    own = views[same.entries]
    np.testing.assert_allclose(larger.vectors - own, 3 * (same.vectors - own), atol=1e-6)
    assert np.abs(same.vectors - own).max() > 0.01
    assert np.array_equal(same.changes.values, larger.changes.values)


def test_blocks_and_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch):
    histories, knowledge = few_known()
    table, views = start(histories, knowledge)
    users = np.tile(np.arange(histories.users), 8)
    triples, sent = draw(histories, users, 6, share=0.5)
    whole = local_pass(table, views, knowledge, users, triples, sent, Learning(0.4, FACTORS))
    monkeypatch.setattr("steelyard.recommend.kgflex.local_pass._LOOKUPS", 1)
    parts = local_pass(table, views, knowledge, users, triples, sent, Learning(0.4, FACTORS), threads=2)
    assert whole.changes.clients == parts.changes.clients == len(users)
    for name in ("entries", "vectors", "losses"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))
    for name in ("owners", "rows", "values"):
        assert np.array_equal(getattr(whole.changes, name), getattr(parts.changes, name))


def test_a_user_without_features_sends_nothing_and_loses_what_chance_loses():
    histories, knowledge = few_known()
    table, views = start(histories, knowledge)
    selection = knowledge.selection
    emptied = type(selection)(
        np.concatenate([[0, 0], selection.starts[2:] - selection.starts[1]]),
        selection.features[selection.starts[1] :],
        selection.weights[selection.starts[1] :],
        selection.total,
    )
    users = np.array([0, 1])
    triples, sent = draw(histories, users, 4)
    found = local_pass(
        *(table, views[selection.starts[1] :], Knowledge(knowledge.items, emptied), users, triples, sent),
        Learning(0.4, FACTORS),
    )
    assert found.losses[0] == pytest.approx([np.log(2)] * 4)
    assert set(found.changes.owners.tolist()) == {1}
    assert found.changes.clients == 2
