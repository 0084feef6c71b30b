"""What clients that do not keep the protocol keep between rounds: models of their own, global models of the past."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from steelyard.data.dataset import HONEST, Behaviour
from steelyard.messages import Task


class KeptModels:
    """The models from which such clients start; part of every checkpoint, so that a resume gives the same bits."""

    def __init__(self) -> None:
        self._own: dict[tuple[str, str], torch.Tensor] = {}
        """By federation and client: the model that a client which ignores the global one trains on from."""
        self._past: dict[str, dict[int, torch.Tensor]] = {}
        """By federation and round: the global model that was sent out, as far back as a stale client looks."""

    def receive(self, task: Task, behaviours: Mapping[str, Behaviour]) -> None:
        """Remember the global model of a task for clients that will start from it later; call it before `start`."""
        reach = max((how.stale for how in behaviours.values()), default=0)
        if not reach:
            return
        past = {**self._past.get(task.federation, {}), task.round: task.parameters.detach().cpu().clone()}
        # A later round is one that a resumed run does again.
        kept = {round: model for round, model in past.items() if task.round - reach <= round <= task.round}
        self._past[task.federation] = kept

    def start(self, task: Task, client: str, behaviours: Mapping[str, Behaviour]) -> torch.Tensor:
        """Return the model that a client starts from; the one it received unless it has reasons of its own."""
        how = behaviours.get(client, HONEST)
        if how.own_model:
            return self._own.get((task.federation, client), task.parameters)
        if how.stale:
            past = self._past[task.federation]
            return past.get(task.round - how.stale, past[min(past)])
        return task.parameters

    def keep(self, task: Task, client: str, model: torch.Tensor, behaviours: Mapping[str, Behaviour]) -> None:
        """Keep the model that a client ended with, where it will go on from it."""
        if behaviours.get(client, HONEST).own_model:
            self._own[task.federation, client] = model.detach().cpu().clone()

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return all models by name; names hold federation and client or round."""
        own = {json.dumps(["own", *key]): model for key, model in sorted(self._own.items())}
        past = {
            json.dumps(["global", federation, round]): model
            for federation, models in sorted(self._past.items())
            for round, model in sorted(models.items())
        }
        return {**own, **past}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Hold what `snapshot` returned and nothing else."""
        self._own.clear()
        self._past.clear()
        for key, model in state.items():
            kind, federation, whose, *_ = json.loads(key)
            if kind == "own":
                self._own[federation, whose] = model.cpu()
            elif kind == "global":
                self._past.setdefault(federation, {})[whose] = model.cpu()
