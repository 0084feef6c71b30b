"""What travels between the server and the clients: frozen, typed, checked where it enters the server.

    Task ──▶ clients.train ──▶ Updates ──▶ weigh ──▶ combine ──▶ Question ──▶ clients.evaluate ──▶ Evaluations

A task and an answer concern one federation (one rule with one seed) and its whole cohort: weights need the whole cohort
before anything is summed. Several federations that are compared side by side pass several tasks in one call, so
that an implementation may train them all together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from steelyard.messages.algorithm import Algorithm, Vectors
from steelyard.messages.payloads import Counts, DenseModels, Floats, Payload

if TYPE_CHECKING:
    # Only for annotations: rules and criteria are looked up and tried on paper without waiting for torch.
    import torch

COLUMNS = ("samples", "losses", "bytes_sent", "steps", "first_losses", "label_counts")
"""The arrays of `Updates` that have an entry, or a row, for each client; those after the second may be missing."""
MOST_SAMPLES = 10**12
"""More samples than any device can hold; a larger number is a lie or a mistake."""


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
class Updates:
    """What a cohort sent back for one task, in ascending order of client id."""

    federation: str
    round: int
    clients: tuple[str, ...]
    samples: Counts
    """Number of training samples of each client."""
    criteria: Mapping[str, Floats]
    """The raw measures that the clients took themselves, by criterion."""
    losses: Floats
    """Mean training loss of the last local epoch."""
    payload: Payload
    failures: tuple[Failure, ...] = ()
    bytes_sent: Counts | None = None
    """Size of each client's answer as sent, where a real message was sent or can be counted."""
    steps: Counts | None = None
    """Number of local steps that each client did; None where clients do not say."""
    first_losses: Floats | None = None
    """Mean loss of the received model on the training samples; None unless a criterion of the run needs it."""
    label_counts: Counts | None = None
    """[clients, classes]: training samples of each class; None unless a criterion needs it and clients share it."""
    vectors: Vectors = field(default_factory=dict[str, "torch.Tensor"])
    """What the algorithm's clients send beside their models, by name, [clients, parameters] each."""
    listening: Floats | None = None
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
        if not isinstance(self.payload, DenseModels):
            return None
        return self.payload.nbytes + sum(sent.nbytes for sent in self.vectors.values())

    def select(self, keep: Sequence[int], refused: Sequence[Failure]) -> Updates:
        """Return the same updates with only the clients at these positions; the rest are noted as failures."""
        rows = list(keep)
        return replace(
            self,
            clients=tuple(self.clients[i] for i in rows),
            criteria={name: values[rows] for name, values in self.criteria.items()},
            payload=self.payload.select(rows),
            failures=(*self.failures, *refused),
            vectors={name: vectors[rows] for name, vectors in self.vectors.items()},
            listening=None if self.listening is None else self.listening[np.ix_(rows, rows)],
            late={name: share for name, share in self.late.items() if name in {self.clients[i] for i in rows}},
            **{name: column[rows] for name in COLUMNS if (column := getattr(self, name)) is not None},
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


@dataclass(frozen=True, eq=False)
class Evaluations:
    """The answers to one question, in ascending order of client id; clients without test samples are left out."""

    federation: str
    round: int
    clients: tuple[str, ...]
    samples: Counts
    """Number of test samples of each client."""
    scores: Floats
    """[candidates, clients]: local accuracy, or another score for which more is better."""
    losses: Floats
    """[candidates, clients]: mean test loss."""
    metrics: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """Further figures per client of the first candidate (ranking metrics, errors)."""
    right: NDArray[np.bool_] | None = None
    """Right or wrong per test sample of the first candidate, clients in order; None unless asked for."""
    failures: tuple[Failure, ...] = ()

    def without(self, clients: Collection[str]) -> Evaluations:
        """Return the answers of all but some clients."""
        keep = [place for place, name in enumerate(self.clients) if name not in clients]
        owner = np.repeat(np.arange(len(self.clients)), self.samples)
        return replace(
            self,
            clients=tuple(self.clients[place] for place in keep),
            samples=self.samples[keep],
            scores=self.scores[:, keep],
            losses=self.losses[:, keep],
            metrics={name: values[keep] for name, values in self.metrics.items()},
            right=None if self.right is None else self.right[np.isin(owner, keep)],
            failures=tuple(failure for failure in self.failures if failure.client not in clients),
        )

    def overall(self) -> Floats:
        """Return each candidate's score over all clients, weighted by their number of test samples; NaN without any."""
        total = self.samples.sum()
        return self.scores @ self.samples / total if total else np.full(len(self.scores), np.nan)


@dataclass(frozen=True, eq=False)
class RowTests:
    """How models do on single test rows: [models, rows] each."""

    losses: Floats
    right: NDArray[np.bool_] | None = None
    """Right or wrong; None for a regression."""
