"""Playing the curious server on digits: what it reads of a client's samples, with and without noise or aggregation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from steelyard.data import load
from steelyard.data.settings import DataSettings
from steelyard.learning.inversion import gradient, likeness, read_off, search
from steelyard.learning.models import build
from steelyard.learning.settings import ModelSettings
from steelyard.privacy.central import noisy_sum
from steelyard.privacy.mechanisms import gaussian_noise
from steelyard.privacy.source import Source, SystemSource
from steelyard.randomness import generator

READ = 0.99
"""A sample whose correlation with what was found is above this counts as read; class means reach 0.9 by themselves."""
DELTA = 1e-5


@dataclass(frozen=True)
class Protection:
    """What stands between a client's gradient and the server."""

    name: str
    epsilon: float | None = None
    """Noise on the device for this ε in one round; None: no noise."""
    clients: int = 1
    """The server sees the sum of so many clients only."""


PROTECTIONS = (
    Protection("none"),
    Protection("sum of 10 clients", clients=10),
    Protection("sum of 100 clients", clients=100),
    Protection("local noise, ε = 100", epsilon=100.0),
    Protection("local noise, ε = 10", epsilon=10.0),
    Protection("local noise, ε = 1", epsilon=1.0),
)


def audit_inversion(
    batches: Sequence[int] = (1, 4), tries: int = 20, steps: int = 300, seed: int = 0, source: Source | None = None
) -> list[dict[str, Any]]:
    """Attack clients of digits, a linear model and an MLP; one entry per model, batch and protection.

    `likeness` is the mean correlation of each sample with the nearest one that was found, `read` the share above 0.99;
    the control "guess" is the mean image of the sample's class, for which nothing need be sent.
    """
    dataset = load(DataSettings(source="digits"))
    rows = dataset.features.reshape(len(dataset), -1).to(torch.float32)
    rows = (rows - rows.min()) / (rows.max() - rows.min()).clamp(min=1e-12)
    labels = dataset.labels.to(torch.int64)
    found: list[dict[str, Any]] = []
    for name, settings in (
        ("linear", ModelSettings(name="logistic")),
        ("MLP", ModelSettings(name="mlp", hidden=(32,))),
    ):
        model = build(settings, torch.Size(rows.shape[1:]), dataset.classes, seed)
        for batch in batches:
            found.append(_guess(name, rows, labels, batch, tries, seed))
            for protection in PROTECTIONS:
                # The search costs seconds a try; what is read off costs nothing.
                ways = ("analytic", "search") if name == "MLP" and steps else ("analytic",)
                for way in ways:
                    count = tries if way == "analytic" else max(1, tries // 5)
                    values = [
                        _attack(model, rows, labels, batch, protection, way, steps, seed + number, source)
                        for number in range(count)
                    ]
                    together = np.concatenate(values)
                    found.append(
                        {
                            "model": name,
                            "samples": batch,
                            "attack": way,
                            "protection": protection.name,
                            "likeness": float(together.mean()),
                            "read": float((together > READ).mean()),
                            "tries": count,
                        }
                    )
    return found


def _guess(model: str, rows: torch.Tensor, labels: torch.Tensor, batch: int, tries: int, seed: int) -> dict[str, Any]:
    """Return the control: the mean image of a sample's class, which anybody can guess without seeing an update."""
    means = torch.stack([rows[labels == label].mean(dim=0) for label in range(int(labels.max()) + 1)])
    values: list[np.ndarray] = []
    for number in range(tries):
        picked = torch.from_numpy(
            generator(seed + number, purpose="audit").choice(len(rows), size=batch, replace=False)
        )
        pairs = [likeness(means[labels[row]][None], rows[row][None]) for row in picked]
        values.append(torch.cat(pairs).numpy())
    together = np.concatenate(values)
    return {
        "model": model,
        "samples": batch,
        "attack": "guess",
        "protection": "nothing is sent",
        "likeness": float(together.mean()),
        "read": float((together > READ).mean()),
        "tries": tries,
    }


def _attack(
    model: nn.Module,
    rows: torch.Tensor,
    labels: torch.Tensor,
    batch: int,
    protection: Protection,
    way: str,
    steps: int,
    seed: int,
    source: Source | None,
) -> np.ndarray:
    """Return the likeness of each of a client's samples to what the server finds."""
    picked = generator(seed, purpose="audit").choice(len(rows), size=batch * protection.clients, replace=False)
    chosen = torch.from_numpy(picked)
    each = [gradient(model, rows[mine], labels[mine]) for mine in chosen.split(batch)]
    told = [torch.stack(parts).mean(dim=0) for parts in zip(*each, strict=True)]
    if protection.epsilon is not None:
        told = _noised(told, protection.epsilon, source or SystemSource())
    mine = rows[chosen[:batch]]
    if way == "search":
        found = search(model, told, tuple(rows.shape[1:]), labels[chosen[:batch]], steps, seed)
    else:
        found = read_off(told[0], told[1])[None]
    return likeness(found, mine).numpy()


def _noised(parts: list[torch.Tensor], epsilon: float, source: Source) -> list[torch.Tensor]:
    """Return a gradient as a device with local noise would send it: clipped to its own length, the kindest clip."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    clip = float(flat.norm())
    deviation = gaussian_noise(epsilon, DELTA) * 2.0 * clip
    sent = noisy_sum(flat[None], torch.zeros_like(flat), np.ones(1), clip, deviation, source)
    return [part.reshape(like.shape) for part, like in zip(sent.split([p.numel() for p in parts]), parts, strict=True)]
