"""What can be looked at when a client's worth is measured: by the client itself, and by the server."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.messages.payloads import DenseModels, Payload, ServerTest, SingleModels, blocks
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


def _no_models() -> UserError:
    return UserError("weighing: the server sees no single models in this run; allowed: criteria and rules without them")


class ServerSide:
    """What the server itself can do for a view of a cohort; by default nothing, each answer a line that says so."""

    def test(self, models: torch.Tensor) -> ServerTest:
        """Test models [models, parameters] on rows of the server."""
        raise UserError(
            "weighing.criteria: the server tests no models in this run; allowed: criteria that need no test set of the "
            "server"
        )

    def trained(self) -> torch.Tensor:
        """Return the model that the server trains this round on rows of its own, from the one that the cohort got."""
        raise UserError("weighing: this server has no rows to train on; allowed: criteria but RD, defences but fltrust")

    def gradient(self, model: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the server's loss at a model."""
        raise UserError(
            "weighing.policy: the server learns from no rows of its own in this run; allowed: other policies"
        )

    def kernels(self) -> Counts:
        """Return where each layer's kernel begins and ends in the flat model: [kernels, 2]."""
        raise UserError(
            "weighing: this server knows no layers of single models; allowed: criteria that do not need them"
        )

    def output_layer(self) -> Counts:
        """Return the positions [outputs, parameters of each] of the last layer's rows in the flat model."""
        raise UserError("weighing.policy: this server knows no last layer of the network; allowed: other policies")


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
    noise: Floats | None = None
    """Standard deviation of the noise in each client's update; None without [privacy.records]."""
    seed: int = 0
    """The seed of the federation; with `round` it names the streams of chance (`steelyard.base.randomness`)."""
    round: int = 0
    """The round, counted from 1."""
    rounds: int = 0
    """How many rounds are planned; 0 where nobody knows."""
    rate: float = 0.0
    """The clients' learning rate in this round; 0 where nobody knows."""
    memory: Mapping[str, Memory] = field(default_factory=dict[str, Memory])
    """What was remembered in the rounds before, by name; empty in the first round."""
    changes: dict[str, Memory] = field(default_factory=dict[str, Memory], repr=False)
    """What was remembered in this round; a view that `replace` makes of this one goes on with the same."""
    payload: Payload | None = None
    """The updates themselves; None where measures alone are at hand."""
    parameters: torch.Tensor | None = None
    """The model that the cohort got."""
    server: ServerSide = field(default_factory=ServerSide)

    @classmethod
    def of(
        cls,
        updates: Updates,
        parameters: torch.Tensor,
        server: ServerSide,
        memory: Mapping[str, Memory] | None = None,
        *,
        samples: Counts | None = None,
        seed: int = 0,
        round: int = 0,
        rounds: int = 0,
        rate: float = 0.0,
    ) -> CohortView:
        """Return the view of a cohort's updates; `samples` stand in place of those that the clients claim."""
        return cls(
            samples=read_only(updates.samples if samples is None else samples),
            clients=updates.clients,
            label_counts=_or_none(updates.label_counts),
            steps=_or_none(updates.steps),
            first_losses=_or_none(updates.first_losses),
            losses=_or_none(updates.losses),
            noise=_or_none(updates.noise),
            seed=seed,
            round=round,
            rounds=rounds,
            rate=rate,
            # A copy: what a criterion changes in it would otherwise be remembered here, and forgotten by a checkpoint.
            memory=copy.deepcopy(dict(memory or {})),
            payload=updates.payload,
            parameters=parameters,
            server=server,
        )

    @property
    def _sent(self) -> tuple[Payload, torch.Tensor]:
        """The updates, and the model that they begin from."""
        if self.payload is None or self.parameters is None:
            raise _no_models()
        return self.payload, self.parameters

    @property
    def _single(self) -> tuple[SingleModels, torch.Tensor]:
        payload, start = self._sent
        if payload.single is None:
            raise _no_models()
        return payload.single, start

    @property
    def _dense(self) -> tuple[DenseModels, torch.Tensor]:
        payload, start = self._sent
        if payload.dense is None:
            raise _no_models()
        return payload.dense, start

    @cached_property
    def divergence(self) -> Floats:
        """‖Θ − Θ_a‖₂ of every client, over all parameters together."""
        payload, start = self._sent
        return read_only(payload.divergence(start))

    @cached_property
    def gram(self) -> Floats:
        """⟨Θ_a − Θ, Θ_b − Θ⟩ of every pair of clients: [clients, clients]; norms and cosines follow."""
        payload, start = self._sent
        return read_only(payload.gram(start))

    @cached_property
    def validation(self) -> ServerTest:
        """Every client's model on the server's test set."""
        return _read_only_test(self._single[0].tested(self.server.test))

    @cached_property
    def along_start(self) -> tuple[float, Floats]:
        """‖Θ‖² and ⟨Θ, Θ_a − Θ⟩ of every client: with `gram`, the angles between whole models follow."""
        models, start = self._single
        return models.along_start(start)

    @cached_property
    def root(self) -> tuple[Floats, float]:
        """⟨Θ_a − Θ, u_0⟩ of every client and ‖u_0‖, with u_0 what the server learned this round from its own rows."""
        models, start = self._single
        return models.along_root(start, self.server.trained())

    @cached_property
    def class_grams(self) -> Floats:
        """As `gram`, over the rows of the last layer, one for each class: [classes, clients, clients]."""
        models, start = self._dense
        return models.grams_of(start, self.server.output_layer())

    @cached_property
    def last_layer(self) -> Floats:
        """Θ_a − Θ of every client in the parameters of the last layer: [clients, parameters]."""
        models, start = self._dense
        return models.parts_of(start, self.server.output_layer()).flatten(1).cpu().numpy()

    @cached_property
    def kernel_norms(self) -> Floats:
        """‖W_l − W_al‖₂ of every client and every layer's kernel, without biases: [clients, kernels]."""
        models, start = self._single
        return models.kernel_norms(start, self.server.kernels())

    def test(self, weights: Floats) -> ServerTest:
        """Test the models that these weights combine on the server's test set: [clients], or [models, clients].

        Weights that are all 0 stand for the model that the cohort received.
        """
        payload, start = self._sent
        rows = np.atleast_2d(weights)
        # Some models at a time: all coalitions of twelve clients are 4,096.
        parts: list[ServerTest] = []
        for block in blocks(len(rows), start.numel(), MOST_TESTED):
            some = rows[block]
            models = payload.combine(start, some)
            if (nobody := ~some.any(axis=1)).any():
                models[np.flatnonzero(nobody)] = start.to(models.device, models.dtype)
            parts.append(self.server.test(models))
        return parts[0] if len(parts) == 1 else ServerTest.joined(parts)

    def slopes(self, weights: Floats) -> Floats:
        """Return ∂L/∂w of the server's loss at the model Σ w_a Θ_a, one number for each client."""
        models, start = self._dense
        return models.slopes(self.server.gradient(models.combine(start, weights)))

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


def _listed(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"got {type(value).__name__}")
