"""Calling a model that may be a user's own: what it does wrong is one line."""

from __future__ import annotations

import torch
from torch import nn

from steelyard.base.errors import UserError, fault


def outputs_of(module: nn.Module, features: torch.Tensor) -> torch.Tensor:
    """Return what a model makes of some samples, [samples, outputs]; use it wherever a user's module is called."""
    when = "while it trains" if module.training else "while it is tested"
    try:
        found = module(features)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the user's module does
        shape = tuple(features.shape[1:])
        raise UserError(
            f"model.name: the model fails {when}, on {len(features)} samples of shape {shape}: {fault(error)}"
        ) from error
    if not isinstance(found, torch.Tensor) or found.dim() != 2 or len(found) != len(features):
        shown = f"shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise UserError(
            f"model.name: the model returned {shown} {when}, for {len(features)} samples; "
            "allowed: one tensor [samples, outputs], in training as in tests"
        )
    return found
