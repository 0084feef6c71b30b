"""The table of algorithms. Importing the built-in ones here registers them: a new one is a file and a name here.

Use `known` and `load_plugins` from here, so that the built-in ones are there.
"""

from __future__ import annotations

from steelyard.algorithms import (
    apfl,
    client_momentum,
    ditto,
    fedala,
    fedavg,
    fedavgm,
    fedbn,
    feddyn,
    fedexp,
    fedfomo,
    fednova,
    fedopt,
    fedprox,
    fedrep,
    fine_tuned,
    flexlora,
    local_only,
    scaffold,
)
from steelyard.algorithms.registry import known, load_plugins

__all__ = [
    "apfl",
    "client_momentum",
    "ditto",
    "fedala",
    "fedavg",
    "fedavgm",
    "fedbn",
    "feddyn",
    "fedexp",
    "fedfomo",
    "fednova",
    "fedopt",
    "fedprox",
    "fedrep",
    "fine_tuned",
    "flexlora",
    "known",
    "load_plugins",
    "local_only",
    "scaffold",
]
