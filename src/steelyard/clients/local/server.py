"""What the server computes itself: the first model, tests, slopes and training on its own samples."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

import numpy as np
import torch

from steelyard.base import randomness
from steelyard.base.errors import UserError
from steelyard.base.tallies import Leading, Tally, figures_of
from steelyard.clients.local.evaluator import tallies_of
from steelyard.clients.local.hardware import threads_for
from steelyard.clients.local.population import DevicePopulation
from steelyard.clients.local.simulation import Simulation
from steelyard.clients.protocol import Server
from steelyard.data.dataset import Rows
from steelyard.learning import evaluation, losses
from steelyard.learning.parameters import Layout
from steelyard.learning.training import chance_of, orders, train_client
from steelyard.messages.payloads import ServerTest
from steelyard.messages.updates import Counts, Floats, RowTests


class SimulationServer(Server):
    """The server of a simulation; it shares data and model with the clients that it is made from.

    >>> server = SimulationServer(clients)  # a Simulation
    """

    def __init__(self, clients: Simulation) -> None:
        self.clients = clients

    @property
    def classes(self) -> int:
        """Number of classes of the data; 0 for a regression."""
        return self.clients.context.setup.classes

    def initial(self, seed: int) -> torch.Tensor:
        """Return the first global model, a pure function of the seed."""
        context = self.clients.context
        dataset = self._population(seed).dataset
        module = dataset.build(context.model, seed)
        return Layout.of(module).read(module).to(context.device)

    def output_layer(self, seed: int) -> Counts:
        """Return where the rows of the network's last layer stand in the flat model."""
        return self.clients.context.setup.layout.output

    def kernels(self, seed: int) -> Counts:
        """Return where the kernels of the network's layers begin and end in the flat model."""
        return self.clients.context.setup.layout.kernels

    def adapters(self, seed: int) -> Counts:
        """Return where the factors of the network's low-rank adapters stand in the flat model."""
        return self.clients.context.setup.layout.adapters

    def test(self, seed: int, models: torch.Tensor, measure: Leading | None = None) -> ServerTest:
        """Test models [candidates, parameters] on the rows on which the server weighs."""
        return self._test(seed, models, self._held(seed), measure)

    def report(self, seed: int, models: torch.Tensor, measure: Leading | None = None) -> ServerTest:
        """Test models [candidates, parameters] on the rows on which the server reports."""
        return self._test(seed, models, self._population(seed).source.report, measure)

    def row_tests(self, seed: int, models: torch.Tensor) -> RowTests:
        """Test models [candidates, parameters] on single rows: those on which the server reports, or else weighs."""
        source = self._population(seed).source
        labels, predictions, each = self._tried(seed, models, source.report if len(source.report) else source.server)
        right = (predictions == labels).cpu().numpy() if self.classes else None
        return RowTests(each.to(torch.float64).cpu().numpy(), right)

    def report_rows(self, seed: int) -> int:
        """Return on how many rows the server reports."""
        return len(self._population(seed).source.report)

    def gradients(self, seeds: Sequence[int], models: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the server's mean loss at each model [models, parameters], one seed per model.

        Models whose servers hold equally many rows are differentiated in one pass.
        """
        held = [self._weighing_rows(seed) for seed in seeds]
        found = torch.empty_like(models)
        for size in sorted({len(rows) for rows in held}):
            alike = [index for index, rows in enumerate(held) if len(rows) == size]
            found[alike] = self._slopes([seeds[i] for i in alike], models[alike], torch.stack([held[i] for i in alike]))
        return found

    def _slopes(self, seeds: Sequence[int], models: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        context = self.clients.context
        datasets = [self._population(seed).dataset for seed in seeds]
        setup, each = context.setup, losses.per_sample(context.loss())
        module = copy.deepcopy(setup.module).to(context.device).eval()
        features = torch.stack([dataset.gather(mine) for dataset, mine in zip(datasets, rows, strict=True)])
        labels = torch.stack([dataset.labels[mine] for dataset, mine in zip(datasets, rows, strict=True)])

        def loss_of(flat: torch.Tensor, samples: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
            return each(torch.func.functional_call(module, setup.layout.views(flat), (samples,)), truth).mean()

        with threads_for(context.device, setup.layout.size):
            slope = torch.func.vmap(torch.func.grad(loss_of))
            return slope(models.to(context.device), features, labels).to(models.device)

    def train(self, seed: int, round: int, parameters: torch.Tensor) -> torch.Tensor:
        """Train a model on the rows on which the server weighs, as a client of that size would, and return it."""
        context = self.clients.context
        dataset, rows = self._population(seed).dataset, self._weighing_rows(seed)
        setup, training = context.setup, context.training
        with threads_for(context.device, setup.layout.size):
            trained, _ = train_client(
                copy.deepcopy(setup.module).to(context.device),
                setup.layout,
                parameters.to(context.device),
                dataset.gather(rows),
                dataset.labels[rows],
                orders(seed, round, ["server"], len(rows), training)[0],
                training,
                context.loss(),
                chance_of(seed, round, "server"),
                chance_of(seed, round, "server"),
                augment=dataset.augment,
            )
        return trained.to(parameters.device)

    def imagined(self, seed: int, colluders: Collection[str], *, insider: bool = False) -> SimulationServer:
        """Return the server as colluders imagine it in one round."""
        known = self._held(seed) if insider else np.zeros(0, np.int64)
        return ColludingServer(self.clients, seed, colluders, known)

    def _population(self, seed: int) -> DevicePopulation:
        return self.clients.context.population(seed)

    def _held(self, seed: int) -> Rows:
        """Return the rows on which the server weighs."""
        return self._population(seed).source.server

    def _weighing_rows(self, seed: int) -> torch.Tensor:
        return _on_device(self._held(seed), self.clients.context.device)

    def _test(self, seed: int, models: torch.Tensor, held: Rows, measure: Leading | None) -> ServerTest:
        dataset = self._population(seed).dataset
        labels, predictions, each = self._tried(seed, models, held)
        mean = each.to(torch.float64).mean(dim=1).cpu().numpy()
        further = {} if measure is None else self._measured(seed, models, held, measure)
        if dataset.classes:
            counts = evaluation.confusion(predictions, labels, dataset.classes)
            by_class = evaluation.by_class(counts)
            return ServerTest(evaluation.accuracy(counts), evaluation.f1(counts), further, mean, by_class)
        if dataset.task is not None:
            figures = evaluation.FIGURES[dataset.task](predictions, labels)
            return ServerTest(next(iter(figures.values())), np.zeros((len(models), 0)), figures, mean)
        errors = {**further, **evaluation.errors(predictions, labels)}
        return ServerTest(np.zeros(len(models)), np.zeros((len(models), 0)), errors, mean)

    def _measured(self, seed: int, models: torch.Tensor, held: Rows, measure: Leading) -> dict[str, Floats]:
        """Return all measures of each model on rows."""
        dataset, device = self._population(seed).dataset, self.clients.context.device
        rows, count = _on_device(held, device), len(held)
        outputs = self.clients.context.evaluator.outputs(models.to(device), dataset, rows)
        sums = tallies_of(measure, dataset, rows, np.arange(count), np.array([count]), outputs)
        found = figures_of(Tally(sums[:, 0]))
        # The one that leads comes first: readers of a run know it by that.
        return {measure.name: found[measure.name], **found}

    def _tried(self, seed: int, models: torch.Tensor, held: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the labels of rows, and what each model predicts and loses on each of them."""
        context = self.clients.context
        dataset = self._population(seed).dataset
        rows = _on_device(held, context.device)
        loss = context.loss()
        return dataset.labels[rows], *context.evaluator.test(models.to(context.device), dataset, rows, loss)


class ColludingServer(SimulationServer):
    """The server as colluders imagine it in one round: its rows are theirs, as many as the median client has.

    These are drawn from all that they train on, with true labels, unless its rows are `known`. Whatever seed it is
    asked for, its own is meant.
    """

    def __init__(self, clients: Simulation, seed: int, colluders: Collection[str], known: Rows) -> None:
        super().__init__(clients)
        self.seed = seed
        source = self._population(seed).source
        pooled = np.concatenate([client.train for client in source.clients if client.client in colluders])
        count = max(1, int(np.median([len(client.train) for client in source.clients])))
        drawn = randomness.generator(seed, purpose="attack/rows").permutation(len(pooled))
        self._rows = known if len(known) else np.sort(pooled[drawn[:count]])
        self._trained: torch.Tensor | None = None

    def train(self, seed: int, round: int, parameters: torch.Tensor) -> torch.Tensor:
        """Train once: all candidates of a round start from the same model."""
        if self._trained is None:
            self._trained = super().train(seed, round, parameters)
        return self._trained

    def _population(self, seed: int) -> DevicePopulation:
        return self.clients.context.population(self.seed)

    def _held(self, seed: int) -> Rows:
        return self._rows


def _on_device(held: Rows, device: torch.device) -> torch.Tensor:
    if not len(held):
        raise UserError(
            "partition.server: the server holds no test samples; allowed: held-out or fraction, with rows in it"
        )
    return torch.from_numpy(np.asarray(held, dtype=np.int64)).to(device)
