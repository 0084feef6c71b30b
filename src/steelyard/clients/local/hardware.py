"""What the compute settings mean on this machine: the device, its memory, and how many threads there are."""

from __future__ import annotations

import os

import torch

from steelyard.base.errors import UserError
from steelyard.clients.local.settings import ComputeSettings


def device_of(settings: ComputeSettings) -> torch.device:
    """Return the device that the settings name, or say that it is not there."""
    name = settings.device
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"compute.device: got '{name}'; allowed: auto, cpu, cuda, cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise UserError(f"compute.device: got '{name}', but this machine has {count} CUDA devices; allowed: cpu")
        return torch.device("cuda", device.index or 0)
    return device


def threads_of(settings: ComputeSettings) -> int:
    """Return how many CPU threads to use."""
    if settings.threads is not None:
        return settings.threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def memory_of(settings: ComputeSettings, device: torch.device) -> int:
    """Return the bytes that the simulation may plan for on the device."""
    if settings.memory_gb is not None:
        return int(settings.memory_gb * 1e9)
    if device.type == "cuda":
        return int(0.7 * torch.cuda.mem_get_info(device)[0])
    return int(0.7 * _free_memory())


def _free_memory() -> float:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return float(line.split()[1]) * 1024
    except OSError:
        pass
    return 4e9


def peak_memory(device: torch.device) -> int:
    """Return the most bytes taken so far: of the GPU by torch, or of main memory by this process; 0 where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/status") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
    except OSError:
        return 0
