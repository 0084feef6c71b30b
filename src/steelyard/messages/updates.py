"""What travels between the server and the clients: frozen, typed, checked where it enters the server.

    Task ──▶ clients.train ──▶ Updates ──▶ weigh ──▶ combine ──▶ Question ──▶ clients.evaluate ──▶ Evaluations

A task and an answer concern one federation (one rule with one seed) and its whole cohort: weights need the whole cohort
before anything is summed. Several federations that are compared side by side pass several tasks in one call, so
that an implementation may train them all together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from steelyard.base.tallies import Leading, Tally, figures_of
from steelyard.messages.algorithm import Algorithm, Vectors
from steelyard.messages.payloads import Counts, Floats, Payload

if TYPE_CHECKING:
    # Only for annotations: rules and criteria are looked up and tried on paper without waiting for torch.
    import torch

MOST_SAMPLES = 10**12
"""More samples than any device can hold; a larger number is a lie or a mistake."""
MOST_WORTH = 1e15
"""No number that a client says of itself is larger: sums over a whole cohort must stay numbers."""


@dataclass(frozen=True)
class Column:
    """A field with an entry, or a row, for each client; see `Answer.columns`.

    Selecting clients, joining answers, the wire, the checks at the server and the run's folder follow from it.
    """

    kind: type[np.generic] = np.float64
    least: float = -MOST_WORTH
    most: float = MOST_WORTH
    """A client that says a number beyond these is left out."""
    word: str = ""
    """What one client's number is called in a reason."""
    told: Literal["always", "asked", "never"] = "always"
    """Whether nodes say it in any answer, where a criterion or an algorithm of the run needs it, or never: it is of the
    server or a simulation. What is not told is None."""
    named: bool = False
    """Whether there are several, by name."""
    array: str = ""
    """Under this name it travels as an array beside the written form, where it is named as a prefix."""
    axes: tuple[int, ...] = (0,)
    """The axes along which clients stand."""
    rows: bool = False
    """Whether it has several numbers for each client, or for each candidate."""
    each_sample: bool = False
    """Whether it has one for each of a client's `samples`, one client after another."""
    stored: str = ""
    """Its column of the database (runs/schema.py); of tested candidates the first is stored."""

    @property
    def written(self) -> Any:
        """The type of what JSON has of it."""
        number: Any = int if np.issubdtype(self.kind, np.integer) else float
        whole = list[list[number]] if self.rows else list[number]
        return dict[str, whole] if self.named else whole if self.told == "always" else whole | None

    def over(self, values: Any, do: Callable[[Any], Any]) -> Any:
        """Do something with it, or with each of those that have names; None stays None."""
        if values is None:
            return None
        return {name: do(one) for name, one in values.items()} if self.named else do(values)

    def write(self, values: Any) -> Any:
        """Return it as JSON has it."""
        return self.over(values, lambda one: one.tolist())

    def read(self, values: Any) -> Any:
        """Return arrays of what JSON has; a whole number that no array holds becomes one that is out of range."""

        def numbers(one: list[Any]) -> NDArray[Any]:
            if np.issubdtype(self.kind, np.integer) and not self.rows:
                one = [min(max(number, self.least - 1), self.most + 1) for number in one]
            return np.array(one, dtype=self.kind)

        return self.over(values, numbers)

    def of_clients(self, values: Any, rows: Sequence[int], samples: Counts) -> Any:
        """Return it for the clients at these positions, in this order."""

        def chosen(one: Any) -> Any:
            if self.each_sample:
                pieces = np.split(one, np.cumsum(samples)[:-1])
                return np.concatenate([one[:0], *(pieces[row] for row in rows)])
            for axis in self.axes:
                one = one[(*(slice(None),) * axis, list(rows))]
            return one

        return self.over(values, chosen)

    def joined(self, parts: Sequence[Any]) -> Any:
        """Return what the clients of several answers say, one after another; None unless all say it."""
        if not parts:
            return {} if self.named else np.zeros(0, self.kind) if self.told == "always" else None
        if any(part is None for part in parts):
            return None
        if self.named:
            return {name: self._joined([part[name] for part in parts]) for name in parts[0]}
        return self._joined(parts)

    def _joined(self, parts: Sequence[Any]) -> Any:
        axis, *others = self.axes
        if others:  # Clients of different answers have nothing to do with each other.
            ends = np.cumsum([0, *map(len, parts)])
            found = np.zeros((ends[-1], ends[-1]), self.kind)
            for begin, end, part in zip(ends[:-1], ends[1:], parts, strict=True):
                found[begin:end, begin:end] = part
            return found
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts, axis=axis)
        import torch  # Late for speed of start; whoever has tensors has loaded it already.

        return torch.cat([part.to(parts[0].device) for part in parts])

    def fault(self, values: Any, client: int, name: str = "") -> str | None:
        """Say why what a client says cannot be true, or None where it can; `name` is of one of several."""
        if values is None:
            return None
        if self.named and not name:
            return next((why for one in values if (why := self.fault(values[one], client, one))), None)
        said = np.asarray(values[(*(slice(None),) * self.axes[0], client)])
        wrong = said[~(np.isfinite(said) & (said >= self.least) & (said <= self.most))]
        if not wrong.size:
            return None
        return f"{self.word} {name}".strip() + f" = {wrong[0]:.15g}; allowed: {self.least:.15g} to {self.most:.15g}"

    @property
    def declared(self) -> Mapping[str, Column]:
        """The metadata of a field that is this column."""
        return {"column": self}


@dataclass(frozen=True, eq=False)
class Answer:
    """What `Updates` and `Evaluations` have in common: columns with something of each client, ascending by id."""

    federation: str
    round: int
    clients: tuple[str, ...]
    samples: Counts = field(metadata=Column(np.int64, 1, MOST_SAMPLES, "samples", stored="samples").declared)
    """Number of samples of each client, for training or for tests."""

    @classmethod
    @cache
    def columns(cls) -> Mapping[str, Column]:
        """Return the fields that have an entry, or a row, for each client."""
        return {each.name: each.metadata["column"] for each in fields(cls) if "column" in each.metadata}

    def rows_of(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return the clients at these positions and what their columns hold, in this order."""
        found = {name: one.of_clients(getattr(self, name), rows, self.samples) for name, one in self.columns().items()}
        return {"clients": tuple(self.clients[row] for row in rows), **found}

    def write(self) -> dict[str, Any]:
        """Return as JSON has it what stands in columns, but for tensors."""
        columns = self.columns().items()
        return {name: one.write(getattr(self, name)) for name, one in columns if one.kind is not np.float32}

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns that were written."""
        return {name: one.read(written[name]) for name, one in cls.columns().items() if name in written}


def joined_columns(kind: type[Answer], parts: Sequence[Answer]) -> tuple[dict[str, Any], list[int]]:
    """Return the clients of several answers and their columns, ascending, and from where each client has come."""
    clients = [client for part in parts for client in part.clients]
    order = sorted(range(len(clients)), key=clients.__getitem__)
    found = {name: one.joined([getattr(part, name) for part in parts]) for name, one in kind.columns().items()}
    together = {name: kind.columns()[name].of_clients(each, order, found["samples"]) for name, each in found.items()}
    return {"clients": tuple(clients[row] for row in order), **together}, order


@dataclass(frozen=True)
class LossState:
    """The loss that clients are to use this round; what adapts between rounds is in here.

    "auto" is the loss that fits: cross-entropy for classes, on one logit for two, squared error for regression.
    `class_weights` are AdaFed's κ_c (None for 1); `shape` and `scale` are α and c of Barron's general loss.
    """

    name: str = "auto"
    class_weights: tuple[float, ...] | None = None
    shape: float | None = None
    scale: float | None = None


@dataclass(frozen=True, eq=False)
class Task:
    """One round's work for one federation: train these clients from these parameters with this loss."""

    federation: str
    seed: int
    round: int
    clients: tuple[str, ...]
    """The cohort, in ascending order of client id."""
    parameters: torch.Tensor
    """The global model as one flat float32 vector."""
    loss: LossState = LossState()
    algorithm: Algorithm = field(default_factory=Algorithm)
    """What clients do beside plain training."""
    vectors: Vectors = field(default_factory=dict[str, "torch.Tensor"])
    """What the algorithm's server sends beside the model, by name, [parameters] each."""
    registered: int = 0
    """How many clients there are, in and outside this cohort."""
    rate: float = 1.0
    """What the clients' learning rate is multiplied by in this round."""
    waited: float = 0.0
    """Seconds on the devices' clock before somebody was there to be asked."""


@dataclass(frozen=True)
class Failure:
    """A client that was asked and gives nothing to weigh, with the reason; the round goes on without it."""

    client: str
    reason: str


@dataclass(frozen=True)
class Signed:
    """What one node signed of the updates that it sent, as it was checked (`statements.Statement`)."""

    key: str
    """The node's public key, as one line of OpenSSH."""
    before: str
    """Digest of its statement before this one; empty where it knows of none."""
    digests: Mapping[str, bytes]
    """By client: the salted digest of its update; also of clients that were left out afterwards."""
    salts: Mapping[str, bytes]
    """By client; empty where updates are hidden: the node keeps them."""
    signature: bytes


@dataclass(frozen=True, eq=False)
class Updates(Answer):
    """What a cohort sent back for one task, in ascending order of client id.

    What is new of each client is one more field with its `Column`: it then travels, is checked, joined and kept.
    """

    criteria: Mapping[str, Floats] = field(metadata=Column(word="criterion", named=True).declared)
    """The raw measures that the clients took themselves, by criterion."""
    losses: Floats = field(metadata=Column(word="loss", stored="loss").declared)
    """Mean training loss of the last local epoch."""
    payload: Payload
    failures: tuple[Failure, ...] = ()
    bytes_sent: Counts | None = field(default=None, metadata=Column(np.int64, 0, told="never", stored="bytes").declared)
    """Size of each client's answer as sent, where a real message was sent or can be counted."""
    steps: Counts | None = field(
        default=None, metadata=Column(np.int64, 1, MOST_SAMPLES - 1, "steps", told="asked").declared
    )
    """Number of local steps that each client did; None where clients do not say."""
    first_losses: Floats | None = field(default=None, metadata=Column(word="first loss", told="asked").declared)
    """Mean loss of the received model on the training samples; None unless a criterion of the run needs it."""
    label_counts: Counts | None = field(
        default=None,
        metadata=Column(
            np.int64, 0, MOST_SAMPLES, "label_counts", told="asked", array="label_counts", rows=True
        ).declared,
    )
    """[clients, classes]: training samples of each class; None unless a criterion needs it and clients share it."""
    noise: Floats | None = field(default=None, metadata=Column(told="never").declared)
    """Standard deviation of the noise that each client's steps added to its update, where the server knows it."""
    vectors: Vectors = field(
        default_factory=dict[str, "torch.Tensor"],
        metadata=Column(np.float32, word="vector", named=True, array="vector/", rows=True).declared,
    )
    """What the algorithm's clients send beside their models, by name, [clients, parameters] each."""
    listening: Floats | None = field(
        default=None, metadata=Column(told="never", axes=(0, 1), rows=True, stored="listening").declared
    )
    """[clients, clients]: how much each client (row) weighed the model of each (column) for itself, where they do."""
    late: Mapping[str, float] = field(default_factory=dict[str, float])
    """Clients of an earlier round whose update came too late for it, and what their weight is multiplied by."""
    simulated: float | None = None
    """Seconds that the round took on the devices' clock; None without one."""
    started_over: tuple[str, ...] = ()
    """Clients across machines that began with nothing kept: in their first round, or because their node lost it."""
    signed: tuple[Signed, ...] = ()
    """What nodes signed of these updates, checked; empty where nobody signs."""

    @property
    def bytes_up(self) -> int | None:
        """Size of all answers: as sent, or, in a simulation, of the models and vectors that would be; None: unknown."""
        if self.bytes_sent is not None:
            return int(self.bytes_sent.sum())
        models = self.payload.nbytes
        return None if models is None else models + sum(sent.nbytes for sent in self.vectors.values())

    def select(self, keep: Sequence[int], refused: Sequence[Failure]) -> Updates:
        """Return the same updates with only the clients at these positions; the rest are noted as failures."""
        kept = self.rows_of(keep)
        return replace(
            self,
            **kept,
            payload=self.payload.select(list(keep)),
            failures=(*self.failures, *refused),
            late={name: share for name, share in self.late.items() if name in set(kept["clients"])},
        )

    @classmethod
    def joined(
        cls,
        task: Task,
        parts: Sequence[Updates],
        failures: Sequence[Failure],
        payload: Callable[[Sequence[int]], Payload],
    ) -> Updates:
        """Return the answers of several groups of clients to one task as one; with none, an empty answer.

        `payload` makes the payload of all clients, given where each stands when the groups follow each other.
        """
        found, order = joined_columns(cls, parts)
        return cls(
            federation=task.federation,
            round=task.round,
            payload=payload(order),
            failures=tuple(sorted(failures, key=lambda failure: failure.client)),
            late={name: share for part in parts for name, share in part.late.items()},
            started_over=tuple(sorted(client for part in parts for client in part.started_over)),
            signed=tuple(signed for part in parts for signed in part.signed),
            **found,
        )


@dataclass(frozen=True, eq=False)
class Question:
    """Test these models on every client's local test set; several candidates are asked in one question."""

    federation: str
    seed: int
    round: int
    models: torch.Tensor
    """One flat model per row: [candidates, parameters]."""
    detailed: bool = False
    """Also return right or wrong for every single test sample of the first candidate."""
    algorithm: Algorithm = field(default_factory=Algorithm)
    """Where it is personal, each client tests the model of its own that the algorithm makes of each candidate."""
    rate: float = 1.0
    """What the clients' learning rate is multiplied by, where they train before they test."""
    withdrawn: frozenset[str] = frozenset()
    """Clients that have withdrawn: nodes are asked for none of them; elsewhere their tests are dropped."""
    measure: Leading | None = None
    """By what clients are scored, with their sums; None: by the task's own score, without."""


@dataclass(frozen=True, eq=False)
class Evaluations(Answer):
    """The answers to one question, in ascending order of client id; clients without test samples are left out."""

    scores: Floats = field(
        metadata=Column(least=-np.inf, most=np.inf, word="score", axes=(1,), rows=True, stored="score").declared
    )
    """[candidates, clients]: local accuracy, or another score for which more is better."""
    losses: Floats = field(metadata=Column(word="loss", axes=(1,), rows=True, stored="loss").declared)
    """[candidates, clients]: mean test loss."""
    metrics: Mapping[str, Floats] = field(
        default_factory=dict[str, Floats],
        metadata=Column(least=-np.inf, most=np.inf, word="metric", named=True).declared,
    )
    """Further figures per client of the first candidate (ranking metrics, errors)."""
    right: NDArray[np.bool_] | None = field(
        default=None, metadata=Column(np.bool_, told="asked", array="right", each_sample=True).declared
    )
    """Right or wrong per test sample of the first candidate, clients in order; None unless asked for."""
    tallies: Floats | None = field(
        default=None,
        metadata=Column(word="sum", told="asked", array="tallies", axes=(1,), rows=True).declared,
    )
    """[candidates, clients, sums]: what test rows add up to (`base.tallies`); None unless a measure is asked for."""
    failures: tuple[Failure, ...] = ()

    def without(self, clients: Collection[str]) -> Evaluations:
        """Return the answers of all but some clients."""
        keep = [place for place, name in enumerate(self.clients) if name not in clients]
        failures = tuple(failure for failure in self.failures if failure.client not in clients)
        return replace(self, **self.rows_of(keep), failures=failures)

    def overall(self, measure: Leading | None = None) -> Floats:
        """Return each candidate's score over all clients, weighted by their number of test samples; NaN without any.

        A measure that was asked for is that of the clients' sums together, as if all rows were of one client.
        """
        if measure is not None and self.tallies is not None:
            return figures_of(Tally(self.tallies.sum(axis=1)))[measure.name]
        total = self.samples.sum()
        return self.scores @ self.samples / total if total else np.full(len(self.scores), np.nan)


@dataclass(frozen=True, eq=False)
class RowTests:
    """How models do on single test rows: [models, rows] each."""

    losses: Floats
    right: NDArray[np.bool_] | None = None
    """Right or wrong; None for a regression."""
