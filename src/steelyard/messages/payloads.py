"""The updates of a cohort in forms that can be weighed, and how models do on the server's own test set.

Combining is weights @ models, of whatever the models lie in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    # Only for annotations: rules and criteria are looked up and tried on paper without waiting for torch.
    import torch

    from steelyard.messages.updates import Failure
    from steelyard.privacy.noise import Source

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


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
    """[models, classes] each: precision, recall, accuracy, jaccard, odds of every class; empty for regression."""

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


@dataclass(frozen=True, eq=False)
class Summed:
    """What came out of summing a cohort's hidden updates."""

    total: Floats
    """Σ w·Δ over the clients that stayed: one number per parameter."""
    clients: tuple[str, ...]
    """Who is in the sum, ascending."""
    dropped: tuple[Failure, ...] = ()
    """Who was to be in it and dropped out after the weights were known."""
    bytes_sent: dict[str, int] = field(default_factory=dict[str, int])
    """What each client sent in the round for the sum, where it was counted."""
    step: float = 0.0
    """Each client's numbers were rounded to multiples of this."""


class Payload(Protocol):
    """The updates of a cohort in a form that can be weighed: dense models, or sparse rows of a shared table.

    Derive from it. What has an answer here need only be written by payloads of which something else is true.
    """

    summed: Summed | None = None
    """What the one sum of hidden updates came to; None before it was taken, and where updates are not hidden."""

    @property
    def single(self) -> SingleModels | None:
        """The models, for whoever looks at them one by one; None where the server sees no whole models."""
        return None

    @property
    def dense(self) -> DenseModels | None:
        """The models, for whoever needs them stacked; None where they are not."""
        return None

    @property
    def nbytes(self) -> int | None:
        """How many bytes the models have that clients would send; None where these are no models in memory."""
        return None

    def combine(self, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
        """Return the new global parameters for weights[clients], or one row per candidate for [candidates, clients]."""
        ...

    def aggregate(self, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
        """Return what becomes the new model of a round; of hidden updates there is this one sum and no other."""
        return self.combine(parameters, weights)

    def noised(self, clip: float, deviation: float, source: Source) -> Payload | None:
        """Return what each client sends where its change is clipped and noised; None where that is not defined."""
        return None

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

    def far(self, parameters: torch.Tensor, most: float) -> NDArray[np.bool_]:
        """Return for each client whether some parameter has gone farther than `most`, as far as that can be seen."""
        return ~(self.divergence(parameters) <= most * max(1.0, parameters.numel() ** 0.5))


AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Numbers that are looked at in one go: all models at once may need several times their memory."""


def spans(size: int, rows: int, device: str = "cpu") -> Iterator[slice]:
    """Return the columns of models [clients, parameters] in runs small enough to work on so many rows of them."""
    return blocks(size, rows, AT_ONCE[device])


def blocks(count: int, each: int, most: int) -> Iterator[slice]:
    """Yield 0 .. `count` − 1 in runs that hold `most` numbers at a time, of so many each; one at least."""
    step = max(1, most // max(each, 1))
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


class SingleModels(Payload, ABC):
    """Whole local models of a cohort that the server can look at one by one, in memory or elsewhere."""

    @property
    def single(self) -> SingleModels:
        return self

    @property
    @abstractmethod
    def like(self) -> torch.Tensor:
        """Return an empty tensor [clients, 0] of the models' type, on their device."""

    @abstractmethod
    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield some parameters of all models at a time: where they lie, and their values [clients, some]."""

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

    def kernel_norms(self, parameters: torch.Tensor, kernels: Counts) -> Floats:
        """Return ‖W_l − W_al‖₂ of every client and kernel: kernels[l] has where W_l begins and ends in the model."""
        squares = self.like.double().sum(dim=1)[:, None].repeat(1, len(kernels))
        for span, models in self.blocks():
            part = (models.double() - parameters[span].to(models.device)).square()
            for column, (begin, end) in enumerate(kernels - span.start):
                squares[:, column] += part[:, max(begin, 0) : max(end, 0)].sum(dim=1)
        return squares.sqrt().cpu().numpy()

    def gram(self, parameters: torch.Tensor) -> Floats:
        """Return the inner products of all pairs of updates; see `Payload`."""
        total = self.like.double() @ self.like.double().T
        for span, models in self.blocks():
            part = models.double() - parameters[span].to(models.device)
            total += part @ part.T
        # A product may round ⟨a, b⟩ and ⟨b, a⟩ differently; one of them is kept for both.
        return (total.tril() + total.tril(-1).T).cpu().numpy()

    def combine(self, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
        """Return what the weights make of the models; see `Payload`."""
        given = self.like.new_tensor(weights)
        found = given.new_empty((*given.shape[:-1], parameters.numel()))
        for span, models in self.blocks():
            found[..., span] = given @ models
        return found

    def divergence(self, parameters: torch.Tensor) -> Floats:
        """Return ‖Θ − Θ_a‖₂ of every client; see `Payload`."""
        total = self.like.double().sum(dim=1)
        for span, models in self.blocks():
            total += (models - parameters[span].to(models.device)).norm(dim=1, dtype=total.dtype).square()
        return total.sqrt().cpu().numpy()

    def finite(self) -> NDArray[np.bool_]:
        """Return for each client whether all its numbers are finite."""
        # In float64 a sum of float32 numbers is finite exactly when every term is: not even 1e38s overflow.
        # By blocks: a sum of another type copies what it sums, which of large models would be twice all of them.
        total = self.like.double().sum(dim=1)
        for _, part in self.blocks():
            total += part.sum(dim=1, dtype=total.dtype)
        return total.isfinite().cpu().numpy()

    def far(self, parameters: torch.Tensor, most: float) -> NDArray[np.bool_]:
        near = self.like.sum(dim=1) == 0
        for span, models in self.blocks():
            near &= ((models - parameters[span].to(models.device)).abs() <= most).all(dim=1)
        return (~near).cpu().numpy()

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

    @property
    def dense(self) -> DenseModels:
        return self

    def here(self) -> DenseModels:
        """Return the same models, in the memory of this process."""
        return self

    def combine(self, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
        import torch  # Late for speed of start; whoever has models has loaded it already.

        combined = torch.tensor(weights, dtype=self.models.dtype, device=self.models.device) @ self.models
        return self.keep_frozen(combined, parameters)

    def slopes(self, gradient: torch.Tensor) -> Floats:
        """Return ∂L/∂w_a = ⟨∇L, Θ_a⟩ of a loss at a combined model, given its gradient there: one for each client."""
        return (self.models @ gradient.to(self.models.device)).double().cpu().numpy()

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

        part = self.parts_of(parameters, rows)
        return torch.einsum("akp,bkp->kab", part, part).cpu().numpy()

    def parts_of(self, parameters: torch.Tensor, rows: Counts) -> torch.Tensor:
        """Return the updates in some parameters: rows[k, positions] give [n, k, positions] in float64."""
        import torch  # Late for speed of start.

        positions = torch.from_numpy(rows).to(self.models.device)
        return self.models[:, positions].to(torch.float64) - parameters.to(self.models.device, torch.float64)[positions]

    def select(self, keep: Sequence[int]) -> DenseModels:
        return DenseModels(self.models[list(keep)], self.frozen)

    def content(self) -> Sequence[NDArray[Any]] | None:
        return list(self.models.detach().cpu().contiguous().numpy())


Shape = tuple[str, tuple[int | None, ...]]
"""Type and lengths of an array; any length where it is None."""
_ARRAY_HEAD = 4096


def bytes_of(shapes: Iterable[Shape]) -> int:
    """Return the most bytes that arrays of these shapes have as they travel."""
    return sum(
        prod(length or 0 for length in lengths) * np.dtype(kind).itemsize + _ARRAY_HEAD for kind, lengths in shapes
    )


class Codec(ABC):
    """How one kind of payload travels, as named arrays; derive one for a payload class of your own.

    An experiment names the one codec of its payload, and both ends of the wire are given it: a node cannot choose
    another.
    """

    kind: ClassVar[str]

    @abstractmethod
    def shapes(self, clients: int, parameters: int) -> dict[str, Shape]:
        """Return the arrays of so many clients' payload, for a model of so many parameters."""

    def largest(self, clients: int, parameters: int) -> int:
        """Return the most bytes that these arrays have in an honest answer."""
        return bytes_of(self.shapes(clients, parameters).values())

    @abstractmethod
    def pack(self, payload: Any) -> dict[str, NDArray[Any]]:
        """Return the payload of one node's clients as these arrays."""

    @abstractmethod
    def unpack(self, arrays: Mapping[str, NDArray[Any]], clients: int, parameters: int) -> Payload:
        """Return the payload that arrays of these shapes hold; what they cannot hold is refused."""

    def empty(self, parameters: int) -> Payload:
        """Return the payload of nobody."""
        shapes = self.shapes(0, parameters).items()
        nothing = {name: np.zeros([length or 0 for length in lengths], kind) for name, (kind, lengths) in shapes}
        return self.unpack(nothing, 0, parameters)

    @abstractmethod
    def join(self, parts: Sequence[Any], order: Sequence[int]) -> Payload:
        """Return the payloads of several nodes as one, with all their clients in this order."""


class WholeModels(Codec):
    """Whole models, one row of numbers per client."""

    kind = "dense"

    def shapes(self, clients: int, parameters: int) -> dict[str, Shape]:
        return {"models": ("<f4", (clients, parameters))}

    def pack(self, payload: DenseModels) -> dict[str, NDArray[Any]]:
        return {"models": payload.models.detach().cpu().float().numpy()}

    def unpack(self, arrays: Mapping[str, NDArray[Any]], clients: int, parameters: int) -> DenseModels:
        import torch  # Late for speed of start.

        return DenseModels(torch.from_numpy(arrays["models"].copy()))

    def join(self, parts: Sequence[DenseModels], order: Sequence[int]) -> DenseModels:
        import torch  # Late for speed of start; whoever has models has loaded it already.

        return DenseModels(torch.cat([part.models for part in parts])).select(order)


DENSE = WholeModels()
