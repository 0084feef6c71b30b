"""What an algorithm's clients keep from round to round: vectors by name, each as long as the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from steelyard.algorithms.algorithm import LAST, OWN, Algorithm, Vectors

KIND = "vector"


class KeptVectors:
    """The clients' vectors by federation, client and name; part of every checkpoint, as a resume needs them all.

    A tensor that is held is never written into: whoever keeps a copy of the table can tell what has changed since.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, str, str], torch.Tensor] = {}

    def of(
        self, federation: str, algorithm: Algorithm, clients: Sequence[str], received: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return what these clients keep, stacked: [clients, parameters] by name.

        `received` [clients, parameters] is what the clients received: a model of their own begins as that.
        """

        def stacked(name: str) -> torch.Tensor:
            found = received.clone() if name in (OWN, LAST) else torch.zeros_like(received)
            for row, client in enumerate(clients):
                held = self._held.get((federation, client, name))
                if held is not None:
                    found[row] = held.to(found.device)
            return found

        return {name: stacked(name) for name in algorithm.keeps}

    def keep(self, federation: str, clients: Sequence[str], vectors: Vectors) -> None:
        """Keep what the clients ended with, [clients, parameters] by name."""
        for name, rows in vectors.items():
            for client, row in zip(clients, rows.detach().cpu(), strict=True):
                self._held[federation, client, name] = row.clone()

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
