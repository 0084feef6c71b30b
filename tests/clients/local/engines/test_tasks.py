"""Masks and several labels: every engine gives what the loop gives, and scores are what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.clients.local import engine_cases as cases

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.clients.local.engines.graph import GraphEngine
from steelyard.clients.local.engines.graph_steps import MappedStep
from steelyard.data.dataset import Population
from steelyard.learning.evaluation import dice
from steelyard.learning.models import ModelSettings
from steelyard.messages import LossState, Question, Task, Updates

SIZES = (7, 4, 9, 1)
UNET = ModelSettings(name="auto", arguments={"wide": 4, "depth": 1})


def masked() -> Population:
    """Images of 8×8 in which a bright square is class 1 and a dark one class 2."""
    people = cases.population((1, 8, 8), 0, SIZES)
    image = people.dataset.features[:, 0]
    masks = ((image > 0.8).long() + 2 * (image < -0.8).long()).to(torch.uint8).flatten(1)
    return replace(people, dataset=replace(people.dataset, labels=masks, task="segmentation", targets=3))


def labelled() -> Population:
    people = cases.population((5,), 0, SIZES)
    found = (people.dataset.features[:, :3] > 0.4).float()
    return replace(people, dataset=replace(people.dataset, labels=found, task="multi-label", targets=3))


def updates(people: Population, model: ModelSettings, how: str, engine: str, loss: str = "auto") -> Updates:
    compute = ComputeSettings(engine=engine, device="cpu")
    training = cases.TRAINING[how].model_copy(update={"loss": loss})
    clients = Simulation({0: people}, model, training, compute)
    start = SimulationServer(clients).initial(0)
    return clients.train([Task("f", 0, 1, tuple(clients.names(0)), start, LossState())])[0]


def held(found: Updates, expected: Updates) -> None:
    # Float32 sums in another order.
    assert torch.allclose(found.payload.models, expected.payload.models, atol=2e-5)
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.parametrize(("loss", "how"), [("pixel-cross-entropy", "mini"), ("dice", "full")])
def test_masks_train_alike_in_loop_and_stack(loss: str, how: str) -> None:
    expected = updates(masked(), UNET, how, "loop", loss)
    for engine in ("threads", "vmap:3"):
        held(updates(masked(), UNET, how, engine, loss), expected)


def test_the_step_that_graphs_capture_trains_masks() -> None:
    clients = Simulation({0: masked()}, UNET, cases.TRAINING["mini"], ComputeSettings(engine="loop", device="cpu"))
    task = Task("f", 0, 1, tuple(clients.names(0)), SimulationServer(clients).initial(0), LossState())
    expected = clients.train([task])[0]
    setup = clients.context.setup
    engine = GraphEngine(setup, lambda descent: MappedStep(setup, descent), "graph", 3)
    cohort, _ = clients.cohort_builder.gather([task])
    for _ in range(2):  # the buffers are used again
        out = torch.zeros_like(expected.payload.models)
        losses = engine.train(cohort, out)
        assert torch.allclose(out, expected.payload.models, atol=2e-5)
        assert losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.parametrize("name", ["mlp", "linear", "tabular"])
def test_several_labels_train_alike_in_loop_and_stack(name: str) -> None:
    model = ModelSettings(name=name)
    expected = updates(labelled(), model, "mini", "loop")
    for engine in ("threads", "vmap:3", *(["stacked:3"] if name != "tabular" else [])):
        held(updates(labelled(), model, "mini", engine), expected)


def test_scores_of_clients_and_of_the_server_are_means_of_dice() -> None:
    people = masked()
    clients = Simulation({0: people}, UNET, cases.TRAINING["mini"], ComputeSettings(engine="loop", device="cpu"))
    server = SimulationServer(clients)
    start = server.initial(0)
    models = torch.stack([start, start.flip(0)])
    answer = clients.evaluate([Question("f", 0, 0, models)])[0]
    outputs = clients.evaluator.outputs(models, clients.context.population(0).dataset, torch.from_numpy(people.server))
    rows = {row: place for place, row in enumerate(people.server.tolist())}
    each = dice(outputs, people.dataset.labels[torch.from_numpy(people.server)])
    expected = [[float(each[model, rows[int(one.test[0])]]) for one in people.clients] for model in range(2)]
    assert answer.scores == pytest.approx(np.array(expected))
    assert np.isnan(answer.metrics["score_error"]).all()  # one row each
    test = server.test(0, models)
    assert test.errors["dice"] == pytest.approx(each.mean(dim=1).numpy())


def test_a_network_of_other_outputs_is_refused_in_one_line() -> None:
    with pytest.raises(Exception, match=r"model.outputs: got 3 for masks; allowed: 192, flat"):
        updates(masked(), ModelSettings(name="mlp"), "mini", "loop")
