"""Data: sources that are read into a `Dataset`, and partitions that share it out among clients.

`load` reads what a `DataSettings` names; `share_out` makes a `Population` of it. Heavy imports wait until they are
called, so that importing this package is cheap, for speed of start.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from steelyard.data import attacks as attacks
from steelyard.data.flaws import FlawSettings, check_flaws
from steelyard.data.partition_settings import PartitionSettings
from steelyard.data.schemes import check_together
from steelyard.data.sources.source import DataSettings

if TYPE_CHECKING:
    from steelyard.data.dataset import ClientRows, Dataset, Population
    from steelyard.data.memory import in_memory
    from steelyard.data.partition import share_out
    from steelyard.data.scaling import load

__all__ = [
    "ClientRows",
    "DataSettings",
    "Dataset",
    "FlawSettings",
    "PartitionSettings",
    "Population",
    "check_flaws",
    "check_together",
    "in_memory",
    "load",
    "share_out",
]

_HOMES = {
    **dict.fromkeys(("ClientRows", "Dataset", "Population"), "dataset"),
    "in_memory": "memory",
    "load": "scaling",
    "share_out": "partition",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
