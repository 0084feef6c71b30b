"""Bucketing by hand, and against byzfl."""

from __future__ import annotations

import numpy as np
import pytest
from tests.defence.byzfl_rules import aggregators

from steelyard.defence.bucketing import buckets
from steelyard.defence.rules import mixing
from steelyard.defence.settings import DefenceSettings


class InOrder(np.random.Generator):
    """Chance that leaves everything where it is."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))

    def permutation(self, x: int) -> np.ndarray:  # type: ignore[override]
        return np.arange(x)


def test_a_bucket_is_the_weighted_mean_of_its_clients_and_has_their_weight() -> None:
    means, weights = buckets(np.array([0.1, 0.3, 0.2, 0.2, 0.2]), 2, InOrder())
    # Buckets {a, b}, {c, d}, {e}: a has a quarter of the first.
    assert means == pytest.approx(np.array([[0.25, 0.75, 0, 0, 0], [0, 0, 0.5, 0.5, 0], [0, 0, 0, 0, 1.0]]))
    assert weights.tolist() == pytest.approx([0.4, 0.4, 0.2])


def test_a_bucket_without_weight_has_none_and_divides_by_no_0() -> None:
    means, weights = buckets(np.array([0.0, 0.0, 1.0]), 2, InOrder())
    assert means.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    assert weights.tolist() == [0.0, 1.0]


def test_every_client_is_in_one_bucket_and_the_weighted_sum_stays() -> None:
    given = np.random.default_rng(3).dirichlet(np.ones(11))
    means, weights = buckets(given, 3, np.random.default_rng(7))
    assert means.shape == (4, 11)
    assert ((means > 0).sum(axis=0) == 1).all()
    assert sorted((means > 0).sum(axis=1).tolist()) == [2, 3, 3, 3]
    assert weights @ means == pytest.approx(given)
    assert np.array_equal(means, buckets(given, 3, np.random.default_rng(7))[0])
    assert not np.array_equal(means, buckets(given, 3, np.random.default_rng(8))[0])


@pytest.mark.parametrize(("clients", "size"), [(10, 2), (11, 3)])
def test_equal_weights_give_byzfl(clients: int, size: int) -> None:
    byzfl = aggregators("preaggregators")
    updates = np.random.default_rng(1).normal(size=(clients, 5))
    np.random.seed(4)
    expected = byzfl.Bucketing(s=size)(updates)
    means, _ = buckets(np.full(clients, 1 / clients), size, np.random.RandomState(4))  # type: ignore[arg-type]
    np.testing.assert_allclose(means @ updates, expected)


@pytest.mark.parametrize("clients", [8, 11])
def test_nearest_neighbours_are_those_of_byzfl(clients: int) -> None:
    byzfl = aggregators("preaggregators")
    updates = np.random.default_rng(2).normal(size=(clients, 5))
    found = mixing(updates @ updates.T, 2 / clients) @ updates
    np.testing.assert_allclose(found, byzfl.NNM(f=2)(updates))


def test_buckets_and_mixing_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="buckets: given together with mix; allowed: one of the two"):
        DefenceSettings(rule="median", mix=True, buckets=2)
    assert DefenceSettings(rule="median", buckets=3).label("EQ") == "median(EQ;buckets=3)"
    assert DefenceSettings(rule="none", buckets=2).robust
