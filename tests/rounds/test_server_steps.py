"""What the server does itself within a round: fitting weights to its rows, and training alone as a control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.rounds.scripted import NAMES, Clients, Recorder, Server, federation, state

from steelyard.errors import UserError
from steelyard.messages import Task, Updates
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.soundness import Exploded
from steelyard.rounds.state import Plan
from steelyard.weighing.fitted import fit_weights

FIT = {"steps": 3, "rate": 0.5, "shrink": 0.1}
PLAN = Plan(rounds=1, fraction=0.4)


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
    clients, server, kept = Clients(), Fitting(), Recorder()
    made = [
        federation("plain"),
        federation("slow", fit=FIT),
        federation("fast", seed=5, fit={**FIT, "rate": 2.0}),
    ]
    states = {one.name: state(0) for one in made}
    done = run_rounds(made, states, clients, server, PLAN, kept)
    # One call a step for both, in order; the plain rule is left alone.
    assert server.asked == [((3, 5), 2)] * 3
    cohorts = {task.federation: task.clients for task in clients.tasks}
    sizes = np.array([NAMES.index(name) + 1 for name in cohorts["plain"]])
    records = {record.federation: record for record in kept.records}
    assert records["plain"].weighing is not None
    assert records["plain"].weighing.weights.tolist() == (sizes / sizes.sum()).tolist()
    for name, seed, rate in (("slow", 3, 0.5), ("fast", 5, 2.0)):
        weights, model = fitted(cohorts[name], server, seed, rate)
        found = records[name].weighing
        assert found is not None
        # The slopes are float32 products of numbers up to 5, in three steps.
        assert found.weights.tolist() == pytest.approx(weights.tolist(), rel=1e-5)
        assert done[name].parameters.tolist() == pytest.approx(model.tolist(), rel=1e-5)
        # Scores stay those of the rule, so that a reader sees both.
        assert found.scores.tolist() != pytest.approx(weights.tolist(), rel=1e-2)
        asked = next(question for question in clients.questions if question.federation == name)
        assert asked.models[0].tolist() == done[name].parameters.tolist()


def test_fitted_weights_keep_to_the_cap_of_their_rule() -> None:
    clients, kept = Clients(), Recorder()
    steep = {"steps": 20, "rate": 20.0, "shrink": 0.0}
    made = [federation("free", fit=steep), federation("capped", fit=steep, max_weight=0.3)]
    done = run_rounds(made, {one.name: state(0) for one in made}, clients, Fitting(), PLAN, kept)
    weights = {record.federation: record.weighing.weights for record in kept.records if record.weighing is not None}
    assert weights["free"].max() > 0.5  # without the cap the fit gives one of the four more than that
    assert weights["capped"].max() == pytest.approx(0.3)
    assert weights["capped"].sum() == pytest.approx(1.0)
    # And these are the weights that made the model, where each client has a column of its own.
    assert done["capped"].parameters.max() == pytest.approx(0.3)


def test_nothing_is_fitted_where_the_old_model_is_kept() -> None:
    clients, server = Clients(), Fitting()
    clients.broken = dict.fromkeys(NAMES, "lost")
    plan = replace(PLAN, min_clients=0)
    run_rounds([federation(fit=FIT)], {"f": state(0)}, clients, server, plan, Recorder())
    clients = Clients()
    clients.worthless = True
    run_rounds([federation(fit=FIT, when_zero="keep")], {"f": state(0)}, clients, server, plan, Recorder())
    assert server.asked == []


def test_a_slope_that_is_missing_is_not_passed_over() -> None:
    class Short(Fitting):
        def gradients(self, seeds: Sequence[int], models: torch.Tensor) -> torch.Tensor:
            return super().gradients(seeds, models)[:-1]

    with pytest.raises(ValueError, match="shorter"):
        run_rounds([federation(fit=FIT)], {"f": state(0)}, Clients(), Short(), PLAN, Recorder())


def test_a_server_that_cannot_fit_and_models_that_cannot_be_seen_are_named() -> None:
    message = r"^weighing.fit: given, but this server has no rows to fit to; allowed: no \[weighing.fit\]$"
    with pytest.raises(UserError, match=message):
        run_rounds([federation(fit=FIT)], {"f": state(0)}, Clients(), Server(), PLAN, Recorder())

    class Hidden(Clients):
        def train(self, tasks: Sequence[Task]) -> list[Updates]:
            return [replace(answer, payload=Wrapped(answer.payload)) for answer in super().train(tasks)]

    class Wrapped:
        """A payload of another kind than whole models."""

        def __init__(self, inner: object) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

    message = r"^weighing.fit: the server sees no single models in this run; allowed: no \[weighing.fit\]$"
    with pytest.raises(UserError, match=message):
        run_rounds([federation(fit=FIT)], {"f": state(0)}, Hidden(), Fitting(), PLAN, Recorder())


def test_the_server_alone_trains_its_own_model_and_asks_nobody() -> None:
    clients, server, kept = Clients(), Fitting(), Recorder()
    made = [federation("alone", seed=2, trained_by="server"), federation("f")]
    states = {"alone": replace(state(4), parameters=torch.arange(10.0), memory={"seen": 1}), "f": state(4)}
    done = run_rounds(made, states, clients, server, Plan(rounds=5, fraction=0.4), kept)
    assert server.trained == [(2, 5, list(range(10)))]
    assert done["alone"].parameters.tolist() == [52.0 + index for index in range(10)]
    assert (done["alone"].round, done["alone"].memory) == (5, {"seen": 1})
    assert [task.federation for task in clients.tasks] == ["f"]
    alone, other = kept.records
    assert (alone.federation, other.federation) == ("alone", "f")
    assert (alone.weighing, alone.kept_old, alone.order, alone.accuracy) == (None, False, (0,), 0.4375)
    assert alone.updates is not None
    assert (alone.updates.federation, alone.updates.round, alone.updates.clients) == ("alone", 5, ())
    assert (len(alone.updates.samples), len(alone.updates.losses), alone.updates.criteria) == (0, 0, {})
    assert alone.updates.samples.dtype == np.int64
    assert alone.updates.payload.finite().tolist() == []
    assert other.updates is not None
    assert len(other.updates.clients) == 4


def test_a_server_whose_own_model_explodes_ends_alone_with_its_last_good_one() -> None:
    class Diverging(Fitting):
        def train(self, seed: int, round: int, parameters: torch.Tensor) -> torch.Tensor:
            return parameters + (1.0 if round == 1 else float("nan"))

    kept = Recorder()
    made = [federation("alone", trained_by="server"), federation("f")]
    states = {"alone": state(0), "f": state(0)}
    done = run_rounds(made, states, Clients(), Diverging(), Plan(rounds=3, fraction=0.4), kept)
    why = "the server's own model is no longer finite"
    assert (done["alone"].round, done["alone"].ended, done["alone"].finished) == (1, why, True)
    assert done["alone"].parameters.tolist() == (state(0).parameters + 1).tolist()
    assert done["f"].round == 3
    assert [record.federation for record in kept.records] == ["alone", "f", "f", "f"]
    with pytest.raises(Exploded, match=rf"^round 2 of alone: {why}; the model before this round is kept"):
        run_rounds(made[:1], {"alone": state(0)}, Clients(), Diverging(), Plan(rounds=3, fraction=0.4), Recorder())


def test_without_other_rules_no_task_is_given_out() -> None:
    clients = Clients(())
    run_rounds([federation(trained_by="server")], {"f": state(0)}, clients, Fitting(), PLAN, Recorder())
    assert clients.tasks == []


def test_a_server_that_cannot_train_is_named() -> None:
    message = r"^weighing.trained_by: got 'server', but this server cannot train; allowed: clients$"
    with pytest.raises(UserError, match=message):
        run_rounds([federation(trained_by="server")], {"f": state(0)}, Clients(), Server(), PLAN, Recorder())
