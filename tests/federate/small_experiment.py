"""A small experiment that is simulated and federated over the two real Flower apps, joined without a network."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from tests import kit
from tests.clients.flower.flower_fakes import FakeGrid
from tests.runs.contents import models

from steelyard.clients.node import MEMORY
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.federate import client_app
from steelyard.federate.app_folder import experiment_text
from steelyard.federate.server_app import federate
from steelyard.runs.history import History

SMALL: dict[str, Any] = kit.changed(
    kit.SMALL,
    partition={"test": "local"},
    rounds={"count": 3, "fraction": 0.5},
    weighing={"criteria": ["DS", "LD", "MD"], "score": "prioritized", "priority": "LD>DS>MD"},
)
BUSY = threading.Lock()


def described(**sections: Any) -> dict[str, Any]:
    return kit.changed(SMALL, **sections)


def assert_same_weights(one: Path, other: Path, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    first, second = models(one), models(other)
    assert set(first) == set(second)
    for name in first:
        # A simulation may train clients in a stack and a node trains them singly: float32 sums in another order.
        torch.testing.assert_close(first[name], second[name], rtol=rtol, atol=atol)


def node(config: dict[str, Any], run_config: dict[str, Any], fresh: bool = False) -> Any:
    """A node that runs the real ClientApp, with a state of its own."""
    own = {"allow": "*", **config}  # The federation is our own; what a node's own rules refuse is tested apart.
    context = Context(run_id=1, node_id=1, node_config=own, state=RecordDict(), run_config=run_config)

    def answer(message: Message) -> Any:
        with BUSY:  # The clients of a node are made for one message at a time.
            if fresh:
                forget()
            return client_app.app(message, context).content

    answer.context = context  # type: ignore[attr-defined]
    return answer


def forget() -> None:
    """Let nodes build their clients anew: as on a real node, where every message is a process of its own."""
    client_app._built.clear()


def grid_of(
    document: dict[str, Any], nodes: int, fresh: bool = False, memory: Path | None = None, **extra: Any
) -> tuple[FakeGrid, dict[str, Any]]:
    document = {**document, "federate": {"nodes": nodes, "timeout": 60.0}}
    config = {"experiment": experiment_text(build(document)), "set": "", **extra}
    shares = [{"partition-id": i, "num-partitions": nodes} for i in range(nodes)]
    own = [{} if memory is None else {MEMORY: str(memory / str(i))} for i in range(nodes)]
    made = {40 + i: node({**shares[i], **own[i]}, config, fresh) for i in range(nodes)}
    return FakeGrid(made), config


def federated(folder: Path, document: dict[str, Any], nodes: int = 2, fresh: bool = False) -> tuple[History, FakeGrid]:
    """Run an experiment on nodes of this process; returns its record and its nodes."""
    grid, config = grid_of(document, nodes, fresh, out=str(folder))
    return History(federate(grid, config, "77")), grid  # type: ignore[arg-type]


def both(
    folder: Path, document: dict[str, Any], nodes: int = 2, fresh: bool = False, rtol: float = 1e-5, atol: float = 1e-6
) -> tuple[History, History, FakeGrid]:
    """Simulate and federate an experiment; returns both records and the nodes.

    The models agree within `rtol` and `atol`: sums of 50 rows in float32 are 50 times 1.2e-7 of their terms apart.
    """
    run(build(document), out=folder / "simulated")
    there, grid = federated(folder / "federated", document, nodes, fresh)
    assert_same_weights(folder / "simulated", folder / "federated", rtol, atol)
    return History(folder / "simulated"), there, grid
