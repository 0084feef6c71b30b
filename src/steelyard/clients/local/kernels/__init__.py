"""Triton kernels of the convolutional network for stacked clients; they come with torch's CUDA builds."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

_launch: Any = None
with suppress(ImportError):
    _launch = import_module("steelyard.clients.local.kernels.launch")


def ready(device: torch.device) -> bool:
    """Whether Triton is there and can work on this device (its interpreter takes CPU tensors; the tests use it)."""
    return _launch is not None and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
