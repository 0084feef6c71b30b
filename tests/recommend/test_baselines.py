"""Baselines: each must beat chance where there is something to learn; FCF is held to its equations."""

import numpy as np
import pytest
import torch
from tests.recommend.conftest import two_tastes

from steelyard.errors import UserError
from steelyard.recommend import splits
from steelyard.recommend.baselines import BASELINES, recommend, settings_of
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


LIBRARY = {"user-knn": "implicit", "item-knn": "implicit", "bpr": "implicit", "vae": "cornac"}
RACES = {"bpr"}
"""Baselines whose threads may write the same row in one moment: the same seed gives nearly the same scores only."""


@pytest.fixture(params=sorted(BASELINES))
def kind(request: pytest.FixtureRequest) -> str:
    """Every baseline there is, where its library is at hand."""
    if request.param in LIBRARY:
        pytest.importorskip(LIBRARY[request.param])
    return request.param


class TestEveryBaseline:
    """What every baseline must do, whatever it learns: a new one in the table is held to this by itself."""

    def test_scores_have_one_finite_row_per_user_asked(self, split, kind: str):
        scores = BASELINES[kind](split.train, seed=1)
        asked = np.array([7, 0, 59])
        found = scores(asked)
        assert found.shape == (3, len(split.train.items))
        taken = np.unique(split.train.item)
        assert np.isfinite(found[:, taken]).all()
        assert not np.isnan(found).any()
        for row, user in enumerate(asked):
            # Single-precision factors: products over other shapes add up in another order.
            np.testing.assert_allclose(scores(np.array([user]))[0], found[row], rtol=1e-5, atol=1e-6)

    def test_lists_hold_unseen_items_once_with_falling_scores(self, split, kind: str):
        lists, scores = recommend(kind, split.train, 40, seed=1)
        assert lists.shape == scores.shape == (60, 40)
        for user in range(60):
            own = set(split.train.item[split.train.user == user].tolist())
            shown = lists[user][lists[user] >= 0].tolist()
            assert len(shown) == len(set(shown)) > 0
            assert not own & set(shown)
            assert (np.diff(scores[user, : len(shown)]) <= 0).all()
            assert (lists[user, len(shown) :] == -1).all()

    def test_the_same_seed_gives_the_same_lists(self, split, kind: str):
        if kind in RACES:
            pytest.skip("promises no more than nearly the same scores")
        first, again = (recommend(kind, split.train, 5, seed=3) for _ in range(2))
        assert np.array_equal(first[0], again[0])
        np.testing.assert_array_equal(first[1], again[1])

    def test_a_user_without_training_items_gets_a_list(self, kind: str):
        train = build(list("aabbc"), list("xyyzx"), all_users=["cold"], all_items=["w"])
        lists, scores = recommend(kind, train, 2, seed=1)
        cold = train.users.tolist().index("cold")
        assert lists.shape == (4, 2)
        assert not np.isnan(scores).any()
        if kind != "vae":  # it scores nobody whom it has not trained on: an empty list
            assert (lists[cold] >= 0).all()

    def test_two_users_and_two_items_are_enough(self, kind: str):
        lists, _ = recommend(kind, build(["a", "b"], ["x", "y"]), 3, seed=1)
        # One item is left for each; the rest of the list stays empty.
        assert lists.tolist() == [[1, -1, -1], [0, -1, -1]]

    def test_a_repeated_pair_counts_once_for_what_is_unseen(self, kind: str):
        lists, _ = recommend(kind, build(["a", "a", "b"], ["x", "x", "y"], all_items=["z"]), 3, seed=1)
        assert 0 not in lists[0]
        assert 1 not in lists[1]


@pytest.mark.parametrize("kind", ["user-knn", "item-knn", "bpr", "vae", "fcf"])
def test_learners_beat_chance(split, kind):
    if kind in ("user-knn", "item-knn", "bpr"):
        pytest.importorskip("implicit")
    if kind == "vae":
        pytest.importorskip("cornac")
    # Two of the twelve items left of a user's own taste are in her test set; by chance it is two of 32.
    assert precision(split, kind) > 0.12


def test_chance_and_popularity(split):
    # 60 users with 5 items each: two standard errors of 0.014.
    assert precision(split, "random") == pytest.approx(2 / 32, abs=0.028)
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
