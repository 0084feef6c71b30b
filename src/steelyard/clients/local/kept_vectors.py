"""What an algorithm's clients keep from round to round: vectors by name, each as long as the model, 0 at first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from steelyard.algorithms.algorithm import Vectors
from steelyard.messages import Task

KIND = "vector"


class KeptVectors:
    """The clients' vectors by federation, client and name; part of every checkpoint, as a resume needs them all.

    A tensor that is held is never written into: whoever keeps a copy of the table can tell what has changed since.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, str, str], torch.Tensor] = {}

    def of(self, task: Task, clients: Sequence[str], device: torch.device) -> dict[str, torch.Tensor]:
        """Return what these clients keep, stacked: [clients, parameters] by name."""
        nothing = torch.zeros_like(task.parameters, device=device)

        def stacked(name: str) -> torch.Tensor:
            held = [self._held.get((task.federation, client, name), nothing).to(device) for client in clients]
            return torch.stack(held) if held else nothing[None][:0]

        return {name: stacked(name) for name in task.algorithm.keeps}

    def keep(self, task: Task, clients: Sequence[str], vectors: Vectors) -> None:
        """Keep what the clients ended with, [clients, parameters] by name."""
        for name, rows in vectors.items():
            for client, row in zip(clients, rows.detach().cpu(), strict=True):
                self._held[task.federation, client, name] = row.clone()

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return all vectors by name; names hold federation, client and vector."""
        return {json.dumps([KIND, *key]): held for key, held in sorted(self._held.items())}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Hold what `snapshot` returned and nothing else; entries of other kinds are passed over."""
        self._held.clear()
        for key, held in state.items():
            kind, *rest = json.loads(key)
            if kind == KIND:
                federation, client, name = rest
                self._held[federation, client, name] = held.cpu()
