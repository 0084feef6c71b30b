"""Which part of its machine a rank uses: a device, threads and memory of its own."""

from __future__ import annotations

import math

import torch

from steelyard.clients.local.hardware import device_of, memory_of, threads_of
from steelyard.clients.local.settings import ComputeSettings
from steelyard.clients.ranks.group import Place


def on_rank(compute: ComputeSettings, place: Place) -> ComputeSettings:
    """Return the settings for one of several processes of a machine: what is given stays, the rest is shared out.

    The ranks of a machine take its CUDA devices in turn, unless one is named.
    """
    changes: dict[str, object] = {}
    sharing = place.local_count
    device = device_of(compute)
    if device.type == "cuda" and compute.device in ("auto", "cuda"):
        devices = torch.cuda.device_count()
        device = torch.device("cuda", place.local_rank % devices)
        changes["device"] = str(device)
        sharing = math.ceil(place.local_count / devices)
    if compute.threads is None:
        changes["threads"] = max(1, threads_of(compute) // place.local_count)
    if compute.memory_gb is None:
        changes["memory_gb"] = memory_of(compute, device) / sharing / 1e9
    return compute.model_copy(update=changes)
