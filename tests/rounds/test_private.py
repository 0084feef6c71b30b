"""Rounds with noise: what each costs, who is in it, how it is weighed, and how much noise its sum gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import assert_refused
from tests.privacy.seeded_source import SeededSource
from tests.rounds.scripted import Clients, Recorder, Server, federation, state

from steelyard.messages.algorithm import Algorithm, ServerStep
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Task, Updates
from steelyard.privacy.accounting import Release, spent
from steelyard.privacy.ledger import Charge
from steelyard.privacy.settings import PrivacySettings
from steelyard.recommend.sparse import TableChange
from steelyard.rounds.loop import make_task, run_rounds
from steelyard.rounds.private import PrivateRounds, nobody
from steelyard.rounds.progress import SPENT
from steelyard.rounds.state import Federation, Plan
from steelyard.rounds.weigh import Exploded, TooFewClients, weigh_soundly

NAMES = tuple(f"c{number:02d}" for number in range(20))


DELTA = 1e-5


PLAN = Plan(rounds=10, fraction=0.25)


def rounds(plan: Plan = PLAN, *federations: Federation, **given: Any) -> PrivateRounds:
    """Rounds under these fields of [privacy.central], and of [privacy] in `beside`."""
    beside = given.pop("beside", {})
    fields = {"central": {"clip": 1.0, "noise": 2.0, **given}, "budget": {"delta": DELTA}, **beside}
    made = PrivateRounds(
        PrivacySettings.model_validate(fields), plan, bounds={"DS": 100.0, "LD": 10.0}, source=SeededSource(1)
    )
    made.prepare(federations or (RULE,), {3: NAMES})
    return made


RULE = federation(max_shares=2.0)


COHORT = {"weights": "cohort", "cohorts": "public"}


CHARGED = {"criteria": "charged", "criteria_bounds": {"DS": 100.0}}


# ---------------------------------------------------------------- what a round costs


def test_a_secret_cohort_is_charged_to_everybody_by_how_likely_anybody_is_in_it() -> None:
    assert rounds().charges(RULE, 4) == [Charge("f", 4, "update", Release(2.0, "fixed", 5 / 20))]
    least = rounds(replace(PLAN, min_clients=8))
    assert least.charges(RULE, 1)[0].release == Release(2.0, "fixed", 8 / 20)


def test_a_public_cohort_is_charged_to_those_in_it() -> None:
    public = rounds(cohorts="public")
    (charge,) = public.charges(RULE, 4)
    assert charge == Charge("f", 4, "update", Release(2.0), PLAN.cohort(3, 4, NAMES))
    assert public.charges(RULE, 4, ("c01", "c02"))[0].clients == ("c01", "c02")


def test_criteria_that_are_charged_are_charged_beside_the_update() -> None:
    rule = federation(criteria=("DS", "EQ", "LD"), max_shares=2.0)
    plain = rounds(PLAN, rule, **COHORT, beside=CHARGED)
    who = ("c01", "c02")
    # EQ is the same for everybody and says nothing.
    assert plain.charges(rule, 1, who) == [
        Charge("f", 1, "update", Release(2.0), who),
        Charge("f", 1, "criteria", Release(2.0), who, 2),
    ]
    given = rounds(PLAN, rule, **COHORT, beside={**CHARGED, "criteria_noise": 7.0})
    assert given.charges(rule, 1, who)[1].release == Release(7.0)


def test_devices_with_noise_are_charged_before_they_are_asked() -> None:
    settings = PrivacySettings.model_validate({"local": {"clip": 1.0, "noise": 3.0}, **CHARGED})
    devices = PrivateRounds(settings, PLAN, device_criteria=2)
    devices.prepare([RULE], {3: NAMES})
    task = Task("f", 3, 1, ("c03", "c07"), torch.zeros(2))
    devices.before_training(RULE, task)
    assert devices.ledger.charges == [
        Charge("f", 1, "update", Release(3.0), ("c03", "c07")),
        Charge("f", 1, "criteria", Release(3.0), ("c03", "c07"), 2),
    ]
    # A server that adds the noise charges when it weighs.
    central = rounds()
    central.before_training(RULE, task)
    assert central.ledger.charges == []


def test_what_was_spent_is_counted_as_the_budget_says() -> None:
    made = rounds(cohorts="public", beside={"budget": {"delta": DELTA}})
    for round in (1, 2, 3):
        made.ledger.charge(made.charges(RULE, round, ("c00",)))
    assert made.epsilon("f") == spent({Release(2.0): 3}, DELTA)
    release = Release(2.0, "fixed", 0.25)
    by_losses = rounds()
    by_losses.ledger.charge(by_losses.charges(RULE, 1))
    assert by_losses.epsilon("f") == spent({release: 1}, DELTA)
    assert by_losses.epsilon("f", coarse=True) == spent({release: 1}, DELTA, coarse=True)
    assert (made.delta, made.epsilon("g")) == (DELTA, 0.0)


# ---------------------------------------------------------------- the noise that a budget asks for


def test_noise_is_found_for_all_planned_rounds() -> None:
    budget = {"budget": {"epsilon": 3.0, "delta": DELTA}}
    secret = rounds(noise=None, beside=budget)
    found = secret.noise("f")
    assert spent({Release(found, "fixed", 0.25): 10}, DELTA, coarse=True) <= 3.0
    assert spent({Release(found / 1.01, "fixed", 0.25): 10}, DELTA, coarse=True) > 3.0
    # In a public cohort the client counts that is in most of them.
    public = rounds(noise=None, cohorts="public", beside=budget)
    times = max(sum(name in PLAN.cohort(3, round, NAMES) for round in range(1, 11)) for name in NAMES)
    assert 2 < times < 10
    assert spent({Release(public.noise("f")): times}, DELTA) <= 3.0
    assert spent({Release(public.noise("f") / 1.001): times}, DELTA) > 3.0
    charged = rounds(PLAN, RULE, noise=None, **COHORT, beside={**budget, **CHARGED})
    assert spent({Release(charged.noise("f")): 2 * times}, DELTA) <= 3.0
    assert spent({Release(charged.noise("f") / 1.001): 2 * times}, DELTA) > 3.0


def test_a_rule_that_the_server_trains_alone_has_no_noise_and_no_limit() -> None:
    alone = federation("alone", trained_by="server")
    made = rounds(PLAN, alone, RULE, beside={"budget": {"epsilon": 1e-3, "delta": DELTA}})
    assert made.affords(alone, range(1, 100))
    assert not made.affords(RULE, (1,))
    # The other rule is looked at although this one is passed over.
    cost = spent({Release(2.0, "fixed", 0.25): 1}, DELTA)
    assert_refused(
        lambda: made.check_first_round([alone, RULE]), "privacy.budget.epsilon: got 0.001", "'f'", f"{cost:.4g}"
    )
    assert made.ledger.charges == []


def test_a_delta_that_guarantees_nothing_is_refused() -> None:
    large = {"budget": {"delta": 0.05}}
    assert_refused(lambda: rounds(beside=large), "privacy.budget.delta: got 0.05 with 20 clients", "accept_large_delta")
    assert rounds(beside={**large, "accept_large_delta": True}).delta == 0.05


def test_rounds_are_afforded_until_the_budget_is_reached() -> None:
    release = Release(2.0, "poisson", 0.25)
    limit = spent({release: 4}, DELTA) * 1.0001
    budget = {"epsilon": limit, "delta": DELTA}
    made = rounds(replace(PLAN, poisson=True), beside={"budget": budget})
    made.check_first_round([RULE])
    assert made.affords(RULE, (1, 2, 3, 4))
    assert not made.affords(RULE, (1, 2, 3, 4, 5))
    for round in (1, 2, 3, 4):
        made.require(RULE, round)
        made.ledger.charge(made.charges(RULE, round))
    assert_refused(lambda: made.require(RULE, 4), f"privacy.budget.epsilon: got {limit:g}, and round 4 of 'f'")
    assert rounds().affords(RULE, range(1, 1000))


# ---------------------------------------------------------------- one round


def test_a_secret_cohort_follows_no_seed_and_a_public_one_does() -> None:
    secret = rounds()
    drawn = [secret.cohort(PLAN, RULE, 1, NAMES[::-1], {}) for _ in range(40)]
    assert {len(cohort) for cohort in drawn} == {5}
    assert all(list(cohort) == sorted(cohort) for cohort in drawn)
    assert len(set(drawn)) > 30
    assert {name for cohort in drawn for name in cohort} == set(NAMES)
    poisson = rounds(replace(PLAN, poisson=True))
    sizes = [len(poisson.cohort(PLAN, RULE, 1, NAMES, {})) for _ in range(300)]
    assert np.mean(sizes) == pytest.approx(5.0, abs=0.6)
    assert len(set(sizes)) > 4
    public = rounds(cohorts="public")
    assert public.cohort(PLAN, RULE, 7, NAMES, {}) == PLAN.cohort(3, 7, NAMES)


def test_clients_that_come_later_are_counted_from_then_on() -> None:
    made = rounds()
    made.cohort(PLAN, RULE, 2, NAMES[:8], {})
    assert made.charges(RULE, 2)[0].release == Release(2.0, "fixed", 2 / 8)


TASK = Task("f", 3, 2, NAMES[:5], torch.zeros(4))


def test_a_client_s_weight_follows_from_itself_and_a_reference() -> None:
    rule = federation(criteria=("DS", "LD"), max_weight=0.4)
    made = rounds(PLAN, rule, references={"DS": 100.0})
    raw = np.array([[100.0, 1.0], [50.0, 2.0], [1e6, 1.0]])
    found = made.weigh(rule, TASK, raw, (0, 1))
    # m = 5 and references 100 and 1: c = (1, ½, 10⁴)/5 and (1, 2, 1)/5; a typical client has f = 0.2 + 0.04.
    typical = 0.2 * 1.2
    expected = [0.2 * 1.2, 0.1 * 1.4]
    assert found.weights == pytest.approx([expected[0] / typical / 5, expected[1] / typical / 5, 0.4])
    # Where a cohort is larger than the share says, a typical client has its share of that.
    larger = rounds(replace(PLAN, min_clients=8), rule, references={"DS": 100.0})
    assert larger.weigh(rule, TASK, raw, (0, 1)).weights[0] == pytest.approx(1 / 8)
    assert made.ledger.charges == made.charges(rule, 2)
    # In the other order LD comes first.
    other = made.weigh(rule, TASK, raw, (1, 0))
    assert other.weights[1] == pytest.approx(0.4 * 1.1 / typical / 5)


def test_criteria_of_a_cohort_are_noised_where_they_are_charged() -> None:
    rule = federation(criteria=("DS", "EQ"), max_shares=4.0)
    raw = np.array([[10.0, 1.0], [20.0, 1.0], [70.0, 1.0]])
    plain = rounds(PLAN, rule, **COHORT, beside={"criteria": "public"}).weigh(rule, TASK, raw, (1, 0))
    assert plain.raw.tolist() == raw.tolist()
    assert plain.weights == pytest.approx(rule.rule.weigh(raw, (1, 0)).weights)
    assert plain.weights != pytest.approx(rule.rule.weigh(raw, (0, 1)).weights)
    # The same words give the same noise: it comes from the source that was handed over.
    noisy, again = (
        rounds(PLAN, rule, **COHORT, beside={**CHARGED, "criteria_noise": 0.01}).weigh(rule, TASK, raw, (0, 1)).raw
        for _ in range(2)
    )
    assert noisy.tolist() == again.tolist()
    assert noisy[:, 1].tolist() == [1.0, 1.0, 1.0]
    assert noisy[:, 0] == pytest.approx(raw[:, 0], abs=6.0)
    assert not np.isin(noisy[:, 0], raw[:, 0]).any()
    levels = {**CHARGED, "criteria_mechanism": "exponential", "criteria_levels": 5}
    told = rounds(PLAN, rule, **COHORT, beside=levels).weigh(rule, TASK, raw, (0, 1)).raw
    assert set(told[:, 0]) <= {0.0, 25.0, 50.0, 75.0, 100.0}


@pytest.mark.parametrize(
    ("limits", "answered", "largest"),
    [
        ({}, 4, 1.0),
        ({"max_weight": 0.1}, 4, 0.25),
        ({"max_shares": 2.0}, 10, 0.2),
        ({"max_weight": 0.15, "max_shares": 2.0}, 10, 0.15),
        ({"max_shares": 2.0}, 1, 1.0),
    ],
)
def test_what_no_weight_of_a_cohort_can_pass(limits: dict[str, float], answered: int, largest: float) -> None:
    rule = federation(**limits)
    made = rounds(PLAN, rule, **COHORT, beside={"criteria": "public"})
    assert made.largest_weight(rule, answered) == pytest.approx(largest)


def test_the_noise_on_a_sum_is_z_times_the_clip_times_the_largest_weight() -> None:
    task = replace(TASK, parameters=torch.full((20_000,), 2.0))
    made = rounds(noise=3.0, clip=0.5)
    # Nobody came: the model and noise of 3 · 0.5 · 2/5.
    empty = nobody("f", 2, task.parameters)
    assert (empty.federation, empty.round, empty.clients, len(empty.samples)) == ("f", 2, (), 0)
    found = made.combine(RULE, task, empty, made.weigh(RULE, task, np.zeros((0, 1)), (0,)))
    assert float(found.std()) == pytest.approx(0.6, rel=0.03)
    assert float(found.mean()) == pytest.approx(2.0, abs=0.02)
    # Updates are clipped, weighted and summed; what is frozen stays.
    small = replace(TASK, parameters=torch.zeros(3))
    models = DenseModels(torch.tensor([[3.0, 4.0, 0.0]]), ((2, 3),))
    updates = Updates("f", 2, ("c00",), np.array([1]), {}, np.zeros(1), models)
    quiet = rounds(noise=1e-3, clip=1.0)
    weighing = replace(quiet.weigh(RULE, small, np.ones((1, 1)), (0,)), weights=np.array([0.4]))
    sent = quiet.combine(RULE, small, updates, weighing)
    assert sent.tolist() == pytest.approx([0.24, 0.32, 0.0], abs=0.005)
    assert sent[2] == 0.0
    hidden = replace(updates, payload=TableChange(1, torch.zeros(3)))
    assert_refused(lambda: quiet.combine(RULE, small, hidden, weighing), "privacy.central: ", "no single models")


# ---------------------------------------------------------------- the loop


def looped(plan: Plan, epsilon: float | None, *names: str, **central: Any) -> tuple[Any, Recorder, Clients, list[Any]]:
    """A run of the scripted clients under a guarantee; returns states, records, clients and what progress was told."""
    made = [federation(name, max_shares=2.0) for name in names]
    fields = {"central": {"clip": 1.0, "noise": 2.0, **central}, "budget": {"epsilon": epsilon, "delta": DELTA}}
    private = PrivateRounds(PrivacySettings.model_validate(fields), plan, source=SeededSource(1))
    clients, kept, told = Clients(), Recorder(), list[Any]()
    private.prepare(made, {3: clients.names(3)})
    states = run_rounds(made, {}, clients, Server(), plan, kept, lambda *given: told.append(given), private)
    assert [charge.round for charge in private.ledger.charges] == sorted(r.round for r in kept.records if r.round)
    return states, kept, clients, told


def test_a_federation_rests_when_its_budget_does_not_reach_for_another_round() -> None:
    release = Release(2.0, "fixed", 0.5)
    limit = spent({release: 2}, DELTA) * 1.0001
    plan = Plan(rounds=5, fraction=0.5, evaluate_every=4)
    states, kept, _, told = looped(plan, limit, "f", "g")
    assert [(name, state.round, state.finished) for name, state in states.items()] == [("f", 2, True), ("g", 2, True)]
    # The last round of a budget is tested although it is none of every fourth.
    tested = [(record.round, record.accuracy is not None) for record in kept.records if record.federation == "f"]
    assert tested == [(0, True), (1, False), (2, True)]
    # What was spent: by the coarse count on the way, by the fine one at the end.
    costs = [record.epsilon for record in kept.records if record.federation == "f"]
    assert costs == [None, spent({release: 1}, DELTA, coarse=True), spent({release: 2}, DELTA)]
    # Rules side by side that spend the same are told in one figure.
    assert list(told[2][1]) == ["f", "g", SPENT]
    assert told[2][1][SPENT] == spent({release: 2}, DELTA)


def test_an_empty_cohort_asks_nobody_and_gives_noise_alone() -> None:
    plan = Plan(rounds=2, fraction=1e-9, poisson=True)
    states, kept, clients, _ = looped(plan, None, "f")
    assert clients.tasks == []
    assert [record.updates.clients for record in kept.records[1:] if record.updates] == [(), ()]
    assert states["f"].parameters.std() > 0


def test_losses_of_devices_with_noise_are_not_known() -> None:
    fields = {"local": {"clip": 1.0, "noise": 2.0}, "criteria": "public", "budget": {"delta": DELTA}}
    plan, kept = Plan(rounds=1, fraction=0.5), Recorder()
    private = PrivateRounds(PrivacySettings.model_validate(fields), plan, source=SeededSource(1))
    private.prepare([RULE], {3: ()})
    run_rounds([RULE], {}, Clients(), Server(), plan, kept, None, private)
    assert np.isnan(kept.records[1].updates.losses).all()
    assert kept.records[1].epsilon == spent({Release(2.0): 1}, DELTA)


def test_a_round_that_is_charged_too_much_is_not_begun() -> None:
    plan, clients = Plan(rounds=5, fraction=0.5), Clients()
    budget = {"epsilon": spent({Release(2.0, "fixed", 0.5): 1}, DELTA) * 1.0001, "delta": DELTA}
    private = rounds(plan, beside={"budget": budget})
    private.prepare([RULE], {3: clients.names(3)})
    private.ledger.charge(private.charges(RULE, 1))  # by a run that was killed
    given = ([RULE], {"f": state(0)}, clients, Server(), plan, Recorder(), None, private)
    assert_refused(lambda: run_rounds(*given), "privacy.budget.epsilon", "round 1 of 'f' would exceed it")
    assert clients.tasks == []
    assert len(private.ledger.charges) == 1


def test_a_noisy_draft_has_what_its_round_had() -> None:
    class Adds(Algorithm):
        def step(self, server: ServerStep) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return server.average + 100, {"control": server.tensors["control"] + server.share}

    made = replace(federation(max_shares=2.0), algorithm=Adds())
    before = replace(state(1), tensors={"control": torch.ones(10)}, memory={"seen": 1})
    clients = Clients()
    for cohorts, share in (("secret", 0.25), ("public", 0.2)):
        plan = Plan(rounds=9, fraction=0.25, min_clients=2)
        private = rounds(plan, made, noise=1e-3, cohorts=cohorts)
        private.prepare([made], {3: clients.names(3)})
        task = replace(make_task(made, before, clients, plan, 2), clients=("b", "d"))
        draft = weigh_soundly(made, before, task, clients._trained(task), Server(), plan, private)
        assert (draft.federation, draft.before, draft.order, draft.memory) == (made, before, (0,), {"seen": 1})
        assert draft.updates.clients == ("b", "d")
        assert draft.tensors["control"].tolist() == pytest.approx([1 + share] * 10)
        expected = np.full(10, 100.0)
        expected[[1, 3]] += draft.weighing.weights
        assert draft.model.tolist() == pytest.approx(expected.tolist(), abs=0.01)
        assert [(charge.round, charge.what) for charge in private.ledger.charges] == [(2, "update")]


def test_fewer_than_must_answer_stop_a_noisy_round_too() -> None:
    plan = Plan(rounds=9, fraction=0.5, min_clients=3)
    private, clients = rounds(plan), Clients(broken={"b": "lost", "d": "lost"})
    task = Task("f", 3, 2, ("b", "d", "e"), torch.zeros(10))
    with pytest.raises(TooFewClients, match=r"1 of 3 clients gave .* rounds\.min_clients = 3 \(b: lost; d: lost\)$"):
        weigh_soundly(RULE, state(1), task, clients._trained(task), Server(), plan, private)
    # A cohort that is smaller by chance must be whole, and no more.
    small = replace(task, clients=("e",))
    draft = weigh_soundly(RULE, state(1), small, clients._trained(small), Server(), plan, private)
    assert draft.updates.clients == ("e",)


def test_noise_that_carries_the_model_away_ends_the_federation() -> None:
    task = Task("f", 3, 2, ("b", "d"), torch.full((10,), 2e15))  # as after many such rounds
    with pytest.raises(Exploded, match=r"^round 2 of f: noise has carried the model away; .*privacy\.central\.clip"):
        weigh_soundly(RULE, state(1), task, Clients()._trained(task), Server(), PLAN, rounds())
