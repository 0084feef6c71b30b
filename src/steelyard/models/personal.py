"""The model of one client: that of its own which a run holds, or what a newcomer makes of the global model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from steelyard.base.errors import UserError, first_names, nearest
from steelyard.clients.local import Kept, Simulation
from steelyard.data.columns import owners_of
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.data.new_rows import NewRows
from steelyard.data.preparation import Preparation, Scale
from steelyard.experiment.learning import LearningDescription
from steelyard.learning.parameters import mask
from steelyard.messages.algorithm import Algorithm
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Task
from steelyard.models.predicting import Predictor
from steelyard.models.testing import labels_of

NEWCOMER = "newcomer"


@dataclass(frozen=True, eq=False)
class Own:
    """The model of one client."""

    parameters: torch.Tensor
    scale: Scale | None
    """What its rows are scaled by, where each site has a scale of its own."""
    words: str
    """Whose it is, and how it came about."""
    client: str = ""
    """The client of the run whose tests are of this model."""

    def prepared(self, usual: Preparation) -> Preparation:
        """Return what rows of this client go through."""
        own = {"scale": self.scale, "normalise": "standard", "sites": {}}
        return usual if self.scale is None else usual.model_copy(update=own)


def of_client(
    algorithm: Algorithm,
    base: Predictor,
    parameters: torch.Tensor,
    federation: str,
    kept: Mapping[str, torch.Tensor],
    client: str,
) -> Own:
    """Return the model that a client has for itself, from what the run's clients keep in its last checkpoint."""
    if not algorithm.personal:
        raise UserError(
            f"--client: got '{client}', and {algorithm.name} gives all clients one model; allowed: --adapt FILE with "
            "the rows of one client, or a run with a personalised algorithm, such as ditto"
        )
    if algorithm.tunes:
        raise UserError(
            f"--client: got '{client}', and clients of {algorithm.name} keep no model; allowed: --adapt FILE with the "
            "rows that this client trained on"
        )
    named = {whose for kind, of, whose, *_ in map(json.loads, kept) if (kind, of) == ("vector", federation)}
    if client not in named:
        words = first_names(sorted(named)) or "none: models of single clients are not in this folder"
        raise UserError(f"--client: got '{client}'{nearest(client, named)}; allowed: clients that trained: {words}")
    held = Kept()
    held.restore(kept)
    received = parameters[None].to(torch.float32)
    vectors = held.vectors(algorithm, [(federation, client)], received)
    found = algorithm.own_models(received, vectors, mask(base.network, algorithm.private, received.device))[0]
    return Own(found, base.preparation.sites.get(client), f"the own model of {client}", client)


def of_newcomer(
    algorithm: Algorithm,
    base: Predictor,
    parameters: torch.Tensor,
    experiment: LearningDescription,
    *,
    seed: int,
    round: int,
    files: Sequence[Path],
) -> Own:
    """Return what a client that did not take part makes of the global model: one round as the run's clients train.

    Where an algorithm gives no personalised models, it is one round of plain training, as in FedAvg.
    """
    algorithm = algorithm if algorithm.personal else Algorithm()
    words = ", ".join(path.name for path in files)
    if algorithm.listens or algorithm.receives or algorithm.private == "everything":
        raise UserError(f"--adapt: {algorithm.name} makes no model of the global one alone; allowed: other algorithms")
    rows, target = base.read(list(files)), base.preparation.target
    client, empty = _client(rows, base.preparation), np.zeros(0, dtype=np.int64)
    outputs, task = len(target.names), None if target.task in ("classes", "regression") else target.task
    classes = outputs if target.task == "classes" else 0
    labels = labels_of(rows, target, None)
    dataset = Dataset(words, rows.features, labels, classes, task=task, targets=outputs - classes)
    mine = ClientRows(client, np.arange(len(dataset)), empty)
    compute = experiment.compute.model_copy(update={"engine": "loop"})
    population = Population(dataset, (mine,), empty)
    simulation = Simulation({seed: population}, experiment.model, experiment.training, compute)
    asked = Task("", seed, round + 1, (client,), parameters, algorithm=algorithm, rate=experiment.rate(round))
    answer = simulation.train([asked])[0]
    if answer.failures:
        raise UserError(f"--adapt: {words}: {answer.failures[0].reason}; allowed: more rows")
    if algorithm.personal and not algorithm.tunes:
        received = parameters[None].to(simulation.context.device)
        vectors = simulation.context.kept.vectors(algorithm, [("", client)], received)
        models = algorithm.own_models(received, vectors, simulation.context.private(algorithm))
    else:
        assert isinstance(answer.payload, DenseModels)
        models = answer.payload.models
    found = models[0].cpu()
    if torch.equal(found, parameters):
        raise UserError(f"--adapt: {algorithm.name} leaves a newcomer at the global model; allowed: other algorithms")
    scale = next(iter(rows.scales.values()), None)
    return Own(found, scale, f"the global model after one round of training ({algorithm.name}) on {words}")


def _client(rows: NewRows, preparation: Preparation) -> str:
    """Return the name of the one site whose rows these are."""
    owner = preparation.owner
    if rows.table is None or owner is None or owner not in rows.table.names:
        return NEWCOMER
    sites = np.unique(owners_of(rows.table, owner)).tolist()
    if len(sites) > 1:
        raise UserError(f"--adapt: got rows of {first_names(sites)}; allowed: rows of one site")
    return sites[0]
