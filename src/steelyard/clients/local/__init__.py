"""The simulator: all clients of a federation inside this process, a cohort at a time.

Import it from here only: what lies below is the simulator's own. Importing it costs no torch; the others
load it when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from steelyard.clients.local.settings import ClockSettings, ComputeSettings

if TYPE_CHECKING:
    from steelyard.clients.local.clock import Clock
    from steelyard.clients.local.cohort import Kept
    from steelyard.clients.local.hidden_simulation import Hide
    from steelyard.clients.local.server import SimulationServer
    from steelyard.clients.local.simulation import Simulation

__all__ = ["Clock", "ClockSettings", "ComputeSettings", "Hide", "Kept", "Simulation", "SimulationServer"]


_LATE = {
    "Clock": "clock",
    "Hide": "hidden_simulation",
    "Kept": "cohort",
    "Simulation": "simulation",
    "SimulationServer": "server",
}


def __getattr__(name: str) -> Any:
    # Imported late for speed of start: reading an experiment's settings must not wait for torch.
    if name not in _LATE:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
