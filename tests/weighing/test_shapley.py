"""Shapley values: exact ones against all orders, sampled ones against exact, and their axioms."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.randomness import generator
from steelyard.update_payloads import Floats, ServerTest
from steelyard.weighing.contribution import coalition_weights, contributions, shapley_value
from steelyard.weighing.shapley import Coalitions, Values, shapley_values
from steelyard.weighing.view import CohortView


def chance() -> np.random.Generator:
    return generator(1, purpose="test")


def refused() -> np.random.Generator:
    raise AssertionError("exact values need no chance")


def by_orders(worths: dict[frozenset[int], float], players: int) -> Floats:
    """The definition, one order after another."""
    found = np.zeros(players)
    orders = list(permutations(range(players)))
    for order in orders:
        inside: frozenset[int] = frozenset()
        for player in order:
            found[player] += worths[inside | {player}] - worths[inside]
            inside |= {player}
    return found / len(orders)


@given(st.integers(1, 5), st.integers(0, 10_000))
def test_exact_values_are_the_mean_over_all_orders(players: int, seed: int) -> None:
    drawn = generator(seed, purpose="worths")
    worths: dict[frozenset[int], float] = {}

    def worth(coalitions: Coalitions) -> Floats:
        for row in coalitions:
            worths.setdefault(frozenset(np.flatnonzero(row).tolist()), float(drawn.normal()))
        return np.array([worths[frozenset(np.flatnonzero(row).tolist())] for row in coalitions])

    found = shapley_values(players, worth, refused)
    assert found.exact
    assert found.tests == 2**players
    np.testing.assert_allclose(found.values, by_orders(worths, players), atol=1e-12)


def test_known_games() -> None:
    """A glove game: one left glove, two right ones; only pairs are worth anything."""

    def gloves(coalitions: Coalitions) -> Floats:
        return (coalitions[:, 0] & coalitions[:, 1:].any(axis=1)).astype(np.float64)

    np.testing.assert_allclose(shapley_values(3, gloves, refused).values, [2 / 3, 1 / 6, 1 / 6])


def pairs_game(coalitions: Coalitions) -> Floats:
    """Everyone is worth his number, and neighbours something more together; not additive."""
    numbers = np.arange(coalitions.shape[1])
    return coalitions @ numbers / 10 + (coalitions[:, 1:] & coalitions[:, :-1]).sum(axis=1) ** 1.5


def test_sampled_values_come_with_an_interval_that_holds_the_exact_ones() -> None:
    exact = shapley_values(12, pairs_game, refused)
    hits: list[float] = []
    for seed in range(20):
        found = shapley_values(12, pairs_game, lambda seed=seed: generator(seed, purpose="orders"), exact=0)
        assert not found.exact
        assert found.values.sum() == pytest.approx(exact.values.sum())  # every order shares out the whole
        hits += ((found.low <= exact.values) & (exact.values <= found.high)).tolist()
    assert 0.88 <= np.mean(hits) <= 1.0
    more = shapley_values(12, pairs_game, chance, exact=0, orders=400)
    less = shapley_values(12, pairs_game, chance, exact=0, orders=25)
    assert (more.high - more.low).mean() < 0.5 * (less.high - less.low).mean()


def test_above_twelve_players_values_are_sampled_and_each_coalition_asked_once() -> None:
    asked: list[Coalitions] = []

    def worth(coalitions: Coalitions) -> Floats:
        asked.append(coalitions)
        return pairs_game(coalitions)

    found = shapley_values(13, worth, chance)
    assert len(asked) == 1
    assert len(np.unique(asked[0], axis=0)) == len(asked[0]) == found.tests
    assert np.array_equal(found.values, shapley_values(13, pairs_game, chance).values)  # the same stream, the same bits


# ---------------------------------------------------------------- of a cohort


def cohort(goods: Floats, samples: list[int]) -> CohortView:
    """A cohort whose combined model has the loss 1 less the weighted good of its clients; the received one has 1."""

    def test(weights: Floats) -> ServerTest:
        losses = 1.0 - np.atleast_2d(weights) @ goods
        return ServerTest(np.zeros(len(losses)), np.zeros((len(losses), 0)), losses=losses)

    return CohortView(
        samples=np.array(samples),
        divergence_of=lambda: np.zeros(len(samples)),
        validation_of=lambda: ServerTest(np.zeros(0), np.zeros((0, 0))),
        test_of=test,
        clients=tuple(map(str, range(len(samples)))),
    )


def test_contributions_of_a_cohort_sum_to_what_the_round_gained() -> None:
    goods = np.array([0.5, 0.2, -0.4])
    found = contributions(cohort(goods, [10, 20, 10]))
    assert found.values.sum() == pytest.approx(goods @ [0.25, 0.5, 0.25])
    assert found.values[2] < 0 < found.values[1] < found.values[0]
    assert shapley_value(cohort(goods, [10, 20, 10])).tolist() == pytest.approx(np.maximum(found.values, 0).tolist())


def test_copies_contribute_alike_and_a_broken_coalition_does_not_spoil_the_rest() -> None:
    found = contributions(cohort(np.array([0.5, 0.1, 0.5]), [10, 5, 10]))
    assert found.values[0] == pytest.approx(found.values[2])
    broken = contributions(cohort(np.array([0.5, 0.1, np.nan]), [10, 5, 10]))
    assert np.isfinite(broken.values).all()


def test_nobody_has_no_weight_and_clients_without_samples_count_alike() -> None:
    view = cohort(np.zeros(3), [10, 0, 0])
    rows = coalition_weights(view, np.array([[0, 0, 0], [1, 1, 0], [0, 1, 1]], dtype=bool))
    assert rows.tolist() == [[0, 0, 0], [1, 0, 0], [0, 0.5, 0.5]]


def test_exact_says_so() -> None:
    one = np.ones(1)
    assert Values(one, one, one, 2).exact
    assert not Values(one, one - 1, one, 2).exact
