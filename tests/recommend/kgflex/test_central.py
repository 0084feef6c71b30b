"""Central training: a batch is one step of all its triples from the parameters before it."""

import numpy as np
import pytest
from tests.recommend.kgflex.kgflex_cases import FACTORS, few_known, sets_of
from tests.recommend.kgflex.kgflex_reference import local_update
from tests.recommend.kgflex.test_local_pass import of_user, start

from steelyard.recommend.fpl import Learning
from steelyard.recommend.kgflex.central import _batch, central_epoch


def test_a_batch_adds_up_what_each_triple_alone_would_change():
    histories, knowledge = few_known()
    table, views = start(histories, knowledge)
    random = np.random.default_rng(3)
    users = random.integers(histories.users, size=25)
    liked, others = (random.integers(histories.catalogue, size=25).astype(np.int32) for _ in range(2))
    learning = Learning(0.2, FACTORS, 0.03, 0.02, 0.01)
    new_table, new_views = table.copy(), views.copy()
    margins = _batch(new_table, new_views, knowledge, users, liked, others, learning, own_rate=0.5)
    of, wanted_table, wanted_views = sets_of(knowledge.items), table.astype(float), views.astype(float)
    g, b = table[:, :-1].astype(float).tolist(), table[:, -1].astype(float).tolist()
    for user, i, j, margin in zip(users.tolist(), liked, others, margins, strict=True):
        k, p = of_user(knowledge, views, user)
        after, changes, found = local_update(k, p, g, b, [(of[i], of[j])], 0.2, [True], [True], learning.decays)
        assert abs(found[0] - margin) < 1e-5
        mine = knowledge.selection.entries(user)
        wanted_views[mine] += (np.array([after[f] for f in sorted(after)]) - views[mine]) * 0.5 / 0.2
        for feature, change in changes.items():
            wanted_table[feature] += 0.2 * np.array(change)
    np.testing.assert_allclose(new_table, wanted_table, atol=5e-6)
    np.testing.assert_allclose(new_views, wanted_views, atol=5e-6)
    assert np.abs(new_table - table).max() > 0.01


def test_an_epoch_is_the_same_for_the_same_seed_and_another_for_another():
    histories, knowledge = few_known()
    found = []
    for seed in (1, 1, 2):
        table, views = start(histories, knowledge)
        everyone = np.arange(histories.users)
        after, losses = central_epoch(
            *(table, views, knowledge, histories, everyone, Learning(0.2, FACTORS)), batch=7, seed=seed, epoch=1
        )
        assert not np.array_equal(after, table)
        assert losses.shape == (histories.users,)
        assert (losses >= 0).all()
        found.append((after, views))
    assert np.array_equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1])
    assert not np.array_equal(found[0][0], found[2][0])


def test_epochs_visit_every_interaction_once_on_average(monkeypatch: pytest.MonkeyPatch):
    histories, knowledge = few_known()
    visits = np.zeros((histories.users, histories.catalogue))

    def counted(table, views, known, users, liked, others, learning, own_rate):
        np.add.at(visits, (users, liked), 1)
        assert not histories.seen(np.arange(histories.users))[users, others].any()
        return np.zeros(len(users), dtype=np.float32)

    monkeypatch.setattr("steelyard.recommend.kgflex.central._batch", counted)
    table, views = start(histories, knowledge)
    everyone, epochs = np.arange(histories.users), 400
    for epoch in range(1, epochs + 1):
        central_epoch(
            *(table, views, knowledge, histories, everyone, Learning(0.2, FACTORS)), batch=7, seed=1, epoch=epoch
        )
    seen = histories.seen(everyone)
    assert not visits[~seen].any()
    assert visits.sum() == epochs * seen.sum()
    # A count over 400 epochs has a standard deviation of about 20: five of these are never left.
    assert np.abs(visits[seen] - epochs).max() < 100
