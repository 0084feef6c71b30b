"""What clients added in a round: hand-made games, the rule's own weights, groups of rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.rounds.scripted import NAMES, Clients, Server, federation, state

from steelyard.errors import UserError
from steelyard.messages import Floats, RowTests
from steelyard.rounds.contributions import ContributionSettings, RoundValues
from steelyard.rounds.loop import one_round
from steelyard.rounds.state import Plan


class Rows(Server):
    """A server with as many rows as parameters: row i loses (1 − θᵢ)², and is right where θᵢ is above a quarter."""

    def rows(self, seed: int, models: torch.Tensor) -> RowTests:
        each = models.double().numpy()
        return RowTests((1 - each) ** 2, each > 0.25)


def values(
    names: str = "ab", settings: ContributionSettings | None = None, server: Server | None = None, **rule: object
) -> tuple[RoundValues, ...]:
    plan = Plan(1, 1.0, contributions=settings or ContributionSettings())
    (record,) = one_round([federation(**rule)], {"f": state(0)}, Clients(tuple(names)), server or Rows(), plan, 1)
    return record.contributions


def by_hand(names: str) -> dict[frozenset[str], float]:
    """The mean loss of every coalition's model: client i's model is 1 in its own column, and it weighs i + 1."""
    found: dict[frozenset[str], float] = {}
    for number in range(2 ** len(names)):
        inside = [name for place, name in enumerate(names) if number >> place & 1]
        total = sum(NAMES.index(name) + 1 for name in inside)
        model = np.zeros(len(NAMES))
        for name in inside:
            model[NAMES.index(name)] = (NAMES.index(name) + 1) / total
        found[frozenset(inside)] = float(((1 - model) ** 2).mean())
    return found


def test_two_clients_by_hand() -> None:
    # Start: all 0, loss 1. a alone: .9, b alone: .9; both weigh 1/3 and 2/3: (4/9 + 1/9 + 8) / 10 = 77/90.
    shapley, one_less = values()
    assert shapley.clients == ("a", "b")
    gain = 1 - 77 / 90
    assert shapley.values[:, 0] == pytest.approx([gain / 2, gain / 2])
    assert (shapley.before, shapley.after) == pytest.approx((1.0, 77 / 90))
    assert one_less.values[:, 0] == pytest.approx([0.9 - 77 / 90, 0.9 - 77 / 90])
    # Rows are groups here: in a's own row b adds what it takes away from a.
    assert shapley.sizes.tolist() == [1] * len(NAMES)
    alone, both = 1.0, 1 - 4 / 9
    assert shapley.values[0, 1] == pytest.approx((alone + both) / 2)
    assert shapley.values[1, 1] == pytest.approx((0 + both - alone) / 2)


@pytest.mark.parametrize("names", ["a", "abc", "bdf", "abcde"])
def test_values_are_those_of_the_game_by_hand(names: str) -> None:
    from itertools import permutations

    losses = by_hand(names)
    wanted = dict.fromkeys(names, 0.0)
    orders = list(permutations(names))
    for order in orders:
        for place, name in enumerate(order):
            wanted[name] += losses[frozenset(order[:place])] - losses[frozenset(order[: place + 1])]
    found, one_less = values(names)
    assert found.values[:, 0] == pytest.approx([wanted[name] / len(orders) for name in names])
    assert found.values[:, 0].sum() == pytest.approx(found.before - found.after)
    whole = frozenset(names)
    assert one_less.values[:, 0] == pytest.approx([losses[whole - {name}] - losses[whole] for name in names])


def test_accuracy_and_clients_rows_are_other_measures() -> None:
    (found, _) = values(settings=ContributionSettings(measure="accuracy"))
    assert (found.before, found.after) == pytest.approx((0.0, 0.2))
    assert found.values[:, 0] == pytest.approx([0.1, 0.1])
    # The scripted clients score each further model of a question an eighth lower, whoever made it.
    (_, one_less) = values(settings=ContributionSettings(measure="local-accuracy"))
    assert one_less.values[:, 0] == pytest.approx([0.125, 0.25])
    assert one_less.sizes.tolist() == [3, 1]


def test_one_whom_the_rule_gives_no_weight_adds_nothing() -> None:
    class Mute(Clients):
        def _trained(self, task):  # type: ignore[no-untyped-def]
            updates = super()._trained(task)
            return replace(updates, criteria={**updates.criteria, "DS": np.array([0, 1, 1])})

    plan = Plan(1, 1.0, contributions=ContributionSettings())
    clients = Mute(("a", "b", "c"))
    (record,) = one_round([federation(criteria=("DS",))], {"f": state(0)}, clients, Rows(), plan, 1)
    found, one_less = record.contributions
    assert found.values[0].tolist() == [0.0] * (1 + len(NAMES))
    assert one_less.values[0].tolist() == [0.0] * (1 + len(NAMES))
    assert found.values[1:, 0].all()


def test_more_than_twelve_are_drawn_with_an_error_that_holds_the_truth() -> None:
    clients = tuple(f"client-{number:02d}" for number in range(14))

    class Many(Clients):
        def _trained(self, task):  # type: ignore[no-untyped-def]
            from steelyard.messages import DenseModels, Updates

            count = len(task.clients)
            models = torch.eye(14)[:count]
            ones = np.ones(count)
            return Updates(
                task.federation,
                task.round,
                task.clients,
                np.ones(count, np.int64),
                {"DS": ones},
                ones,
                DenseModels(models),
            )

    class Wide(Rows):
        def initial(self, seed: int) -> torch.Tensor:
            return torch.zeros(14)

    plan = Plan(1, 1.0, contributions=ContributionSettings())
    start = replace(state(0), parameters=torch.zeros(14))
    (record,) = one_round([federation(criteria=("DS",))], {"f": start}, Many(clients), Wide(), plan, 1)
    found, _ = record.contributions
    # All are alike, so each adds a fourteenth of the gain.
    truth = (found.before - found.after) / 14
    assert found.values[:, 0].sum() == pytest.approx(found.before - found.after)
    assert (found.error > 0).all()
    # An interval of 95 % each: two of fourteen may miss.
    assert (np.abs(found.values[:, 0] - truth) <= 1.96 * found.error).sum() >= 12


@given(st.permutations(list("abcd")))
def test_names_do_not_matter(order: list[str]) -> None:
    found, _ = values("abcd")
    plan = Plan(1, 1.0, contributions=ContributionSettings())
    (record,) = one_round([federation()], {"f": state(0)}, Clients(tuple(order)), Rows(), plan, 1)
    again = record.contributions[0]
    assert again.clients == found.clients
    assert again.values == pytest.approx(found.values)


def test_a_server_without_rows_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"contributions\.measure: got 'loss', and the server has no rows"):
        values(server=Server())


def test_an_exploding_coalition_counts_as_the_worst_of_the_others() -> None:
    class Explodes(Rows):
        def rows(self, seed: int, models: torch.Tensor) -> RowTests:
            tested = super().rows(seed, models)
            broken: Floats = tested.losses.copy()
            broken[models[:, 0] == 1] = np.inf
            return RowTests(broken, tested.right)

    found, _ = values(server=Explodes())
    assert np.isfinite(found.values).all()
    assert found.values[:, 0].sum() == pytest.approx(found.before - found.after)
