"""Rounds with noise: what each costs, who is in it, how it is weighed, and how much noise its sum gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.rounds.scripted import federation

from steelyard.errors import UserError
from steelyard.messages import DenseModels, Task, Updates
from steelyard.privacy.accounting import Release, spent
from steelyard.privacy.ledger import Charge
from steelyard.privacy.settings import PrivacySettings
from steelyard.privacy.source import SeededSource
from steelyard.rounds.private import PrivateRounds, nobody
from steelyard.rounds.state import Federation, Plan

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
    poisson = rounds(replace(PLAN, poisson=True))
    assert poisson.charges(RULE, 4) == [Charge("f", 4, "update", Release(2.0, "poisson", 0.25))]
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
    public = rounds(PLAN, rule, **COHORT, beside={"criteria": "public"})
    assert public.charges(rule, 1, who) == [Charge("f", 1, "update", Release(2.0), who)]


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
    # Without a number of criteria, the update alone.
    assert len(PrivateRounds(settings, PLAN)._names) == 0
    alone = PrivateRounds(settings, PLAN)
    alone.prepare([RULE], {3: NAMES})
    assert [charge.what for charge in alone.charges(RULE, 1, ("c03",))] == ["update"]
    # A server that adds the noise charges when it weighs.
    central = rounds()
    central.before_training(RULE, task)
    assert central.ledger.charges == []


def test_what_was_spent_is_counted_as_the_budget_says() -> None:
    made = rounds(beside={"budget": {"delta": DELTA, "accountant": "rdp"}})
    for round in (1, 2, 3):
        made.ledger.charge(made.charges(RULE, round))
    release = Release(2.0, "fixed", 0.25)
    assert made.epsilon("f") == spent({release: 3}, DELTA, "rdp")
    by_losses = rounds()
    by_losses.ledger.charge(by_losses.charges(RULE, 1))
    assert (made.accountant, by_losses.accountant) == ("rdp", "pld")
    assert by_losses.epsilon("f") == spent({release: 1}, DELTA)
    assert by_losses.epsilon("f", coarse=True) == spent({release: 1}, DELTA, coarse=True)
    assert (made.delta, made.epsilon("g")) == (DELTA, 0.0)


@pytest.mark.parametrize(
    ("fields", "poisson", "words"),
    [
        ({}, False, "with one client, or with another in its place"),
        ({}, True, "with or without one client"),
        ({"cohorts": "public"}, False, "with one client's updates, or with zeros in their place"),
    ],
)
def test_the_two_cases_of_the_guarantee(fields: dict[str, Any], poisson: bool, words: str) -> None:
    made = rounds(replace(PLAN, poisson=poisson), **fields)
    assert made.neighbours == words
    assert made.central
    local = PrivateRounds(PrivacySettings.model_validate({"local": {"clip": 1.0, "noise": 3.0}}), PLAN)
    assert (local.neighbours, local.central, local.secret) == ("any two sets of data on one device", False, False)


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
    with pytest.raises(KeyError):
        made.noise("alone")
    # The other rule is looked at although this one is passed over.
    with pytest.raises(UserError, match="the first round of 'f' alone costs"):
        made.check_first_round([alone, RULE])


def test_a_delta_that_guarantees_nothing_is_refused() -> None:
    with pytest.raises(UserError) as found:
        rounds(beside={"budget": {"delta": 0.05}})
    assert str(found.value).startswith("privacy.budget.delta: got 0.05 with 20 clients")
    assert str(found.value).endswith("allowed: below 0.05, or privacy.accept_large_delta = true")
    assert rounds(beside={"budget": {"delta": 0.05}, "accept_large_delta": True}).delta == 0.05


# ---------------------------------------------------------------- what is left


def test_rounds_are_afforded_until_the_budget_is_reached() -> None:
    release = Release(2.0, "fixed", 0.25)
    limit = spent({release: 4}, DELTA) * 1.0001
    made = rounds(beside={"budget": {"epsilon": limit, "delta": DELTA}})
    made.check_first_round([RULE])
    assert made.affords(RULE, (1, 2, 3, 4))
    assert not made.affords(RULE, (1, 2, 3, 4, 5))
    for round in (1, 2, 3):
        made.ledger.charge(made.charges(RULE, round))
    made.require(RULE, 4)
    made.ledger.charge(made.charges(RULE, 4))
    with pytest.raises(UserError) as found:
        made.require(RULE, 4)
    assert str(found.value) == (
        f"privacy.budget.epsilon: got {limit:g}, and round 4 of 'f' would exceed it; a round that is run again is "
        "charged again, and new clients may have come; the finished rounds are kept; allowed: a new run with a larger "
        "budget"
    )
    assert rounds().affords(RULE, range(1, 1000))


def test_a_budget_that_allows_no_round_is_refused() -> None:
    made = rounds(beside={"budget": {"epsilon": 0.1, "delta": DELTA}})
    cost = spent({Release(2.0, "fixed", 0.25): 1}, DELTA)
    with pytest.raises(UserError) as found:
        made.check_first_round([RULE])
    assert str(found.value) == (
        f"privacy.budget.epsilon: got 0.1, and the first round of 'f' alone costs {cost:.4g}; allowed: a larger "
        "budget, or more noise"
    )
    assert made.ledger.charges == []
    rounds().check_first_round([RULE])


# ---------------------------------------------------------------- one round


def test_a_secret_cohort_follows_no_seed_and_a_public_one_does() -> None:
    secret = rounds()
    drawn = [secret.cohort(RULE, 1, NAMES[::-1]) for _ in range(40)]
    assert {len(cohort) for cohort in drawn} == {5}
    assert all(list(cohort) == sorted(cohort) for cohort in drawn)
    assert len(set(drawn)) > 30
    assert {name for cohort in drawn for name in cohort} == set(NAMES)
    poisson = rounds(replace(PLAN, poisson=True))
    sizes = [len(poisson.cohort(RULE, 1, NAMES)) for _ in range(300)]
    assert np.mean(sizes) == pytest.approx(5.0, abs=0.6)
    assert len(set(sizes)) > 4
    public = rounds(cohorts="public")
    assert public.cohort(RULE, 7, NAMES) == PLAN.cohort(3, 7, NAMES)


def test_clients_that_come_later_are_counted_from_then_on() -> None:
    made = rounds()
    made.cohort(RULE, 2, NAMES[:8])
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
    assert made.ledger.charges == made.charges(rule, 2)
    # In the other order LD comes first.
    other = made.weigh(rule, TASK, raw, (1, 0))
    assert other.weights[1] == pytest.approx(0.4 * 1.1 / typical / 5)


def test_the_expected_cohort_of_poisson_sampling_is_at_least_one() -> None:
    few = rounds(replace(PLAN, poisson=True, fraction=0.01))
    # In a cohort of one a client with half of the reference has half of the weight.
    assert few.weigh(RULE, TASK, np.array([[0.5]]), (0,)).weights == pytest.approx([0.5])
    usual = rounds(replace(PLAN, poisson=True))
    assert usual.largest_weight(RULE, 7) == pytest.approx(2.0 / 5)
    assert rounds().largest_weight(RULE, 7) == pytest.approx(2.0 / 5)


def test_criteria_of_a_cohort_are_noised_where_they_are_charged() -> None:
    rule = federation(criteria=("DS", "EQ"), score="mean", max_shares=4.0)
    raw = np.array([[10.0, 1.0], [20.0, 1.0], [70.0, 1.0]])
    plain = rounds(PLAN, rule, **COHORT, beside={"criteria": "public"}).weigh(rule, TASK, raw, (0, 1))
    assert plain.raw.tolist() == raw.tolist()
    noisy = rounds(PLAN, rule, **COHORT, beside={**CHARGED, "criteria_noise": 0.01}).weigh(rule, TASK, raw, (0, 1))
    assert noisy.raw[:, 1].tolist() == [1.0, 1.0, 1.0]
    assert noisy.raw[:, 0] == pytest.approx(raw[:, 0], abs=6.0)
    assert not np.isin(noisy.raw[:, 0], raw[:, 0]).any()
    # The same words give the same noise: it comes from the source that was handed over.
    again = rounds(PLAN, rule, **COHORT, beside={**CHARGED, "criteria_noise": 0.01}).weigh(rule, TASK, raw, (0, 1))
    assert again.raw.tolist() == noisy.raw.tolist()


@pytest.mark.parametrize(
    ("limits", "answered", "largest"),
    [
        ({}, 4, 1.0),
        ({"max_weight": 0.4}, 4, 0.4),
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
    found = made.combine(RULE, task, nobody(task), made.weigh(RULE, task, np.zeros((0, 1)), (0,)))
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
    with pytest.raises(UserError) as refused:
        quiet.combine(RULE, small, replace(updates, payload=object()), weighing)  # type: ignore[arg-type]
    assert str(refused.value) == (
        "privacy.central: the server sees no single models in this run; allowed: no [privacy.central]"
    )


def test_an_empty_cohort_has_the_models_form() -> None:
    task = replace(TASK, parameters=torch.zeros(4, dtype=torch.float64))
    found = nobody(task)
    assert (found.federation, found.round, found.clients, found.criteria) == ("f", 2, (), {})
    assert (found.samples.dtype, found.samples.shape, found.losses.shape) == (np.int64, (0,), (0,))
    assert isinstance(found.payload, DenseModels)
    assert found.payload.models.shape == (0, 4)
    assert found.payload.models.dtype == torch.float64
