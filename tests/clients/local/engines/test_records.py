"""DP-SGD of simulated clients: held to a plain loop over samples in float64, with the same draws."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.clients.local import engine_cases as cases
from tests.kit import assert_refused
from tests.privacy.seeded_source import SeededSource
from torch import nn

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.clients.local.engines.records import RecordsEngine
from steelyard.clients.local.population import as_numbers
from steelyard.learning import losses
from steelyard.learning.parameters import Layout, for_training
from steelyard.learning.records import RecordNoise
from steelyard.learning.settings import ModelSettings, TrainingSettings, batches
from steelyard.messages.updates import Floats, LossState, Task
from steelyard.privacy.noise import lattice_step, normals, uniforms
from steelyard.privacy.settings import PrivacySettings

PRIVACY = PrivacySettings.model_validate({"records": {"clip": 0.5, "noise": 0.8}})
SEED = 3


def simulated(what: cases.Case, seed: int = SEED, privacy: PrivacySettings = PRIVACY) -> Simulation:
    records = RecordNoise(privacy, what.training, rounds=5, source=SeededSource(seed))
    compute = ComputeSettings(device="cpu", threads=1)
    return Simulation({0: what.people}, what.model, what.training, compute, records=records)


def plain_gradient(
    module: nn.Module, layout: Layout, model: Floats, x: torch.Tensor, y: torch.Tensor, loss: LossState
) -> Floats:
    """The gradient of one sample, by autograd, in double precision."""
    own = for_training(copy.deepcopy(module)).double()
    with torch.no_grad():
        for name, view in layout.views(torch.from_numpy(model)).items():
            dict(own.named_parameters(remove_duplicate=False))[name].copy_(view)
    x = x if x.dtype == torch.int64 else x.double()
    with torch.enable_grad():
        each = losses.weigh(
            losses.per_sample(replace(loss, class_weights=None))(own(x[None]), y[None]),
            y[None],
            None if loss.class_weights is None else torch.tensor(loss.class_weights).double(),
        )
        each.sum().backward()
    named = dict(own.named_parameters())
    slopes = [named[slot.name].grad for slot in layout.slots]
    return np.concatenate([np.zeros(slot.size) if slope is None else slope.numpy().ravel()
                           for slot, slope in zip(layout.slots, slopes, strict=True)])  # fmt: skip


NETWORKS = ["cnn-digits, mini", "cnn-odd, heavy", "mlp, updates", "linear, full", "own, mini", "tied, mini",
            "frozen cnn, mini", "mlp, mini, labels", "unet, mini, dice"]  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_a_round_is_that_of_a_plain_loop_over_samples(name: str) -> None:
    what = cases.case(name)
    clients = simulated(what)
    start = SimulationServer(clients).initial(0)
    classes = what.people.dataset.classes
    weights = tuple(1 + 0.5 * c for c in range(classes)) if classes else None
    task = Task("f", 0, 1, ("c0", "c2"), start, replace(what.loss, class_weights=weights))
    clients.check([])
    (found,) = clients.train([task])
    assert found.payload.dense is not None
    setup, population, source = clients.context.setup, clients.context.population(0), SeededSource(SEED)
    loss = replace(clients.context.loss(task.loss), class_weights=weights)
    expected = {}
    for client in ("c2", "c0"):  # longest first: 16 samples, then 15
        place = population.position[client]
        size, begin = int(population.sizes[place]), int(population.begins[place])
        rows = population.rows[begin : begin + size]
        features, labels = as_numbers(what.people.dataset.features[rows]), population.labels[begin : begin + size]
        rate, steps = batches(size, what.training)
        fine = lattice_step(0.8 * 0.5)
        model, speed = start.double().numpy().copy(), np.zeros(len(start))
        slack = 0.0
        for _ in range(steps):
            batch = np.flatnonzero(uniforms(source, size) < rate)
            total = np.zeros(len(start))
            for row in batch:
                slope = plain_gradient(setup.module, setup.layout, model, features[row], labels[row], loss)
                total += slope * min(1.0, 0.5 / max(np.linalg.norm(slope), 1e-300))
            total += np.rint(normals(source, len(start)) * (0.4 / fine)) * fine
            speed = what.training.momentum * speed + total / (rate * size) + what.training.weight_decay * model
            model -= what.training.learning_rate * speed
            # Each sample's part is cut to the lattice, by less than one step of it.
            slack += len(batch) * fine / (rate * size)
        expected[client] = model, slack * what.training.learning_rate / (1 - what.training.momentum)
    for row, client in enumerate(found.clients):
        model, slack = expected[client]
        # float32 keeps 6e-8 of a number, and gradients are sums of some hundreds of them.
        np.testing.assert_allclose(found.payload.dense.models[row].double().numpy(), model, rtol=0, atol=slack + 2e-5)
    assert found.losses.tolist() == [0.0, 0.0]


def test_a_sample_is_clipped_by_itself_and_nothing_of_others_is_in_its_gradient() -> None:
    what = cases.case("reused, mini")  # with dropout
    clients = simulated(what)
    clients.check([])
    engine, dataset = clients.context.engine, clients.context.population(0).dataset
    assert isinstance(engine, RecordsEngine)
    model = SimulationServer(clients).initial(0)
    gradients, rows = engine.of_each(clients.context.loss()), torch.arange(6)
    chance = torch.stack([rows, torch.zeros_like(rows)], dim=1)
    features, labels = dataset.gather(rows), dataset.labels[rows]
    whole = gradients(model, features, labels, chance)
    part = gradients(model, features[2:4], labels[2:4], chance[2:4])
    torch.testing.assert_close(whole[2:4], part, rtol=1e-5, atol=1e-7)
    # The same sample under another stream loses other units.
    twice = gradients(model, features[:1].expand(2, -1, -1), labels[:1].expand(2), chance[:2])
    assert not torch.allclose(twice[0], twice[1])


def test_a_sample_moves_the_sum_by_no_more_than_the_clip() -> None:
    """The two neighbouring cases of the guarantee, with the same draws: the distance is what the noise is for."""
    noise = RecordNoise(PRIVACY, TrainingSettings(batch_size=4), rounds=1, source=SeededSource(1))
    draw = np.random.default_rng(0)
    each = torch.from_numpy(draw.normal(size=(9, 30)) * 10 ** draw.uniform(-3, 3, (9, 1))).float()
    each[4] = float("nan")  # has no length that could be clipped, and counts as nothing
    for who in range(9):
        without = each.clone()
        without[who] = 0
        found = []
        for gradients in (each, without):
            noise.source = SeededSource(who)
            found.append(
                noise.slope(torch.zeros(30, dtype=torch.float64), 9, lambda _, at, held=gradients: held[at], 2)
            )
        # The sum is divided by the 4 samples that are expected.
        assert float((found[0] - found[1]).norm()) * 4 <= 0.5


def test_batches_are_poisson_and_noise_has_its_size() -> None:
    noise = RecordNoise(PRIVACY, TrainingSettings(batch_size=5), rounds=1, source=SeededSource(2))
    taken: list[np.ndarray] = []

    def gradients(model: torch.Tensor, at: np.ndarray) -> torch.Tensor:
        taken.append(at)
        return torch.zeros(len(at), 50)

    drawn = [noise.slope(torch.zeros(50, dtype=torch.float64), 20, gradients, 100) for _ in range(400)]
    sizes = np.array([*map(len, taken), *[0] * (400 - len(taken))])  # of an empty batch nothing is asked
    everyone = np.bincount(np.concatenate(taken), minlength=20) / 400
    # 8,000 draws with probability 1/4: a deviation of .005. Sizes vary as those of independent draws: 20 · 3/16.
    assert sizes.mean() / 20 == pytest.approx(0.25, abs=0.02)
    assert sizes.var() == pytest.approx(3.75, rel=0.25)
    assert everyone == pytest.approx(np.full(20, 0.25), abs=0.1)
    # 20,000 normal numbers of 0.8 · 0.5 / 5: their deviation is off by 1/√40,000.
    assert float(torch.stack(drawn).std()) == pytest.approx(0.08, rel=0.03)


def test_batches_and_noise_of_two_rounds_differ_though_seeds_do_not() -> None:
    what = cases.case("mlp, mini")
    records = RecordNoise(PRIVACY, what.training, rounds=5)
    compute = ComputeSettings(device="cpu", threads=1)
    models = []
    for _ in range(2):
        clients = Simulation({0: what.people}, what.model, what.training, compute, records=records)
        (found,) = clients.train([Task("f", 0, 1, ("c0",), SimulationServer(clients).initial(0))])
        assert found.payload.dense is not None
        models.append(found.payload.dense.models)
    assert not torch.equal(*models)


class Branching(nn.Module):
    """A module that vmap does not take: it branches on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x.flatten(1)) * (2.0 if bool(x.sum() > 0) else 1.0)


def refused(network: Any, *parts: str) -> None:
    what = cases.Case(cases.of(network), cases.population((8, 8), 10))
    assert_refused(lambda: simulated(what).check([]), *parts)


def test_what_mixes_samples_is_refused() -> None:
    refused(lambda: cases.Normed(10), "model.name: ", "batch norm", "group norm")
    running = lambda: nn.Sequential(nn.InstanceNorm1d(8, track_running_stats=True), nn.Flatten(), nn.Linear(64, 10))  # noqa: E731
    refused(running, "model.name: ", "running means", "group norm")
    refused(Branching, "model.name: ", "single samples", "vmap")
    grouped = lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(64, 10))  # noqa: E731
    simulated(cases.Case(cases.of(grouped), cases.population((8, 8), 10))).check([])
    survival = cases.case("linear, mini, survival")
    assert_refused(lambda: simulated(survival).check([]), "training.loss: ", "cox", "privacy.local")
    plain = ModelSettings(name="linear")
    simulated(replace(survival, model=plain, people=cases.population((5,), 0))).check([])
