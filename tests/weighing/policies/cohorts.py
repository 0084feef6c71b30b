"""Small cohorts for policies: three clients, six parameters (the last layer of two classes), and rows of the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from steelyard.messages.payloads import DenseModels, ServerTest
from steelyard.messages.updates import Counts, Floats, Updates
from steelyard.weighing import criterion as registry
from steelyard.weighing.cohort import CohortView, Memory, ServerSide
from steelyard.weighing.policy import Policy
from steelyard.weighing.weights import to_weights

START = torch.tensor([0.5, -1.0, 0.25, 2.0, 0.0, -0.5])
MODELS = torch.tensor(
    [[0.7, -0.8, 0.25, 1.5, 0.3, -0.5], [0.1, -1.1, 0.75, 2.2, 0.4, -0.9], [0.6, -0.7, -0.25, 1.8, -0.2, -0.1]]
)
LATER = torch.tensor(
    [[0.4, -0.9, 0.5, 1.6, 0.2, -0.4], [0.3, -1.3, 0.5, 2.4, 0.1, -0.7], [0.9, -0.6, 0.0, 1.5, 0.1, -0.3]]
)
SIZES = [120, 60, 20]
LOSSES = [0.9, 1.4, 0.3]
LATER_LOSSES = [0.7, 0.6, 0.5]
COUNTS = [[40, 40, 40], [50, 10, 0], [0, 0, 20]]
SKEWED = [[110, 10, 0], [0, 55, 5], [0, 0, 20]]
OUTPUT = np.array([[0, 1, 4], [2, 3, 5]])
"""Where the two rows of the last layer stand: weights [2, 2] first, then the bias."""
ROWS = torch.tensor([[1.0, 0.5], [-0.5, 1.5], [0.2, -1.0], [1.5, 1.0]])
LABELS = torch.tensor([0, 1, 1, 0])


def server_slopes(models: torch.Tensor, weights: Floats) -> Floats:
    """∂L/∂w of the server's cross-entropy at Σ wᵢθᵢ, by torch alone."""
    given = torch.tensor(weights, dtype=torch.float64, requires_grad=True)
    model = given @ models.double()
    outputs = ROWS.double() @ model[:4].reshape(2, 2).T + model[4:]
    torch.nn.functional.cross_entropy(outputs, LABELS).backward()
    return given.grad.numpy()


class WithRows(ServerSide):
    """A server that tests models by a function, and knows the last layer."""

    def __init__(self, test: Callable[[torch.Tensor], ServerTest]) -> None:
        self.test = test  # type: ignore[method-assign]

    def output_layer(self) -> Counts:
        return OUTPUT


class Sloped(CohortView):
    """A cohort whose server knows its slopes by torch alone."""

    def slopes(self, weights: Floats) -> Floats:
        return server_slopes(self._dense[0].models, weights)


def answering(
    samples: Any, clients: Sequence[str] = (), memory: Mapping[str, Memory] | None = None, **answers: Any
) -> CohortView:
    """A view that answers with these values, and by these functions of weights."""
    given = {name: staticmethod(each) if callable(each) else each for name, each in answers.items()}
    return type("Answering", (CohortView,), given)(np.asarray(samples), clients=tuple(clients), memory=memory or {})


def cohort(
    models: torch.Tensor = MODELS,
    *,
    names: Sequence[str] = "abc",
    sizes: Sequence[int] = SIZES,
    losses: Sequence[float] = LOSSES,
    after: Sequence[float] = LATER_LOSSES,
    counts: Sequence[Sequence[int]] = COUNTS,
    memory: Mapping[str, Memory] | None = None,
    round: int = 1,
    rounds: int = 0,
) -> CohortView:
    """A view of a cohort, as a round makes it."""
    updates = Updates(
        "f",
        round,
        tuple(names),
        np.array(sizes),
        {},
        np.array(after),
        DenseModels(models),
        first_losses=np.array(losses),
        label_counts=np.array(counts),
    )
    nothing = WithRows(lambda found: ServerTest(np.zeros(len(found)), np.zeros((len(found), 0))))
    return Sloped.of(updates, START, nothing, memory, round=round, rounds=rounds, rate=0.1)


def weighed(policy: Policy, view: CohortView) -> Floats:
    """The weights of a policy on criteria measured as in a round; shares sum to 1."""
    measures = {
        name: np.asarray(view.samples, dtype=np.float64) if name == "DS" else registry.get(name).on_server(view)
        for name in policy.criteria
    }
    found = policy.weigh(measures, view)
    return to_weights(found)[0] if policy.applies_to == "shares" else found
