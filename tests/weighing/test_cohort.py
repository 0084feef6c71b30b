"""The server's view of a cohort: what it shows, computes only once, remembers; and what coalitions in it are worth."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit import assert_refused
from tests.weighing.policies.cohorts import WithRows, answering

from steelyard.base.randomness import generator
from steelyard.messages.payloads import DenseModels, Floats, ServerTest
from steelyard.messages.updates import Updates
from steelyard.recommend.sparse import TableChange
from steelyard.weighing.builtin import coalition_weights, contributions, shapley_value
from steelyard.weighing.cohort import CohortView, ServerSide
from steelyard.weighing.criterion import Criterion, Needs
from steelyard.weighing.shapley import Coalitions, shapley_values

START = torch.tensor([1.0, 0.0, -1.0])


MODELS = torch.tensor([[2.0, 0.0, -1.0], [1.0, 3.0, -1.0], [3.0, 4.0, 0.0]])


# Updates (1, 0, 0), (0, 3, 0) and (2, 4, 1).
GRAM = [[1.0, 0.0, 2.0], [0.0, 9.0, 12.0], [2.0, 12.0, 21.0]]


def updates(**more: object) -> Updates:
    fields = {"losses": np.array([0.1, 0.2, 0.3]), "payload": DenseModels(MODELS), **more}
    return Updates("f", 1, ("a", "b", "c"), np.array([5, 6, 7]), {}, **fields)  # type: ignore[arg-type]


def first_number(models: torch.Tensor) -> ServerTest:
    return ServerTest(models[:, 0].double().numpy(), np.zeros((len(models), 0)))


def test_everything_that_clients_told_is_in_the_view() -> None:
    told = {
        "steps": np.array([1, 2, 3]),
        "first_losses": np.array([1.0, 2.0, 3.0]),
        "label_counts": np.array([[5, 0], [3, 3], [0, 7]]),
    }
    view = CohortView.of(updates(**told), START, WithRows(first_number), {"a": [1]})
    assert (view.clients, view.memory) == (("a", "b", "c"), {"a": [1]})
    for name, expected in {**told, "samples": np.array([5, 6, 7]), "losses": np.array([0.1, 0.2, 0.3])}.items():
        assert getattr(view, name).tolist() == expected.tolist()
    assert view.divergence == pytest.approx([1, 3, np.sqrt(21)])
    assert view.gram.tolist() == GRAM
    assert view.validation.accuracy.tolist() == [2, 1, 3]
    assert view.test(np.array([0.5, 0.5, 0.0])).accuracy == pytest.approx([1.5])
    silent = CohortView.of(updates(), START, WithRows(first_number))
    assert [getattr(silent, name) for name in told] == [None] * 3
    assert (silent.memory, silent.remembered) == ({}, {})


def test_a_part_is_asked_for_once_and_one_that_is_not_there_is_named() -> None:
    asked: list[int] = []
    test = ServerTest(np.zeros(1), np.zeros((1, 0)))
    view = CohortView.of(updates(), START, WithRows(lambda _: (asked.append(1), test)[1]))
    assert view.validation is view.validation
    assert asked == [1]
    alone = CohortView.of(updates(), START, ServerSide())
    ones = np.ones(3)
    assert_refused(lambda: alone.test(ones), "weighing.criteria", "tests no models")
    assert_refused(lambda: alone.slopes(ones), "weighing.policy", "no rows")
    assert_refused(lambda: alone.class_grams, "weighing.policy", "no last layer")
    for name in (
        "divergence",
        "gram",
        "validation",
        "along_start",
        "root",
        "class_grams",
        "last_layer",
        "kernel_norms",
    ):
        assert_refused(lambda name=name: getattr(CohortView(ones), name), "weighing", "no single models")
    for ask in (CohortView(ones).test, CohortView(ones).slopes):
        assert_refused(lambda ask=ask: ask(ones), "weighing", "no single models")
    hidden = CohortView.of(updates(payload=TableChange(2, torch.zeros(3))), START, WithRows(first_number))
    assert_refused(lambda: hidden.validation, "weighing", "no single models")
    for need, words in (("label_counts", "label counts, and this cohort"), ("first_losses", "losses before training")):
        criterion = Criterion(
            name="X", measured_by="server", measure=lambda view: np.ones(3), needs=Needs(**{need: True})
        )
        assert_refused(lambda c=criterion: c.on_server(hidden), "X looks at", words)
        told = CohortView.of(updates(**{need: np.ones((3, 2))}), START, WithRows(first_number))
        assert criterion.on_server(told).tolist() == [1, 1, 1]


def test_memory_goes_from_round_to_round_and_leaves_the_past_alone() -> None:
    before = {"X": [1.0], "Y": "kept"}
    view = CohortView.of(updates(), START, WithRows(first_number), before)
    view.remember("X", np.array([2.5, 3.5]))
    assert view.memory == {"X": [1.0], "Y": "kept"}
    assert view.remembered == {"X": [2.5, 3.5], "Y": "kept"}
    assert_refused(lambda: view.remember("X", {1.5j}), "remember('X')", "set")
    assert before == {"X": [1.0], "Y": "kept"}


def test_what_the_server_looks_at_cannot_be_written() -> None:
    given, remembered = updates(steps=np.array([1, 2, 3])), {"A": {"a": 1.0}}
    parts = {"errors": {"mape": np.ones(3)}, "losses": np.ones(3), "by_class": {"recall": np.ones((3, 2))}}
    view = CohortView.of(given, START, WithRows(lambda _: ServerTest(np.ones(3), np.ones((3, 2)), **parts)), remembered)
    shown = view.validation
    arrays = [shown.accuracy, shown.f1, shown.errors["mape"], shown.losses, shown.by_class["recall"]]
    assert (shown.errors["mape"].tolist(), shown.f1.shape) == ([1, 1, 1], (3, 2))
    for array in [view.samples, view.steps, view.losses, view.divergence, view.gram, *arrays]:
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 9
    view.memory["A"]["a"] = 2.0  # type: ignore[index, call-overload]
    assert remembered == {"A": {"a": 1.0}}
    assert given.samples.tolist() == [5, 6, 7]
    given.samples[0] = 4  # the run's own arrays stay as they were


def test_models_are_tested_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def everything(models: torch.Tensor) -> ServerTest:
        asked.append(len(models))
        found = models.double().numpy()
        errors, by_class = {"mse": found[:, 0] + 1}, {"recall": found[:, 1:] + 2}
        return ServerTest(found[:, 0], found[:, 1:], errors, found[:, 2], by_class)

    view = CohortView.of(updates(), START, WithRows(everything))
    weights = np.array([[1.0, 0, 0], [0, 0, 0], [0, 0.5, 0.5]])
    whole = view.test(weights)
    monkeypatch.setattr("steelyard.weighing.cohort.MOST_TESTED", 6)
    parts = view.test(weights)
    assert asked == [3, 2, 1]
    assert whole.accuracy.tolist() == [2.0, 1.0, 2.0]  # nobody's weight: the model that was sent
    for name in ("accuracy", "f1", "losses"):
        assert getattr(parts, name).tolist() == getattr(whole, name).tolist()
    assert parts.errors["mse"].tolist() == whole.errors["mse"].tolist()
    assert parts.by_class["recall"].tolist() == whole.by_class["recall"].tolist()


def no_chance() -> np.random.Generator:
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


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(0, 10_000))
def test_exact_values_are_the_mean_over_all_orders(players: int, seed: int) -> None:
    drawn = generator(seed, purpose="worths")
    worths: dict[frozenset[int], float] = {}

    def worth(coalitions: Coalitions) -> Floats:
        for row in coalitions:
            worths.setdefault(frozenset(np.flatnonzero(row).tolist()), float(drawn.normal()))
        return np.array([worths[frozenset(np.flatnonzero(row).tolist())] for row in coalitions])

    found = shapley_values(players, worth, no_chance)
    assert found.exact
    assert found.tests == 2**players
    np.testing.assert_allclose(found.values, by_orders(worths, players), atol=1e-12)


def pairs_game(coalitions: Coalitions) -> Floats:
    """Everyone is worth his number, and neighbours something more together; not additive."""
    numbers = np.arange(coalitions.shape[1])
    return coalitions @ numbers / 10 + (coalitions[:, 1:] & coalitions[:, :-1]).sum(axis=1) ** 1.5


def test_sampled_values_come_with_an_interval_that_holds_the_exact_ones() -> None:
    exact = shapley_values(12, pairs_game, no_chance)
    hits: list[float] = []
    for seed in range(20):
        found = shapley_values(12, pairs_game, lambda seed=seed: generator(seed, purpose="orders"), exact=0)
        assert not found.exact
        assert found.values.sum() == pytest.approx(exact.values.sum())  # every order shares out the whole
        hits += ((found.low <= exact.values) & (exact.values <= found.high)).tolist()
    assert 0.88 <= np.mean(hits) <= 1.0
    # One order and its reverse tell nothing of the error.
    assert np.isinf(
        shapley_values(12, pairs_game, lambda: generator(0, purpose="orders"), exact=0, orders=1).high
    ).all()


def cohort(goods: Floats, samples: list[int]) -> CohortView:
    """A cohort whose combined model has the loss 1 less the weighted good of its clients; the received one has 1."""

    def test(weights: Floats) -> ServerTest:
        losses = 1.0 - np.atleast_2d(weights) @ goods
        return ServerTest(np.zeros(len(losses)), np.zeros((len(losses), 0)), losses=losses)

    return answering(samples, clients=list(map(str, range(len(samples)))), test=test)


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


def test_a_view_made_of_another_remembers_what_that_one_did() -> None:
    first = CohortView.of(updates(), START, WithRows(first_number))
    first.remember("A-mean", 1)
    second = replace(first, round=2)
    second.remember("B-mean", 2)
    assert second.remembered == {"A-mean": 1, "B-mean": 2}
