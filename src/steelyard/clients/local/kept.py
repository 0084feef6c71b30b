"""What clients keep from round to round: models of those that do not keep the protocol, vectors of an algorithm."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from steelyard.base import randomness
from steelyard.data.dataset import HONEST, Behaviour
from steelyard.messages.algorithm import Algorithm, Vectors
from steelyard.messages.updates import Task


class Kept:
    """All that the clients of a simulation keep; part of every checkpoint, so that a resume gives the same bits.

    A vector that is held is never written into: whoever keeps a copy of the table can tell what has changed since.
    """

    def __init__(self) -> None:
        self._own: dict[tuple[str, str], torch.Tensor] = {}
        """By federation and client: the model that a client which ignores the global one trains on from."""
        self._past: dict[str, dict[int, torch.Tensor]] = {}
        """By federation and round: the global model that was sent out, as far back as a stale client looks."""
        self._vectors: dict[tuple[str, str, str], torch.Tensor] = {}
        """By federation, client and name."""

    def receive(self, task: Task, behaviours: Mapping[str, Behaviour]) -> None:
        """Remember the global model of a task for clients that will start from it later; call it before `start`."""
        reach = max((max(how.stale, how.pretends) for how in behaviours.values()), default=0)
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

    def pretended(self, task: Task, client: str, how: Behaviour) -> torch.Tensor:
        """Return what a free rider sends: the model it received, or, of colluders, that with its last step once more.

        Each adds noise of a tenth of the step's size (disguised free riders: Y. Fraboni, R. Vidal, M. Lorenzi,
        "Free-rider Attacks on Model Aggregation in Federated Learning", AISTATS 2021).
        """
        before = self._past.get(task.federation, {}).get(task.round - 1) if how.pretends else None
        if before is None:
            return task.parameters
        step = task.parameters - before.to(task.parameters.device)
        chance = randomness.generator(task.seed, task.round, client, "attack/free-rider")
        noise = torch.from_numpy(chance.standard_normal(len(step), dtype=np.float32)).to(step.device)
        return task.parameters + step + 0.1 * step.square().mean().sqrt() * noise

    def keep_model(self, task: Task, client: str, model: torch.Tensor, behaviours: Mapping[str, Behaviour]) -> None:
        """Keep the model that a client ended with, where it will go on from it."""
        if behaviours.get(client, HONEST).own_model:
            self._own[task.federation, client] = model.detach().cpu().clone()

    def vectors(
        self, federation: str, algorithm: Algorithm, clients: Sequence[str], received: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return what these clients keep, stacked: [clients, parameters or 1] by name.

        `received` [clients, parameters] is what the clients received: a model of their own begins as that.
        """

        def stacked(name: str) -> torch.Tensor:
            found = algorithm.fresh(name, received).clone()
            for row, client in enumerate(clients):
                held = self._vectors.get((federation, client, name))
                if held is not None:
                    found[row] = held.to(found.device)
            return found

        return {name: stacked(name) for name in algorithm.keeps}

    def keep_vectors(self, federation: str, clients: Sequence[str], vectors: Vectors) -> None:
        """Keep what the clients ended with, [clients, parameters] by name."""
        for name, rows in vectors.items():
            for client, row in zip(clients, rows.detach().cpu(), strict=True):
                self._vectors[federation, client, name] = row.clone()

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return all of it by name: its kind, then federation, and client, round, or client and vector."""
        own = {json.dumps(["own", *key]): model for key, model in sorted(self._own.items())}
        past = {
            json.dumps(["global", federation, round]): model
            for federation, models in sorted(self._past.items())
            for round, model in sorted(models.items())
        }
        return {**own, **past, **{json.dumps(["vector", *key]): held for key, held in sorted(self._vectors.items())}}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Hold what `snapshot` returned and nothing else; entries of other kinds are passed over."""
        for table in (self._own, self._past, self._vectors):
            table.clear()
        for key, held in state.items():
            match json.loads(key):
                case ["own", federation, client]:
                    self._own[federation, client] = held.cpu()
                case ["global", federation, round]:
                    self._past.setdefault(federation, {})[round] = held.cpu()
                case ["vector", federation, client, name]:
                    self._vectors[federation, client, name] = held.cpu()
                case _:
                    pass
