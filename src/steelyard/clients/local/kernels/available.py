"""Whether the Triton kernels can be used here; Triton comes with torch's CUDA builds."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from steelyard.clients.local.convolution.keras import KerasSteps
    from steelyard.clients.local.convolution.stacked import ConvSteps
    from steelyard.clients.local.kernels.steps import KernelSteps
    from steelyard.learning.descent import Descent

_triton: Any = None
with suppress(ImportError):
    _triton = import_module("triton")
AMPERE = (8, 0)
"""The first generation whose matrix units take TF32 and bfloat16."""


def ready(device: torch.device) -> bool:
    """Whether Triton is there and can work on this device (its interpreter takes CPU tensors; the tests use it)."""
    if _triton is None:
        return False
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= AMPERE
    return os.environ.get("TRITON_INTERPRET") == "1"


def kernel_steps(steps: ConvSteps, descent: Descent, precision: str, device: torch.device) -> KernelSteps | None:
    """Return the steps through kernels of our own, or None where these do not fit the network or the device.

    Use it wherever a network is trained or tested on a GPU; torch's operators do what is left.
    """
    if not ready(device):
        return None
    # Late, for speed of start and because it imports Triton, which is not everywhere.
    from steelyard.clients.local.kernels.steps import KernelSteps

    found = KernelSteps(steps, descent, precision)
    return found if found.fits else None


def kernel_descent(descent: Descent, device: torch.device) -> Descent:
    """Return the same local optimiser with its steps in one kernel, or as it is where there is no Triton."""
    if not ready(device):
        return descent
    from steelyard.clients.local.kernels.descent import KernelDescent  # For speed of start; it imports Triton.

    return KernelDescent.like(descent)


def kernel_passes(steps: KerasSteps, device: torch.device) -> None:
    """Let steps go through our own kernels between their products, where there is Triton."""
    if ready(device):
        from steelyard.clients.local.kernels.passes import KernelPasses  # For speed of start; it imports Triton.

        steps.passes = KernelPasses()
