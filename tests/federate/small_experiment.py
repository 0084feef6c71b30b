"""A small experiment that is simulated and federated, and whether both end with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from steelyard.runs.store import Store

SMALL: dict[str, Any] = {
    "name": "small",
    "seed": 5,
    "data": {"source": "digits"},
    "partition": {"scheme": "dirichlet", "clients": 6, "alpha": 0.5, "minimum": 10, "test": "local"},
    "model": {"name": "logistic"},
    "training": {"learning_rate": 0.1, "epochs": 1, "batch_size": 50},
    "rounds": {"count": 3, "fraction": 0.5},
    "weighing": {"criteria": ["DS", "LD", "MD"], "score": "prioritized", "priority": "LD>DS>MD"},
    "compute": {"engine": "loop", "device": "cpu"},
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    store = Store(folder)
    try:
        return {name: state.parameters for name, state in store.resume().states.items()}
    finally:
        store.close()


def assert_same_weights(one: Path, other: Path, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    first, second = weights(one), weights(other)
    assert set(first) == set(second)
    for name in first:
        # A simulation may train clients in a stack and a node trains them singly: float32 sums in another order.
        torch.testing.assert_close(first[name], second[name], rtol=rtol, atol=atol)
