"""The clients of a learning experiment that live on one node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np
import torch

from steelyard.base.errors import UserError
from steelyard.clients.local import ComputeSettings, Simulation
from steelyard.clients.node import NodeClients, NodeConfig
from steelyard.clients.protocol import Clients
from steelyard.data import DataSettings, PartitionSettings, load
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.data.sources.csv import Csv
from steelyard.experiment.enough_rows import EnoughRows
from steelyard.experiment.learning_simulation import LearningSections
from steelyard.experiment.node_rows import own_partition, own_seed, refuse_few, with_enough

ValueT = TypeVar("ValueT")


def host(
    sections: LearningSections, *, seed: int, node: NodeConfig, rows_behind: Callable[[int, int], float]
) -> NodeClients:
    """Build the clients that live on a node; nothing of other clients is kept.

    `rows_behind` says, of a client's rows, how many of so many are behind an update, for the owner's min-rows. Flaws
    are of simulated clients: a node with data of its own has the clients it has.
    """
    if sections.flaws and node.own_data:
        raise UserError(
            f"flaws: got {len(sections.flaws)} on a node with data of its own ({node.data}); allowed: no flaws, or a "
            "node that takes its part of a shared data set (partition-id)"
        )
    dataset = _dataset(sections.data, node)
    outputs = dataset.targets or dataset.classes
    about: dict[str, int | list[int]] = {"features": list(dataset.features.shape[1:]), "classes": outputs}
    about |= {"pixels": 1} if dataset.task == "segmentation" else {}
    if node.guards_rows:
        guarded, names, notes = _guarded(sections, dataset, seed, node, rows_behind)
        return NodeClients(sections.noisy(guarded), names, about, notes)
    if node.own_data:
        sections = replace(sections, partition=_own_rows(sections.partition))
    first = _population(sections, dataset, seed, node)
    clients = Simulation(
        lambda wanted: first if wanted == seed else _population(sections, dataset, wanted, node),
        *(sections.model, sections.training, _compute(sections.compute), sections.criteria, node.facts(first.names)),
    )
    return NodeClients(sections.noisy(clients), tuple(sorted(first.names)), about)


def _guarded(
    sections: LearningSections, dataset: Dataset, seed: int, node: NodeConfig, rows_behind: Callable[[int, int], float]
) -> tuple[Clients, tuple[str, ...], tuple[str, ...]]:
    """Build the clients of a node that reads its owner's file: its rows are fixed by that file, whatever is asked.

    Returns the clients, their names, and what the owner should know.
    """
    secret = own_seed(node)
    held_out = dataset.held_out is not None and bool(dataset.held_out.any())
    partition = own_partition(node, held_out=held_out, seed=secret)
    fixed = _population(replace(sections, partition=partition, flaws=()), dataset, seed, node)
    fixed, notes = with_enough(fixed, rows_behind, node)
    _check_introduction(dataset, sections.data, node)
    clients = Simulation(
        lambda _: fixed,
        *(sections.model, sections.training, _compute(sections.compute), sections.criteria, node.facts(fixed.names)),
    )
    tested = {rows.client: len(rows.test) for rows in fixed.clients}
    labelled = fixed.label_counts() if dataset.classes else {}
    behind = {name: [rows_behind(sum(counts), count) for count in counts] for name, counts in labelled.items()}
    counting = any(criterion.needs.label_counts for criterion in sections.criteria)
    guarded = EnoughRows(clients, node.min_rows, secret, tested, labelled, behind, counts_labels=counting)
    return guarded, tuple(sorted(fixed.names)), notes


def _check_introduction(dataset: Dataset, data: DataSettings, node: NodeConfig) -> None:
    """Refuse to give a number of classes that rests on the few rows of one of them."""
    if data.capabilities().classes is None and dataset.classes:
        counts = torch.bincount(dataset.labels.long())
        what = "data.classes: missing, and a class here has few rows"
        refuse_few(what, int(counts[counts > 0].min()), node, "the number of classes, or a smaller min-rows here")


def _dataset(data: DataSettings, node: NodeConfig) -> Dataset:
    if node.data is None:
        return load(data)
    if data.source in ("digits", "diabetes"):
        raise UserError(f"node config data: got {node.data}, but data.source = '{data.source}' comes with the package")
    dataset = load(data.model_copy(update={"path": node.data} | ({"files": ()} if isinstance(data, Csv) else {})))
    if not node.own_data:
        return dataset
    if len(node.names) == 1:
        return replace(dataset, owners=np.full(len(dataset), node.names[0]))
    if dataset.owners is None:
        raise UserError(f"node config clients: {node.data} has no column of owners; allowed: one client")
    return dataset


def _own_rows(partition: PartitionSettings) -> PartitionSettings:
    """Return the partition for a file of a node's own rows: each owner is a client, tests are split as asked."""
    scheme = "given" if partition.test == "held-out" else "natural"
    changes = {"scheme": scheme, "clients": None, "server": "none", "server_report": "none"}
    kind = cast("type[PartitionSettings]", PartitionSettings.kinds[scheme])
    return kind.model_construct(None, **partition.model_dump() | changes)


def _population(sections: LearningSections, dataset: Dataset, seed: int, node: NodeConfig) -> Population:
    """Return a population of only those clients that live on the node, with only their rows of the data set."""
    population = sections.population(dataset, seed, everyone=not node.own_data)
    chosen = [population.by_name[name] for name in node.choose(population.names)]
    triggers = {} if population.backdoor is None else _of(chosen, population.backdoor.rows)
    parts = [part for rows in chosen for part in (rows.train, rows.test)] + list(triggers.values())
    used = np.unique(np.concatenate(parts)) if parts else np.zeros(0, dtype=np.int64)
    moved = [
        replace(rows, train=np.searchsorted(used, rows.train), test=np.searchsorted(used, rows.test)) for rows in chosen
    ]
    return replace(
        population,
        dataset=population.dataset.take(used),
        clients=tuple(moved),
        server=np.zeros(0, dtype=np.int64),
        report=np.zeros(0, dtype=np.int64),
        behaviours=_of(chosen, population.behaviours),
        flaws=_of(chosen, population.flaws),
        backdoor=population.backdoor
        and replace(population.backdoor, rows={name: np.searchsorted(used, rows) for name, rows in triggers.items()}),
    )


def _of(chosen: Sequence[ClientRows], facts: Mapping[str, ValueT]) -> dict[str, ValueT]:
    return {rows.client: facts[rows.client] for rows in chosen if rows.client in facts}


def _compute(compute: ComputeSettings) -> ComputeSettings:
    # A process that trains a few clients once has no time for trials; the engines agree within float tolerance.
    return compute.model_copy(update={"engine": "loop"}) if compute.engine == "auto" else compute
