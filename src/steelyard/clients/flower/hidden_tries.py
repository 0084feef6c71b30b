"""One try at a round with hidden updates on the server: what it is about, and what nodes answered, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from steelyard.clients.flower import arrays as packing
from steelyard.clients.flower import checks, wire
from steelyard.clients.flower.forms import Form, Refused
from steelyard.clients.flower.hidden_forms import AnswerForm, rows
from steelyard.clients.flower.payloads import only_keys
from steelyard.messages.updates import Failure, Task
from steelyard.privacy.secure import PUBLIC_BYTES, SecureServer


@dataclass(frozen=True, eq=False)
class Answer:
    """What a node sent for some of its clients, checked: one array, and who it is of."""

    clients: tuple[str, ...]
    found: NDArray[Any]
    failures: tuple[Failure, ...]
    sent: int = 0
    """Bytes for each client."""
    unreadable: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])


@dataclass(eq=False)
class RoundTry:
    """One try at a round of one federation, on the server."""

    task: Task
    attempt: str
    server: SecureServer
    failures: list[Failure] = field(default_factory=list[Failure])
    sent: dict[str, int] = field(default_factory=dict[str, int])

    def fields(self, run: str, clients: Sequence[str], seconds: float, experiment: str) -> dict[str, Any]:
        """Return the fields that every message of this try has."""
        task = self.task
        return {
            "run": run,
            "federation": task.federation,
            "seed": task.seed,
            "round": task.round,
            "attempt": self.attempt,
            "clients": list(clients),
            "seconds": seconds,
            "experiment": experiment,
        }


Written = Callable[[RoundTry, dict[str, Any]], tuple[Form, dict[str, NDArray[Any]]]]
"""From a try, and the fields that every message of it has, to a message: its form, and the arrays beside it."""
Shape = Callable[[int], tuple[str, tuple[int, ...]]]
"""From a number of clients to type and sizes of the array that their answer must hold."""


def read_answer(content: RecordDict, asked: Sequence[str], work: RoundTry, array: str, shape: Shape) -> Answer:
    """Return what a node answered for those it was asked for; anything else is refused."""
    text, found = wire.split(content)
    dtype, sizes = shape(len(asked))
    most = checks.largest_form(len(asked))
    sent = checks.refuse_size(text, found, most, int(np.prod(sizes)) * np.dtype(dtype).itemsize + 4096)
    form = AnswerForm.read(text, most)
    checks.refuse_other(form.federation, form.round, work.task.federation, work.task.round)
    count = checks.refuse_clients(form.clients, form.failures, asked)
    if form.clients != sorted(form.clients):
        raise Refused("clients: not in ascending order")
    if not set(form.unreadable) <= {failure.client for failure in form.failures}:
        raise Refused("unreadable: names clients that hid their updates; allowed: those that did not")
    only_keys(found, [array] if count else [])
    dtype, sizes = shape(count)
    values = packing.unpack(found[array], array, dtype, sizes) if count else np.zeros(0, np.dtype(dtype))
    failures = checks.failures(form.failures, form.clients, asked)
    return Answer(tuple(form.clients), values, failures, sent // max(count, 1), form.unreadable)


def key_rows(work: RoundTry) -> NDArray[np.uint8]:
    """Return the public keys of all of a round in ascending order of client."""
    return rows([keys.write() for _, keys in sorted(work.server.keys.items())], PUBLIC_BYTES)


def keep_shares(work: RoundTry, clients: Sequence[str], shares: NDArray[Any]) -> None:
    """Keep the key shares that these clients sent for all others of the round: [clients, cohort, bytes]."""
    cohort = sorted(work.server.keys)
    for client, mine in zip(clients, shares, strict=True):
        to = {name: row.tobytes() for name, row in zip(cohort, mine, strict=True) if name != client}
        work.server.keep_shares(client, to)
