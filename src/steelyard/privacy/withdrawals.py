"""What a client looks at before it hides its update: whether it can be written down at all."""

from __future__ import annotations

import torch

_BLOCK = 1 << 18


def beyond(models: torch.Tensor, parameters: torch.Tensor, bound: float) -> list[str | None]:
    """Say of each client's model why its update cannot be hidden, or None where it can: [clients, parameters].

    Each client does this for itself; one that cannot write its update down says so and takes no part in the round,
    instead of sending something else than what it learnt.
    """
    largest = torch.zeros(len(models), dtype=torch.float64)
    start = parameters.to(models.device)
    for begin in range(0, parameters.numel(), _BLOCK):
        step = models[:, begin : begin + _BLOCK].to(torch.float64) - start[begin : begin + _BLOCK].to(torch.float64)
        # amax keeps NaN, and so does maximum.
        largest = torch.maximum(largest, step.abs().amax(dim=1).cpu())
    return [
        None
        if size <= bound
        else f"its update changes a parameter by {size:.3g}; allowed: at most {bound:g} (privacy.aggregation.bound)"
        if size < float("inf")
        else "model holds NaN or infinity"
        for size in largest.tolist()
    ]
