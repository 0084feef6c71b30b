"""The steps of local optimisers in Triton kernels against torch's operators, on whatever device."""

from __future__ import annotations

import torch

from steelyard.clients.local.kernels import KernelDescent
from steelyard.learning.descent import Descent


def steps(device: str) -> None:
    """Three steps of each optimiser; one client is done before the others."""
    for optimiser, rate in (("adam", 0.01), ("adadelta", 1.0)):
        descent = Descent(rate, 0.0, 0.01, optimiser, 0.2)
        results: list[list[torch.Tensor]] = []
        for each in (descent, KernelDescent.like(descent)):
            draw = torch.Generator().manual_seed(5)
            models = torch.randn(3, 2100, generator=draw).to(device)
            memory, start = each.remember(models), models.clone()
            for number in range(3):
                gradients = torch.randn(3, 2100, generator=draw).to(device)
                rates = torch.tensor([rate, rate, rate if number < 2 else 0.0], device=device)
                each.apply(models, gradients, memory, start, torch.tensor([number], device=device), rates)
            results.append([models, *memory])
        for found, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
