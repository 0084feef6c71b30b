"""From hidden sums to models and records: who dropped out is left out of both, and a sum that cannot be ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.privacy.seeded_source import SeededSource
from tests.rounds.scripted import NAMES, Clients, Recorder, Server, federation, state

from steelyard.algorithms.algorithm import Algorithm, ServerStep
from steelyard.algorithms.fedavgm import FedAvgM
from steelyard.errors import UserError
from steelyard.messages import Failure, Task, Updates
from steelyard.privacy.hidden import HiddenUpdates, Summed
from steelyard.privacy.settings import AggregationSettings, PrivacySettings
from steelyard.rounds.combining import RADIUS, Combiner, as_summed, combiner
from steelyard.rounds.drafting import weigh_soundly
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.private import PrivateRounds
from steelyard.rounds.soundness import Exploded
from steelyard.rounds.state import Plan
from steelyard.update_payloads import DenseModels
from steelyard.weighing.priorities import OrderState
from steelyard.weighing.weights import Weighing

PLAN = Plan(rounds=3, fraction=1.0)


class Hiding(Clients):
    """The scripted clients with their updates hidden; `gone` drop out of every sum, `excess` is added by federation."""

    def __init__(self, gone: str = "", excess: dict[str, float] | None = None) -> None:
        super().__init__()
        self.gone, self.excess = gone, excess or {}

    def _trained(self, task: Task) -> Updates:
        updates = super()._trained(task)
        assert isinstance(updates.payload, DenseModels)
        steps = updates.payload.models.double().numpy() - task.parameters.double().numpy()
        payload = HiddenUpdates(updates.clients, Open(self, task, steps), AggregationSettings(bound=2.0))
        return replace(updates, payload=payload)


class Open:
    """A sum that is taken in the open."""

    def __init__(self, clients: Hiding, task: Task, steps: np.ndarray) -> None:
        self.clients, self.task, self.steps = clients, task, steps

    def sum(self, clients: Sequence[str], weights: np.ndarray) -> Summed:
        stayed = [row for row, name in enumerate(clients) if name not in self.clients.gone]
        total = weights[stayed] @ self.steps[stayed] + self.clients.excess.get(self.task.federation, 0.0)
        names = tuple(clients[row] for row in stayed)
        dropped = tuple(Failure(name, "its node is gone") for name in clients if name in self.clients.gone)
        return Summed(total, names, dropped, {name: 10 * NAMES.index(name) for name in names})


def test_the_model_is_the_weighted_mean_of_those_who_stayed_and_the_record_says_so() -> None:
    kept = Recorder()
    states = run_rounds([federation()], {"f": state(0)}, Hiding(gone="bj"), Server(), Plan(1, 1.0), kept)
    sizes = np.array([1, 0, 3, 4, 5, 6, 7, 8, 9, 0])  # of b and j nothing is left
    expected = torch.tensor(sizes / sizes.sum(), dtype=torch.float32)
    torch.testing.assert_close(states["f"].parameters, expected)
    (record,) = kept.records
    assert record.updates is not None
    assert record.weighing is not None
    assert record.updates.clients == tuple("acdefghi")
    assert record.weighing.weights.tolist() == pytest.approx((sizes[sizes > 0] / sizes.sum()).tolist())
    assert record.weighing.raw[:, 0].tolist() == sizes[sizes > 0].tolist()
    assert [(failure.client, failure.reason) for failure in record.updates.failures] == [
        ("b", "its node is gone"),
        ("j", "its node is gone"),
    ]
    assert record.updates.bytes_sent is not None
    assert record.updates.bytes_sent.tolist() == [10 * NAMES.index(name) for name in "acdefghi"]


def test_a_federation_whose_sum_cannot_be_ends_alone_with_its_last_good_model() -> None:
    kept = Recorder()
    made = [federation("spoiled"), federation("f")]
    clients = Hiding()
    done = run_rounds(
        made, {"spoiled": state(0), "f": state(0)}, clients, Server(), PLAN, kept,
        progress=lambda round, _: clients.excess.update(spoiled=40.0),
    )  # fmt: skip
    assert (done["spoiled"].round, done["spoiled"].finished, done["f"].round) == (1, True, 3)
    assert done["spoiled"].parameters.tolist() == pytest.approx((np.arange(1, 11) / 55).tolist())
    reason = str(done["spoiled"].ended)
    assert reason.startswith("the hidden sum of 10 clients moves a parameter by 40")
    assert "one or more of a, b, c, d, e, f, g, h, i, j sent too much" in reason
    assert [record.federation for record in kept.records] == ["spoiled", "f", "f", "f"]


def test_without_another_federation_the_run_stops_with_that_line() -> None:
    with pytest.raises(
        Exploded, match=r"^round 1 of f: the hidden sum of 10 .*from another seed, without clients that"
    ):
        run_rounds([federation()], {"f": state(0)}, Hiding(excess={"f": 3.0}), Server(), PLAN, Recorder())


def test_updates_in_the_open_are_there_before_they_are_weighed() -> None:
    updates = Clients()._trained(Task("f", 0, 1, tuple("ab"), torch.zeros(10)))
    two = np.array([0.25, 0.75])
    weighing = Weighing(("DS",), two[:, None], two[:, None], two, two, (), uniform=False)
    assert as_summed(updates, weighing) == (updates, weighing)


def test_the_whole_record_of_those_who_stayed_is_kept() -> None:
    hidden = Hiding(gone="b")
    updates = hidden._trained(Task("f", 0, 1, tuple("abcd"), torch.zeros(10)))
    payload = updates.payload
    assert isinstance(payload, HiddenUpdates)
    four = np.array([0.1, 0.4, 0.2, 0.3])
    weighing = Weighing(("DS",), 10 * four[:, None], 20 * four[:, None], 30 * four, four, (), uniform=False)
    assert as_summed(updates, weighing) == (updates, weighing)  # nothing was summed yet
    payload.aggregate(torch.zeros(10), four)
    left, found = as_summed(updates, weighing)
    assert left.clients == ("a", "c", "d")
    stayed = four[[0, 2, 3]]
    assert found.raw[:, 0].tolist() == (10 * stayed).tolist()
    assert found.normalised[:, 0].tolist() == (20 * stayed).tolist()
    assert found.scores.tolist() == (30 * stayed).tolist()
    assert found.weights == pytest.approx(stayed / 0.6)
    assert found.criteria == ("DS",)
    assert payload.summed is not None
    payload.summed = replace(payload.summed, bytes_sent={"a": 7, "d": 9, "b": 5})
    counted, _ = as_summed(updates, weighing)
    assert counted.bytes_sent.tolist() == [7, 0, 9]


# ---------------------------------------------------------------- robust rules in rounds


class Training(Server):
    """A server with rows of its own: what it learns from them points to the first client's model."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, list[float]]] = []

    def train(self, seed: int, round: int, parameters: torch.Tensor) -> torch.Tensor:
        self.asked.append((seed, round, parameters.tolist()))
        return parameters + torch.eye(len(NAMES))[0]

    def gradients(self, seeds: Sequence[int], models: torch.Tensor) -> torch.Tensor:
        raise AssertionError


def test_a_robust_rule_combines_what_was_weighed() -> None:
    median = federation(defence={"rule": "median"})
    states = run_rounds([median], {"f": state(0)}, Clients(), Server(), Plan(1, 1.0), Recorder())
    # Each parameter is 1 for one client of ten and 0 for all others: the weighted median is 0 everywhere.
    assert states["f"].parameters.tolist() == [0.0] * 10
    plain = federation(defence={"rule": "none"})
    states = run_rounds([plain], {"f": state(0)}, Clients(), Server(), Plan(1, 1.0), Recorder())
    assert states["f"].parameters.tolist() == pytest.approx((np.arange(1, 11) / 55).tolist())


def test_the_radius_of_clipping_is_remembered_where_it_is_smoothed() -> None:
    smooth = federation(defence={"rule": "clip", "smooth": 0.5})
    kept = Recorder()
    states = run_rounds([smooth], {"f": state(0)}, Clients(), Server(), Plan(1, 1.0), kept)
    # All updates have length 1 in the first round.
    assert states["f"].memory[RADIUS] == pytest.approx(1.0)
    before = replace(state(0), memory={RADIUS: 1 / 16})
    states = run_rounds([smooth], {"f": before}, Clients(), Server(), Plan(1, 1.0), Recorder())
    # √(1 · 1/16): every update is cut to a quarter.
    assert states["f"].memory[RADIUS] == pytest.approx(0.25)
    assert states["f"].parameters.tolist() == pytest.approx((np.arange(1, 11) / 55 / 4).tolist())
    hard = federation(defence={"rule": "clip"})
    states = run_rounds([hard], {"f": before}, Clients(), Server(), Plan(1, 1.0), Recorder())
    assert states["f"].memory == before.memory
    assert states["f"].parameters.tolist() == pytest.approx((np.arange(1, 11) / 55).tolist())


def test_fltrust_asks_the_server_what_it_would_learn_in_this_round() -> None:
    server = Training()
    trusting = federation(defence={"rule": "fltrust"})
    states = run_rounds([trusting], {"f": state(0)}, Clients(), server, Plan(1, 1.0), Recorder())
    # Only client a points where the server does.
    assert states["f"].parameters.tolist() == pytest.approx([1.0] + [0.0] * 9)
    assert server.asked == [(3, 1, [0.0] * 10)]
    with pytest.raises(UserError) as found:
        run_rounds([trusting], {"f": state(0)}, Clients(), Server(), Plan(1, 1.0), Recorder())
    assert str(found.value) == (
        "weighing.defence.rule: got 'fltrust', but this server has no rows to train on; allowed: the other rules"
    )


def test_a_robust_rule_needs_single_models() -> None:
    class Sums(Clients):
        def _trained(self, task: Task) -> Updates:
            return replace(super()._trained(task), payload=Opaque(len(task.clients)))  # type: ignore[arg-type]

    with pytest.raises(UserError) as found:
        run_rounds(
            *([federation(defence={"rule": "median"})], {"f": state(0)}, Sums(), Server(), Plan(1, 1.0), Recorder())
        )
    assert str(found.value) == (
        "weighing.defence: the server sees no single models in this run; allowed: no [weighing.defence]"
    )


class Opaque:
    """A payload of which single models cannot be seen."""

    def __init__(self, count: int) -> None:
        self.count = count

    def finite(self) -> np.ndarray:
        return np.ones(self.count, dtype=np.bool_)

    def combine(self, parameters: torch.Tensor, weights: np.ndarray) -> torch.Tensor:
        return parameters

    def divergence(self, parameters: torch.Tensor) -> np.ndarray:
        return np.zeros(self.count)


# ---------------------------------------------------------------- the algorithm's step


def task(clients: str = "ab") -> Task:
    return Task("f", 0, 1, tuple(clients), torch.arange(10.0), registered=8)


def test_candidates_are_stepped_one_by_one() -> None:
    made = replace(federation(), algorithm=FedAvgM(beta=0.5), momentum=0.25)
    asked = task()
    updates = Clients()._trained(asked)
    kept = made.algorithm.start(asked.parameters)
    average = partial(updates.payload.combine, asked.parameters)
    combine = Combiner(made, asked, kept, average, 0.25)
    one, two = np.array([0.5, 0.5]), np.array([1.0, 0.0])
    alone = combine.step(one)
    assert torch.equal(combine.models(one), alone[0])
    assert torch.equal(combine.models(np.stack([one, two])), torch.stack([alone[0], combine.step(two)[0]]))
    assert set(alone[1]) == set(kept)
    # Without a step of its own, an algorithm keeps what it has, and the sum is the model.
    plain = Combiner(
        federation(), asked, kept, lambda weights: updates.payload.combine(asked.parameters, weights), 0.25
    )
    assert plain.step(one)[1] is kept
    assert torch.equal(plain.models(one), updates.payload.combine(asked.parameters, one))
    assert plain.models(np.stack([one, two])).shape == (2, 10)


def test_an_algorithm_s_step_is_given_all_that_it_may_see() -> None:
    seen: list[ServerStep] = []

    class Looking(Algorithm):
        sees = "models"

        def step(self, server: ServerStep) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            seen.append(server)
            return server.average, {"kept": server.average}

    asked = task()
    updates = replace(
        Clients()._trained(asked),
        steps=np.array([3, 4]),
        vectors={"v": torch.ones(2, 10)},
        payload=DenseModels(torch.ones(2, 10)),
    )
    made = replace(federation(), algorithm=Looking(), momentum=0.25)
    combine = combiner(made, {"t": torch.ones(10)}, asked, updates, None)  # type: ignore[arg-type]
    model, kept = combine.step(np.array([0.25, 0.75]))
    (given,) = seen
    assert given.parameters.tolist() == list(range(10))
    assert torch.equal(given.average, torch.ones(10))
    assert given.weights.tolist() == [0.25, 0.75]
    assert given.tensors["t"].tolist() == [1.0] * 10
    # Two of eight clients.
    assert (given.share, given.momentum) == (0.25, 0.25)
    assert given.models is not None
    assert given.models.shape == (2, 10)
    assert given.sent is not None
    assert given.sent["v"].shape == (2, 10)
    assert given.steps is not None
    assert given.steps.tolist() == [3, 4]
    assert torch.equal(kept["kept"], model)

    class Blind(Looking):
        sees = "sum"

    hidden = combiner(replace(made, algorithm=Blind()), {}, asked, updates, None)  # type: ignore[arg-type]
    hidden.step(np.array([0.5, 0.5]))
    assert (seen[1].models, seen[1].sent, seen[1].steps) == (None, None, None)


# ---------------------------------------------------------------- rounds with noise


def private(**central: object) -> PrivateRounds:
    fields = {"central": {"clip": 1e3, "noise": 1e-3, **central}, "budget": {"delta": 1e-5}}
    return PrivateRounds(PrivacySettings.model_validate(fields), Plan(1, 0.5), source=SeededSource(1))


@pytest.mark.parametrize(("cohorts", "share"), [("secret", 0.5), ("public", 0.2)])
def test_a_secret_cohort_s_size_does_not_show_in_the_algorithm_s_step(cohorts: str, share: float) -> None:
    shares: list[float] = []

    class Looking(Algorithm):
        def step(self, server: ServerStep) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            shares.append(server.share)
            return server.average, {"kept": server.average}

    made = replace(federation(max_shares=2.0, criteria=("DS", "LD")), algorithm=Looking())
    rounds = private(cohorts=cohorts, references={"DS": 1.0, "LD": 1.0})
    rounds.prepare([made], {3: NAMES})
    asked = replace(task(), registered=10)
    before = replace(state(0), orders=OrderState((1, 0), 0.0))
    draft = weigh_soundly(made, before, asked, Clients()._trained(asked), Server(), Plan(1, 0.5), rounds)
    assert shares == [pytest.approx(share)]
    assert torch.equal(draft.tensors["kept"], draft.model)
    # Weighed in the order of the state: LD, which is 1, before DS, which is 1 and 2.
    assert draft.weighing is not None
    expected = rounds.weigh(made, asked, np.array([[1.0, 1.0], [2.0, 1.0]]), (1, 0)).weights
    assert draft.weighing.weights.tolist() == expected.tolist()


def test_noise_that_carries_the_model_away_ends_the_federation() -> None:
    made = federation(max_shares=2.0)
    rounds = private(clip=1e15, noise=1e3)
    rounds.prepare([made], {3: NAMES})
    asked = replace(task(), registered=10)
    with pytest.raises(Exploded) as found:
        weigh_soundly(made, state(0), asked, Clients()._trained(asked), Server(), Plan(1, 0.5), rounds)
    assert str(found.value) == (
        "round 1 of f: noise has carried the model away; the model before this round is kept (allowed: a smaller "
        "privacy.central.clip, or less noise)"
    )


def test_weights_of_updates_step_from_the_model_that_was_sent() -> None:
    models = DenseModels(torch.tensor([[2.0, 2.0], [1.0, 4.0]]))
    updates = Updates("f", 1, ("a", "b"), np.array([1, 1]), {}, np.zeros(2), models)
    task = Task("f", 3, 1, ("a", "b"), torch.tensor([1.0, 2.0]))
    # Θ + ½(1, 0) + ¼(0, 2), although the weights sum to ¾.
    combine = combiner(federation(policy={"name": "cgsv"}), {}, task, updates, None)  # type: ignore[arg-type]
    assert combine.models(np.array([0.5, 0.25])).tolist() == [1.5, 2.5]
    assert combine.models(np.array([[0.5, 0.25], [0.0, 2.0]])).tolist() == [[1.5, 2.5], [1.0, 6.0]]


class Wrong(Algorithm):
    """What a user's step may return by mistake."""

    gives: str = "short"

    def step(self, server: ServerStep) -> Any:
        return {"short": (server.parameters[:-1], {}), "alone": server.parameters, "nothing": None}[self.gives]


@pytest.mark.parametrize(
    ("gives", "says"),
    [("short", r"a model of shape \(9,\); .*\(10,\)"), ("alone", "Tensor;"), ("nothing", "NoneType;")],
)
def test_a_step_that_returns_no_model_is_named(gives: str, says: str) -> None:
    mistaken = replace(federation(), algorithm=Wrong(gives=gives))
    with pytest.raises(UserError, match=f"algorithm .*: its step returned {says}"):
        run_rounds([mistaken], {"f": state(0)}, Clients(), Server(), Plan(1, 1.0), Recorder())


def test_a_step_that_raises_is_one_line_with_round_rule_and_seed() -> None:
    falling = replace(federation(), name="f#7", algorithm=Wrong(gives="absent"))
    with pytest.raises(UserError, match=r"^round 1 of f, seed 7: algorithm .*: its step fails: KeyError: 'absent'; "):
        run_rounds([falling], {"f#7": state(0)}, Clients(), Server(), Plan(1, 1.0), Recorder())
