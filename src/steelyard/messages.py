"""What travels between the server and the clients: frozen, typed, checked where it enters the server.

    Task ──▶ clients.train ──▶ Updates ──▶ weigh ──▶ combine ──▶ Question ──▶ clients.evaluate ──▶ Evaluations

A task and an answer concern one federation (one rule with one seed) and its whole cohort: weights need the whole cohort
before anything is summed. Several federations that are compared side by side pass several tasks in one call, so
that an implementation may train them all together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from steelyard.algorithms.algorithm import Algorithm, Vectors

if TYPE_CHECKING:
    # Only for annotations: rules and criteria are looked up and tried on paper without waiting for torch.
    import torch

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
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


class Payload(Protocol):
    """The updates of a cohort in a form that can be weighed: dense models, or sparse rows of a shared table."""

    def combine(self, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
        """Return the new global parameters for weights[clients], or one row per candidate for [candidates, clients]."""
        ...

    def divergence(self, parameters: torch.Tensor) -> Floats:
        """Return ‖Θ − Θ_a‖₂ over all parameters together, one number per client."""
        ...

    def gram(self, parameters: torch.Tensor) -> Floats:
        """Return the inner products ⟨Θ_a − Θ, Θ_b − Θ⟩ of all pairs of updates: [clients, clients], symmetric."""
        ...

    def select(self, keep: Sequence[int]) -> Payload:
        """Return the payload of some of the clients only, by position; used when an update is refused."""
        ...

    def finite(self) -> NDArray[np.bool_]:
        """Return for each client whether all its numbers are finite."""
        ...

    def content(self) -> Sequence[NDArray[Any]] | None:
        """Return each client's update as the bytes that its digest is taken of (docs/reference/chain.md).

        None where the server sees no single updates.
        """
        ...


AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Numbers that are looked at in one go: all models at once may need several times their memory."""


def spans(size: int, rows: int, device: str = "cpu") -> Iterator[slice]:
    """Yield the columns of models [clients, parameters] in runs small enough to work on so many rows of them."""
    block = max(1, AT_ONCE[device] // max(rows, 1))
    for begin in range(0, size, block):
        yield slice(begin, min(begin + block, size))


class SingleModels(ABC):
    """Whole local models of a cohort that the server can look at one by one, in memory or elsewhere."""

    @property
    @abstractmethod
    def like(self) -> torch.Tensor:
        """Return an empty tensor [clients, 0] of the models' type, on their device."""

    @abstractmethod
    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield some parameters of all models at a time: where they lie, and their values [clients, some]."""

    @abstractmethod
    def combine(self, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
        """Return what the weights make of the models; see `Payload`."""

    @abstractmethod
    def tested(self, test: Callable[[torch.Tensor], ServerTest]) -> ServerTest:
        """Return the test of every model; `test` takes some of them, [models, parameters]."""

    def along_start(self, parameters: torch.Tensor) -> tuple[float, Floats]:
        """Return ‖Θ‖² and ⟨Θ, Θ_a − Θ⟩ of every client: with `gram`, all angles between models follow."""
        found = self.like.double().sum(dim=1)
        for span, models in self.blocks():
            start = parameters[span].to(models.device).double()
            found += (models.double() - start) @ start
        return float(parameters.double().square().sum()), found.cpu().numpy()

    def along_root(self, parameters: torch.Tensor, trained: torch.Tensor) -> tuple[Floats, float]:
        """Return ⟨Θ_a − Θ, u_0⟩ of every client and ‖u_0‖, with u_0 = `trained` − Θ what the server learned itself."""
        root = (trained.to(self.like.device) - parameters.to(self.like.device)).double()
        found = self.like.double().sum(dim=1)
        for span, models in self.blocks():
            found += (models.double() - parameters[span].to(models.device)) @ root[span]
        return found.cpu().numpy(), float(root.norm())

    def gram(self, parameters: torch.Tensor) -> Floats:
        """Return the inner products of all pairs of updates; see `Payload`."""
        total = self.like.double() @ self.like.double().T
        for span, models in self.blocks():
            part = models.double() - parameters[span].to(models.device)
            total += part @ part.T
        # A product may round ⟨a, b⟩ and ⟨b, a⟩ differently; one of them is kept for both.
        return (total.tril() + total.tril(-1).T).cpu().numpy()

    def keep_frozen(self, combined: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
        """Put what is not trained back as it was; here all is trained."""
        return combined


@dataclass(frozen=True, eq=False)
class DenseModels(SingleModels):
    """Whole local models, stacked: `models[clients, parameters]`. Combining is a matrix product, weights @ models."""

    models: torch.Tensor
    frozen: tuple[tuple[int, int], ...] = ()
    """Spans of parameters that are not trained: every model holds the received ones, and so does any combination."""
    at_hand: ClassVar[bool] = True
    """Whether `models` lie in this process; otherwise whoever asks for them has them brought here."""

    def combine(self, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
        import torch  # Late for speed of start; whoever has models has loaded it already.

        combined = torch.as_tensor(weights, dtype=self.models.dtype, device=self.models.device) @ self.models
        return self.keep_frozen(combined, parameters)

    def keep_frozen(self, combined: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
        """Put what is not trained back as it was, in place: weights sum to 1 only as far as float32 goes."""
        for begin, end in self.frozen:
            combined[..., begin:end] = parameters[begin:end].to(combined.device)
        return combined

    @property
    def like(self) -> torch.Tensor:
        return self.models[:, :0]

    @property
    def nbytes(self) -> int:
        """How many bytes the models have."""
        return self.models.nbytes

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        for span in spans(self.models.shape[1], len(self.models), self.models.device.type):
            yield span, self.models[:, span]

    def tested(self, test: Callable[[torch.Tensor], ServerTest]) -> ServerTest:
        return test(self.models)

    def divergence(self, parameters: torch.Tensor) -> Floats:
        import torch  # Late for speed of start.

        if not len(self.models):
            return np.zeros(0)
        reference = parameters.to(self.models.device)
        # Differences of a few models at a time: they stay in a cache, and no second matrix is ever needed.
        block = max(1, (1 << (28 if self.models.is_cuda else 20)) // (4 * len(reference)))
        parts = [
            torch.linalg.vector_norm(part - reference, dim=1, dtype=torch.float64) for part in self.models.split(block)
        ]
        return torch.cat(parts).cpu().numpy()

    def grams_of(self, parameters: torch.Tensor, rows: Counts) -> Floats:
        """Return the inner products of all pairs of updates over some parameters: rows[k, positions] give [k, n, n]."""
        import torch  # Late for speed of start.

        positions = torch.from_numpy(rows).to(self.models.device)
        part = self.models[:, positions].to(torch.float64) - parameters.to(self.models.device, torch.float64)[positions]
        return torch.einsum("akp,bkp->kab", part, part).cpu().numpy()

    def select(self, keep: Sequence[int]) -> DenseModels:
        return DenseModels(self.models[list(keep)], self.frozen)

    def finite(self) -> NDArray[np.bool_]:
        import torch  # Late for speed of start.

        # In float64 a sum of float32 numbers is finite exactly when every term is: not even 1e38s overflow.
        # By blocks: a sum of another type copies what it sums, which of large models would be twice all of them.
        total = torch.zeros(len(self.models), dtype=torch.float64, device=self.models.device)
        for _, part in self.blocks():
            total += part.sum(dim=1, dtype=torch.float64)
        return total.isfinite().cpu().numpy()

    def content(self) -> Sequence[NDArray[Any]] | None:
        return list(self.models.detach().cpu().contiguous().numpy())


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
        return Updates(
            federation=self.federation,
            round=self.round,
            clients=tuple(self.clients[i] for i in rows),
            samples=self.samples[rows],
            criteria={name: values[rows] for name, values in self.criteria.items()},
            losses=self.losses[rows],
            payload=self.payload.select(rows),
            failures=(*self.failures, *refused),
            bytes_sent=None if self.bytes_sent is None else self.bytes_sent[rows],
            steps=None if self.steps is None else self.steps[rows],
            first_losses=None if self.first_losses is None else self.first_losses[rows],
            label_counts=None if self.label_counts is None else self.label_counts[rows],
            vectors={name: vectors[rows] for name, vectors in self.vectors.items()},
            listening=None if self.listening is None else self.listening[np.ix_(rows, rows)],
            late={name: share for name, share in self.late.items() if name in {self.clients[i] for i in rows}},
            simulated=self.simulated,
            started_over=self.started_over,
            signed=self.signed,
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
        return Evaluations(
            federation=self.federation,
            round=self.round,
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


@dataclass(frozen=True, eq=False)
class ServerTest:
    """How models do on the server's own test set, one row per model."""

    accuracy: Floats
    f1: Floats
    """[models, classes]: F1 of each class; shape [models, 0] for regression."""
    errors: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """Regression errors by name: mape, mae, rmse."""
    losses: Floats = field(default_factory=lambda: np.zeros(0))
    """Mean loss of each model; empty where the server does not say."""
    by_class: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """[models, classes] each: precision, recall, accuracy and jaccard of every class; empty for regression."""

    @classmethod
    def joined(cls, parts: Sequence[ServerTest], order: Sequence[int] | Counts | slice = slice(None)) -> ServerTest:
        """Return the tests of several groups of models as one, in another order of the models where one is given."""

        def along(values: Callable[[ServerTest], Floats]) -> Floats:
            found = np.concatenate([values(part) for part in parts])
            return found[order] if len(found) else found

        return cls(
            accuracy=along(lambda part: part.accuracy),
            f1=along(lambda part: part.f1),
            errors={name: along(lambda part, name=name: part.errors[name]) for name in parts[0].errors},
            losses=along(lambda part: part.losses),
            by_class={name: along(lambda part, name=name: part.by_class[name]) for name in parts[0].by_class},
        )
