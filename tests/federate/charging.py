"""What a node's ledger is charged with in tests; apart, because processes that charge one import nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steelyard.federate.node_ledger import Disclosure, NodeLedger


def disclosure(round: int = 1, noise: float = 2.0, run: str = "run", **more: Any) -> Disclosure:
    return Disclosure(
        **{"run": run, "federation": "fed", "round": round, "clients": 1, "clip": 0.5, "noise": noise, **more}
    )


def charge_twenty(folder: str, run: str, gate: Any) -> None:
    """Charge the ledger of a folder for twenty rounds, beginning when all others at the gate do."""
    gate.wait(60)
    for round in range(20):
        NodeLedger(Path(folder)).charge(disclosure(round, run=run))
