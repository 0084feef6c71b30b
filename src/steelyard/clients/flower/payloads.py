"""How the updates of a cohort travel: one codec per kind of payload.

A codec packs what some clients of one node trained, reads it back on the server with every shape and type checked, and
joins what came from several nodes. `DENSE` carries whole models. An experiment names the one codec of its payload, and
both ends of the wire are given it: a node cannot choose another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, cast

import torch
from flwr.app import Array
from numpy.typing import NDArray

from steelyard.clients.flower.arrays import tensor, unpack
from steelyard.clients.flower.forms import Refused
from steelyard.messages.payloads import DenseModels, Payload
from steelyard.messages.updates import Task, Updates


@dataclass(frozen=True)
class Codec:
    """One kind of payload on the wire; make one for a payload class of your own."""

    kind: str
    payload: type | tuple[type, ...]
    """The payload classes that it carries."""
    pack: Callable[[Any], dict[str, NDArray[Any]]]
    """Payload of one node's clients -> named arrays."""
    unpack: Callable[[Mapping[str, Array], int, torch.Tensor], Payload]
    """Named arrays, number of clients, global parameters -> payload; raises Refused."""
    join: Callable[[Sequence[Any], Sequence[int]], Payload]
    """Payloads of several nodes, and the order of all their clients -> one payload with the clients in that order."""
    largest: Callable[[int, torch.Tensor], int]
    """Number of clients, global parameters -> most bytes that an honest answer can have."""

    def refuse_other(self, kind: str) -> None:
        """Refuse an answer whose node says that it used another codec."""
        if kind != self.kind:
            raise Refused(f"payload: got {kind!r}; allowed: {self.kind}")

    def packed(self, payload: Payload) -> dict[str, NDArray[Any]]:
        """Return what a node's clients trained as named arrays."""
        if not isinstance(payload, self.payload):
            raise TypeError(f"the codec '{self.kind}' does not carry {type(payload).__name__}")
        return self.pack(payload)


class CohortRows:
    """The matrices of a whole cohort, into which models and an algorithm's vectors are copied as they arrive.

    No second copy of them is ever needed. Use one for each task whose updates travel as whole models, `put` for each
    answer and `joined` at the end.
    """

    def __init__(self, task: Task) -> None:
        self._row = {client: row for row, client in enumerate(sorted(task.clients))}
        shape = (len(self._row), task.parameters.numel())
        self._models = torch.empty(shape)
        self._vectors = {name: torch.empty(shape) for name in task.algorithm.sends}
        self._lock, self._closed = Lock(), False

    def put(self, part: Updates) -> Updates:
        """Take over the models and vectors of an answer; what is returned holds them no longer."""
        models = cast(DenseModels, part.payload).models
        with self._lock:
            if self._closed:  # Rows have moved: an answer after the deadline must not be written over another.
                raise Refused("came after the deadline")
            rows = [self._row[client] for client in part.clients]
            for matrix, found in ((self._models, models), *((self._vectors[n], v) for n, v in part.vectors.items())):
                for row, numbers in zip(rows, found, strict=True):
                    matrix[row].copy_(numbers)
        return replace(part, payload=DenseModels(models[:0].clone()), vectors={})

    def joined(self, clients: Sequence[str]) -> tuple[DenseModels, dict[str, torch.Tensor]]:
        """Return models and vectors of these clients, ascending; rows move up over those of clients left out."""
        with self._lock:
            self._closed = True
        for matrix in (self._models, *self._vectors.values()):
            for row, client in enumerate(clients):
                if self._row[client] != row:
                    matrix[row].copy_(matrix[self._row[client]])
        count = len(clients)
        return DenseModels(self._models[:count]), {name: matrix[:count] for name, matrix in self._vectors.items()}


def only_keys(arrays: Mapping[str, Array], allowed: Sequence[str]) -> None:
    """Refuse missing and unexpected arrays by name."""
    if set(arrays) != set(allowed):
        got = ", ".join(sorted(arrays)) or "none"
        raise Refused(f"arrays: got {got[:200]}; allowed: exactly {', '.join(sorted(allowed))}")


def _pack_dense(payload: DenseModels) -> dict[str, NDArray[Any]]:
    return {"models": payload.models.detach().to("cpu", torch.float32).numpy()}


def _unpack_dense(arrays: Mapping[str, Array], clients: int, parameters: torch.Tensor) -> Payload:
    only_keys(arrays, ["models"])
    return DenseModels(tensor(unpack(arrays["models"], "models", "<f4", (clients, parameters.numel()))))


def _join_dense(payloads: Sequence[Any], order: Sequence[int]) -> Payload:
    return DenseModels(torch.cat([cast(DenseModels, payload).models for payload in payloads])).select(order)


DENSE = Codec(
    kind="dense",
    payload=DenseModels,
    pack=_pack_dense,
    unpack=_unpack_dense,
    join=_join_dense,
    largest=lambda clients, parameters: 4 * clients * parameters.numel() + 4096,
)
"""Whole models, one row of numbers per client."""
