"""A clock for simulated devices: how long each would take, who comes too late, and what becomes of late updates.

    t = bytes down / download + (samples visited · sample_seconds + bytes up / upload), times slowdown for a straggler

A round lasts as long as its slowest client, or until the deadline where somebody is late. A late update is dropped, or
joins the next round as a step from the model of then: Θ + (θ_late − Θ_old), its weight multiplied by the discount.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from steelyard.base import randomness
from steelyard.clients.local.context import SimulationContext
from steelyard.clients.local.settings import ClockSettings
from steelyard.clients.protocol import Clients, WrappedClients
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Failure, Floats, Task, Updates

KIND = "late"


@dataclass(frozen=True, eq=False)
class _Late:
    """One update that came too late: the client's step, and what it said beside it."""

    step: torch.Tensor
    said: Mapping[str, Any]


class ClockedClients(WrappedClients):
    """Simulated clients whose work takes simulated time; wrap them where they are built.

    Facts of each device (`sample_seconds`, `download`, `upload` under [facts.device]) go before those of [clock].
    """

    def __init__(self, clients: Clients, context: SimulationContext, settings: ClockSettings) -> None:
        super().__init__(clients)
        self.context, self.settings = context, settings
        self._late: dict[tuple[str, str], _Late] = {}
        """By federation and client: what came too late for the last round."""

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        return [self._timed(task, answer) for task, answer in zip(tasks, self.clients.train(tasks), strict=True)]

    def seconds(self, task: Task, updates: Updates) -> Floats:
        """Return how long each client that answered took, its stragglers drawn by seed, round and client."""
        settings, population = self.settings, self.context.population(task.seed)
        sizes = np.array([population.sizes[population.position[name]] for name in updates.clients], dtype=np.float64)
        facts = [population.source.facts.get(name, {}).get("device", {}) for name in updates.clients]

        def of(name: str) -> Floats:
            usual = float(getattr(settings, name))
            return np.array([max(device.get(name, usual), 1e-12) for device in facts], dtype=np.float64)

        down, up = self._bytes(task, updates)
        keys = randomness.stream_keys(task.seed, task.round, updates.clients, "clock/stragglers")
        slow = np.where(randomness.uniforms(keys, 1)[:, 0] < settings.stragglers, settings.slowdown, 1.0)
        return down / of("download") + slow * (self._visited(task, sizes) * of("sample_seconds") + up / of("upload"))

    def _bytes(self, task: Task, updates: Updates) -> tuple[float, float]:
        """Return the bytes that each client receives and sends: numbers of four bytes, without what stays at home."""
        size, payload = len(task.parameters), updates.payload
        kept = sum(end - begin for begin, end in payload.frozen) if isinstance(payload, DenseModels) else 0
        received, sent = len(task.algorithm.receives), len(task.algorithm.sends)
        return 4.0 * (size - kept + size * received), 4.0 * (size - kept + size * sent)

    def _visited(self, task: Task, sizes: Floats) -> Floats:
        """Return how many samples each client goes through in all of its trainings of a round."""
        training, algorithm = self.context.training, task.algorithm
        batch = sizes if training.batch_size == "full" else np.minimum(training.batch_size, sizes)
        once = training.epochs * sizes if training.updates is None else training.updates * batch
        return algorithm.visited(once, sizes)

    def _timed(self, task: Task, updates: Updates) -> Updates:
        took, deadline = self.seconds(task, updates), self.settings.deadline
        late = [row for row, seconds in enumerate(took) if deadline is not None and seconds > deadline]
        if not late:
            return self._joined(task, replace(updates, simulated=task.waited + float(took.max(initial=0.0))))
        assert deadline is not None
        failures = [
            Failure(updates.clients[row], f"late: {took[row]:.4g} s, and clock.deadline = {deadline:g}") for row in late
        ]
        in_time = updates.select([row for row in range(len(took)) if row not in late], failures)
        joined = self._joined(task, replace(in_time, simulated=task.waited + deadline))
        if self.settings.late == "next":
            self._keep(task, updates, late)
        return joined

    def _keep(self, task: Task, updates: Updates, rows: Sequence[int]) -> None:
        payload = updates.payload
        assert isinstance(payload, DenseModels), "what hides updates stands around the clock"
        for row in rows:
            said: dict[str, Any] = {
                "samples": int(updates.samples[row]),
                "loss": float(updates.losses[row]),
                "criteria": {name: float(values[row]) for name, values in updates.criteria.items()},
                "steps": None if updates.steps is None else int(updates.steps[row]),
                "first_loss": None if updates.first_losses is None else float(updates.first_losses[row]),
                "labels": None if updates.label_counts is None else updates.label_counts[row].tolist(),
            }
            step = (payload.models[row] - task.parameters.to(payload.models.device)).cpu()
            self._late[task.federation, updates.clients[row]] = _Late(step, said)

    def _joined(self, task: Task, updates: Updates) -> Updates:
        """Add what came too late for the round before; a client that has answered since is heard once."""
        names = sorted(client for federation, client in self._late if federation == task.federation)
        found = {client: self._late.pop((task.federation, client)) for client in names}
        found = {client: late for client, late in found.items() if client not in updates.clients}
        if not found:
            return updates
        payload = updates.payload
        assert isinstance(payload, DenseModels)
        here = payload.models
        start = task.parameters.to(here.device)
        models = torch.cat([here, torch.stack([start + late.step.to(here.device) for late in found.values()])])
        said = [late.said for late in found.values()]

        def more(values: Any, name: str) -> Any:
            return None if values is None else np.concatenate([values, np.array([one[name] for one in said])])

        together = replace(
            updates,
            clients=(*updates.clients, *found),
            samples=more(updates.samples, "samples"),
            criteria={
                name: np.concatenate([values, [one["criteria"][name] for one in said]])
                for name, values in updates.criteria.items()
            },
            losses=more(updates.losses, "loss"),
            payload=DenseModels(models, payload.frozen),
            steps=more(updates.steps, "steps"),
            first_losses=more(updates.first_losses, "first_loss"),
            label_counts=more(updates.label_counts, "labels"),
            failures=tuple(failure for failure in updates.failures if failure.client not in found),
            late=dict.fromkeys(found, self.settings.discount),
        )
        return together.select(sorted(range(len(together.clients)), key=together.clients.__getitem__), [])

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        late = {json.dumps([KIND, *key, held.said]): held.step for key, held in sorted(self._late.items())}
        return {**self.clients.snapshot(), **late}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self._late.clear()
        for key, step in state.items():
            kind, *rest = json.loads(key)
            if kind == KIND:
                federation, client, said = rest
                self._late[federation, client] = _Late(step.cpu(), said)
        self.clients.restore(state)

    def describe(self) -> Mapping[str, str]:
        return {**self.clients.describe(), "clock": self.settings.model_dump_json(exclude_none=True)}
