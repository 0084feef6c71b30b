"""Putting the answers of several nodes together, clients in ascending order of id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.clients.flower.payloads import Codec, CohortRows
from steelyard.messages.payloads import DenseModels, Payload
from steelyard.messages.updates import MOST_SAMPLES, Evaluations, Failure, Question, Task, Updates

NumberT = TypeVar("NumberT", np.int64, np.float64)

_NO_COUNTS = np.zeros(0, dtype=np.int64)
_NO_FLOATS = np.zeros(0, dtype=np.float64)


def updates(
    task: Task, parts: Sequence[Updates], failures: Sequence[Failure], codec: Codec, rows: CohortRows | None = None
) -> Updates:
    """Join the checked updates of several nodes; with none, an empty answer.

    `rows` holds whole models and the algorithm's vectors already.
    """
    clients = [client for part in parts for client in part.clients]
    order = sorted(range(len(clients)), key=lambda i: clients[i])
    names = sorted({name for part in parts for name in part.criteria})
    ordered = tuple(clients[i] for i in order)
    if rows is None:
        payload, vectors = _payload(task, [part.payload for part in parts if part.clients], order, codec), {}
    else:
        payload, vectors = rows.joined(ordered)
    return Updates(
        federation=task.federation,
        round=task.round,
        clients=ordered,
        samples=_column([part.samples for part in parts], _NO_COUNTS)[order],
        criteria={name: _column([part.criteria[name] for part in parts], _NO_FLOATS)[order] for name in names},
        losses=_column([part.losses for part in parts], _NO_FLOATS)[order],
        payload=payload,
        failures=tuple(sorted(failures, key=lambda failure: failure.client)),
        bytes_sent=_column([part.bytes_sent for part in parts if part.bytes_sent is not None], _NO_COUNTS)[order],
        steps=_said_by_all([part.steps for part in parts], order),
        first_losses=_said_by_all([part.first_losses for part in parts], order),
        label_counts=_said_by_all([part.label_counts for part in parts], order),
        vectors=vectors,
        started_over=tuple(sorted(client for part in parts for client in part.started_over)),
        signed=tuple(signed for part in parts for signed in part.signed),
    )


def _said_by_all(columns: Sequence[NDArray[NumberT] | None], order: list[int]) -> NDArray[NumberT] | None:
    """Join what every node must say where it is asked for; None where it is not."""
    said = [column for column in columns if column is not None]
    return np.concatenate(said)[order] if said and len(said) == len(columns) else None


def _payload(task: Task, parts: Sequence[Payload], order: list[int], codec: Codec) -> Payload:
    if not parts:
        return DenseModels(torch.zeros(0, task.parameters.numel()))
    return codec.join(parts, order)


def evaluations(
    question: Question, parts: Sequence[Evaluations], failures: Sequence[Failure], most: int = MOST_SAMPLES
) -> Evaluations:
    """Join the checked evaluations of several nodes; of each test set no more than the first `most` samples count."""
    return _joined(question, [_counted(part, most) for part in parts], failures)


def _counted(part: Evaluations, most: int) -> Evaluations:
    if not (part.samples > most).any():
        return part
    right = None
    if part.right is not None:
        right = np.concatenate([np.zeros(0, dtype=np.bool_), *(piece[:most] for piece in _pieces(part))])
    return replace(part, samples=np.minimum(part.samples, most), right=right)


def _joined(question: Question, parts: Sequence[Evaluations], failures: Sequence[Failure]) -> Evaluations:
    clients = [client for part in parts for client in part.clients]
    order = sorted(range(len(clients)), key=lambda i: clients[i])
    names = _metrics(parts)
    samples = _column([part.samples for part in parts], _NO_COUNTS)
    right = None
    if question.detailed:
        pieces = [piece for part in parts for piece in _pieces(part)]
        right = np.concatenate([np.zeros(0, dtype=np.bool_), *(pieces[i] for i in order)])
    return Evaluations(
        federation=question.federation,
        round=question.round,
        clients=tuple(clients[i] for i in order),
        samples=samples[order],
        scores=np.concatenate([part.scores for part in parts], axis=1)[:, order],
        losses=np.concatenate([part.losses for part in parts], axis=1)[:, order],
        metrics={
            name: _column([p.metrics.get(name, np.full(len(p.clients), np.nan)) for p in parts], _NO_FLOATS)[order]
            for name in names
        },
        right=right,
        failures=tuple(sorted(failures, key=lambda failure: failure.client)),
    )


def _metrics(parts: Sequence[Evaluations]) -> list[str]:
    """Return the metrics that were given for most clients: one node can neither add one nor take one away."""
    given = Counter[str]()
    for part in parts:
        given.update(dict.fromkeys(part.metrics, len(part.clients)))
    most = sum(len(part.clients) for part in parts) / 2
    return sorted(name for name, clients in given.items() if clients > most)


def _pieces(part: Evaluations) -> list[NDArray[np.bool_]]:
    assert part.right is not None
    return np.split(part.right, np.cumsum(part.samples)[:-1]) if len(part.samples) else []


def _column(columns: Sequence[NDArray[NumberT]], none: NDArray[NumberT]) -> NDArray[NumberT]:
    return np.concatenate([none, *columns])
