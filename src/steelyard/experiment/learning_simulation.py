"""The clients of a learning experiment, all of them simulated in this process, and their server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from steelyard.base.errors import UserError
from steelyard.clients.local import ClockedClients, ClockSettings, ComputeSettings, Simulation, SimulationServer
from steelyard.clients.private import PrivateClients
from steelyard.clients.protocol import Clients
from steelyard.clients.ranks.group import current
from steelyard.clients.ranks.simulation import RankedSimulation, on_rank
from steelyard.data import DataSettings, FlawSettings, PartitionSettings, load, share_out
from steelyard.data.dataset import Dataset, DatasetOrSeeded, Population
from steelyard.data.facts import FactSettings
from steelyard.data.scaling import normalised
from steelyard.data.sources.source import TaskKind
from steelyard.learning.settings import ModelSettings, TrainingSettings
from steelyard.privacy.clipping import DeviceNoise
from steelyard.weighing.criterion import Criterion


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

    def population(self, dataset: Dataset, seed: int, *, everyone: bool = True) -> Population:
        """Share out a data set; `everyone`: all clients that [facts] names are here."""
        population = share_out(dataset, self.partition, seed, self.flaws)
        return replace(population, facts=self.facts.of(population.names, seed, all_known=everyone))

    def noisy(self, clients: Clients) -> Clients:
        """Return the clients with the noise that their devices add."""
        return clients if self.noise is None else PrivateClients(clients, self.noise)


def simulate(
    sections: LearningSections,
    *,
    dataset: DatasetOrSeeded | None = None,
    clock: ClockSettings | None = None,
    rounds: int = 0,
    experiment: Mapping[str, Any] | None = None,
) -> tuple[Clients, SimulationServer]:
    """Build all clients of an experiment in this process, and their server.

    Data are read once for all seeds; a function handed over as `dataset` is called once for each seed. `rounds` is how
    many there will be at most, where that is known. Where this process leads others, they build the same from the
    document `experiment`, and the clients are shared out.
    """
    data = sections.data
    given = load(data) if dataset is None else dataset
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
    compute = sections.compute if ranks is None else on_rank(sections.compute, ranks.place)
    clients = Simulation(
        lambda seed: sections.population(samples(seed), seed),
        *(sections.model, sections.training, compute, sections.criteria),
        rounds=rounds,
    )
    server = SimulationServer(clients)
    trained: Clients = clients
    if ranks is not None and ranks.place.rank == 0 and experiment is not None:
        trained = RankedSimulation(clients, server, ranks, experiment)
    timed = trained if clock is None else ClockedClients(trained, clients.context, clock)
    return sections.noisy(timed), server


def first_called(dataset: DatasetOrSeeded, seed: int) -> tuple[DatasetOrSeeded, TaskKind | None]:
    """Return data from Python and their task, None where they are none or cannot be had: that is refused later."""
    if not callable(dataset):
        return dataset, dataset.kind if isinstance(dataset, Dataset) else None
    try:
        found = dataset(seed)
    except Exception:
        return dataset, None
    waiting = {seed: found}
    return lambda at: waiting.pop(at) if at in waiting else dataset(at), getattr(found, "kind", None)


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
