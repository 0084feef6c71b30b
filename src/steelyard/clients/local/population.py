"""The clients' data as tensors on the device, laid out so that a whole cohort is gathered in one step."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from steelyard.base.randomness import generator
from steelyard.data.dataset import HONEST, Behaviour, ClientRows, Dataset, Population
from steelyard.data.sources.source import FurtherTask
from steelyard.learning.augmentation import Augmentation
from steelyard.learning.models import Factory, build
from steelyard.learning.settings import ModelSettings
from steelyard.weighing.cohort import read_only
from steelyard.weighing.criterion import Labelled, LocalData

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DeviceDataset:
    """The samples of one data set on the device; populations of several seeds share it."""

    features: torch.Tensor
    labels: torch.Tensor
    classes: int
    task: FurtherTask | None = None
    """What is learnt where it is neither a class nor a number, as `Dataset.task` has it."""
    targets: int = 0
    """Number of classes of a pixel, or of labels."""
    augment: Augmentation | None = None
    """How images are changed at random each time they are trained on."""

    @classmethod
    def of(cls, dataset: Dataset, device: torch.device) -> DeviceDataset:
        """Put a data set on the device."""
        features, labels = dataset.features.to(device), dataset.labels.to(device)
        return cls(features, labels, dataset.classes, dataset.task, dataset.targets, dataset.augment)

    def build(self, model: ModelSettings | Factory, seed: int) -> nn.Module:
        """Build a network for these samples: an output for each class, label, or class of each pixel, else one."""
        outputs = self.targets or self.classes
        return build(model, self.features.shape[1:], outputs, seed, pixels=self.task == "segmentation")

    @property
    def outputs(self) -> int:
        """How many outputs a network must have where the task says it: one for each label, or class of a pixel."""
        return self.targets * (self.labels.shape[1] if self.task == "segmentation" else 1)

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the samples of these rows as they lie in the data set."""
        return self.features.index_select(0, rows.reshape(-1)).view(*rows.shape, *self.features.shape[1:])

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the samples of these rows as numbers that a network takes."""
        return as_numbers(self.take(rows))

    @property
    def device(self) -> torch.device:
        return self.features.device

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample once it is float32."""
        return 4 * self.features[:1].numel()


def as_numbers(samples: torch.Tensor) -> torch.Tensor:
    """Return samples as float32; bytes become numbers from 0 to 1, tokens (int64) stay."""
    if samples.dtype == torch.int64:
        return samples
    return samples.to(torch.float32).div_(255) if samples.dtype == torch.uint8 else samples.to(torch.float32)


class DevicePopulation:
    """One population on the device: the training rows of every client, one after another, and where each begins."""

    def __init__(self, source: Population, dataset: DeviceDataset) -> None:
        self.source = source
        self.dataset = dataset
        ordered = sorted(source.clients, key=lambda rows: rows.client)
        self.names: tuple[str, ...] = tuple(rows.client for rows in ordered)
        self.position = {name: index for index, name in enumerate(self.names)}
        self.sizes: Ints = np.array([len(rows.train) for rows in ordered], dtype=np.int64)
        self.begins: Ints = np.cumsum(self.sizes) - self.sizes
        flat = np.concatenate([rows.train for rows in ordered]) if ordered else np.zeros(0, np.int64)
        self.rows = torch.from_numpy(flat.astype(np.int64)).to(dataset.device)
        self.own_labels = _labels(source, ordered, flat)
        self.labels = self.own_labels.to(dataset.device)
        self.behaviours: Mapping[str, Behaviour] = source.behaviours
        self._ordered = ordered

    @cached_property
    def _lies(self) -> NDArray[np.float64]:
        """By client: how many times its size it claims, how many times its criteria, and from which round on."""
        known = [self.behaviours.get(name, HONEST) for name in self.names]
        return np.array([(how.claims, how.inflates, how.lies_from) for how in known], dtype=np.float64).reshape(-1, 3)

    def claims(self, round: int) -> NDArray[np.float64]:
        """How many times its number of samples each client reports in a round."""
        return np.where(self._lies[:, 2] <= round, self._lies[:, 0], 1.0)

    def inflates(self, round: int) -> NDArray[np.float64]:
        """How many times what is true each client reports in a round of criteria that it measures itself."""
        return np.where(self._lies[:, 2] <= round, self._lies[:, 1], 1.0)

    def at_work(self, seed: int, round: int) -> DevicePopulation:
        """Return the population as it trains in a round: clients that work through a part of their rows have only it.

        The part is drawn anew each round. Everything but training sees all rows.
        """
        lazy = {name: how.work for name, how in self.behaviours.items() if how.work < 1 and name in self.position}
        parts = {name: max(1, int(np.rint(work * self.sizes[self.position[name]]))) for name, work in lazy.items()}
        return self.parts(parts, seed, round, "flaws/few-steps") if parts else self

    def parts(self, parts: Mapping[str, int], seed: int, round: int, purpose: str) -> DevicePopulation:
        """Return the population with so many rows of some clients, drawn by seed, round, client and purpose."""
        chosen: dict[int, tuple[Ints, int]] = {}
        for name, part in parts.items():
            drawn = generator(seed, round, name, purpose).permutation(int(self.sizes[self.position[name]]))[:part]
            chosen[self.position[name]] = np.sort(drawn), len(drawn)
        return self._arranged(chosen)

    def holding_back(self, share: float, seed: int) -> DevicePopulation:
        """Return the population with a share of each client's rows kept from training; drawn once for a whole run.

        The rows that are held back follow those that are trained on. A client with one row trains and tests on it.
        """
        chosen: dict[int, tuple[Ints, int]] = {}
        for position, name in enumerate(self.names):
            size = int(self.sizes[position])
            drawn = generator(seed, 0, name, "held back").permutation(size)
            part = size - int(np.ceil(share * size)) or min(size, 1)
            chosen[position] = np.concatenate([np.sort(drawn[:part]), np.sort(drawn[part:])]), part
        return self._arranged(chosen)

    def _arranged(self, chosen: Mapping[int, tuple[Ints, int]]) -> DevicePopulation:
        """Return the population with these rows of some clients in front, of which they train on the first so many."""
        found, order = copy.copy(self), np.arange(len(self.rows))
        found.sizes = self.sizes.copy()
        for position, (rows, count) in chosen.items():
            begin = self.begins[position]
            order[begin : begin + len(rows)] = begin + rows
            found.sizes[position] = count
        places = torch.from_numpy(order).to(self.rows.device)
        found.rows, found.labels = self.rows[places], self.labels[places]
        return found

    @property
    def labelled(self) -> Labelled:
        """The training labels of all clients, for criteria that are measured on all of them at once."""
        return Labelled(read_only(self.own_labels.numpy()), read_only(self.sizes), self.dataset.classes)

    @cached_property
    def tests(self) -> TestRows:
        """Every client's local test rows; read once, used in every round."""
        return TestRows.of(self._ordered, self.dataset)

    def local(self, name: str) -> LocalData:
        """Return what the client can look at when it measures itself."""
        position = self.position[name]
        rows, begin = self._ordered[position], int(self.begins[position])
        known = self.source.facts.get(name, {})
        dataset = self.source.dataset
        return LocalData(
            client=name,
            labels=self.own_labels[begin : begin + int(self.sizes[position])],
            classes=dataset.classes,
            marks={mark: read_only(values[rows.train]) for mark, values in dataset.marks.items()},
            features=lambda: dataset.features[torch.from_numpy(rows.train)],
            device=MappingProxyType(dict(known.get("device", {}))),
            user=MappingProxyType(dict(known.get("user", {}))),
        )


@dataclass(frozen=True, eq=False)
class TestRows:
    """Which samples are tested, each once, and which of them belong to which client."""

    clients: tuple[str, ...]
    sizes: Ints
    unique: torch.Tensor
    """Rows of the data set that some client tests on, ascending."""
    index: Ints
    """For every client's test samples, one after another: the index of each in `unique`."""

    @classmethod
    def of(cls, ordered: Sequence[ClientRows], dataset: DeviceDataset) -> TestRows:
        """Collect the test rows of all clients that have some."""
        having = [rows for rows in ordered if len(rows.test)]
        flat = np.concatenate([rows.test for rows in having]) if having else np.zeros(0, np.int64)
        unique, index = np.unique(flat, return_inverse=True)
        return cls(
            tuple(rows.client for rows in having),
            np.array([len(rows.test) for rows in having], dtype=np.int64),
            torch.from_numpy(unique.astype(np.int64)).to(dataset.device),
            index.astype(np.int64).reshape(-1),
        )

    @cached_property
    def apart(self) -> TestRows:
        """The same, each client's samples for itself: where two clients test on the same row, it stands twice."""
        rows = self.unique[torch.from_numpy(self.index).to(self.unique.device)]
        return TestRows(self.clients, self.sizes, rows, np.arange(len(self.index)))

    def sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum values[..., unique rows] over each client's test samples: [..., clients]."""
        if not len(self.sizes):
            return np.zeros((*values.shape[:-1], 0))
        return np.add.reduceat(values[..., self.index], np.cumsum(self.sizes) - self.sizes, axis=-1)


def _labels(source: Population, ordered: Sequence[ClientRows], flat: Ints) -> torch.Tensor:
    labels = source.dataset.labels[torch.from_numpy(flat.astype(np.int64))].clone()
    begin = 0
    for rows in ordered:
        if rows.train_labels is not None:
            labels[begin : begin + len(rows.train)] = rows.train_labels.to(labels.dtype)
        begin += len(rows.train)
    return labels
