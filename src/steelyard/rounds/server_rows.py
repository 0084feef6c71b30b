"""What a round does with the server's own rows: train on them alone, or fit the weights to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from steelyard.base.errors import UserError
from steelyard.clients.protocol import FittingServer, Server
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Updates
from steelyard.rounds.soundness import Exploded, is_sound
from steelyard.rounds.state import Draft, Federation, RoundState
from steelyard.weighing.fitted import FitSettings, fit_weights


def train_alone(federation: Federation, state: RoundState, server: Server, round: int) -> Draft:
    """The control without a federation: the server trains on its own rows, and nobody is asked."""
    if not isinstance(server, FittingServer):
        raise UserError("weighing.trained_by: got 'server', but this server cannot train; allowed: clients")
    model = server.train(federation.seed, round, state.parameters)
    if not is_sound(model):
        raise Exploded(federation.name, round, "the server's own model is no longer finite")
    none = np.zeros(0)
    nobody = Updates(federation.name, round, (), np.zeros(0, np.int64), {}, none, DenseModels(model[None][:0]))
    order = state.orders.order
    return Draft(federation, state, nobody, None, model, order, state.memory, tensors=state.tensors)


def fit_to_server(drafts: Sequence[Draft], server: Server) -> None:
    """Fit the weights of all federations that ask for it to the server's own rows, side by side."""
    fitting = [draft for draft in drafts if not draft.kept_old and draft.weighing is not None]
    if not fitting:
        return
    if not isinstance(server, FittingServer):
        raise UserError("weighing.fit: given, but this server has no rows to fit to; allowed: no [weighing.fit]")
    payloads: list[DenseModels] = []
    starts: list[np.ndarray] = []
    for draft in fitting:
        if not isinstance(draft.updates.payload, DenseModels) or draft.weighing is None:
            raise UserError("weighing.fit: the server sees no single models in this run; allowed: no [weighing.fit]")
        payloads.append(draft.updates.payload)
        starts.append(draft.weighing.weights)
    seeds = [draft.federation.seed for draft in fitting]
    start = fitting[0].before.parameters

    def slopes(weights: Sequence[np.ndarray]) -> list[np.ndarray]:
        combined = [payload.combine(start, mine) for payload, mine in zip(payloads, weights, strict=True)]
        gradients = server.gradients(seeds, torch.stack(combined))
        return [payload.slopes(gradient) for payload, gradient in zip(payloads, gradients, strict=True)]

    settings = [draft.federation.rule.settings.fit or FitSettings() for draft in fitting]
    for draft, weights in zip(fitting, fit_weights(starts, slopes, settings), strict=True):
        if draft.weighing is not None and draft.combine is not None:
            limited = draft.federation.rule.settings.limited(weights, draft.updates.clients)
            draft.weighing = replace(draft.weighing, weights=limited)
            draft.model, draft.tensors = draft.combine.step(limited)
