"""Baselines: each must beat chance where there is something to learn; FCF is held to its equations."""

import numpy as np
import pytest
import torch
from tests.recommend.conftest import two_tastes

from steelyard.errors import UserError
from steelyard.recommend import splits
from steelyard.recommend.baselines import recommend, settings_of
from steelyard.recommend.baselines.fcf import item_gradient, solve
from steelyard.recommend.baselines.libraries import matrix
from steelyard.recommend.interactions import build
from steelyard.recommend.metrics import Precision
from steelyard.recommend.ranking import Ground


@pytest.fixture(scope="module")
def split():
    rows = two_tastes(users=60, taken=10)
    columns = list(zip(*rows, strict=True))
    return splits.temporal(build(columns[0], columns[1], columns[2], columns[3]), 0.2)


def precision(split, kind: str, **settings) -> float:
    lists, scores = recommend(kind, split.train, 5, seed=1, settings=settings)
    assert lists.shape == scores.shape == (60, 5)
    own = set(zip(split.train.user.tolist(), split.train.item.tolist(), strict=True))
    assert not own & {(u, i) for u in range(60) for i in lists[u].tolist()}
    return Precision()(Ground.of(split).view(lists, 5))


@pytest.mark.parametrize("kind", ["user-knn", "item-knn", "bpr", "vae", "fcf"])
def test_learners_beat_chance(split, kind):
    if kind in ("user-knn", "item-knn", "bpr"):
        pytest.importorskip("implicit")
    if kind == "vae":
        pytest.importorskip("cornac")
    # Two of the twelve items left of a user's own taste are in her test set; by chance it is two of 32.
    assert precision(split, kind) > 0.12


def test_chance_and_popularity(split):
    assert precision(split, "random") == pytest.approx(2 / 32, abs=0.03)
    assert precision(split, "popular") < 0.15
    first, _ = recommend("random", split.train, 5, seed=1)
    again, _ = recommend("random", split.train, 5, seed=1)
    other, _ = recommend("random", split.train, 5, seed=2)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_fcf_solves_its_equations():
    random = np.random.default_rng(1)
    data = build(["a", "a", "b", "c"], ["0", "1", "1", "2"])
    taken = matrix(data)
    table, confidence, decay = random.normal(size=(3, 2)), 4.0, 0.7
    vectors = solve(taken, table, confidence, decay)
    dense = np.asarray(taken.todense())
    for user in range(3):
        weights = np.diag(1 + confidence * dense[user])
        expected = np.linalg.solve(table.T @ weights @ table + decay * np.eye(2), table.T @ weights @ dense[user])
        assert vectors[user] == pytest.approx(expected)
    items = torch.tensor(table, requires_grad=True)
    error = torch.tensor(dense) - torch.tensor(vectors) @ items.T
    loss = ((1 + confidence * torch.tensor(dense)) * error**2).sum() + decay * (items**2).sum()
    loss.backward()
    np.testing.assert_allclose(item_gradient(taken, table, vectors, confidence, decay), items.grad.numpy())


def test_unknown_baselines_and_settings_are_named():
    with pytest.raises(UserError, match="did you mean 'user-knn'"):
        settings_of("user-nn", [])
    with pytest.raises(UserError, match="has no 'neighbors'"):
        settings_of("item-knn", ["neighbors=3"])
    with pytest.raises(UserError, match="allowed: a number"):
        settings_of("item-knn", ["neighbours=many"])
    assert settings_of("bpr", ["rate=0.1", "epochs=3"]) == {"rate": 0.1, "epochs": 3}
