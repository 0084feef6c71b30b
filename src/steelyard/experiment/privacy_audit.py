"""Playing the curious server on digits: what it reads of a client's samples, with and without noise or aggregation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np
import torch
from torch import nn

from steelyard.base.randomness import generator
from steelyard.data import DataSettings, load
from steelyard.learning.inversion import gradient, likeness, read_off, search
from steelyard.learning.models import build
from steelyard.learning.settings import ModelSettings
from steelyard.messages.updates import Floats
from steelyard.privacy.accounting import gaussian_noise
from steelyard.privacy.clipping import noisy_sum
from steelyard.privacy.noise import Source, SystemSource

Way = Literal["analytic", "search"]
READ = 0.99
"""A sample whose correlation with what was found is above this counts as read; the mean image of a class, which nobody
need send, has 0.82 with its samples on average."""
DELTA = 1e-5


@dataclass(frozen=True)
class Protection:
    """What stands between a client's gradient and the server."""

    name: str
    epsilon: float | None = None
    """Noise on the device for this ε in one round; None: no noise."""
    clients: int = 1
    """The server sees the sum of so many clients only."""


@dataclass(frozen=True)
class Attack:
    """One way to attack one kind of client."""

    model: str
    samples: int
    way: Way

    @property
    def name(self) -> str:
        """The attack in words."""
        count = "1 sample" if self.samples == 1 else f"{self.samples} samples"
        return f"{self.model}, {count}, {'read off' if self.way == 'analytic' else 'search'}"


PROTECTIONS = (
    Protection("none"),
    Protection("sum of 10 clients", clients=10),
    Protection("sum of 100 clients", clients=100),
    Protection("local noise, ε = 100", epsilon=100.0),
    Protection("local noise, ε = 10", epsilon=10.0),
    Protection("local noise, ε = 1", epsilon=1.0),
)


@dataclass(frozen=True, eq=False)
class Victims:
    """The digits that clients hold, between 0 and 1, and the models that they train; make it with `victims`."""

    rows: torch.Tensor
    labels: torch.Tensor
    models: Mapping[str, nn.Module]

    def means(self) -> torch.Tensor:
        """Return the mean image of each class, which anybody can guess without seeing an update."""
        count = int(self.labels.max()) + 1
        return torch.stack([self.rows[self.labels == label].mean(dim=0) for label in range(count)])


def victims() -> Victims:
    """Load digits and build a linear model and an MLP with their first parameters."""
    dataset = load(DataSettings(source="digits"))
    rows = dataset.features.reshape(len(dataset), -1).to(torch.float32)
    rows = (rows - rows.min()) / (rows.max() - rows.min()).clamp(min=1e-12)
    kinds = {"linear": ModelSettings(name="logistic"), "MLP": ModelSettings(name="mlp", hidden=(32,))}
    models = {name: build(kind, torch.Size(rows.shape[1:]), dataset.classes, 0) for name, kind in kinds.items()}
    return Victims(rows, dataset.labels.to(torch.int64), models)


class InversionRow(TypedDict):
    """One attack on one kind of client under one protection; the correlation with what is found, the share read."""

    model: str
    samples: int
    attack: str
    protection: str
    likeness: float
    read: float
    tries: int


def audit_inversion(
    batches: Sequence[int] = (1, 4), tries: int = 20, steps: int = 300, source: Source | None = None
) -> list[InversionRow]:
    """Attack clients of digits, a linear model and an MLP; one entry per model, batch and protection.

    `likeness` is the mean correlation of each sample with the nearest one that was found, `read` the share above 0.99;
    the control "guess" is the mean image of the sample's class, for which nothing need be sent.
    """
    held = victims()
    found: list[InversionRow] = []
    for name in held.models:
        for batch in batches:
            found.append(_entry(name, batch, "guess", "nothing is sent", guess(held, batch, tries), tries))
            for protection in PROTECTIONS:
                # The search costs seconds a try; what is read off costs nothing.
                ways: tuple[Way, ...] = ("analytic", "search") if name == "MLP" and steps else ("analytic",)
                for way in ways:
                    count = tries if way == "analytic" else max(1, tries // 5)
                    values = attack_many(held, Attack(name, batch, way), protection, count, steps, source)
                    found.append(_entry(name, batch, way, protection.name, values, count))
    return found


def _entry(model: str, batch: int, attack: str, protection: str, values: Floats, tries: int) -> InversionRow:
    return {
        "model": model,
        "samples": batch,
        "attack": attack,
        "protection": protection,
        "likeness": float(values.mean()),
        "read": float((values > READ).mean()),
        "tries": tries,
    }


def guess(held: Victims, batch: int, tries: int) -> Floats:
    """Return the control: how alike each sample is to the mean image of its class."""
    means = held.means()
    values: list[Floats] = []
    for number in range(tries):
        chosen = picked(held, batch, number)
        pairs = [likeness(means[held.labels[row]][None], held.rows[row][None]) for row in chosen]
        values.append(torch.cat(pairs).numpy())
    return np.concatenate(values)


def attack_many(
    held: Victims, attack: Attack, protection: Protection, tries: int, steps: int, source: Source | None = None
) -> Floats:
    """Attack several clients and return the likeness of each of their samples to what the server finds."""
    found = [attack_one(held, attack, protection, steps, number, source) for number in range(tries)]
    return np.concatenate([likeness(images, samples).numpy() for images, samples in found])


def attack_one(
    held: Victims, attack: Attack, protection: Protection, steps: int, seed: int, source: Source | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the server finds from one client's update, and the client's samples: [samples, pixels] each."""
    net, rows, labels = held.models[attack.model], held.rows, held.labels
    chosen = picked(held, attack.samples * protection.clients, seed)
    gradient = sent(held, attack.model, chosen.split(attack.samples), protection, source)
    mine = chosen[: attack.samples]
    if attack.way == "search":
        return search(net, gradient, tuple(rows.shape[1:]), labels[mine], steps, seed), rows[mine]
    return read_off(gradient[0], gradient[1])[None], rows[mine]


def sent(
    held: Victims, model: str, clients: Sequence[torch.Tensor], protection: Protection, source: Source | None = None
) -> list[torch.Tensor]:
    """Return what the server sees of clients with these rows: the mean of their gradients, with noise or without."""
    net = held.models[model]
    each = [gradient(net, held.rows[mine], held.labels[mine]) for mine in clients]
    mean = [torch.stack(parts).mean(dim=0) for parts in zip(*each, strict=True)]
    return mean if protection.epsilon is None else _noised(mean, protection.epsilon, source or SystemSource())


def picked(held: Victims, count: int, seed: int) -> torch.Tensor:
    """Return the rows that an audit with this seed looks at, no row twice."""
    return torch.from_numpy(generator(seed, purpose="audit").choice(len(held.rows), size=count, replace=False))


def _noised(parts: list[torch.Tensor], epsilon: float, source: Source) -> list[torch.Tensor]:
    """Return a gradient as a device with local noise would send it: clipped to its own length, the kindest clip."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    clip = float(flat.norm())
    deviation = gaussian_noise(epsilon, DELTA) * 2.0 * clip
    sent = noisy_sum(flat[None], torch.zeros_like(flat), np.ones(1), clip, deviation, source)
    return [part.reshape(like.shape) for part, like in zip(sent.split([p.numel() for p in parts]), parts, strict=True)]
