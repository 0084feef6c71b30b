"""From weights to the new model: the weighted sum, or a robust rule that the federation names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from steelyard.base.errors import UserError
from steelyard.defence.robust import RobustRule
from steelyard.messages.algorithm import Algorithm, ServerStep, Vectors
from steelyard.messages.payloads import DenseModels, SingleModels
from steelyard.messages.updates import Floats, Task, Updates
from steelyard.privacy.hidden import BeyondBound, HiddenUpdates
from steelyard.rounds.own_code import step_fault, told_in_one_line
from steelyard.rounds.soundness import Exploded
from steelyard.rounds.state import Federation
from steelyard.weighing.cohort import CohortView
from steelyard.weighing.weights import Weighing

RADIUS = "defence/radius"
"""Under this name a federation remembers the radius of adaptive clipping from round to round."""


class Combiner:
    """Combines one cohort under any weights: the rule's sum of the models, then the algorithm's step at the server."""

    def __init__(
        self,
        federation: Federation,
        task: Task,
        tensors: Vectors,
        average: Callable[[Floats], torch.Tensor],
        share: float,
        updates: Updates | None = None,
    ) -> None:
        algorithm = federation.algorithm
        self.average = average
        self._algorithm, self._task, self._tensors = algorithm, task, tensors
        self._share, self._momentum = share, federation.momentum
        self._updates = updates if algorithm.sees == "models" else None
        self._steps = type(algorithm).step is not Algorithm.step

    def models(self, weights: Floats) -> torch.Tensor:
        """Return the new model for weights [clients], or one row per candidate for [candidates, clients]."""
        if not self._steps:
            return self.average(weights)
        if weights.ndim == 1:
            return self.step(weights)[0]
        return torch.stack([self.step(row)[0] for row in weights])

    def step(self, weights: Floats) -> tuple[torch.Tensor, Vectors]:
        """Return the new model for weights [clients], and what the server keeps with it."""
        average = self.average(weights)
        if not self._steps:
            return average, self._tensors
        updates = self._updates
        payload = None if updates is None else updates.payload
        given = ServerStep(
            parameters=self._task.parameters.to(average.device),
            average=average,
            weights=weights,
            tensors={name: tensor.to(average.device) for name, tensor in self._tensors.items()},
            share=self._share,
            momentum=self._momentum,
            models=payload.models if isinstance(payload, DenseModels) else None,
            sent=None if updates is None else updates.vectors,
            steps=None if updates is None else updates.steps,
        )
        with told_in_one_line(partial(step_fault, self._algorithm, self._task)):
            found = self._algorithm.step(given)
        return self._checked(found, average.shape)

    def _checked(self, found: object, shape: torch.Size) -> tuple[torch.Tensor, Vectors]:
        """Refuse what is no model of this shape with the server's vectors: users write algorithms, too."""
        match found:
            case (torch.Tensor() as model, Mapping() as kept) if model.shape == shape:
                return model, kept  # pyright: ignore[reportUnknownVariableType]
            case (torch.Tensor() as model, Mapping()):
                what = f"a model of shape {tuple(model.shape)}"
            case _:
                what = f"{type(found).__name__}"
        raise UserError(
            f"algorithm {self._algorithm.name}: its step returned {what}; allowed: the new parameters, "
            f"a tensor of shape {tuple(shape)}, and a dict of what the server keeps"
        )


def combiner(federation: Federation, tensors: Vectors, task: Task, updates: Updates, view: CohortView) -> Combiner:
    """Return what combines this cohort under any weights; call it once a round and federation."""
    average = _average(federation, task, updates, view)
    share = len(updates.clients) / max(task.registered, len(updates.clients), 1)
    return Combiner(federation, task, tensors, average, share, updates)


def _average(
    federation: Federation, task: Task, updates: Updates, view: CohortView
) -> Callable[[Floats], torch.Tensor]:
    """Return what sums this cohort's models under any weights: plainly, hidden, or by a robust rule."""
    settings, payload = federation.rule.settings.defence, updates.payload
    if isinstance(payload, HiddenUpdates):
        return partial(_aggregate, task, payload)
    policy = federation.rule.policy
    if policy is not None and policy.applies_to == "updates" and isinstance(payload, SingleModels):
        return partial(_stepped, task, payload)
    if settings is None or not settings.robust:
        return partial(payload.combine, task.parameters)
    if not isinstance(payload, SingleModels):
        raise UserError(
            "weighing.defence: the server sees no single models in this run; allowed: no [weighing.defence]"
        )
    if settings.needs_root and view.root_of is None:
        raise UserError(
            "weighing.defence.rule: got 'fltrust', but this server has no rows to train on; allowed: the other rules"
        )
    rule = RobustRule(settings, payload, task.parameters, lambda: view.gram, lambda: view.root, view.memory.get(RADIUS))

    def combine(weights: Floats) -> torch.Tensor:
        found = rule.combine(weights)
        if settings.smooth:
            view.remember(RADIUS, rule.radius)
        return found

    return combine


def _stepped(task: Task, payload: SingleModels, weights: Floats) -> torch.Tensor:
    """Return Θ + Σ wᵢ(θᵢ − Θ) for weights [clients] or [candidates, clients] that need not sum to 1."""
    rest = payload.like.new_tensor(1.0 - weights.sum(axis=-1))[..., None]
    start = task.parameters.to(payload.like.device)
    return payload.keep_frozen(payload.combine(task.parameters, weights) + rest * start, task.parameters)


def _aggregate(task: Task, payload: HiddenUpdates, weights: Floats) -> torch.Tensor:
    """Return the model of one hidden sum; one that honest clients cannot have ends the federation.

    It does not go on with the next round: that would begin from the same model, where full batches give the same
    updates, and a second sum of them for other clients or weights is one more equation about single ones.
    """
    try:
        return payload.aggregate(task.parameters, weights)
    except BeyondBound as error:
        allowed = "another run, from another seed, without clients that are not trusted"
        raise Exploded(task.federation, task.round, str(error), allowed) from None


def as_summed(updates: Updates, weighing: Weighing) -> tuple[Updates, Weighing]:
    """Return both without the clients that dropped out while a sum was taken, and with the weights that it then has.

    Only hidden updates can be missing from their own sum: those that the server sees are there before it weighs.
    """
    summed = updates.payload.summed if isinstance(updates.payload, HiddenUpdates) else None
    if summed is None:
        return updates, weighing
    stayed = set(summed.clients)
    keep = [row for row, name in enumerate(updates.clients) if name in stayed]
    if len(keep) < len(updates.clients):
        updates = updates.select(keep, summed.dropped)
        weights = weighing.weights[keep]
        weighing = replace(
            weighing,
            raw=weighing.raw[keep],
            normalised=weighing.normalised[keep],
            scores=weighing.scores[keep],
            weights=weights / weights.sum(),
        )
    if summed.bytes_sent:
        sent = np.array([summed.bytes_sent.get(name, 0) for name in updates.clients])
        updates = replace(updates, bytes_sent=sent)
    return updates, weighing
