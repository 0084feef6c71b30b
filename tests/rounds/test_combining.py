"""From updates to models: hidden sums, robust rules, the algorithm's step, and what the server fits and trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import assert_refused
from tests.rounds.scripted import NAMES, Clients, Recorder, Server, federation, ran, state

from steelyard.algorithms.fedavgm import FedAvgM
from steelyard.messages.algorithm import Algorithm, ServerStep
from steelyard.messages.payloads import DenseModels, Summed
from steelyard.messages.updates import Failure, Task, Updates
from steelyard.privacy.hidden import HiddenUpdates
from steelyard.privacy.settings import AggregationSettings
from steelyard.recommend.sparse import TableChange
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import Plan
from steelyard.rounds.weigh import RADIUS, Combiner, combiner
from steelyard.weighing.fitted import fit_weights


class Hiding(Clients):
    """The scripted clients with their updates hidden; `gone` drop out of every sum, `excess` is added by federation."""

    def __init__(self, gone: str = "", excess: dict[str, float] | None = None) -> None:
        super().__init__()
        self.gone, self.excess = gone, excess or {}

    def _trained(self, task: Task) -> Updates:
        updates = super()._trained(task)
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
    done = ran(clients=Hiding(gone="bj"))
    sizes = np.array([1, 0, 3, 4, 5, 6, 7, 8, 9, 0])  # of b and j nothing is left
    expected = torch.tensor(sizes / sizes.sum(), dtype=torch.float32)
    torch.testing.assert_close(done.state.parameters, expected)
    record = done.record
    assert record.updates.clients == tuple("acdefghi")
    assert record.weighing.weights.tolist() == pytest.approx((sizes[sizes > 0] / sizes.sum()).tolist())
    weighing = record.weighing
    assert weighing.raw[:, 0].tolist() == sizes[sizes > 0].tolist()
    assert weighing.normalised[:, 0] == pytest.approx(sizes[sizes > 0] / 55)
    assert weighing.scores == pytest.approx(sizes[sizes > 0] / 55)
    assert [(failure.client, failure.reason) for failure in record.updates.failures] == [
        ("b", "its node is gone"),
        ("j", "its node is gone"),
    ]
    assert record.updates.bytes_sent.tolist() == [10 * NAMES.index(name) for name in "acdefghi"]


def test_a_federation_whose_sum_cannot_be_ends_alone_with_its_last_good_model() -> None:
    kept, clients = Recorder(), Hiding()
    done = run_rounds(
        *([federation("spoiled"), federation("f")], {"spoiled": state(0), "f": state(0)}, clients, Server()),
        *(Plan(3, 1.0), kept, lambda round, _: clients.excess.update(spoiled=40.0)),
    )
    spoiled = done["spoiled"]
    assert (spoiled.round, spoiled.finished, done["f"].round) == (1, True, 3)
    assert spoiled.parameters.tolist() == pytest.approx((np.arange(1, 11) / 55).tolist())
    assert "the hidden sum of 10 clients moves a parameter by 40" in spoiled.ended
    assert "a, b, c, d, e, f, g, h, i, j" in spoiled.ended
    assert [record.federation for record in kept.records] == ["spoiled", "f", "f", "f"]


# ---------------------------------------------------------------- robust rules in rounds


def test_the_radius_of_clipping_is_remembered_where_it_is_smoothed() -> None:
    smooth = federation(defence={"rule": "clip", "smooth": 0.5})
    # All updates have length 1 in the first round.
    assert ran(smooth).state.memory[RADIUS] == pytest.approx(1.0)
    before = replace(state(0), memory={RADIUS: 1 / 16})
    after = ran(smooth, before=before).state
    # √(1 · 1/16): every update is cut to a quarter.
    assert after.memory[RADIUS] == pytest.approx(0.25)
    assert after.parameters.tolist() == pytest.approx((np.arange(1, 11) / 55 / 4).tolist())
    hard = federation(defence={"rule": "clip"})
    after = ran(hard, before=before).state
    assert after.memory == before.memory
    assert after.parameters.tolist() == pytest.approx((np.arange(1, 11) / 55).tolist())


# ---------------------------------------------------------------- the algorithm's step


def task(clients: str = "ab") -> Task:
    return Task("f", 0, 1, tuple(clients), torch.arange(10.0), registered=8)


def test_candidates_are_stepped_one_by_one() -> None:
    made = replace(federation(), algorithm=FedAvgM(beta=0.5), momentum=0.25)
    asked = task()
    kept = {name: torch.ones(10) for name in made.algorithm.start(asked.parameters)}
    average = partial(Clients()._trained(asked).payload.combine, asked.parameters)
    combine = Combiner(made, asked, kept, average, 0.25)
    one, two = np.array([0.5, 0.5]), np.array([1.0, 0.0])
    alone = combine.step(one)
    # The same operations on one vector at a time.
    assert torch.equal(combine.models(one), alone[0])
    assert not torch.equal(alone[0], average(one))
    assert torch.equal(combine.models(np.stack([one, two])), torch.stack([alone[0], combine.step(two)[0]]))
    assert set(alone[1]) == set(kept)


def test_an_algorithm_s_step_is_given_all_that_it_may_see() -> None:
    seen: list[ServerStep] = []

    class Looking(Algorithm):
        sees = "models"

        def step(self, server: ServerStep) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            seen.append(server)
            return server.average, {"kept": server.average}

    class Blind(Looking):
        sees = "sum"

    asked = task()
    payload, vectors = DenseModels(torch.ones(2, 10)), {"v": torch.ones(2, 10)}
    updates = replace(Clients()._trained(asked), steps=np.array([3, 4]), vectors=vectors, payload=payload)
    made = replace(federation(), algorithm=Looking(), momentum=0.25)
    model, kept = combiner(made, {"t": torch.ones(10)}, asked, updates, None).step(np.array([0.25, 0.75]))
    (given,) = seen
    assert given.average.tolist() == pytest.approx([1.0] * 10)
    assert given.weights.tolist() == [0.25, 0.75]
    assert given.tensors["t"].tolist() == [1.0] * 10
    # Two of eight clients.
    assert (given.share, given.momentum) == (0.25, 0.25)
    assert given.models.shape == given.sent["v"].shape == (2, 10)
    assert given.steps.tolist() == [3, 4]
    assert kept["kept"] is model
    combiner(replace(made, algorithm=Blind()), {}, asked, updates, None).step(np.array([0.5, 0.5]))
    assert (seen[1].models, seen[1].sent, seen[1].steps) == (None, None, None)


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
        return {"short": (server.parameters[:-1], {}), "alone": server.parameters}[self.gives]


@pytest.mark.parametrize(
    ("gives", "says"),
    [("short", "(9,)"), ("alone", "Tensor"), ("absent", "round 1 of f, seed 7: algorithm")],
)
def test_a_step_that_raises_or_returns_no_model_is_one_line(gives: str, says: str) -> None:
    mistaken = replace(federation("f#7"), algorithm=Wrong(gives=gives))
    assert_refused(lambda: ran(mistaken), "algorithm ", ": its step ", says)


FIT = {"steps": 3, "rate": 0.5, "shrink": 0.1}


PLAN = {"fraction": 0.4}


class Fitting(Server):
    """Its loss is half the squared distance to a target that depends on the seed."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], int]] = []
        self.trained: list[tuple[int, int, list[float]]] = []

    def target(self, seed: int) -> torch.Tensor:
        return torch.linspace(0, seed, len(NAMES))

    def gradients(self, seeds: Sequence[int], models: torch.Tensor) -> torch.Tensor:
        self.asked.append((tuple(seeds), len(models)))
        return torch.stack([model - self.target(seed) for seed, model in zip(seeds, models, strict=True)])

    def train(self, seed: int, round: int, parameters: torch.Tensor) -> torch.Tensor:
        self.trained.append((seed, round, parameters.tolist()))
        return parameters + 10 * round + seed


def fitted(cohort: Sequence[str], server: Fitting, seed: int, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights that the rule DS gives the cohort, fitted with the slope of the loss in float64; the model."""
    from steelyard.weighing.fitted import FitSettings

    sizes = np.array([NAMES.index(name) + 1 for name in cohort])
    models = np.eye(len(NAMES))[sizes - 1]
    target = server.target(seed).double().numpy()
    (weights,) = fit_weights(
        [sizes / sizes.sum()],
        lambda given: [models @ (given[0] @ models - target)],
        [FitSettings(**{**FIT, "rate": rate})],
    )
    return weights, weights @ models


def test_weights_are_fitted_side_by_side_each_to_its_own_rows() -> None:
    server = Fitting()
    made = [
        federation("plain"),
        federation("slow", fit=FIT),
        federation("fast", seed=5, fit={**FIT, "rate": 2.0}),
    ]
    done = ran(*made, server=server, **PLAN)
    # One call a step for both, in order; the plain rule is left alone.
    assert server.asked == [((3, 5), 2)] * 3
    cohorts = {task.federation: task.clients for task in done.clients.tasks}
    sizes = np.array([NAMES.index(name) + 1 for name in cohorts["plain"]])
    records = {record.federation: record for record in done.kept.records}
    assert records["plain"].weighing.weights.tolist() == (sizes / sizes.sum()).tolist()
    for name, seed, rate in (("slow", 3, 0.5), ("fast", 5, 2.0)):
        weights, model = fitted(cohorts[name], server, seed, rate)
        found = records[name].weighing
        # The slopes are float32 products of numbers up to 5, in three steps.
        assert found.weights.tolist() == pytest.approx(weights.tolist(), rel=1e-5)
        assert done.states[name].parameters.tolist() == pytest.approx(model.tolist(), rel=1e-5)
        asked = next(question for question in done.clients.questions if question.federation == name)
        assert asked.models[0].tolist() == done.states[name].parameters.tolist()


def test_fitted_weights_keep_to_the_cap_of_their_rule() -> None:
    steep = {"steps": 20, "rate": 20.0, "shrink": 0.0}
    made = [federation("free", fit=steep), federation("capped", fit=steep, max_weight=0.3)]
    done = ran(*made, server=Fitting(), **PLAN)
    weights = {record.federation: record.weighing.weights for record in done.kept.records}
    assert weights["free"].max() > 0.5  # without the cap the fit gives one of the four more than that
    assert weights["capped"].max() == pytest.approx(0.3)
    # And these are the weights that made the model, where each client has a column of its own.
    assert done.states["capped"].parameters.max() == pytest.approx(0.3)


def test_fltrust_asks_the_server_what_it_would_learn_in_this_round() -> None:
    class Training(Fitting):
        def train(self, seed: int, round: int, parameters: torch.Tensor) -> torch.Tensor:
            super().train(seed, round, parameters)
            return parameters + torch.eye(len(NAMES))[0]

    server = Training()
    done = ran(federation(defence={"rule": "fltrust"}), server=server)
    # Only client a points where the server does.
    assert done.state.parameters.tolist() == pytest.approx([1.0] + [0.0] * 9)
    assert server.trained == [(3, 1, [0.0] * 10)]


def test_nothing_is_fitted_where_the_old_model_is_kept() -> None:
    server = Fitting()
    ran(federation(fit=FIT), clients=Clients(broken=dict.fromkeys(NAMES, "lost")), server=server, min_clients=0)
    ran(federation(fit=FIT, when_zero="keep"), clients=Clients(worthless=True), server=server)
    assert server.asked == []


class Opaque(Clients):
    """Clients of whose payload single models cannot be seen."""

    def _trained(self, task: Task) -> Updates:
        updates = super()._trained(task)
        return replace(updates, payload=TableChange(len(updates.clients), torch.zeros_like(task.parameters)))


@pytest.mark.parametrize(
    ("field", "value", "rule", "server"),
    [
        ("weighing", "no rows to train on", {"defence": {"rule": "fltrust"}}, Server()),
        ("weighing.fit", "no rows", {"fit": {"steps": 3}}, Server()),
        ("weighing.trained_by", "'server'", {"trained_by": "server"}, Server()),
        ("weighing.defence", "no single models", {"defence": {"rule": "median"}}, None),
        ("weighing.fit", "no single models", {"fit": {"steps": 3}}, None),
    ],
)
def test_what_this_server_cannot_do_or_see_is_refused(
    field: str, value: str, rule: dict[str, Any], server: Server | None
) -> None:
    clients = Opaque() if server is None else Clients()
    given = {"clients": clients, "server": server or Fitting()}
    assert_refused(lambda: ran(federation(**rule), **given), f"{field}: ", value, "allowed: ")


def test_the_server_alone_trains_its_own_model_and_asks_nobody() -> None:
    server = Fitting()
    made = federation("alone", seed=2, trained_by="server"), federation("f")
    before = replace(state(4), parameters=torch.arange(10.0), memory={"seen": 1}, tensors={"kept": torch.ones(1)})
    done = ran(*made, before=before, server=server, rounds=5, fraction=0.4)
    assert server.trained == [(2, 5, list(range(10)))]
    assert done.states["alone"].parameters.tolist() == [52.0 + index for index in range(10)]
    assert (done.states["alone"].round, done.states["alone"].memory) == (5, {"seen": 1})
    assert set(done.states["alone"].tensors) == {"kept"}
    assert [task.federation for task in done.clients.tasks] == ["f"]
    alone, other = done.kept.records
    assert (alone.federation, alone.weighing, alone.kept_old, alone.accuracy) == ("alone", None, False, 0.4375)
    assert (alone.updates.federation, alone.updates.round, alone.updates.clients) == ("alone", 5, ())
    assert len(other.updates.clients) == 4


def test_a_server_whose_own_model_explodes_ends_alone_with_its_last_good_one() -> None:
    class Diverging(Fitting):
        def train(self, seed: int, round: int, parameters: torch.Tensor) -> torch.Tensor:
            return parameters + (1.0 if round == 1 else float("nan"))

    made = federation("alone", trained_by="server"), federation("f")
    done = ran(*made, server=Diverging(), rounds=3, fraction=0.4)
    why = "the server's own model is no longer finite"
    assert (done.states["alone"].round, done.states["alone"].ended, done.states["alone"].finished) == (1, why, True)
    assert done.states["alone"].parameters.tolist() == [1.0] * 10
    assert done.states["f"].round == 3
