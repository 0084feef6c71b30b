"""A simulation on several ranks answers as one process does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.clients.contract import ClientsContract, Make, assert_same_state, assert_same_updates
from tests.clients.local import engine_cases as cases
from tests.clients.local.test_contract import simulation
from tests.clients.ranks.one_process import ranked, ranks_of
from tests.kit import assert_refused

from steelyard.algorithms.settings import AlgorithmSettings
from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.clients.protocol import Clients
from steelyard.clients.ranks import engine as ranked_engine
from steelyard.clients.ranks.engine import RankedModels, read_task, task_content
from steelyard.data.dataset import Behaviour
from steelyard.defence.robust import DefenceSettings, RobustRule
from steelyard.messages.algorithm import Algorithm
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Question, Task, Updates
from steelyard.weighing.criterion import get


class TestContract(ClientsContract):
    """Three ranks keep the contract of all clients."""

    @pytest.fixture
    def make(self) -> Make:
        def fresh() -> Clients:
            return ranked(lambda: simulation("loop", "mlp"))

        return fresh

    @pytest.fixture
    def start(self) -> torch.Tensor:
        return SimulationServer(simulation("loop", "mlp")).initial(0)


SIZES = (23, 9, 30, 1, 9, 16)


def made(name: str = "mlp", **behaviours: Behaviour) -> Simulation:
    _, shape, classes = cases.MODELS[name]
    population = replace(cases.population(shape, classes, SIZES), behaviours=behaviours)
    criteria = [get("DS"), get("LD"), get("LB"), get("KL")]
    compute = ComputeSettings(engine="loop", device="cpu", threads=1)
    return Simulation({0: population}, cases.MODELS[name][0], cases.TRAINING["mini"], compute, criteria)


def start_of(name: str = "mlp") -> torch.Tensor:
    return SimulationServer(made(name)).initial(0)


def tasks(start: torch.Tensor, algorithm: Algorithm, round: int, federations: Sequence[str]) -> list[Task]:
    names = tuple(f"c{number}" for number in range(len(SIZES)))
    sent = {name: torch.full_like(start, 0.01) for name in algorithm.receives}
    return [Task(name, 0, round, names, start, algorithm=algorithm, vectors=sent) for name in federations]


def assert_alike(found: Updates, expected: Updates, start: torch.Tensor) -> None:
    assert_same_updates(found, expected, start, 0.0)
    assert found.failures == expected.failures
    for name in ("steps", "label_counts", "listening"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    # A rank tests fewer rows at once, and some processors multiply fewer rows in another order.
    assert (found.first_losses is None) == (expected.first_losses is None)
    if found.first_losses is not None and expected.first_losses is not None:
        np.testing.assert_allclose(found.first_losses, expected.first_losses, rtol=1e-6)
    assert found.vectors.keys() == expected.vectors.keys()
    for name, vectors in expected.vectors.items():
        assert torch.equal(found.vectors[name], vectors)


@pytest.mark.parametrize(
    ("algorithm", "federations", "behaviour"),
    [
        ("fedavg", "f", Behaviour()),
        ("fedavg", "fgh", Behaviour()),
        ("scaffold", "fg", Behaviour()),
        ("ditto", "f", Behaviour()),
        ("fedfomo", "f", Behaviour()),
        ("fedavg", "f", Behaviour(attack="alie", strength=2.0)),
        ("fedavg", "f", Behaviour(stale=1)),
        ("fedavg", "f", Behaviour(own_model=True)),
        *(pytest.param(name, "fgh", Behaviour(), marks=pytest.mark.slow) for name in ("fednova", "apfl", "fedala")),
    ],
    ids=str,
)
def test_every_algorithm_and_behaviour_trains_as_in_one_process_and_keeps_the_same(
    algorithm: str, federations: str, behaviour: Behaviour
) -> None:
    def make() -> Simulation:
        return made("mlp", c0=behaviour, c4=behaviour)

    chosen, start = AlgorithmSettings(name=algorithm).made(), start_of()
    alone, several = make(), ranked(make)
    for round in (1, 2, 3):
        asked = tasks(start * (1 + 0.01 * round), chosen, round, federations)
        for task, found, expected in zip(asked, several.train(asked), alone.train(asked), strict=True):
            assert_alike(found, expected, task.parameters)
        assert_same_state(several.snapshot(), alone.snapshot())
    question = Question("f", 0, 3, start[None], algorithm=chosen)
    np.testing.assert_array_equal(several.evaluate([question])[0].scores, alone.evaluate([question])[0].scores)


def both() -> tuple[RankedModels, DenseModels, torch.Tensor]:
    asked, start = tasks(start_of(), Algorithm(), 1, ("f",)), start_of()
    (found,), (expected,) = ranked(made).train(asked), made().train(asked)
    assert isinstance(found.payload, RankedModels)
    assert isinstance(expected.payload, DenseModels)
    return found.payload, expected.payload, start


@pytest.mark.parametrize("keep", [[0, 1, 2, 3, 4, 5], [0, 2, 5], [4]], ids=["all", "some", "one"])
def test_models_that_lie_on_ranks_are_summed_measured_and_tested_as_in_one_matrix(keep: list[int]) -> None:
    several, alone, start = both()
    several, alone = several.select(keep), alone.select(keep)
    weights = np.random.default_rng(1).dirichlet(np.ones(len(keep)), size=4)
    for given in (weights, weights[0]):
        torch.testing.assert_close(several.combine(start, given), alone.combine(start, given), rtol=1e-5, atol=1e-6)
    # Two rows at once or six: float32 sums of some hundred squares.
    np.testing.assert_allclose(several.divergence(start), alone.divergence(start), rtol=1e-5)
    np.testing.assert_allclose(several.gram(start), alone.gram(start), rtol=1e-6)
    assert several.finite().tolist() == alone.finite().tolist()
    server = SimulationServer(made())
    mine, theirs = several.tested(lambda models: server.test(0, models)), server.test(0, alone.models)
    np.testing.assert_allclose(mine.f1, theirs.f1, rtol=1e-6)
    np.testing.assert_allclose(mine.losses, theirs.losses, rtol=1e-6)
    assert (several.nbytes, several.at_hand) == (alone.nbytes, False)
    assert torch.equal(several.models, alone.models)
    first = several.combine(start, weights[0])
    assert torch.equal(first, several.combine(start, weights[0]))  # in the order of the ranks, the same bits twice


@pytest.mark.parametrize("rule", ["median", "multi-krum"])
def test_robust_rules_go_over_models_on_ranks(rule: str) -> None:
    *payloads, start = both()
    settings = DefenceSettings.model_validate({"rule": rule})
    several, alone = (
        RobustRule(settings, payload, start, lambda payload=payload: payload.gram(start)).combine(np.full(6, 1 / 6))
        for payload in payloads
    )
    torch.testing.assert_close(several, alone, rtol=1e-5, atol=1e-6)


def test_tests_are_shared_out_and_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked_engine, "FEWEST_ROWS", 1)
    several, alone, start = ranked(made), made(), start_of()
    models = torch.stack([start, start * 0.5])
    (found,), (expected,) = (one.evaluate([Question("f", 0, 1, models, detailed=True)]) for one in (several, alone))
    assert ("test", [0, 1, 2]) in ranks_of(several).asked
    np.testing.assert_array_equal(found.scores, expected.scores)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
    np.testing.assert_array_equal(found.right, expected.right)


def test_a_task_that_is_not_that_of_rank_0_is_refused() -> None:
    (task,) = tasks(start_of(), Algorithm(), 3, ("f",))
    table = task_content(task)
    assert read_task(table).federation == "f"
    changed = task.parameters.clone()
    changed[5] += 1e-6
    assert_refused(lambda: read_task({**table, "parameters": changed}), "round 3 of f", "the model")


def test_other_data_on_a_rank_are_refused_before_it_trains() -> None:
    several = ranked(made)
    data = ranks_of(several).shares[1].simulation.context.population(0).source.dataset
    data.labels[3] = (data.labels[3] + 1) % 10
    asked = tasks(start_of(), Algorithm(), 1, ("f",))
    assert_refused(lambda: several.train(asked), "rank 2: its data differ from those of rank 0", "seed 0")


@pytest.mark.usefixtures("own_cache")
def test_all_ranks_train_with_the_engine_that_rank_0_chose() -> None:
    several = ranked(lambda: simulation("auto", "mlp"))
    several.train([Task("f", 0, 1, ("c0", "c1", "c2", "c3"), start_of())])
    choice = several.describe()["engine_choice"]
    assert choice != "auto"
    assert [share.simulation.describe()["engine_choice"] for share in ranks_of(several).shares] == [choice] * 2
