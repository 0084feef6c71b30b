"""The built-in algorithms: importing this registers them. A new one is a file and a name here."""

from __future__ import annotations

from steelyard.algorithms import fedavg, fedavgm, feddyn, fedexp, fednova, fedopt, fedprox, scaffold

__all__ = ["fedavg", "fedavgm", "feddyn", "fedexp", "fednova", "fedopt", "fedprox", "scaffold"]
