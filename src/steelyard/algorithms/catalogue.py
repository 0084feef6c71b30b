"""The table of algorithms. The built-in ones are imported here, which registers them: a new one is a file and a name."""

from __future__ import annotations

__all__ = [
    *("fedavg", "fedavgm", "feddyn", "fedexp", "fednova", "fedopt", "fedprox", "scaffold"),
    *("known", "load_plugins"),
]
