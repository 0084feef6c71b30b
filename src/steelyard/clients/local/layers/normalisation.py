"""Batch norm for stacks: short batches are padded there, so that the padding must not be counted."""

from __future__ import annotations

from math import prod

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]


class MaskedBatchNorm(nn.Module):
    """nn.BatchNorm over the samples of a batch that are no padding, without a change of its own buffers.

    What trains it gives `valid` [samples], above 0 for a sample that counts, and takes the running mean and variance
    after the step from `fresh`.
    """

    valid: torch.Tensor
    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        self.eps, self.momentum = layer.eps, layer.momentum or 0.0
        self.weight: nn.Parameter | None = layer.weight
        self.bias = layer.bias
        self.register_buffer("running_mean", layer.running_mean)
        self.register_buffer("running_var", layer.running_var)
        self.register_buffer("valid", torch.ones(1), persistent=False)
        self.fresh: tuple[torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def takes(layer: _BatchNorm) -> bool:
        """Whether this layer keeps running means with a fixed share for the newest batch, as torch does unasked."""
        return layer.track_running_stats and layer.momentum is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind, x = x.dtype, x.float()
        rest = (1,) * (x.dim() - 2)
        counted = (self.valid > 0).float().view(-1, 1, *rest)
        axes = (0, *range(2, x.dim()))
        count = (counted.sum() * prod(x.shape[2:])).clamp(min=1)
        mean = (x * counted).sum(axes) / count
        centred = x - mean.view(-1, *rest)
        variance = (centred * centred * counted).sum(axes) / count
        unbiased = variance * count / (count - 1).clamp(min=1)
        self.fresh = (
            torch.lerp(self.running_mean, mean.detach(), self.momentum),
            torch.lerp(self.running_var, unbiased.detach(), self.momentum),
        )
        found = centred * torch.rsqrt(variance + self.eps).view(-1, *rest)
        if self.weight is not None:
            found = found * self.weight.view(-1, *rest) + self.bias.view(-1, *rest)
        return found.to(kind)
