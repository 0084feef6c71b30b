"""What local clients and the local server share: the data on the device, the model, the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import torch

from steelyard.clients.local.device_data.cohort import Workshop
from steelyard.clients.local.device_data.dataset import Shelf, Stock
from steelyard.clients.local.device_data.memory import Pool
from steelyard.clients.local.settings import ComputeSettings, device_of, memory_of, threads_of
from steelyard.data.dataset import Population
from steelyard.errors import UserError
from steelyard.learning import losses
from steelyard.learning.models import Factory, ModelSettings, build
from steelyard.learning.parameters import Layout
from steelyard.learning.training import TrainingSettings
from steelyard.messages import LossState


class Room:
    """Holds populations by seed, puts each data set on the device once, and knows how big things may get."""

    def __init__(
        self,
        populations: Mapping[int, Population] | Callable[[int], Population],
        model: ModelSettings | Factory,
        training: TrainingSettings,
        compute: ComputeSettings,
    ) -> None:
        self._populations = populations
        self.model = model
        self.training = training
        self.compute = compute
        self.device = device_of(compute)
        if compute.threads is not None:
            torch.set_num_threads(compute.threads)
        self._stocks: dict[int, Stock] = {}
        self._shelves: dict[int, Shelf] = {}
        self._pool: Pool | None = None

    def stock(self, seed: int) -> Stock:
        """Return the population of a seed, laid out on the device."""
        if seed not in self._stocks:
            population = self._population(seed)
            key = id(population.dataset)
            if key not in self._shelves:
                self._shelves[key] = Shelf.of(population.dataset, self.device)
            self._stocks[seed] = Stock(population, self._shelves[key])
        return self._stocks[seed]

    def notes(self) -> str:
        """Return what reading and sharing out had to do that the user should know, each note once."""
        said = (note for stock in self._stocks.values() for note in stock.population.notes)
        return "; ".join(dict.fromkeys(said))

    def _population(self, seed: int) -> Population:
        if not isinstance(self._populations, Mapping):
            return self._populations(seed)
        if seed not in self._populations:
            raise UserError(f"seed: got {seed}; there is no population for it, only for {sorted(self._populations)}")
        return self._populations[seed]

    @cached_property
    def shop(self) -> Workshop:
        """The model and how it is trained; built from the first population that is used."""
        if not self._stocks:
            first = next(iter(self._populations)) if isinstance(self._populations, Mapping) else 0
            self.stock(first)
        shelf = next(iter(self._stocks.values())).shelf
        module = build(self.model, shelf.features.shape[1:], shelf.classes, seed=0)
        layout = Layout.of(module)
        return Workshop(
            module=module,
            layout=layout,
            training=self.training,
            classes=shelf.classes,
            device=self.device,
            precision=self.compute.precision,
            threads=threads_of(self.compute),
            memory=memory_of(self.compute, self.device),
            chunk=self.compute.chunk,
        )

    @cached_property
    def outputs(self) -> int:
        """How many outputs the model has, found by asking it."""
        shelf = next(iter(self._stocks.values())).shelf
        rows = torch.zeros(2, dtype=torch.int64, device=shelf.device)
        mode = self.shop.module.training
        try:
            with torch.no_grad():
                said = self.shop.module.eval()(shelf.gather(rows).cpu())
        except (RuntimeError, TypeError, ValueError) as error:
            shape = tuple(shelf.features.shape[1:])
            raise UserError(f"model.name: the model does not take features of shape {shape}: {error}") from error
        self.shop.module.train(mode)
        if said.dim() != 2 or len(said) != 2:
            raise UserError(f"model.name: the model returned shape {tuple(said.shape)}; allowed: [samples, outputs]")
        return said.shape[1]

    def loss(self, state: LossState) -> LossState:
        """Return the loss with "auto" settled for this data and model."""
        if state.name == "auto" and self.training.loss != "auto":
            state = LossState(self.training.loss, state.class_weights, state.shape, state.scale)
        shop = self.shop
        return losses.resolve(state, shop.classes, self.outputs)

    def matrix(self, clients: int) -> torch.Tensor:
        """Return room for the models of a cohort: on the device, else in main memory, else in a file.

        The memory field bounds what lies on the device; a file-backed matrix is read in as it is used, so rules that
        go over the models row by row or as one product keep working.
        """
        size = self.shop.layout.size
        if self.device.type == "cuda" and 4 * clients * size <= self.shop.memory // 3:
            return torch.empty((clients, size), device=self.device)
        if self._pool is None:
            limit = memory_of(self.compute if self.device.type == "cpu" else ComputeSettings(), torch.device("cpu"))
            self._pool = Pool(limit // 2)
        return self._pool.matrix(clients, size)

    @property
    def device_name(self) -> str:
        """The device in words."""
        if self.device.type == "cuda":
            return f"{self.device} ({torch.cuda.get_device_name(self.device)})"
        return str(self.device)

    def close(self) -> None:
        """Let go of the tensors."""
        self._stocks.clear()
        self._shelves.clear()
        self._pool = None
