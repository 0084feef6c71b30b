"""Algorithms against numbers from code that their authors published, run outside this repository on these rows.

A linear model and full batches, so that nothing is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from steelyard.algorithms.apfl import MIXTURE, Apfl
from steelyard.algorithms.fedala import WEIGHTS, FedAla
from steelyard.algorithms.fedfomo import FedFomo
from steelyard.clients.local import ComputeSettings, Simulation
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.learning.settings import ModelSettings, TrainingSettings
from steelyard.messages.algorithm import OWN, Algorithm, Listening
from steelyard.messages.updates import Task

ROWS = [[0.5, -1.0, 2.0], [1.5, 0.3, -0.7], [-0.2, 0.8, 1.1], [0.9, -0.4, 0.6], [2.0, 1.0, -1.5], [-1.2, 0.1, 0.4]]
LABELS = [0, 1, 2, 1, 0, 2]
COMMON = [0.2, -0.1, 0.4, 0.0, 0.3, -0.2, -0.5, 0.1, 0.25, 0.1, -0.2, 0.05]
MINE = [-0.3, 0.6, 0.1, 0.7, -0.4, 0.2, 0.15, -0.25, 0.9, -0.05, 0.3, 0.2]


def simulated(epochs: int) -> Simulation:
    rows = np.arange(6)
    dataset = Dataset("toy", torch.tensor(ROWS), torch.tensor(LABELS), 3)
    training = TrainingSettings(learning_rate=0.1, epochs=epochs, batch_size="full")
    clients = {3: Population(dataset, (ClientRows("a", rows, rows),), rows)}
    return Simulation(clients, ModelSettings(name="logistic"), training, ComputeSettings(engine="loop", device="cpu"))


def trained(
    clients: Simulation, algorithm: Algorithm, common: list[float], kept: Mapping[str, list[float]]
) -> dict[str, list[float]]:
    """Return what the client keeps after one round."""
    held = {json.dumps(["vector", "f", "a", name]): torch.tensor(values) for name, values in kept.items()}
    clients.restore({**clients.snapshot(), **held})
    clients.train([Task("f", 3, 1, ("a",), torch.tensor(common), algorithm=algorithm)])
    return {json.loads(key)[-1]: held.tolist() for key, held in clients.snapshot().items()}


def test_apfl() -> None:
    """MLOPTPSU/FedTorch ab8068d: flow_utils.alpha_update with ∇F at the mixture, less its 0.02·α, which the paper does
    not have; eval.inference_personal for the steps of v, both gradients at the models before the step."""
    kept = trained(simulated(3), Apfl(), COMMON, {OWN: MINE, MIXTURE: [0.3]})
    assert kept[MIXTURE] == pytest.approx([0.27917694497160195], abs=1e-6)
    assert kept[OWN] == pytest.approx(
        [
            *(-0.28127683105227125, 0.5973714399815854, 0.09557856893424825, 0.7050245568504987),
            *(-0.4106626672218653, 0.20476463463719535, 0.12625227420177254, -0.23670877275972016),
            *(0.8996567964285564, -0.05039618672941853, 0.3003879756891342, 0.2000082110402843),
        ],
        abs=1e-6,
    )


def test_fedala() -> None:
    """TsingZ0/FedALA a7a9b21: utils.ALA.adaptive_local_aggregation, twice: until it settles, then one pass."""
    clients, algorithm = simulated(1), FedAla(share=1.0)
    trained(clients, algorithm, COMMON, {OWN: MINE})
    halved = [value / 2 for value in MINE[:9]] + MINE[9:]
    larger = [value * 1.5 for value in COMMON[:9]] + [value * 2 for value in COMMON[9:]]
    kept = trained(clients, algorithm, larger, {OWN: halved})
    expected = [
        *(1.0, 0.9997785059340878, 0.6063289536299509, 0.40084854501061856, 0.010760277768861626, 0.699172000238356),
        *(1.0, 1.0, 0.7149354811939137, 0.8724199714960774, 0.7772194005542084, 0.9473810864114828),
    ]
    assert kept[WEIGHTS] == pytest.approx(expected, abs=2e-5)


def test_fedfomo() -> None:
    """NVlabs/FedFomo fe04f66: federation.compute_fomo_weights ("last_model", L2), its positive part over its sum.

    TsingZ0/PFLlib d832e76, clientFomo.weight_cal and weight_scale, adds 1e-5 to each distance: 0.393931, 0.372429,
    0.233640, 0.
    """
    common, last = torch.tensor(COMMON, dtype=torch.float64), torch.tensor(MINE, dtype=torch.float64)
    half, near, reverse = last.clone(), last + 0.1 * common, -last
    half[:9] /= 2
    near[9:] = last[9:] + 0.1
    reverse[9:] = last[9:]
    models = torch.stack([common, half, near, reverse])

    def loss(model: torch.Tensor) -> torch.Tensor:
        outputs = torch.tensor(ROWS, dtype=torch.float64) @ model[:9].reshape(3, 3).T + model[9:]
        return torch.nn.functional.cross_entropy(outputs, torch.tensor(LABELS))

    heard = Listening(
        torch.stack([loss(model) for model in models])[None], loss(last)[None], (models - last).norm(dim=1)[None]
    )
    expected = [[0.3939255762971089, 0.3724268924391142, 0.2336475312637769, 0.0]]
    assert FedFomo().listen(heard).numpy() == pytest.approx(np.array(expected), abs=1e-12)
