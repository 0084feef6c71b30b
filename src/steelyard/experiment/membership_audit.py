"""Membership inference on digits: was this sample among those that a client trained on?

The curious server holds a sample and asks whether the client's update contains it: a sample that was trained on pulled
the update along its own gradient. Its score is the part of what was sent that lies along that gradient (the attack of
M. Nasr, R. Shokri, A. Houmansadr: "Comprehensive Privacy Analysis of Deep Learning", S&P 2019, without learning it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import torch

from steelyard.experiment.privacy_audit import PROTECTIONS, Protection, Victims, picked, sent, victims
from steelyard.learning.inversion import gradient
from steelyard.messages.updates import Floats
from steelyard.privacy.noise import Source

STRANGERS = 100
"""Samples that nobody trained on, for each client that is attacked."""


class MembershipRow(TypedDict):
    """Membership inference on one kind of client under one protection."""

    model: str
    samples: int
    protection: str
    ranked: float
    found: float
    tries: int


def audit_membership(
    batches: Sequence[int] = (4, 16), tries: int = 20, source: Source | None = None
) -> list[MembershipRow]:
    """Attack clients of digits, a linear model and an MLP; one entry per model, batch and protection.

    `ranked` is how often a sample of the client's scores above one that nobody trained on (0.5 by guessing), `found`
    the share of its samples that score above 99 of 100 such strangers (0.01 by guessing).
    """
    held = victims()
    found: list[MembershipRow] = []
    for model in held.models:
        for batch in batches:
            scored = [_scored(held, model, batch, number, source) for number in range(tries)]
            for index, protection in enumerate(PROTECTIONS):
                members = [mine[index] for mine, _ in scored]
                strangers = [others[index] for _, others in scored]
                found.append(_entry(model, batch, protection, members, strangers))
    return found


def _scored(
    held: Victims, model: str, batch: int, seed: int, source: Source | None
) -> tuple[list[Floats], list[Floats]]:
    """Return the scores of a client's samples and of strangers, under each protection."""
    most = max(protection.clients for protection in PROTECTIONS)
    # Strangers are drawn after all that take part in the largest sum, so that nobody trained on them.
    drawn = picked(held, batch * most + STRANGERS, seed)
    candidates = torch.cat([drawn[:batch], drawn[-STRANGERS:]])
    net = held.models[model]
    each = [_flat(gradient(net, held.rows[[row]], held.labels[[row]])) for row in candidates.tolist()]
    directions = torch.stack([one / one.norm().clamp(min=1e-12) for one in each])
    members, strangers = list[Floats](), list[Floats]()
    for protection in PROTECTIONS:
        clients = drawn[: batch * protection.clients].split(batch)
        scores = (directions @ _flat(sent(held, model, clients, protection, source))).numpy()
        members.append(scores[:batch].astype(np.float64))
        strangers.append(scores[batch:].astype(np.float64))
    return members, strangers


def _flat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _entry(
    model: str, batch: int, protection: Protection, members: list[Floats], strangers: list[Floats]
) -> MembershipRow:
    ranked = [np.mean(mine[:, None] > others[None]) for mine, others in zip(members, strangers, strict=True)]
    limits = [np.quantile(others, 0.99, method="higher") for others in strangers]
    beyond = [np.mean(mine > limit) for mine, limit in zip(members, limits, strict=True)]
    return {
        "model": model,
        "samples": batch,
        "protection": protection.name,
        "ranked": float(np.mean(ranked)),
        "found": float(np.mean(beyond)),
        "tries": len(members),
    }
