"""The messages of a round with hidden updates, beside the task: keys before it, the hidden sum and its opening after.

    keys ──▶ task (with everybody's keys; back come criteria and encrypted shares) ──▶ hide ──▶ open
                                                    keys ──▶ share ──▶ hide, again ◀──┘ where shares cannot be read

Bytes travel as arrays: public keys per client, key shares of 82 bytes per pair, opened shares of 33 bytes per client.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Self

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from pydantic import Field

from steelyard.base.errors import UserError
from steelyard.clients.flower import wire
from steelyard.clients.flower.wire import ClientsForm, Refused, Vouchers, WorkForm, unpack_all
from steelyard.messages.payloads import Codec, Payload, bytes_of
from steelyard.messages.payloads import Shape as ArrayShape
from steelyard.messages.updates import Failure, Floats, Task
from steelyard.privacy.secure import KEY_SHARES_BYTES, PUBLIC_BYTES, SecureServer
from steelyard.proof.signing import digest_of_task

Bytes = NDArray[np.uint8]


class RoundForm(WorkForm):
    """Which attempt at which round of which federation a message is about, and which clients of a node are meant."""

    kind: ClassVar[str]
    """Flower's type of the message."""
    answered: ClassVar[str]
    """The array in the answer to it."""

    attempt: str
    clients: list[str]

    def beside(self) -> dict[str, tuple[int, ...]]:
        """Return the arrays of bytes that go with it, and the shape of each."""
        return {}

    @classmethod
    def receive(cls, records: RecordDict) -> tuple[Self, list[Bytes]]:
        """Return the form of a message of this kind, and the arrays beside it."""
        text, found = wire.split(records)
        form = cls.read(text)
        return form, list(unpack_all(found, {name: ("|u1", shape) for name, shape in form.beside().items()}).values())


class KeysForm(RoundForm):
    """The server asks for fresh keys."""

    kind, answered = "query.keys", "keys"

    again: bool = False
    """Whether they are for another try: what was trained for this round is then hidden, and nothing trained anew."""


class ShareForm(RoundForm):
    """The server asks for key shares in another try; the keys of all of `cohort` are beside it."""

    kind, answered = "query.share", "key_shares"

    cohort: list[str]
    vouchers: Vouchers = Field(default_factory=Vouchers)

    def beside(self) -> dict[str, tuple[int, ...]]:
        return {"keys": (len(self.cohort), PUBLIC_BYTES)}


class HideForm(RoundForm):
    """The server sends the weights, and who goes on: their key shares for the node's clients are beside it."""

    kind, answered = "train.hide", "words"

    members: list[str]
    weights: list[float]
    """One for each of `members`: every node sees the whole vector."""

    def beside(self) -> dict[str, tuple[int, ...]]:
        return {"key_shares": (len(self.clients), len(self.members), KEY_SHARES_BYTES)}


class OpenForm(RoundForm):
    """The server asks for what opens the sum of the clients whose hidden updates arrived."""

    kind, answered = "query.open", "shares"

    survivors: list[str]


class AnswerForm(ClientsForm):
    """For which of its clients a node answers, and why not for the others; all else is in the arrays."""

    unreadable: dict[str, list[str]] = Field(default_factory=dict[str, list[str]])
    """By client that hides nothing: from whom it got key shares that it cannot read."""
    vouchers: Vouchers = Field(default_factory=Vouchers)
    """With fresh keys: the node's signatures under them; none where it has no key of its own."""


def asked_digest(task: Task, algorithm: Mapping[str, Any], experiment: str) -> str:
    """Return the digest of all that a client's training follows from: experiment, model, loss, round."""
    said = [digest_of_task(task, algorithm), experiment]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def rows(parts: Sequence[bytes], width: int) -> Bytes:
    """Return equally long pieces of bytes as one array, a row each."""
    return np.frombuffer(b"".join(parts), dtype=np.uint8).reshape(len(parts), width)


@dataclass(frozen=True, eq=False)
class KeyShares(Payload):
    """What stands in the place of updates where they are hidden: each client's key shares for all others of its cohort.

    `shares[clients, cohort, bytes]`, encrypted; a client's own row is zeros.
    """

    shares: Bytes

    def select(self, keep: Sequence[int]) -> KeyShares:
        return KeyShares(self.shares[list(keep)])

    def finite(self) -> NDArray[np.bool_]:
        return np.ones(len(self.shares), dtype=np.bool_)

    def content(self) -> None:
        """Return None: letters disclose nothing of updates."""

    def divergence(self, parameters: torch.Tensor) -> Floats:
        """Return zeros: nothing is known of how far an update goes, but that its client could write it down."""
        return np.zeros(len(self.shares))

    def combine(self, parameters: torch.Tensor, weights: Floats) -> NoReturn:
        raise UserError("privacy.aggregation: key shares cannot be combined; allowed: the sum that comes after them")

    def gram(self, parameters: torch.Tensor) -> NoReturn:
        raise UserError("privacy.aggregation: key shares disclose nothing of updates; allowed: criteria without them")


@dataclass(frozen=True)
class KeySharesCodec(Codec):
    """How the key shares of a cohort travel, in the answer to a task."""

    kind = "hidden"

    cohort: int

    def shapes(self, clients: int, parameters: int) -> dict[str, ArrayShape]:
        return {"key_shares": ("|u1", (clients, self.cohort, KEY_SHARES_BYTES))}

    def pack(self, payload: KeyShares) -> dict[str, NDArray[Any]]:
        return {"key_shares": payload.shares}

    def unpack(self, arrays: Mapping[str, NDArray[Any]], clients: int, parameters: int) -> KeyShares:
        return KeyShares(arrays["key_shares"])

    def join(self, parts: Sequence[KeyShares], order: Sequence[int]) -> KeyShares:
        return KeyShares(np.concatenate([part.shares for part in parts])[list(order)])


@dataclass(frozen=True, eq=False)
class Answer:
    """What a node sent for some of its clients, checked: one array, and who it is of."""

    clients: tuple[str, ...]
    found: NDArray[Any]
    failures: tuple[Failure, ...]
    sent: int = 0
    """Bytes for each client."""
    unreadable: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    vouchers: Vouchers = field(default_factory=Vouchers)


@dataclass(eq=False)
class RoundTry:
    """One try at a round of one federation, on the server."""

    task: Task
    attempt: str
    server: SecureServer
    failures: list[Failure] = field(default_factory=list[Failure])
    sent: dict[str, int] = field(default_factory=dict[str, int])
    vouchers: Vouchers = field(default_factory=Vouchers)
    """What nodes signed of their clients' keys. They check it among themselves: the server's word is not enough."""

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


Written = Callable[[RoundTry, dict[str, Any]], tuple[RoundForm, dict[str, NDArray[Any]]]]
"""From a try, and the fields that every message of it has, to a message: its form, and the arrays beside it."""
Shape = Callable[[int], tuple[str, tuple[int, ...]]]
"""From a number of clients to type and sizes of the array that their answer must hold."""


def read_answer(content: RecordDict, asked: Sequence[str], work: RoundTry, array: str, shape: Shape) -> Answer:
    """Return what a node answered for those it was asked for; anything else is refused."""
    text, found = wire.split(content)
    most = wire.largest_form(len(asked))
    sent = wire.refuse_size(text, found, most, bytes_of([shape(len(asked))]))
    form = AnswerForm.read(text, most)
    wire.refuse_other(form.federation, form.round, work.task.federation, work.task.round)
    count = wire.refuse_clients(form.clients, form.failures, asked)
    if form.clients != sorted(form.clients):
        raise Refused("clients: not in ascending order")
    if not set(form.unreadable) <= {failure.client for failure in form.failures}:
        raise Refused("unreadable: names clients that hid their updates; allowed: those that did not")
    values = unpack_all(found, {array: shape(count)} if count else {}).get(array, np.zeros(0))
    failures = wire.failures(form.failures, form.clients, asked)
    return Answer(tuple(form.clients), values, failures, sent // max(count, 1), form.unreadable, form.vouchers)


def key_rows(work: RoundTry) -> NDArray[np.uint8]:
    """Return the public keys of all of a round in ascending order of client."""
    return rows([keys.write() for _, keys in sorted(work.server.keys.items())], PUBLIC_BYTES)


def keep_shares(work: RoundTry, clients: Sequence[str], shares: NDArray[Any]) -> None:
    """Keep the key shares that these clients sent for all others of the round: [clients, cohort, bytes]."""
    cohort = sorted(work.server.keys)
    for client, mine in zip(clients, shares, strict=True):
        to = {name: row.tobytes() for name, row in zip(cohort, mine, strict=True) if name != client}
        work.server.keep_shares(client, to)
