"""The samples of the current step of a stack of clients, read through a step counter that lies on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steelyard.clients.local.device_data.dataset import DeviceDataset
from steelyard.clients.local.device_data.schedule import Schedule


@dataclass(frozen=True, eq=False)
class CurrentStep:
    """The current step of the first `busy` clients; the same object serves every step of a captured graph."""

    dataset: DeviceDataset
    tables: Schedule
    counter: torch.Tensor
    losses: torch.Tensor
    """[clients]: the losses of the last epoch so far."""
    busy: int
    keys: torch.Tensor
    """[clients]: the streams from which dropout by name draws."""

    @property
    def samples(self) -> int:
        """Samples of each client, padding included."""
        return self.tables.rows.shape[2]

    def now(self, table: torch.Tensor) -> torch.Tensor:
        """Return this step's part of a table [steps, clients, ...]."""
        return table.index_select(0, self.counter)[0, : self.busy]

    @property
    def features(self) -> torch.Tensor:
        return self.dataset.gather(self.now(self.tables.rows))

    @property
    def labels(self) -> torch.Tensor:
        return self.now(self.tables.labels)

    @property
    def weights(self) -> torch.Tensor:
        return self.now(self.tables.weights)

    @property
    def chance(self) -> torch.Tensor:
        """The clients' streams and the number of the step, [clients, 2]."""
        mine = self.keys[: self.busy]
        return torch.stack([mine, self.counter.expand_as(mine)], dim=1)

    def add(self, each: torch.Tensor) -> None:
        """Count these samples' losses where they are reported; padding may hold anything."""
        report = self.now(self.tables.report)
        self.losses[: self.busy] += torch.where(report > 0, each * report, torch.zeros_like(each)).sum(dim=1)
