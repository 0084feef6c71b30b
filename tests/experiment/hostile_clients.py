"""A small experiment in which some clients are hostile and others may be defended against them."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "data": {"source": "digits"},
    "partition": {
        "scheme": "dirichlet",
        "alpha": 0.5,
        "clients": 10,
        "minimum": 8,
        "server": "fraction",
        "server_report": "apart",
    },
    "model": {"name": "logistic"},
    "training": {"learning_rate": 0.5, "epochs": 2, "batch_size": 60},
    "rounds": {"count": 4, "fraction": 0.6},
    "compute": {"engine": "loop", "device": "cpu", "threads": 1},
    "store": {"checkpoint_every": 1},
}
