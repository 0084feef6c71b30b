"""A grid without a network: nodes are functions that answer messages, honestly or not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict

from steelyard.clients.flower import tasks, wire
from steelyard.clients.flower.grid import FlowerClients
from steelyard.clients.flower.internals import enter_run
from steelyard.clients.flower.register import FederateSettings
from steelyard.clients.flower.wire import EVALUATE, INTRODUCE, TRAIN, IntroductionForm, Refused, pack
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Evaluations, Failure, Question, Task, Updates

# A message can only be made inside a run; these are this run's papers.
enter_run(1, 1)

Answer = RecordDict | Error | None
Node = Callable[[Message], Answer]
Train = Callable[[Task], Updates]
Evaluate = Callable[[Question, tuple[str, ...]], Evaluations]


class FakeGrid:
    """Delivers at once; a node that returns None never answers, `delays` makes one slow."""

    def __init__(self, nodes: dict[int, Node]) -> None:
        self.nodes = nodes
        self.sent: dict[str, tuple[Message, float]] = {}
        self.delays: dict[int, float] = {}
        self.tamper: Callable[[Message, Message], list[Message]] = lambda question, answer: [answer]
        self.pulled: Callable[[Message], object] = lambda question: None
        """Hears of each question whose answer is looked for; may raise, or take its time."""
        self.kinds: list[str] = []

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names: list[str] = []
        for message in messages:
            node = message.metadata.dst_node_id
            if node not in self.nodes:
                names.append("")
                continue
            name = f"message-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = name
            self.sent[name] = (message, time.monotonic() + self.delays.get(node, 0.0))
            self.kinds.append(message.metadata.message_type)
            names.append(name)
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        answers: list[Message] = []
        for name in names:
            message, ready = self.sent[name]
            self.pulled(message)
            if time.monotonic() < ready:
                continue
            answer = self.nodes[message.metadata.dst_node_id](message)
            if answer is not None:
                answers += self.tamper(message, Message(answer, reply_to=message))
        return answers


def introduction(*clients: str) -> RecordDict:
    return wire.content(IntroductionForm(version="test", clients=list(clients)), {})


def train(task: Task) -> Updates:
    """Each client adds the number in its name to every parameter and holds ten times as many samples."""
    numbers = np.asarray([int(client.strip("abcdefghijklmnopqrstuvwxyz-")) for client in task.clients])
    return Updates(
        federation=task.federation,
        round=task.round,
        clients=task.clients,
        samples=numbers * 10,
        criteria={"DS": numbers * 10.0},
        losses=numbers / 8.0,
        payload=DenseModels(task.parameters + torch.as_tensor(numbers, dtype=torch.float32)[:, None]),
    )


def evaluate(question: Question, clients: tuple[str, ...]) -> Evaluations:
    """Each client finds candidate k right on (number + k) percent of its two samples' worth."""
    numbers = np.asarray([int(client.strip("abcdefghijklmnopqrstuvwxyz-")) for client in clients], dtype=np.float64)
    ranks = np.arange(len(question.models))[:, None]
    right = np.asarray([flag for number in numbers for flag in (number % 2 == 1, True)], dtype=np.bool_)
    return Evaluations(
        federation=question.federation,
        round=question.round,
        clients=clients,
        samples=np.full(len(clients), 2, dtype=np.int64),
        scores=(numbers[None] + ranks) / 100,
        losses=np.ones((len(question.models), len(clients))),
        right=right if question.detailed else None,
    )


def honest(*clients: str, train: Train = train, evaluate: Evaluate = evaluate) -> Node:
    """A node that hosts these clients and does as it is asked."""

    def answer(message: Message) -> Answer:
        kind = message.metadata.message_type
        if kind == INTRODUCE:
            return introduction(*clients)
        if kind == TRAIN:
            return tasks.write_updates(train(tasks.read_task(message.content)[0]))
        assert kind == EVALUATE
        return tasks.write_evaluations(evaluate(tasks.read_question(message.content)[0], tuple(sorted(clients))))

    return answer


def failing(*clients: str, kind: str = TRAIN, answer: Answer = None) -> Node:
    """A node that is honest but for one kind of message, which it answers like this."""
    otherwise = honest(*clients)
    return lambda message: answer if message.metadata.message_type == kind else otherwise(message)


def task(*clients: str, parameters: int = 3, round: int = 1) -> Task:
    return Task("fed", 7, round, tuple(sorted(clients)), torch.arange(parameters, dtype=torch.float32))


def reasons(failures: Iterable[Failure]) -> dict[str, str]:
    return {failure.client: failure.reason for failure in failures}


def until(true: Callable[[], bool], clients: FlowerClients, seconds: float = 20.0) -> None:
    """Let introductions come in, which nobody waits for, until something is true of them."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, clients.roster.notes
        clients.roster.refresh(0.2)


def assert_taken_back(call: Callable[[], object], *parts: str) -> None:
    """Hold a refusal of what came over the wire to what its reason must name."""
    with pytest.raises(Refused) as caught:
        call()
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def changed_answer(records: RecordDict, arrays: Mapping[str, Any] | None = None, **form: Any) -> RecordDict:
    """Return an answer in which some arrays, or fields of its form, are others, or left out where an array is None."""
    held = {name: array.numpy() for name, array in records.array_records["arrays"].items()} | dict(arrays or {})
    written = json.loads(str(records.config_records["form"]["json"])) | form
    kept = {name: array for name, array in held.items() if array is not None}
    return RecordDict({"form": ConfigRecord({"json": json.dumps(written)}), "arrays": pack(kept)})


def crowd(
    nodes: Mapping[int, Node] | FakeGrid, /, timeout: float = 20.0, state: Any = None, **options: Any
) -> FlowerClients:
    """Return clients behind nodes that have introduced themselves, from a snapshot's `state` where there is one."""
    grid = nodes if isinstance(nodes, FakeGrid) else FakeGrid(dict(nodes))
    given = {name: options.pop(name) for name in ("register", "known", "codec", "further") if name in options}
    judges = options.pop("judges", {"DS": lambda value: None})
    options = {"nodes": len(grid.nodes), **options}
    settings = FederateSettings(timeout=timeout, **options)
    made = FlowerClients(grid, judges, settings, (0.0, 1.0), **given)  # type: ignore[arg-type]
    made.restore(state or {})
    made.wait()
    return made
