"""From weights to the new model: the weighted sum, or a robust rule that the federation names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch

from steelyard.clients.protocol import FittingServer, Server
from steelyard.defence.robust import RobustRule
from steelyard.errors import UserError
from steelyard.messages import DenseModels, Floats, Task, Updates
from steelyard.privacy.hidden import BeyondBound, HiddenUpdates
from steelyard.rounds.soundness import Exploded
from steelyard.rounds.state import Federation
from steelyard.weighing.view import CohortView
from steelyard.weighing.weights import Weighing

RADIUS = "defence/radius"
"""Under this name a federation remembers the radius of adaptive clipping from round to round."""

Combine = Callable[[Floats], torch.Tensor]
"""From weights [clients], or [candidates, clients], to the new model or models."""


def combiner(federation: Federation, task: Task, updates: Updates, view: CohortView, server: Server) -> Combine:
    """Return what combines this cohort under any weights; call it once a round and federation."""
    settings, payload = federation.rule.settings.defence, updates.payload
    if isinstance(payload, HiddenUpdates):
        return partial(_aggregate, task, payload)
    if settings is None or (settings.rule == "none" and not settings.mix):
        return partial(payload.combine, task.parameters)
    if not isinstance(payload, DenseModels):
        raise UserError("weighing.defence: the server sees no single models in this run; allowed: without it")
    root = _root(federation, task, server) if settings.needs_root else None
    before = cast("float | None", view.memory.get(RADIUS))
    rule = RobustRule(settings, payload, task.parameters, lambda: view.gram, root, before)

    def combine(weights: Floats) -> torch.Tensor:
        found = rule.combine(weights)
        if settings.smooth:
            view.remember(RADIUS, rule.radius)
        return found

    return combine


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
        sent = np.array([summed.bytes_sent.get(name, 0) for name in updates.clients], dtype=np.int64)
        updates = replace(updates, bytes_sent=sent)
    return updates, weighing


def _root(federation: Federation, task: Task, server: Server) -> Callable[[], torch.Tensor]:
    if not isinstance(server, FittingServer):
        raise UserError(
            "weighing.defence.rule: got 'fltrust', but this server has no rows to train on; allowed: others"
        )
    return lambda: server.train(federation.seed, task.round, task.parameters)
