"""What one rank does of a simulation: train its clients, sum and test the models that it holds, test models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import numpy as np
import torch

from steelyard import __version__
from steelyard.algorithms.settings import AlgorithmSettings, algorithm_table
from steelyard.base.errors import UserError, in_words
from steelyard.base.settings import validated
from steelyard.clients.local import Simulation, SimulationServer
from steelyard.clients.local.evaluator import Evaluator
from steelyard.clients.ranks.wire import Content
from steelyard.messages.payloads import DenseModels, Payload
from steelyard.messages.updates import Failure, LossState, Task, Updates
from steelyard.proof.signing import digest_of_task

NOTHING = DenseModels(torch.zeros(0, 0))
"""In place of models that lie on another rank."""


def own_versions() -> dict[str, str]:
    """Return what must be the same on all ranks: other versions draw or round otherwise."""
    return {"steelyard": __version__, "torch": torch.__version__, "numpy": np.__version__}


class Share:
    """One rank's part of the work; rank 0 has one too, and gives itself the same commands as the others."""

    def __init__(self, simulation: Simulation, server: SimulationServer) -> None:
        self.simulation, self.server = simulation, server
        self._held: dict[int, DenseModels] = {}
        """By the place of its task: the models of the last round that were trained here."""
        self._training = 0
        self._received: list[torch.Tensor] = []
        """By the place of its task: the model that the last round began with."""

    def answer(self, command: str, content: Content) -> Content:
        """Do one command of rank 0."""
        match command:
            case "data":
                return dict(self.simulation.fingerprint(content["seed"]))
            case "train":
                return self._train(content)
            case "test":
                return self._test(content)
            case "tested":
                return vars(self.server.test(content["seed"], self._models(content).models))
            case "sum":
                models = self._models(content)
                return models.combine(models.like, content["weights"])
            case "divergence":
                start = content["parameters"]
                return self._models(content).divergence(self._received[content["task"][1]] if start is None else start)
            case "finite":
                return self._models(content).finite()
            case _:
                assert command == "rows", command
                return self._models(content).models[:, slice(*content["span"])]

    def _models(self, content: Content) -> DenseModels:
        (training, place), rows = content["task"], content["rows"]
        assert training == self._training, "models are asked for while the next ones are not trained"
        held = self._held[place]
        return held if np.array_equal(rows, np.arange(len(held.models))) else held.select(rows.tolist())

    def _train(self, content: Content) -> Content:
        # The memory of the last round's models is free for those of this one.
        self._held.clear()
        self._training = content["training"]
        self.simulation.context.use_engine(content["engine"])
        if content["state"] is not None:
            self.simulation.restore(content["state"])
        tasks = [read_task(table, clients) for table, clients in zip(content["tasks"], content["clients"], strict=True)]
        self._received = [task.parameters for task in tasks]
        places = [place for place, task in enumerate(tasks) if task.clients or self._looks_back(task)]
        answers = dict(zip(places, self.simulation.train([tasks[place] for place in places]), strict=True))
        for place, found in answers.items():
            assert isinstance(found.payload, DenseModels)
            self._held[place] = DenseModels(found.payload.models)
        return {
            "answers": [updates_content(answers[place]) if place in answers else None for place in range(len(tasks))],
            "state": None if content["state"] is None else self.simulation.snapshot(),
        }

    def _looks_back(self, task: Task) -> bool:
        """Whether a client may start from this round's model later, wherever it is trained then."""
        return any(
            how.stale or how.pretends for how in self.simulation.context.population(task.seed).behaviours.values()
        )

    def _test(self, content: Content) -> Content:
        context = self.simulation.context
        dataset, loss = context.population(content["seed"]).dataset, read_loss(content["loss"])
        rows = content["rows"].to(context.device)
        # Not what shares tests out: this is one of the shares.
        return Evaluator.test(context.evaluator, content["models"].to(context.device), dataset, rows, loss)


def task_content(task: Task) -> Content:
    """Return a task as it travels, without its clients, and with its digest."""
    algorithm = algorithm_table(task.algorithm)
    return {
        "about": [task.federation, task.seed, task.round],
        "parameters": task.parameters,
        "loss": asdict(task.loss),
        "algorithm": algorithm,
        "vectors": task.vectors,
        "registered": task.registered,
        "rate": task.rate,
        "digest": digest_of_task(task, algorithm),
    }


def read_task(table: Content, clients: Sequence[str]) -> Task:
    """Return a task for some clients; refuse one that is not, number by number, the one that rank 0 knows."""
    federation, seed, round = table["about"]
    task = Task(
        *(federation, seed, round, tuple(clients), table["parameters"], read_loss(table["loss"])),
        algorithm=validated(AlgorithmSettings, table["algorithm"], "algorithm").made(),
        vectors=table["vectors"],
        registered=table["registered"],
        rate=table["rate"],
    )
    if digest_of_task(task, algorithm_table(task.algorithm)) != table["digest"]:
        raise UserError(
            f"round {round} of {in_words(federation)}: the model, the loss or the algorithm here is not the one "
            "of rank 0; allowed: the same program and the same code of your own on all ranks"
        )
    return task


def read_loss(table: Content) -> LossState:
    """Return a loss that travelled as a table."""
    weights = table["class_weights"]
    return LossState(table["name"], None if weights is None else tuple(weights), table["shape"], table["scale"])


def updates_content(updates: Updates) -> Content:
    """Return what a rank's clients say of their updates; the models stay where they are."""
    failures = [[failure.client, failure.reason] for failure in updates.failures]
    columns = {name: getattr(updates, name) for name in Updates.columns()}
    return {"about": [updates.federation, updates.round, updates.clients], "failures": failures, "columns": columns}


def joined(task: Task, parts: Mapping[int, Content], payload: Callable[[list[tuple[int, int]]], Payload]) -> Updates:
    """Put the parts of the ranks together, clients ascending; `payload` takes the rank and the row of each client."""
    answers: list[Updates] = []
    places: list[tuple[int, int]] = []
    for rank, part in parts.items():
        federation, round, clients = part["about"]
        answers.append(Updates(federation, round, tuple(clients), payload=NOTHING, **part["columns"]))
        places += [(rank, row) for row in range(len(clients))]
    failures = [Failure(*each) for part in parts.values() for each in part["failures"]]
    return Updates.joined(task, answers, failures, lambda order: payload([places[place] for place in order]))
