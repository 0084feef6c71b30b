"""The steps of the loop with clients whose every answer is scripted: cohorts, resumption, stops, what is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import assert_refused
from tests.privacy.seeded_source import SeededSource
from tests.rounds.scripted import NAMES, Clients, Recorder, Reporting, Server, federation, ran, state

from steelyard.base import randomness
from steelyard.base.tallies import Leading
from steelyard.messages.algorithm import Algorithm, ServerStep
from steelyard.messages.payloads import DenseModels, ServerTest
from steelyard.messages.updates import Counts, Floats, LossState, Task, Updates
from steelyard.privacy.settings import PrivacySettings
from steelyard.rounds.loop import TooFewClients, make_task, run_rounds
from steelyard.rounds.plan import SELECT, SelectSettings
from steelyard.rounds.private import NO_GUARANTEE, PrivateRounds
from steelyard.rounds.state import CLOCK, Plan, RoundState, first_like
from steelyard.rounds.weigh import Exploded, discounted, weigh_soundly
from steelyard.weighing.cohort import CohortView
from steelyard.weighing.criterion import Criterion
from steelyard.weighing.order import AdjustSettings, OrderState, strategy_of
from steelyard.weighing.policy import Policy
from steelyard.weighing.rule import Rule, WeighingSettings
from steelyard.weighing.weights import Weighing


@pytest.mark.parametrize(
    ("fraction", "least", "names", "count"),
    [
        (0.25, 1, 10, 3),  # 2.5 is rounded up
        (0.01, 1, 10, 1),  # never nobody
        (0.1, 4, 10, 4),  # as many as must answer
        (0.5, 8, 5, 5),  # never more than there are
    ],
)
def test_the_size_of_a_cohort(fraction: float, least: int, names: int, count: int) -> None:
    plan = Plan(rounds=1, fraction=fraction, min_clients=least)
    before = replace(state(2), loss=LossState("barron", None, 1.0, 2.0), parameters=torch.arange(10.0))
    task = make_task(federation(), before, Clients(NAMES[:names]), plan, 7)
    assert task.clients == tuple(randomness.choose(3, 7, NAMES[:names], count))
    assert len(task.clients) == count
    assert (task.federation, task.seed, task.round, task.loss) == ("f", 3, 7, before.loss)
    assert task.parameters is before.parameters


def test_without_clients_there_is_no_round() -> None:
    with pytest.raises(TooFewClients, match=r"^no client is registered; allowed: at least one client with training"):
        make_task(federation(), state(0), Clients(()), Plan(rounds=1, fraction=1.0), 1)


def test_a_run_from_the_start_records_the_first_model_and_every_round() -> None:
    clients, kept, seen = Clients(), Recorder(), []
    plan = Plan(rounds=2, fraction=0.2)
    # The first model of a seed is tested once for all rules that begin with it.
    federations = [federation("f"), federation("g", seed=4), federation("h")]
    states = run_rounds(federations, {}, clients, Server(), plan, kept, lambda *report: seen.append(report))
    assert kept.rounds == [(0, False), (1, False), (2, True)]
    assert kept.states == [dict.fromkeys("fgh", number) for number in range(3)]
    order = [(record.federation, record.round) for record in kept.records]
    assert order == [(name, number) for number in range(3) for name in "fgh"]
    first = kept.records[1]
    # 3 samples at ½ and 1 at ¼, of the model that the server made for seed 4.
    assert first.accuracy == 0.4375
    assert (first.updates, first.weighing, first.order, first.tried, first.tests) == (None, None, (), (), 0)
    assert first.loss == LossState()
    assert clients.questions[1].models.tolist() == [[4.0] * 10]
    asked = [(question.federation, question.seed, question.round) for question in clients.questions[:3]]
    assert asked == [("f", 3, 0), ("g", 4, 0), ("f", 3, 1)]
    assert kept.records[2].evaluations.federation == "h"
    assert seen == [(number, dict.fromkeys("fgh", 0.4375)) for number in range(3)]
    for name in "fgh":
        assert (states[name].round, states[name].finished, states[name].orders.reference) == (2, False, 0.4375)
    # Of another seed it is another's, also where it is the same model.
    begun = dict.fromkeys("fgh", state(0))
    assert [first_like(one, federations, begun).name for one in federations] == ["f", "g", "f"]
    assert all(0 <= record.seconds < 60 for record in kept.records)
    assert not any(question.detailed for question in clients.questions)


def test_a_round_weighs_and_combines_what_the_cohort_sent() -> None:
    done = ran(fraction=0.3)
    sizes = np.array([NAMES.index(name) + 1 for name in done.clients.tasks[0].clients])
    expected = np.zeros(10)
    expected[sizes - 1] = sizes / sizes.sum()
    assert done.state.parameters.tolist() == torch.tensor(expected, dtype=torch.float32).tolist()
    record = done.record
    assert record.weighing.raw[:, 0].tolist() == sizes.tolist()
    assert record.weighing.raw.dtype == np.float64
    assert (record.order, record.tried, record.kept_old) == ((0,), (((0,), 0.4375),), False)
    assert done.clients.questions[0].models.tolist() == [done.state.parameters.tolist()]


def test_a_round_hands_on_its_rate_and_shares_out_its_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=lambda: 1.0, process_time=partial(next, iter([3.0, 7.0])))
    monkeypatch.setattr("steelyard.rounds.loop.time", clock)
    done = ran(federation("f"), federation("g"), before=state(2), rounds=3, rate=lambda round: round / 4)
    assert [(record.cpu, record.gpu) for record in done.kept.records] == [(2.0, 0.0)] * 2
    assert [asked.rate for asked in (*done.clients.tasks, *done.clients.questions)] == [0.75] * 4


def test_a_run_goes_on_where_its_states_stand() -> None:
    clients, kept = Clients(), Recorder()
    states = {"f": state(3), "g": state(2, finished=True)}
    done = run_rounds([federation("f"), federation("g")], states, clients, Server(), Plan(rounds=5, fraction=0.1), kept)
    assert kept.rounds == [(4, False), (5, True)]
    assert {record.federation for record in kept.records} == {"f"}
    assert [task.round for task in clients.tasks] == [4, 5]
    assert (done["f"].round, done["g"].round) == (5, 2)
    assert done["g"].finished


def test_a_run_that_is_over_does_nothing() -> None:
    for states in ({"f": state(5)}, {"f": state(2, finished=True)}):
        kept, clients = Recorder(), Clients()
        assert run_rounds([federation()], states, clients, Server(), Plan(rounds=5, fraction=0.1), kept) is states
        assert (kept.rounds, clients.tasks, clients.questions) == ([], [], [])


def test_each_federation_rests_at_its_own_target_and_the_run_ends_with_the_last() -> None:
    clients = Clients(scores=lambda round: (round / 4, 0.0))
    done = ran(clients=clients, rounds=9, fraction=0.1, stop_at=(0.5, 0.5, False))
    assert done.kept.rounds == [(1, False), (2, True)]
    assert done.state.finished
    # With a share of all devices the second, which stays at 0, holds it up to the last round.
    done = ran(before=state(6), clients=clients, rounds=9, fraction=0.1, stop_at=(0.5, 1.0, False))
    assert done.kept.rounds == [(7, False), (8, False), (9, True)]
    assert not done.state.finished


def test_a_round_that_is_not_tested_stops_nothing_and_keeps_the_orders() -> None:
    plan = {"rounds": 5, "fraction": 0.1, "evaluate_every": 2, "detailed": True}
    done = ran(before=state(2), clients=Clients(scores=lambda _: (1.0, 1.0)), stop_at=(0.5, 0.5, False), **plan)
    assert done.kept.rounds == [(3, False), (4, True)]
    untested, tested = done.kept.records
    assert (untested.accuracy, untested.evaluations, untested.tried, untested.order) == (None, None, (), (0,))
    assert tested.accuracy == done.state.orders.reference == 1.0
    # Right or wrong per sample is asked for in the plan's last round only, and this run stopped before.
    assert [question.detailed for question in done.clients.questions] == [False]
    asked = ran(before=state(3), **plan).clients.questions
    assert [(question.round, question.detailed) for question in asked] == [(4, False), (5, True)]


def test_too_few_answers_stop_the_run_and_say_why() -> None:
    clients = Clients(NAMES[:4], broken={name: f"lost {name}" for name in NAMES})
    why = r"fewer than rounds.min_clients = 3 \(a: lost a; b: lost b; c: lost c\)"
    with pytest.raises(TooFewClients, match=rf"^round 5 of f: 0 of 4 clients gave a usable update, {why}$"):
        ran(before=state(4), clients=clients, rounds=9, min_clients=3)
    clients.broken = {"b": "lost b"}
    assert ran(before=state(8), clients=clients, rounds=9, min_clients=3).kept.rounds == [(9, True)]  # three are enough


def test_a_round_without_any_answer_keeps_the_model_if_that_is_allowed() -> None:
    before = replace(state(0), parameters=torch.arange(10.0), orders=OrderState((1, 0), 0.0))
    ordered = replace(federation(criteria=("DS", "LD")), strategy=strategy_of(AdjustSettings(strategy="greedy")))
    clients = Clients(broken=dict.fromkeys(NAMES, "lost"))
    done = ran(ordered, before=before, clients=clients, fraction=0.2, min_clients=0)
    assert done.state.parameters.tolist() == list(range(10))
    record = done.record
    assert (record.kept_old, record.weighing, record.accuracy) == (True, None, 0.4375)
    assert (record.order, record.tests) == ((1, 0), 0)  # nothing to try other orders on
    assert len(record.updates.failures) == 2


@pytest.mark.parametrize("how", [{}, {"broken": dict.fromkeys(NAMES, "lost")}, {"worthless": True}])
def test_memory_goes_on_whatever_happens_in_a_round(how: dict[str, Any]) -> None:
    before = replace(state(0), memory={"seen": {"a": 2}}, tensors={"control": torch.ones(10)})
    after = ran(federation(when_zero="keep"), before=before, clients=Clients(**how), min_clients=0).state
    assert after.memory == {"seen": {"a": 2}}
    assert after.tensors["control"].tolist() == [1.0] * 10


def test_a_loss_that_adapts_follows_the_new_model_from_the_next_round_on() -> None:
    kept = Recorder()
    done = run_rounds(
        [federation(loss={"adapt": "class-f1"})], {}, Clients(), Server(), Plan(rounds=2, fraction=0.3), kept
    )
    # F1 of the two classes is ½ and 0.
    weights = (1 / 0.6, 1 / 0.1)
    assert done["f"].loss.class_weights == pytest.approx(weights)
    assert [record.loss and record.loss.class_weights for record in kept.records] == [None, None, weights]


@pytest.mark.parametrize(
    ("server", "asked", "found"),
    [
        (Reporting(), True, (0.75, 0.5, {"f1": [1.0, 0.5, 0.0]})),
        (Reporting(regression=True), True, (None, None, {"mape": 0.5, "mae": 2.0})),
        (Reporting(), False, (None, None, {})),
        (Server(), True, (None, None, {})),  # has no rows that report
    ],
)
def test_the_servers_report_is_recorded_where_the_plan_asks_for_it(server: Server, asked: bool, found: Any) -> None:
    record = ran(server=server, report=asked).record
    assert (record.server_accuracy, record.server_macro_f1, record.server_metrics) == found
    if isinstance(server, Reporting):
        assert server.reported == [(3, 1)] * asked


def test_those_who_are_promised_a_least_weight_are_known_by_name() -> None:
    weights = ran(federation(floors={"a": 0.5})).record.weighing.weights
    # a has one of 55 samples, and gets a half.
    assert weights[0] == pytest.approx(0.5)
    assert weights[1:] == pytest.approx(np.arange(2, 11) / 54 / 2)


class Looking(Policy):
    """Weighs alike, and shows what it was given to look at."""

    def weigh(self, measures: Any, view: CohortView) -> Floats:
        SEEN.append(view)
        return np.ones(len(view.clients))


SEEN: list[CohortView] = []


def looked_at(server: Server, before: RoundState, **fields: Any) -> CohortView:
    made = replace(federation(), **fields)
    made.rule.policy = Looking()
    task = Task("f", 3, before.round + 1, ("a", "b"), before.parameters)
    weigh_soundly(made, before, task, Clients()._trained(task), server, Plan(rounds=9, fraction=1.0))
    return SEEN.pop()


def test_slopes_and_last_layers_are_there_where_the_server_knows_them() -> None:
    class Knows(Server):
        def train(self, seed: int, round: int, parameters: torch.Tensor) -> torch.Tensor:
            return parameters + 1

        def gradients(self, seeds: Sequence[int], models: torch.Tensor) -> torch.Tensor:
            assert list(seeds) == [3]
            return models + 1

        def output_layer(self, seed: int) -> Counts:
            assert seed == 3
            return np.array([[0, 1], [1, 2]])

        def kernels(self, seed: int) -> Counts:
            assert seed == 3
            return np.array([[0, 1], [2, 6]])

    view = looked_at(Knows(), replace(state(4), parameters=torch.full((10,), 0.5)), learning_rate=0.5)
    assert (view.seed, view.round, view.rounds, view.rate) == (3, 5, 9, 0.5)
    # The gradient at (¼, ¾, 0, ...) is (5/4, 7/4, 1, ...); a's model is 1 in the first column, b's in the second.
    assert view.slopes(np.array([0.25, 0.75])).tolist() == [1.25, 1.75]
    # Columns 0 and 1: a moved by (½, −½), b by (−½, ½); columns 1 and 2: a by (−½, −½), b by (½, −½).
    assert view.class_grams.tolist() == [[[0.5, -0.5], [-0.5, 0.5]], [[0.5, 0.0], [0.0, 0.5]]]
    # Both kernels moved by ½ in each of their one and four numbers.
    assert view.kernel_norms.tolist() == [[0.5, 1.0], [0.5, 1.0]]
    nothing = looked_at(Server(), state(4))
    assert_refused(lambda: nothing.slopes(np.ones(2)), "weighing.policy", "learns from no rows")
    assert_refused(lambda: nothing.class_grams, "weighing.policy", "no last layer")
    assert_refused(lambda: nothing.kernel_norms, "weighing", "no layers")


def test_where_no_model_is_finite_the_federation_ends_and_says_so() -> None:
    class Broken(Clients):
        def _trained(self, task: Task) -> Updates:
            updates = super()._trained(task)
            models = torch.full((len(updates.clients), len(NAMES)), float("nan"))
            return replace(updates, payload=DenseModels(models))

    with pytest.raises(
        Exploded, match=r"^round 1 of f: no client's model is finite after local training \(4 asked\); "
    ):
        ran(clients=Broken(NAMES[:4]), min_clients=2)
    # Where another reason is among them, too few clients are left, and the run can be resumed.
    with pytest.raises(TooFewClients, match=r"^round 1 of f: 0 of 4 clients gave a usable update, fewer than "):
        ran(clients=Broken(NAMES[:4], broken={"a": "lost a"}), min_clients=2)


def test_what_an_algorithm_s_server_makes_of_the_sum_is_the_draft_s() -> None:
    class Adds(Algorithm):
        def step(self, server: ServerStep) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return server.average + 1, {"control": server.tensors["control"] + server.share}

    made = replace(federation(), algorithm=Adds())
    before = replace(state(0), tensors={"control": torch.ones(10)})
    plan = Plan(rounds=1, fraction=0.2)
    task = make_task(made, before, Clients(), plan, 1)
    draft = weigh_soundly(made, before, task, Clients()._trained(task), Server(), plan)
    assert draft.tensors["control"].tolist() == pytest.approx([1.2] * 10)
    assert draft.model.sum().item() == pytest.approx(11.0)
    assert draft.before is before


def test_a_round_is_weighed_again_without_a_culprit_as_it_was_weighed_first() -> None:
    class Partial(Server):
        def test(self, seed: int, models: torch.Tensor, measure: Leading | None = None) -> ServerTest:
            assert seed == 3
            return replace(super().test(seed, models), accuracy=np.arange(1.0, 1 + len(models)) / 8)

    def sent(task: Task) -> Updates:
        updates = Clients()._trained(task)
        models = torch.eye(10)[:4]
        models[2] = 1e30
        return replace(updates, payload=DenseModels(models))

    made, plan = federation(criteria=("VP",)), Plan(rounds=1, fraction=1.0, min_clients=3)
    task = make_task(made, state(0), Clients(NAMES[:4]), plan, 1)
    draft = weigh_soundly(made, state(0), task, sent(task), Partial(), plan)
    assert draft.updates.clients == ("a", "b", "d")
    assert [failure.client for failure in draft.updates.failures] == ["c"]
    assert draft.model.tolist() == pytest.approx([1 / 6, 1 / 3, 0, 1 / 2, 0, 0, 0, 0, 0, 0])
    # Three must stay: with four the model is beyond repair.
    with pytest.raises(Exploded, match="even with clients excluded"):
        weigh_soundly(made, state(0), task, sent(task), Partial(), replace(plan, min_clients=4))


def test_late_updates_count_less_and_the_sum_stays() -> None:
    updates = Clients()._trained(Task("f", 3, 1, ("a", "b", "c"), torch.zeros(10)))
    weights = np.array([0.5, 0.25, 0.25])
    weighing = Weighing(("DS",), weights[:, None], weights[:, None], weights, weights, (), uniform=False)
    found = discounted(weighing, replace(updates, late={"b": 0.5}))
    assert found.weights == pytest.approx(np.array([0.5, 0.125, 0.25]) / 0.875)
    assert discounted(weighing, updates) is weighing


def test_a_poisson_cohort_by_hand() -> None:
    chance = randomness.uniforms(randomness.stream_keys(7, 2, NAMES, "cohort"), 1)[:, 0]
    expected = tuple(name for row, name in enumerate(NAMES) if chance[row] < 0.5)
    assert Plan(3, 0.5, poisson=True).cohort(7, 2, NAMES[::-1]) == expected
    for least, count in ((0, 1), (1, 1), (4, 4), (99, 10)):
        found = Plan(3, 1e-9, poisson=True, min_clients=least).cohort(7, 2, NAMES)
        assert found == tuple(randomness.choose(7, 2, NAMES, count))


def test_only_members_are_asked_and_counted() -> None:
    some = replace(federation(), members=frozenset("bdz"))
    task = make_task(some, state(0), Clients(), Plan(rounds=1, fraction=1.0), 1)
    assert (task.clients, task.registered) == (("b", "d"), 2)


def test_a_round_with_a_clock_waits_for_the_first_who_comes() -> None:
    select = SelectSettings.model_validate({"available": {"a": [[5, 6]], "b": [[9, 20]]}})
    plan = Plan(rounds=3, fraction=1.0, clocked=True, select=select)
    names, later = ("a", "b"), {CLOCK: 2.5}
    assert plan.time(7, names) == (0.0, 5.0)
    assert plan.time(7, names, later) == (2.5, 2.5)
    assert plan.time(7, names, {CLOCK: 21}) == (21.0, 0.0)  # nobody ever comes again
    assert plan.time(7, ("b",), later) == (2.5, 6.5)
    assert replace(plan, clocked=False).time(7, names, later) == (7.0, 0.0)
    assert plan.cohort(3, 7, names, later) == ("a",)
    assert plan.cohort(3, 7, names, {CLOCK: 9}) == ("b",)
    task = make_task(federation(), replace(state(0), memory=later), Clients(names), plan, 7)
    assert (task.waited, task.clients, task.registered) == (2.5, ("a",), 2)
    only = replace(plan, select=SelectSettings(by="round-robin"), fraction=0.5)
    assert only.cohort(3, 7, names, {SELECT: {"a": {"asked": 6}}}) == ("b",)
    assert only.cohort(3, 7, names, {SELECT: {"b": {"asked": 6}}}) == ("a",)


def test_simulated_seconds_are_recorded_and_move_the_clock() -> None:
    class Timed(Clients):
        def _trained(self, task: Task) -> Updates:
            return replace(super()._trained(task), simulated=1.5)

    plan = {"rounds": 2, "fraction": 0.5}
    before = replace(state(0), memory={CLOCK: 2})
    done = ran(before=before, clients=Timed(), select=SelectSettings(by="score"), **plan)
    last = done.record
    assert (last.simulated, done.state.memory[CLOCK]) == (1.5, 5.0)
    known = done.state.memory[SELECT]
    assert [known[name]["score"] for name in last.updates.clients] == last.weighing.scores.tolist()
    assert {facts["asked"] for facts in known.values()} == {1, 2}
    assert ran(before=state(1), clients=Timed(), **plan).state.memory == {CLOCK: 1.5}


def test_samples_are_cut_at_their_bound_and_cannot_be_written() -> None:
    made = federation(bound=1.0)
    view = looked_at(Server(), state(4), rule=made.rule)
    # a claims 1 sample and b 2; the median is 1½.
    assert view.samples.tolist() == made.rule.samples(np.array([1, 2])).tolist() != [1, 2]
    assert not view.samples.flags.writeable
    assert looked_at(Server(), state(4)).samples.tolist() == [1, 2]


@pytest.mark.parametrize("noisy", [False, True])
def test_nobody_claims_more_classes_than_the_server_knows(noisy: bool) -> None:
    class Classifying(Server):
        @property
        def classes(self) -> int:
            return 3

    class Claims(Clients):
        def _trained(self, task: Task) -> Updates:
            return replace(super()._trained(task), criteria={"LD": np.array([1.0, 4.0, 3.0])})

    kept, plan, clients = Recorder(), Plan(rounds=1, fraction=1.0), Claims(NAMES[:3])
    made = federation(criteria=("LD",), max_shares=2.0)
    fields = {"central": {"clip": 1.0, "noise": 2.0}, "budget": {"delta": 1e-5}}
    private = PrivateRounds(PrivacySettings.model_validate(fields), plan, source=SeededSource(1)) if noisy else None
    for server in (Classifying(), Server()):
        if private is not None:
            private.prepare([made], {3: clients.names(3)})
        run_rounds([made], {"f": state(0)}, clients, server, plan, kept, guarantee=private or NO_GUARANTEE)
    refused, believed = (record.updates for record in kept.records)
    assert (refused.clients, [failure.client for failure in refused.failures]) == (("a", "c"), ["b"])
    assert believed.clients == ("a", "b", "c")
    # And what a measure of the user's own gets wrong at the server is told with round and federation.
    wrong = Criterion(name="BAD", measured_by="server", measure=lambda view: -1.0 * view.samples)
    made = replace(federation("f#7"), rule=Rule(WeighingSettings(criteria=("BAD",)), [wrong]))
    given = ([made], {"f#7": state(0)}, clients, Server(), plan, kept, None, private or NO_GUARANTEE)
    assert_refused(lambda: run_rounds(*given), "round 1 of f, seed 7: criterion BAD")
