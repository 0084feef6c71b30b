"""What clients added in a round: hand-made games, the rule's own weights, groups of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import assert_refused
from tests.rounds.scripted import NAMES, Clients, Server, federation, ran, state
from tests.weighing.test_cohort import by_orders

from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Counts, Evaluations, Floats, Question, RowTests, Task, Updates
from steelyard.rounds import valuing
from steelyard.rounds.plan import ContributionSettings, RoundValues


class Rows(Server):
    """A server with as many rows as parameters: row i loses (1 − θᵢ)², and is right where θᵢ is above a quarter."""

    seed = 3

    def row_tests(self, seed: int, models: torch.Tensor) -> RowTests:
        assert seed == self.seed
        each = models.double().numpy()
        return RowTests((1 - each) ** 2, each > 0.25)


def values(
    names: Sequence[str] = "ab",
    settings: ContributionSettings | None = None,
    server: Server | None = None,
    clients: Clients | None = None,
    **rule: object,
) -> tuple[RoundValues, ...]:
    asked = clients or Clients(tuple(names))
    valued = settings or ContributionSettings()
    return ran(federation(**rule), clients=asked, server=server or Rows(), contributions=valued).record.contributions


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
    assert (shapley.measure, shapley.method, one_less.measure, one_less.method) == (
        *("loss", "shapley"),
        *("loss", "leave-one-out"),
    )
    assert shapley.error.tolist() == one_less.error.tolist() == [0.0, 0.0]
    assert (one_less.before, one_less.after) == (shapley.before, shapley.after) == pytest.approx((1.0, 77 / 90))
    assert one_less.values[:, 0] == pytest.approx([0.9 - 77 / 90, 0.9 - 77 / 90])
    # Rows are groups here: in a's own row b adds what it takes away from a.
    assert shapley.sizes.tolist() == one_less.sizes.tolist() == [1] * len(NAMES)
    alone, both = 1.0, 1 - 4 / 9
    assert shapley.values[:, 1] == pytest.approx([(alone + both) / 2, (0 + both - alone) / 2])


@pytest.mark.parametrize("names", ["a", "abc", "bdf", "abcde"])
def test_values_are_those_of_the_game_by_hand(names: str) -> None:
    losses = by_hand(names)
    worths = {frozenset(map(names.index, inside)): -loss for inside, loss in losses.items()}
    found, one_less = values(names)
    assert found.values[:, 0] == pytest.approx(by_orders(worths, len(names)))
    assert found.values[:, 0].sum() == pytest.approx(found.before - found.after)
    whole = frozenset(names)
    assert one_less.values[:, 0] == pytest.approx([losses[whole - {name}] - losses[whole] for name in names])


def test_accuracy_and_clients_rows_are_other_measures() -> None:
    (found, _) = values(settings=ContributionSettings(measure="accuracy"))
    assert (found.before, found.after) == pytest.approx((0.0, 0.2))
    assert found.values[:, 0] == pytest.approx([0.1, 0.1])
    # The scripted clients score each further model of a question an eighth lower, whoever made it.
    clients = Clients(("a", "b"))
    for measure, before in (("local-accuracy", 0.4375), ("local-loss", 0.5625)):
        (_, one_less) = values(settings=ContributionSettings(measure=measure), clients=clients)  # type: ignore[arg-type]
        assert {(asked.federation, asked.seed, asked.round) for asked in clients.questions} == {("f", 3, 1)}
        assert one_less.before == pytest.approx(before)
        assert one_less.values[:, 0] == pytest.approx([0.125, 0.25])
        assert one_less.sizes.tolist() == [3, 1]


def test_models_that_are_too_many_for_one_go_are_tested_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = values("abc")
    monkeypatch.setattr(valuing, "MOST_TESTED", 2 * len(NAMES) + 1)
    for one, two in zip(whole, values("abc"), strict=True):
        assert one.values.tolist() == two.values.tolist()


def test_rows_are_put_into_64_groups_by_their_place() -> None:
    losses, right = np.arange(130.0)[None], np.arange(130)[None] < 65

    def tested(measure: Any, right: Any = right) -> tuple[Floats, Counts]:
        server = Server()
        server.row_tests = lambda seed, models: RowTests(losses, right)
        return valuing.tester(measure, "f", 3, 7, Clients(), server)(torch.zeros(1, 10))

    means, sizes = tested("loss")
    assert sizes.tolist() == [3, 3] + [2] * 62
    assert means[0, :3].tolist() == [-64.0, -65.0, -34.0]  # rows 0, 64, 128; 1, 65, 129; 2, 66
    assert tested("accuracy")[0][0, :3] == pytest.approx([2 / 3, 1 / 3, 1 / 2])
    assert_refused(lambda: tested("accuracy", None), "contributions.measure", "'accuracy'", "without classes")
    assert valuing.overall_first(np.array([[1.0, 4.0]]), np.array([1, 2])).tolist() == [[3.0, 1.0, 4.0]]


class Idle(Clients):
    def _tested(self, question: Question) -> Evaluations:
        tested = super()._tested(question)
        return replace(tested, samples=0 * tested.samples)


@pytest.mark.parametrize(
    ("measure", "clients", "why"),
    [("local-loss", Idle(), "no client tests"), ("loss", Clients(), "no rows to test on")],
)
def test_where_nobody_can_test_is_refused_in_one_line(measure: Any, clients: Clients, why: str) -> None:
    def test() -> object:
        return valuing.tester(measure, "f", 3, 7, clients, Server())(torch.zeros(1, 10))

    assert_refused(test, "contributions.measure", f"'{measure}'", why)


def test_agreement_by_classes_by_hand() -> None:
    class Layered(Server):
        def output_layer(self, seed: int) -> Counts:
            assert seed == 3
            return np.array([[0, 1], [2, 3]])

        def kernels(self, seed: int) -> Counts:
            raise AssertionError

    (found,) = values("ab", ContributionSettings(method="classes"), Layered())
    # a stepped along column 0 and b along column 1, both of class 0; they weigh 1/3 and 2/3. None touched class 1.
    length = (1 / 9 + 4 / 9) ** 0.5
    agreement = np.array([1 / 3 / length, 2 / 3 / length])
    assert found.values[:, 1] == pytest.approx(agreement)
    assert found.values[:, 2].tolist() == [0.0, 0.0]
    assert found.values[:, 0] == pytest.approx(agreement / 2)
    assert (found.measure, found.method, found.sizes.tolist()) == ("agreement", "classes", [1, 1])
    classes = ContributionSettings(method="classes")
    assert_refused(lambda: values("ab", classes, Server()), "contributions.method", "'classes'", "no last layer")


def test_a_round_that_keeps_its_model_has_no_values() -> None:
    assert values(clients=Clients(("a", "b"), worthless=True), when_zero="keep") == ()


def test_only_the_federations_that_the_plan_names_are_valued() -> None:
    plan = {"contributions": ContributionSettings(method="leave-one-out"), "valued": {"g"}}
    one, two = ran(federation("f"), federation("g"), clients=Clients(("a", "b")), server=Rows(), **plan).kept.records
    assert (len(one.contributions), len(two.contributions)) == (0, 1)


def test_one_whom_the_rule_gives_no_weight_adds_nothing() -> None:
    class Mute(Clients):
        def _trained(self, task):  # type: ignore[no-untyped-def]
            updates = super()._trained(task)
            return replace(updates, criteria={**updates.criteria, "DS": np.array([0, 1, 1])})

    found, one_less = values(clients=Mute(("a", "b", "c")))
    assert not found.values[0].any()
    assert not one_less.values[0].any()
    assert found.values[1:, 0].all()


def test_more_than_twelve_are_drawn_with_an_error_that_holds_the_truth() -> None:
    clients = tuple(f"client-{number:02d}" for number in range(14))

    class Many(Clients):
        def _trained(self, task: Task) -> Updates:
            count = len(task.clients)
            ones, models = np.ones(count), DenseModels(torch.eye(14)[:count])
            sizes = np.ones(count, np.int64)
            return Updates(task.federation, task.round, task.clients, sizes, {"DS": ones}, ones, models)

    def drawn(seed: int = 3, round: int = 1) -> RoundValues:
        start, server = replace(state(round - 1), parameters=torch.zeros(14)), Rows()
        server.seed = seed
        asked = {"clients": Many(clients), "server": server, "contributions": ContributionSettings()}
        return ran(federation(seed=seed), before=start, rounds=round, **asked).record.contributions[0]

    found = drawn()
    # All are alike, so each adds a fourteenth of the gain.
    truth = (found.before - found.after) / 14
    assert found.values[:, 0].sum() == pytest.approx(found.before - found.after)
    # An interval of 95 % each: two of fourteen may miss; and none is so wide that it says nothing.
    assert (np.abs(found.values[:, 0] - truth) <= 1.96 * found.error).sum() >= 12
    assert (found.error > 0).all()
    assert (found.error < truth).all()
    # Seed and round alone decide what is drawn.
    assert np.array_equal(drawn().values, found.values)
    assert not any(np.array_equal(other.values, found.values) for other in (drawn(seed=4), drawn(round=2)))


def test_an_exploding_coalition_counts_as_the_worst_of_the_others() -> None:
    class Explodes(Rows):
        def row_tests(self, seed: int, models: torch.Tensor) -> RowTests:
            tested = super().row_tests(seed, models)
            broken: Floats = tested.losses * np.arange(1, 11)
            broken[models[:, 0] == 1] = np.inf
            return RowTests(broken, tested.right)

    found, _ = values(server=Explodes())
    assert np.isfinite(found.values).all()
    # a alone explodes: it counts, row by row, as the worst of the others: 1 to 10, a mean of 5.5, as with nobody.
    # b alone takes the 2 of its row away; both leave 4/9 of the 1 and 1/9 of the 2.
    assert found.values[0, 0] == pytest.approx((5.5 - 5.5 + 5.3 - (52 + 4 / 9 + 2 / 9) / 10) / 2)
    assert found.values[:, 0].sum() == pytest.approx(found.before - found.after)
