"""The clients of a learning experiment: all of them simulated, those of one node, and a server without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch

from steelyard.clients.local import ClockedClients, ClockSettings, ComputeSettings, Simulation, SimulationServer
from steelyard.clients.node import NodeClients, NodeConfig
from steelyard.clients.private import PrivateClients
from steelyard.clients.protocol import Clients
from steelyard.clients.ranks.group import current
from steelyard.clients.ranks.placing import on_rank
from steelyard.clients.ranks.simulation import RankedSimulation
from steelyard.data import load, share_out
from steelyard.data.dataset import ClientRows, Dataset, DatasetOrSeeded, Population
from steelyard.data.facts import FactSettings
from steelyard.data.loading import normalised
from steelyard.data.settings import DataSettings, FlawSettings, PartitionSettings
from steelyard.data.subset import keep_rows
from steelyard.errors import UserError
from steelyard.experiment.enough_rows import EnoughRows
from steelyard.experiment.node_rows import own_partition, own_seed, refuse_few, with_enough
from steelyard.learning.models import build
from steelyard.learning.parameters import Layout
from steelyard.learning.settings import ModelSettings, TrainingSettings
from steelyard.privacy.local import DeviceNoise
from steelyard.update_payloads import Counts, ServerTest
from steelyard.weighing.criteria import Criterion

ValueT = TypeVar("ValueT")

NO_FACTS = FactSettings()

MOST_INPUTS = 10**8
"""More numbers per sample than any model here takes; a node that says so is mistaken or lying."""


def simulate(
    data: DataSettings,
    partition: PartitionSettings,
    flaws: Sequence[FlawSettings],
    model: ModelSettings,
    training: TrainingSettings,
    compute: ComputeSettings,
    criteria: Sequence[Criterion],
    *,
    dataset: DatasetOrSeeded | None = None,
    facts: FactSettings = NO_FACTS,
    noise: DeviceNoise | None = None,
    clock: ClockSettings | None = None,
    rounds: int = 0,
    experiment: Mapping[str, Any] | None = None,
) -> tuple[Clients, SimulationServer]:
    """Build all clients of an experiment in this process, and their server.

    Data are read once for all seeds; a function handed over as `dataset` is called once for each seed. With `noise`
    every device adds it to what it sends. `rounds` is how many there will be at most, where that is known. Where this
    process leads others, they build the same from the document `experiment`, and the clients are shared out.
    """
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
    clients = Simulation(
        lambda seed: _with_facts(share_out(samples(seed), partition, seed, flaws), facts, seed),
        *(model, training, compute if ranks is None else on_rank(compute, ranks.place), criteria),
        rounds=rounds,
    )
    server = SimulationServer(clients)
    trained: Clients = clients
    if ranks is not None and ranks.place.rank == 0 and experiment is not None:
        trained = RankedSimulation(clients, server, ranks, experiment)
    timed = trained if clock is None else ClockedClients(trained, clients.context, clock)
    return timed if noise is None else PrivateClients(timed, noise), server


def _with_facts(population: Population, facts: FactSettings, seed: int, *, everyone: bool = True) -> Population:
    return replace(population, facts=facts.of(population.names, seed, all_known=everyone))


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


def host(
    data: DataSettings,
    partition: PartitionSettings,
    flaws: Sequence[FlawSettings],
    model: ModelSettings,
    training: TrainingSettings,
    compute: ComputeSettings,
    criteria: Sequence[Criterion],
    *,
    seed: int,
    node: NodeConfig,
    rows_behind: Callable[[int, int], float],
    facts: FactSettings = NO_FACTS,
    noise: DeviceNoise | None = None,
) -> NodeClients:
    """Build the clients that live on a node; nothing of other clients is kept.

    `rows_behind` says, of a client's rows, how many of so many are behind an update, for the owner's min-rows. Flaws
    are of simulated clients: a node with data of its own has the clients it has.
    """
    if flaws and node.own_data:
        raise UserError(
            f"flaws: got {len(flaws)} on a node with data of its own ({node.data}); allowed: no flaws, or a node that "
            "takes its part of a shared data set (partition-id)"
        )
    dataset = _dataset(data, node)
    outputs = dataset.targets or dataset.classes
    about: dict[str, int | list[int]] = {"features": list(dataset.features.shape[1:]), "classes": outputs}
    about |= {"pixels": 1} if dataset.task == "segmentation" else {}
    if node.guards_rows:
        clients, names, notes = _guarded(
            *(dataset, data, model, training, compute, criteria, seed, node, facts, rows_behind)
        )
        return NodeClients(clients if noise is None else PrivateClients(clients, noise), names, about, notes)
    shared = _own_rows(partition) if node.own_data else partition

    def population(seed: int) -> Population:
        # What the owner of a node says of it stands above what the experiment says.
        shared_out = share_out(dataset, shared, seed, flaws)
        return _keep(_with_facts(shared_out, facts, seed, everyone=not node.own_data), node)

    first = population(seed)
    clients = Simulation(
        lambda wanted: first if wanted == seed else population(wanted),
        *(model, training, _compute(compute), criteria, node.facts(first.names)),
    )
    noisy = clients if noise is None else PrivateClients(clients, noise)
    return NodeClients(noisy, tuple(sorted(first.names)), about)


def _guarded(
    dataset: Dataset,
    data: DataSettings,
    model: ModelSettings,
    training: TrainingSettings,
    compute: ComputeSettings,
    criteria: Sequence[Criterion],
    seed: int,
    node: NodeConfig,
    facts: FactSettings,
    rows_behind: Callable[[int, int], float],
) -> tuple[Clients, tuple[str, ...], tuple[str, ...]]:
    """Build the clients of a node that reads its owner's file: its rows are fixed by that file, whatever is asked.

    Returns the clients, their names, and what the owner should know.
    """
    secret = own_seed(node)
    held_out = dataset.held_out is not None and bool(dataset.held_out.any())
    shared_out = share_out(dataset, own_partition(node, held_out=held_out, seed=secret), seed)
    fixed = _keep(_with_facts(shared_out, facts, seed, everyone=not node.own_data), node)
    fixed, notes = with_enough(fixed, rows_behind, node)
    _check_introduction(dataset, data, node)
    clients = Simulation(lambda _: fixed, *(model, training, _compute(compute), criteria, node.facts(fixed.names)))
    tested = {rows.client: len(rows.test) for rows in fixed.clients}
    labelled = fixed.label_counts() if dataset.classes else {}
    behind = {name: [rows_behind(sum(counts), count) for count in counts] for name, counts in labelled.items()}
    counting = any(criterion.needs.label_counts for criterion in criteria)
    guarded = EnoughRows(clients, node.min_rows, secret, tested, labelled, behind, counts_labels=counting)
    return guarded, tuple(sorted(fixed.names)), notes


def _check_introduction(dataset: Dataset, data: DataSettings, node: NodeConfig) -> None:
    """Refuse to tell a number of classes that rests on the few rows of one of them."""
    if data.capabilities().classes is None and dataset.classes:
        counts = torch.bincount(dataset.labels.long())
        what = "data.classes: missing, and a class here has few rows"
        refuse_few(what, int(counts[counts > 0].min()), node, "the number of classes, or a smaller min-rows here")


def _dataset(data: DataSettings, node: NodeConfig) -> Dataset:
    if node.data is None:
        return load(data)
    if data.source in ("digits", "diabetes"):
        raise UserError(f"node config data: got {node.data}, but data.source = '{data.source}' comes with the package")
    dataset = load(data.model_copy(update={"path": node.data, "files": ()}))
    if not node.own_data:
        return dataset
    if len(node.names) == 1:
        return replace(dataset, owners=np.full(len(dataset), node.names[0]))
    if dataset.owners is None:
        raise UserError(f"node config clients: {node.data} has no column of owners; allowed: one client")
    return dataset


def _own_rows(partition: PartitionSettings) -> PartitionSettings:
    """Return the partition for a file of a node's own rows: each owner is a client, tests are split as asked."""
    changes = {
        "scheme": "given" if partition.test == "held-out" else "natural",
        "clients": None,
        "table": None,
        "overlap": False,
        "server": "none",
        "server_report": "none",
    }
    return partition.model_copy(update=changes)


def _keep(population: Population, node: NodeConfig) -> Population:
    """Return a population of only those clients that live on the node, with only their rows of the data set."""
    chosen = [population.by_name[name] for name in node.choose(population.names)]
    door = None if population.backdoor is None else _of(chosen, population.backdoor.rows)
    parts = [part for rows in chosen for part in (rows.train, rows.test)] + list((door or {}).values())
    used = np.unique(np.concatenate(parts)) if parts else np.zeros(0, dtype=np.int64)
    moved = [
        replace(rows, train=np.searchsorted(used, rows.train), test=np.searchsorted(used, rows.test)) for rows in chosen
    ]
    return replace(
        population,
        dataset=keep_rows(population.dataset, used),
        clients=tuple(moved),
        server=np.zeros(0, dtype=np.int64),
        report=np.zeros(0, dtype=np.int64),
        behaviours=_of(chosen, population.behaviours),
        flaws=_of(chosen, population.flaws),
        backdoor=population.backdoor
        and replace(
            population.backdoor, rows={name: np.searchsorted(used, rows) for name, rows in (door or {}).items()}
        ),
    )


def _of(chosen: Sequence[ClientRows], facts: Mapping[str, ValueT]) -> dict[str, ValueT]:
    return {rows.client: facts[rows.client] for rows in chosen if rows.client in facts}


def _compute(compute: ComputeSettings) -> ComputeSettings:
    # A process that trains a few clients once has no time for trials; the engines agree within float tolerance.
    return compute.model_copy(update={"engine": "loop"}) if compute.engine == "auto" else compute


class RemoteServer:
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

    def test(self, seed: int, models: torch.Tensor) -> ServerTest:
        """Refuse: there is nothing to test on."""
        raise UserError("partition.server: 'none' leaves the server without a test set; allowed: held-out, fraction")
