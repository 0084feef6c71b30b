"""What can be looked at when a client's worth is measured: by the client itself, and by the server."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.messages.payloads import Payload, ServerTest, SingleModels
from steelyard.messages.updates import Counts, Floats, Updates

if TYPE_CHECKING:
    import torch  # only for annotations: criteria are listed without waiting for torch

Memory: TypeAlias = Any
"""What can be remembered from round to round: plain JSON values, since a checkpoint holds it."""

MOST_TESTED = 1 << 24
"""How many numbers of combined models are tested at a time: 64 MiB of them."""


@dataclass(frozen=True, eq=False)
class LocalData:
    """What a client can look at when it measures itself: its samples, its trained model, its device, its user.

    >>> local = steelyard.LocalData("ann", torch.tensor([0, 1, 1]), classes=2)  # labels [samples]
    >>> len(local.labels)
    3
    """

    client: str
    """The id of the client."""
    labels: torch.Tensor
    """Labels of the training samples."""
    classes: int
    """Number of classes of the task; 0 for regression."""
    marks: Mapping[str, NDArray[np.float64]] = field(default_factory=dict[str, NDArray[np.float64]])
    """Further attributes per training sample, such as "sharp"."""
    features: Callable[[], torch.Tensor] | None = None
    """Returns the training samples themselves; a function, because most criteria need only the labels."""
    model: torch.Tensor | None = None
    """The trained local model as a flat vector; given only to criteria about the model."""
    device: Mapping[str, float] = field(default_factory=dict[str, float])
    """Facts about the device, from the node's configuration."""
    user: Mapping[str, float] = field(default_factory=dict[str, float])
    """Facts about the user, from the node's configuration."""


@dataclass(frozen=True, eq=False)
class Labelled:
    """The training labels of many clients, one client after another; a simulation measures all of them in one go."""

    labels: NDArray[np.generic]
    sizes: Counts
    """Number of training samples of each client."""
    classes: int
    """Number of classes of the task; 0 for regression."""

    def counts(self) -> Counts | None:
        """Return how many samples of each class each client has, or None where labels are not numbers of classes."""
        if not self.classes or not np.issubdtype(self.labels.dtype, np.integer):
            return None
        labels = self.labels.astype(np.int64)
        if len(labels) and (labels.min() < 0 or labels.max() >= self.classes):
            return None
        owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        cells = np.bincount(owner * self.classes + labels, minlength=len(self.sizes) * self.classes)
        return cells.reshape(len(self.sizes), self.classes)


ArrayT = TypeVar("ArrayT", bound=np.generic)


def read_only(values: NDArray[ArrayT]) -> NDArray[ArrayT]:
    """Return a view of an array that cannot be written; use it for whatever code of users looks at."""
    view = np.asarray(values).view()
    view.flags.writeable = False
    return view


def _or_none(values: NDArray[ArrayT] | None) -> NDArray[ArrayT] | None:
    return None if values is None else read_only(values)


def _read_only_test(test: ServerTest) -> ServerTest:
    errors = {name: read_only(values) for name, values in test.errors.items()}
    by_class = {name: read_only(values) for name, values in test.by_class.items()}
    return ServerTest(read_only(test.accuracy), read_only(test.f1), errors, read_only(test.losses), by_class)


def _nothing_to_test(weights: Floats) -> ServerTest:
    raise UserError(
        "weighing.criteria: the server tests no models in this run; allowed: criteria that need no test set of the "
        "server"
    )


def _nothing_to_fit(weights: Floats) -> Floats:
    raise UserError("weighing.policy: the server learns from no rows of its own in this run; allowed: other policies")


def _no_root() -> Any:
    raise UserError("weighing: this server has no rows to train on; allowed: criteria and rules without u_0")


def _no_layers() -> Any:
    raise UserError("weighing: this server knows no layers of single models; allowed: criteria that do not need them")


def _no_models() -> Any:
    raise UserError("weighing.policy: the server sees no single models in this run; allowed: policies without them")


@dataclass(frozen=True, eq=False)
class CohortView:
    """What the server can look at when it measures a cohort, one entry per client, ascending by client id.

    The costly parts are computed once, when they are first asked for. What only some clients can tell is None where
    they do not; a criterion that declares its need of it is refused there with one line. All arrays are [clients].

        >>> @steelyard.server_criterion("BIG", description="samples, as the clients say", uses_claims=True)
        ... def big(view: steelyard.CohortView): return view.samples
    """

    samples: Counts
    """Number of training samples of each client, as it says."""
    divergence_of: Callable[[], Floats]
    """Computes `divergence`."""
    validation_of: Callable[[], ServerTest]
    """Computes `validation`."""
    gram_of: Callable[[], Floats] = lambda: np.zeros((0, 0))
    """Computes `gram`."""
    test_of: Callable[[Floats], ServerTest] = _nothing_to_test
    """Computes `test`."""
    root_of: Callable[[], tuple[Floats, float]] | None = None
    """Computes `root`; None where the server trains on no rows of its own."""
    clients: tuple[str, ...] = ()
    """The ids of the clients; the key for what is remembered of single clients, since the next cohort is another."""
    label_counts: Counts | None = None
    """[clients, classes]: training samples of each class; None unless a criterion needs it and the clients share it."""
    steps: Counts | None = None
    """Local steps done this round; None where clients do not say."""
    first_losses: Floats | None = None
    """Mean loss of the received model on the client's training samples; None unless a criterion needs it."""
    losses: Floats | None = None
    """Mean training loss of the last local epoch."""
    seed: int = 0
    """The seed of the federation; with `round` it names the streams of chance (`steelyard.base.randomness`)."""
    round: int = 0
    """The round, counted from 1."""
    rounds: int = 0
    """How many rounds are planned; 0 where nobody knows."""
    rate: float = 0.0
    """The clients' learning rate in this round; 0 where nobody knows."""
    slopes_of: Callable[[Floats], Floats] = _nothing_to_fit
    """Computes `slopes`."""
    along_start_of: Callable[[], tuple[float, Floats]] = _no_models
    """Computes `along_start`."""
    class_grams_of: Callable[[], Floats] = _no_models
    """Computes `class_grams`."""
    kernel_norms_of: Callable[[], Floats] = _no_layers
    """Computes `kernel_norms`."""
    memory: Mapping[str, Memory] = field(default_factory=dict[str, Memory])
    """What was remembered in the rounds before, by name; empty in the first round."""
    changes: dict[str, Memory] = field(default_factory=dict[str, Memory], repr=False)
    """What was remembered in this round; a view that `replace` makes of this one goes on with the same."""

    @classmethod
    def of(
        cls,
        updates: Updates,
        parameters: torch.Tensor,
        test: Callable[[torch.Tensor], ServerTest],
        memory: Mapping[str, Memory] | None = None,
    ) -> CohortView:
        """Return the view of a cohort's updates; `parameters` is the model it got, `test` tests models."""
        payload = updates.payload

        def validation() -> ServerTest:
            if not isinstance(payload, SingleModels):
                raise UserError(
                    "weighing.criteria: the server sees no single models in this run; allowed: criteria that do not "
                    "need them"
                )
            return payload.tested(test)

        def combined(weights: Floats) -> ServerTest:
            rows = np.atleast_2d(weights)
            # Some models at a time: all coalitions of twelve clients are 4,096.
            size = max(1, MOST_TESTED // max(1, parameters.numel()))
            parts = [test(_models(payload, parameters, rows[at : at + size])) for at in range(0, len(rows), size)]
            return parts[0] if len(parts) == 1 else ServerTest.joined(parts)

        return cls(
            samples=read_only(updates.samples),
            divergence_of=lambda: read_only(payload.divergence(parameters)),
            validation_of=lambda: _read_only_test(validation()),
            gram_of=lambda: read_only(payload.gram(parameters)),
            test_of=combined,
            along_start_of=(lambda: payload.along_start(parameters))
            if isinstance(payload, SingleModels)
            else _no_models,
            clients=updates.clients,
            label_counts=_or_none(updates.label_counts),
            steps=_or_none(updates.steps),
            first_losses=_or_none(updates.first_losses),
            losses=_or_none(updates.losses),
            # A copy: what a criterion changes in it would otherwise be remembered here, and forgotten by a checkpoint.
            memory=copy.deepcopy(dict(memory or {})),
        )

    @classmethod
    def of_table(cls, clients: Sequence[str], rows: Floats) -> CohortView:
        """Return the view of clients of whom nothing is known but a table of measures."""
        return cls(
            samples=np.ones(len(rows), np.int64),
            divergence_of=_no_models,
            validation_of=lambda: _nothing_to_test(rows),
            gram_of=_no_models,
            clients=tuple(clients),
        )

    @cached_property
    def divergence(self) -> Floats:
        """‖Θ − Θ_a‖₂ of every client, over all parameters together."""
        return self.divergence_of()

    @cached_property
    def gram(self) -> Floats:
        """⟨Θ_a − Θ, Θ_b − Θ⟩ of every pair of clients: [clients, clients]; norms and cosines follow."""
        return self.gram_of()

    @cached_property
    def validation(self) -> ServerTest:
        """Every client's model on the server's test set."""
        return self.validation_of()

    @cached_property
    def along_start(self) -> tuple[float, Floats]:
        """‖Θ‖² and ⟨Θ, Θ_a − Θ⟩ of every client: with `gram`, the angles between whole models follow."""
        return self.along_start_of()

    @cached_property
    def root(self) -> tuple[Floats, float]:
        """⟨Θ_a − Θ, u_0⟩ of every client and ‖u_0‖, with u_0 what the server learned this round from its own rows."""
        return _no_root() if self.root_of is None else self.root_of()

    @cached_property
    def class_grams(self) -> Floats:
        """As `gram`, over the rows of the last layer, one for each class: [classes, clients, clients]."""
        return self.class_grams_of()

    @cached_property
    def kernel_norms(self) -> Floats:
        """‖W_l − W_al‖₂ of every client and every layer's kernel, without biases: [clients, kernels]."""
        return self.kernel_norms_of()

    def test(self, weights: Floats) -> ServerTest:
        """Test the models that these weights combine on the server's test set: [clients], or [models, clients].

        Weights that are all 0 stand for the model that the cohort received.
        """
        return self.test_of(weights)

    def slopes(self, weights: Floats) -> Floats:
        """Return ∂L/∂w of the server's loss at the model Σ w_a Θ_a, one number for each client."""
        return self.slopes_of(weights)

    def remember(self, name: str, value: object) -> None:
        """Keep a value for the next rounds of this federation: `memory[name]` has it from the next round on.

        Use it for averages over rounds, reputations and the like; a checkpoint holds it. Begin the name with that of
        the criterion, so that two of them never share one. Plain JSON values and arrays; arrays become lists.
        """
        try:
            # Through JSON at once: a run that was resumed and one that was not then see the same.
            self.changes[name] = json.loads(json.dumps(value, default=_listed))
        except (TypeError, ValueError) as error:
            raise UserError(f"remember('{name}'): {error}; allowed: numbers, text, lists, tables, arrays") from error

    @property
    def remembered(self) -> dict[str, Memory]:
        """The memory for the next round: what was there, with what was remembered in this round."""
        return {**self.memory, **self.changes}


def _models(payload: Payload, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
    found = payload.combine(parameters, weights)
    nobody = ~weights.any(axis=1)
    if nobody.any():
        found[np.flatnonzero(nobody)] = parameters.to(found.device, found.dtype)
    return found


def _listed(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"got {type(value).__name__}")
