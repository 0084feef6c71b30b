"""The clock of simulated devices: how long each takes, who is late, and what becomes of late updates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from steelyard.base import randomness
from steelyard.clients.local.context import SimulationContext
from steelyard.clients.local.settings import ClockSettings
from steelyard.clients.protocol import Sending, Step
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Failure, Floats, Task, Updates

LATE = "late"


class Clock(Step[Sending]):
    """Simulated devices' work takes simulated time.

        t = bytes down / download + slowdown · (samples visited · sample_seconds + bytes up / upload)

    with slowdown 1 but for stragglers. A round lasts as long as its slowest client, or until the deadline where
    somebody is late. A late update is dropped, or joins the next round as a step from the model of then:
    Θ + (θ_late − Θ_old), its weight multiplied by the discount.

        Facts of each device (`sample_seconds`, `download`, `upload` under [facts.device]) go before those of [clock].
    """

    name = "clock"

    def __init__(self, context: SimulationContext, settings: ClockSettings) -> None:
        self.context, self.settings = context, settings
        self._late: dict[tuple[str, str], Updates] = {}
        """By federation and client: what came too late for the last round; its payload is the client's step."""

    def out(self, sending: Sending) -> None:
        sending.updates = self._timed(sending.task, sending.updates)

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
        size, models = len(task.parameters), updates.payload.dense
        kept = sum(end - begin for begin, end in models.frozen) if models is not None else 0
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
        for row in rows:
            late = updates.select([row], [])
            models = models_of(late)
            step = (models - task.parameters.to(models.device)).cpu()
            self._late[task.federation, updates.clients[row]] = replace(late, failures=(), payload=DenseModels(step))

    def _joined(self, task: Task, updates: Updates) -> Updates:
        """Add what came too late for the round before; a client that has answered since is heard once."""
        names = sorted(client for federation, client in self._late if federation == task.federation)
        found = {client: self._late.pop((task.federation, client)) for client in names}
        found = {client: late for client, late in found.items() if client not in updates.clients}
        if not found:
            return updates
        here, payload = models_of(updates), updates.payload.dense
        start = task.parameters.to(here.device)
        models = torch.cat([here, *(start + models_of(late).to(here.device) for late in found.values())])
        frozen = () if payload is None else payload.frozen
        failures = [failure for failure in updates.failures if failure.client not in found]
        answers = [updates, *found.values()]
        together = Updates.joined(task, answers, failures, lambda order: DenseModels(models[order], frozen))
        late = dict.fromkeys(found, self.settings.discount)
        return replace(together, late=late, simulated=updates.simulated)

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        return {
            json.dumps([LATE, *key, held.round, held.write()]): models_of(held)[0]
            for key, held in sorted(self._late.items(), key=lambda each: each[0])
        }

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self._late.clear()
        for key, step in state.items():
            kind, *rest = json.loads(key)
            if kind == LATE:
                federation, client, round, written = rest
                step = DenseModels(step.cpu()[None])
                late = Updates(federation, round, (client,), payload=step, **Updates.read(written))
                self._late[federation, client] = late

    def describe(self) -> Mapping[str, str]:
        return {"clock": self.settings.model_dump_json(exclude_none=True)}


def models_of(updates: Updates) -> torch.Tensor:
    """Return single models; whoever hides them comes last."""
    models = updates.payload.dense
    assert models is not None
    return models.models
