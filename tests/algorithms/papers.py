"""The algorithms as their papers write them: one client after another, one step after another, in float64.

A least-squares problem, whose gradient is written out. Slow and readable; the product is held to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Vector = np.ndarray
RATE, MOMENTUM, EPOCHS = 0.05, 0.4, 2


@dataclass
class Federated:
    """What a server and its clients hold; every algorithm below is one round of it."""

    features: Mapping[str, np.ndarray]
    labels: Mapping[str, np.ndarray]
    model: Vector = field(default_factory=lambda: np.zeros(0))
    momentum: float = MOMENTUM
    kept: dict[str, dict[str, Vector]] = field(default_factory=dict)
    server: dict[str, Vector] = field(default_factory=dict)
    every_steps: dict[str, int] = field(default_factory=dict)
    """How many steps each client takes in a round, in the cohort or not."""
    held: dict[str, np.ndarray] = field(default_factory=dict)
    """Which rows each client keeps from training, where an algorithm has it test others' models."""
    own: dict[str, Vector] = field(default_factory=dict)
    """Where clients have models of their own: what each of them tests; who is not in here tests the server's model."""

    def gradient(self, client: str, model: Vector, rows: np.ndarray | slice = slice(None)) -> Vector:
        x, y = self.features[client][rows], self.labels[client][rows]
        return 2 * x.T @ (x @ model - y) / len(y)

    def error(self, client: str, rows: int) -> float:
        """The mean squared error of what a client tests, on so many of its rows."""
        x, y = self.features[client][:rows], self.labels[client][:rows]
        return float(np.mean((x @ self.own.get(client, self.model) - y) ** 2))

    def weights(self, cohort: Sequence[str]) -> dict[str, float]:
        total = sum(len(self.labels[client]) for client in cohort)
        return {client: len(self.labels[client]) / total for client in cohort}

    def local(
        self,
        client: str,
        steps: int,
        gradient: Callable[[Vector], Vector],
        after: Vector | float = 0.0,
        start: Vector | None = None,
    ) -> Vector:
        """Heavy-ball steps along a gradient; `after` is added to each step, behind the momentum."""
        model, velocity = (self.model if start is None else start).copy(), np.zeros_like(self.model)
        for _ in range(steps):
            velocity = self.momentum * velocity + gradient(model)
            model = model - RATE * (velocity + after)
        return model

    def plain(self, cohort: Sequence[str], steps: Mapping[str, int]) -> dict[str, Vector]:
        return {c: self.local(c, steps[c], lambda m, c=c: self.gradient(c, m)) for c in cohort}

    def average(self, cohort: Sequence[str], models: Mapping[str, Vector]) -> Vector:
        weights = self.weights(cohort)
        return sum(weights[client] * models[client] for client in cohort)  # type: ignore[return-value]


def fedavg(run: Federated, cohort: Sequence[str], steps: Mapping[str, int]) -> None:
    run.model = run.average(cohort, run.plain(cohort, steps))


def fedprox(run: Federated, cohort: Sequence[str], steps: Mapping[str, int], mu: float = 0.3) -> None:
    centre = run.model
    models = {c: run.local(c, steps[c], lambda m, c=c: run.gradient(c, m) + mu * (m - centre)) for c in cohort}
    run.model = run.average(cohort, models)


def scaffold(run: Federated, cohort: Sequence[str], steps: Mapping[str, int], server_rate: float = 0.8) -> None:
    nothing = np.zeros_like(run.model)
    control = run.server.get("c", nothing)
    weights, moved, changed = run.weights(cohort), nothing, nothing
    for client in cohort:
        own = run.kept.get(client, {}).get("c", nothing)
        model = run.local(client, steps[client], lambda m, c=client: run.gradient(c, m), control - own)
        fresh = own - control + (run.model - model) / (steps[client] * RATE)
        moved = moved + weights[client] * (model - run.model)
        changed = changed + weights[client] * (fresh - own)
        run.kept[client] = {"c": fresh}
    run.model = run.model + server_rate * moved
    run.server["c"] = control + len(cohort) / len(run.features) * changed


def feddyn(run: Federated, cohort: Sequence[str], steps: Mapping[str, int], alpha: float = 0.2) -> None:
    nothing, centre, models = np.zeros_like(run.model), run.model, {}
    for client in cohort:
        own = run.kept.get(client, {}).get("g", nothing)
        models[client] = run.local(
            client, steps[client], lambda m, c=client, g=own: run.gradient(c, m) - g + alpha * (m - centre)
        )
        run.kept[client] = {"g": own - alpha * (models[client] - centre)}
    average = run.average(cohort, models)
    h = run.server.get("h", nothing) - alpha * len(cohort) / len(run.features) * (average - centre)
    run.server["h"] = h
    run.model = average - h / alpha


def client_momentum(run: Federated, cohort: Sequence[str], steps: Mapping[str, int], beta: float = 0.6) -> None:
    """Algorithm 2 of Karimireddy, He, Jaggi 2021, lines 6 and 7, with a whole local training for a gradient."""
    models = run.plain(cohort, steps)
    for client in cohort:
        update = models[client] - run.model
        before = run.kept.get(client, {}).get("m")
        run.kept[client] = {"m": update if before is None else beta * before + (1 - beta) * update}
    run.model = run.average(cohort, {client: run.model + run.kept[client]["m"] for client in cohort})


def fednova(run: Federated, cohort: Sequence[str], steps: Mapping[str, int]) -> None:
    models, weights = run.plain(cohort, steps), run.weights(cohort)
    # How often each gradient counts, added up: the gradient of step k counts momentum^0 + … + momentum^(τ − k).
    counts = {
        c: sum(run.momentum**later for k in range(1, steps[c] + 1) for later in range(steps[c] - k + 1)) for c in cohort
    }
    effective = sum(weights[c] * counts[c] for c in cohort)
    run.model = run.model + effective * sum(weights[c] * (models[c] - run.model) / counts[c] for c in cohort)


def fedavgm(run: Federated, cohort: Sequence[str], steps: Mapping[str, int]) -> None:
    change = run.average(cohort, run.plain(cohort, steps)) - run.model
    run.server["v"] = 0.7 * run.server.get("v", np.zeros_like(change)) + change
    run.model = run.model + 0.9 * run.server["v"]


def _adaptive(run: Federated, cohort: Sequence[str], steps: Mapping[str, int], first: float, follow: Callable) -> None:
    change = run.average(cohort, run.plain(cohort, steps)) - run.model
    mean = first * run.server.get("m", np.zeros_like(change)) + (1 - first) * change
    square = follow(run.server.get("v", np.full_like(change, 0.01**2)), change**2)
    run.server |= {"m": mean, "v": square}
    run.model = run.model + 0.2 * mean / (np.sqrt(square) + 0.01)


def fedadam(run: Federated, cohort: Sequence[str], steps: Mapping[str, int]) -> None:
    _adaptive(run, cohort, steps, 0.9, lambda v, d: 0.99 * v + 0.01 * d)


def fedyogi(run: Federated, cohort: Sequence[str], steps: Mapping[str, int]) -> None:
    _adaptive(run, cohort, steps, 0.9, lambda v, d: v - 0.01 * d * np.sign(v - d))


def fedadagrad(run: Federated, cohort: Sequence[str], steps: Mapping[str, int]) -> None:
    _adaptive(run, cohort, steps, 0.0, lambda v, d: v + d)


def fedexp(run: Federated, cohort: Sequence[str], steps: Mapping[str, int]) -> None:
    models, weights = run.plain(cohort, steps), run.weights(cohort)
    change = sum(weights[c] * (models[c] - run.model) for c in cohort)
    spread = sum(weights[c] * np.sum((models[c] - run.model) ** 2) for c in cohort)
    run.model = run.model + max(1.0, spread / (2 * (np.sum(change**2) + 0.001))) * change


def local_only(run: Federated, cohort: Sequence[str], steps: Mapping[str, int]) -> None:
    for client in cohort:
        start = run.own.get(client, run.model)
        run.own[client] = run.local(client, steps[client], lambda m, c=client: run.gradient(c, m), start=start)


def fine_tuned(run: Federated, cohort: Sequence[str], steps: Mapping[str, int]) -> None:
    fedavg(run, cohort, steps)
    # Everybody trains before the test, not the cohort alone; all have rows enough for as many steps as their size says.
    run.own = run.plain(list(run.features), run.every_steps)


def ditto(run: Federated, cohort: Sequence[str], steps: Mapping[str, int], strength: float = 0.7) -> None:
    received = run.model.copy()
    fedavg(run, cohort, steps)
    for client in cohort:
        start = run.own.get(client, received)
        run.own[client] = run.local(
            client,
            steps[client],
            lambda m, c=client: run.gradient(c, m) + strength * (m - received),
            start=start,
        )


def apfl(run: Federated, cohort: Sequence[str], steps: Mapping[str, int], alpha: float = 0.4) -> None:
    received, models = run.model.copy(), {}
    for client in cohort:
        kept = run.kept.get(client, {"v": received, "alpha": np.array(alpha)})
        w, v, mixture = received, kept["v"], float(kept["alpha"])
        velocities = [np.zeros_like(w), np.zeros_like(w)]
        for step in range(steps[client]):
            at_mixture = run.gradient(client, mixture * v + (1 - mixture) * w)
            gradients = run.gradient(client, w), mixture * at_mixture
            if step == 0:
                mixture = float(np.clip(mixture - RATE * (v - w) @ at_mixture, 0, 1))
            velocities = [run.momentum * old + new for old, new in zip(velocities, gradients, strict=True)]
            w, v = w - RATE * velocities[0], v - RATE * velocities[1]
        models[client] = w
        run.kept[client] = {"v": v, "alpha": np.array(mixture)}
    run.model = run.average(cohort, models)
    for client, kept in run.kept.items():
        run.own[client] = kept["alpha"] * kept["v"] + (1 - kept["alpha"]) * run.model


def fedala(run: Federated, cohort: Sequence[str], steps: Mapping[str, int]) -> None:
    received, models = run.model.copy(), {}
    for client in cohort:
        kept = run.kept.get(client, {"model": received, "weights": np.ones_like(received)})
        change, weights, losses = received - kept["model"], kept["weights"], list[float]()
        while np.any(change):
            loss = 0.0
            for _ in range(steps[client] // EPOCHS):
                mixed = kept["model"] + change * weights
                x, y = run.features[client], run.labels[client]
                loss = float(np.mean((x @ mixed - y) ** 2))
                weights = np.clip(weights - 0.5 * run.gradient(client, mixed) * change, 0, 1)
            losses.append(loss)
            settled = len(losses) > 10 and np.std(losses[-10:]) < 1e-4
            if settled or len(losses) == 100 or "learnt" in kept:
                kept["learnt"] = np.ones(1)
                break
        start = kept["model"] + change * weights
        models[client] = run.local(client, steps[client], lambda m, c=client: run.gradient(c, m), start=start)
        run.kept[client] = {**kept, "model": models[client], "weights": weights}
    run.model = run.average(cohort, models)
    for client, kept in run.kept.items():
        run.own[client] = kept["model"] + (run.model - kept["model"]) * kept["weights"]


def fedfomo(run: Federated, cohort: Sequence[str], steps: Mapping[str, int]) -> None:
    trained, last = {}, {c: run.kept.get(c, {"last": run.model})["last"] for c in cohort}
    for client in cohort:
        start, rows = run.own.get(client, run.model), np.delete(np.arange(len(run.labels[client])), run.held[client])
        trained[client] = run.local(
            client, steps[client], lambda m, c=client, r=rows: run.gradient(c, m, r), start=start
        )
    for client in cohort:
        x, y = (each[client][run.held[client]] for each in (run.features, run.labels))
        moves = np.stack([trained[other] - last[client] for other in cohort])
        losses = np.mean(((moves + last[client]) @ x.T - y) ** 2, axis=1)
        gains = np.maximum(0, (np.mean((x @ last[client] - y) ** 2) - losses) / np.linalg.norm(moves, axis=1))
        run.own[client] = last[client] + gains @ moves / (gains.sum() or 1)
        run.kept[client] = {"last": trained[client]}
    run.model = run.average(cohort, trained)
