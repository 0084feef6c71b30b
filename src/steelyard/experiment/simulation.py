"""The clients of a learning experiment, all of them in this process, and their server; a server without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from steelyard.base.errors import UserError
from steelyard.base.tallies import Leading
from steelyard.clients.local import Clock, ClockSettings, ComputeSettings, Simulation, SimulationServer
from steelyard.clients.protocol import Clients, Noise, Sending, SendingClients, Server, Step
from steelyard.clients.ranks.engine import RanksEngine, on_rank
from steelyard.clients.ranks.group import current
from steelyard.data import DataSettings, FlawSettings, PartitionSettings, load, share_out
from steelyard.data.dataset import Dataset, DatasetOrSeeded, Population
from steelyard.data.facts import FactSettings
from steelyard.data.scaling import normalised
from steelyard.learning.models import build
from steelyard.learning.parameters import Layout
from steelyard.learning.records import RecordNoise
from steelyard.learning.settings import ModelSettings, TrainingSettings
from steelyard.messages.payloads import Counts, ServerTest
from steelyard.privacy.clipping import DeviceNoise
from steelyard.privacy.settings import AggregationSettings
from steelyard.weighing.criterion import Criterion
from steelyard.weighing.fact import unknown


@dataclass(frozen=True)
class LearningSections:
    """The sections of an experiment that its clients are built from, and the criteria that they measure."""

    data: DataSettings
    partition: PartitionSettings
    flaws: Sequence[FlawSettings]
    facts: FactSettings
    model: ModelSettings
    training: TrainingSettings
    compute: ComputeSettings
    criteria: Sequence[Criterion]
    noise: DeviceNoise | None
    """What every device adds to what it sends; None: nothing."""
    records: RecordNoise | None = None
    """What every client does to the gradients of its samples; None: nothing."""

    def population(self, dataset: Dataset, seed: int, *, everyone: bool = True) -> Population:
        """Share out a data set; `everyone`: all clients that [facts] names are here."""
        population = share_out(dataset, self.partition, seed, self.flaws)
        return replace(population, facts=self.facts.of(population.names, seed, all_known=everyone))

    def noted(self, population: Population, *, everyone: bool = True) -> Population:
        """Return a population that notes which facts weigh its clients and are not known of all of them."""
        rows = {"rows": dict.fromkeys(population.dataset.marks, 0.0)}
        known = {name: {**population.facts.get(name, {}), **rows} for name in population.names}
        without = unknown([criterion.name for criterion in self.criteria], known)
        if nobody := next((name for name in without if everyone and len(without[name]) == len(known)), None):
            raise UserError(
                f"weighing.criteria: {nobody}: known of no client; allowed: a fact of [facts.user] or [facts.device], "
                "or a mark of the rows (data.marks)"
            )
        count = "not known of {} of {} clients, which count as 0"
        notes = [f"{name}: {count.format(len(clients), len(known))}" for name, clients in without.items()]
        return replace(population, notes=(*population.notes, *notes))

    def sending(self, clients: Clients, *steps: Step[Sending]) -> Clients:
        """Return the clients with what happens to their updates on the way out, the noise of devices among it."""
        every = [*steps, *([] if self.noise is None else [Noise(self.noise)])]
        return SendingClients(clients, every) if every else clients


def simulate(
    sections: LearningSections,
    *,
    dataset: DatasetOrSeeded | None = None,
    read: Dataset | None = None,
    clock: ClockSettings | None = None,
    hidden: AggregationSettings | None = None,
    rounds: int = 0,
    experiment: Mapping[str, Any] | None = None,
) -> tuple[Clients, SimulationServer]:
    """Build all clients of an experiment in this process, and their server.

    Data are read once for all seeds, if they are not `read` yet; a function handed over as `dataset` is called once for
    each seed. `rounds` is how many there will be at most, where that is known. Where this process leads others, they
    build the same from the document `experiment`, and the clients are shared out.
    """
    data = sections.data
    given = dataset if dataset is not None else read or load(data)
    if not isinstance(given, Dataset) and not callable(given):
        raise UserError(
            f"dataset: got {type(given).__name__}; allowed: a data set built with steelyard.in_memory, or a function "
            "that returns one for a seed"
        )
    if dataset is not None and data.source != "memory":
        raise UserError(
            f"data.source: got '{data.source}' together with dataset=...; allowed: 'memory', so that the run says "
            "where its data are from"
        )
    samples = (
        _Seeded(given, data) if callable(given) else _always(given if dataset is None else normalised(given, data))
    )
    ranks = current()
    if ranks is not None and sections.records is not None:
        raise UserError("WORLD_SIZE: several processes were started, and privacy.records trains in one; allowed: 1")
    compute = sections.compute if ranks is None else on_rank(sections.compute, ranks.place)
    clients = Simulation(
        lambda seed: sections.noted(sections.population(samples(seed), seed)),
        *(sections.model, sections.training, compute, sections.criteria),
        rounds=rounds,
        records=sections.records,
    )
    server = SimulationServer(clients)
    if ranks is not None and ranks.place.rank == 0 and experiment is not None:
        RanksEngine(ranks, clients, experiment)
    steps: list[Step[Sending]] = [] if clock is None else [Clock(clients.context, clock)]
    if hidden is not None:
        # Late, for speed of start, and since it needs the extra privacy.
        from steelyard.clients.local import Hide

        steps.append(Hide(hidden))
    return sections.sending(clients, *steps), server


def first_called(dataset: DatasetOrSeeded, seed: int) -> tuple[DatasetOrSeeded, Dataset | None]:
    """Return data from Python, and those of a seed; None where they are none or cannot be had: that is refused later.

    A function is called once for a seed: the one that is returned knows this seed's already.
    """
    if not callable(dataset):
        return dataset, dataset if isinstance(dataset, Dataset) else None
    try:
        found = dataset(seed)
    except Exception:
        return dataset, None
    waiting = {seed: found}
    first = found if isinstance(found, Dataset) else None
    return lambda at: waiting.pop(at) if at in waiting else dataset(at), first


def _always(dataset: Dataset) -> Callable[[int], Dataset]:
    return lambda seed: dataset


class _Seeded:
    """The user's function from a seed to a data set, what it returns checked: one model must fit all of them."""

    def __init__(self, function: Callable[[int], Dataset], data: DataSettings) -> None:
        self._function, self._data = function, data
        self._first: tuple[tuple[int, ...], int] | None = None

    def __call__(self, seed: int) -> Dataset:
        try:
            found = self._function(seed)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"dataset: the function fails for seed {seed}: {type(error).__name__}: {error}; allowed: a function "
                "of a seed that returns a data set"
            ) from error
        if not isinstance(found, Dataset):
            raise UserError(
                f"dataset: the function returned {type(found).__name__} for seed {seed}; allowed: a data set built "
                "with steelyard.in_memory"
            )
        kind = (found.shape, found.targets or found.classes)
        self._first = self._first or kind
        if kind != self._first:
            raise UserError(
                f"dataset: samples of shape {kind[0]} in {kind[1]} classes for seed {seed}; allowed: shape "
                f"{self._first[0]} in {self._first[1]} classes, as for the first seed"
            )
        return normalised(found, self._data)


# The server of a federation across machines that holds no data.


MOST_INPUTS = 10**8
"""More numbers per sample than any model here takes; a node that says so is mistaken or lying."""


class RemoteServer(Server):
    """A server without data: it knows of the samples only what the nodes say, and can make the first model."""

    def __init__(self, model: ModelSettings, about: Mapping[str, int | list[int]]) -> None:
        shape, classes = about.get("features"), about.get("classes")
        if not isinstance(shape, list) or not isinstance(classes, int) or classes < 0:
            raise UserError(
                "federate: the nodes do not give the shape of their samples and the number of classes, but "
                f"{dict(about)}"
            )
        if min(shape, default=0) < 1 or prod(shape) > MOST_INPUTS or classes > MOST_INPUTS:
            raise UserError(
                f"federate: the nodes say samples of shape {shape} in {classes} classes; allowed: shapes and numbers "
                "above 0"
            )
        self._model, self._shape, self._classes = model, torch.Size(shape), classes
        self._pixels = bool(about.get("pixels"))

    @property
    def classes(self) -> int:
        """Number of classes, as the nodes say."""
        return self._classes

    def initial(self, seed: int) -> torch.Tensor:
        """Return the first global model, the same as a simulation's for this seed."""
        module = self._build(seed)
        return Layout.of(module).read(module)

    def _build(self, seed: int) -> torch.nn.Module:
        return build(self._model, self._shape, self._classes, seed, pixels=self._pixels)

    def output_layer(self, seed: int) -> Counts:
        """Return where the rows of the network's last layer stand in the flat model."""
        return Layout.of(self._build(seed)).output

    def kernels(self, seed: int) -> Counts:
        """Return where the kernels of the network's layers begin and end in the flat model."""
        return Layout.of(self._build(seed)).kernels

    def adapters(self, seed: int) -> Counts:
        """Return where the factors of the network's low-rank adapters stand in the flat model."""
        return Layout.of(self._build(seed)).adapters

    def test(self, seed: int, models: torch.Tensor, measure: Leading | None = None) -> ServerTest:
        """Refuse: there is nothing to test on."""
        raise UserError("partition.server: 'none' leaves the server without a test set; allowed: held-out, fraction")
