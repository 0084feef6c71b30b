"""Criteria: raw measures of a client's worth, each saying who takes it and what it is about.

A criterion that the client measures is believed as sent (after a check of its range); one that the server measures
cannot be lied about. The built-in ones: DS, LD, CB, IS on the client, MD on the server; AdaFed's
measured performance (VP and its kin, on the server) is in `performance`.
A criterion of your own is one decorated function:

    @client_criterion("BT", about="device", description="battery level")
    def battery(local: LocalData) -> float:
        return local.device.get("battery", 1.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.errors import UserError, listed, nearest
from steelyard.messages import Floats, ServerTest

MeasuredBy = Literal["client", "server"]
About = Literal["data", "model", "device", "user"]

FEW_LABELS = 2048
"""Up to here a Python set counts labels faster than a tensor operation; a round may measure thousands of clients."""


@dataclass(frozen=True, eq=False)
class LocalData:
    """What a client can look at when it measures itself: its samples, its trained model, its device, its user."""

    client: str
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
    sizes: NDArray[np.int64]
    classes: int
    """Number of classes of the task; 0 for regression."""

    def counts(self) -> NDArray[np.int64] | None:
        """Return how many samples of each class each client has, or None where labels are not numbers of classes."""
        if not self.classes or not np.issubdtype(self.labels.dtype, np.integer):
            return None
        labels = self.labels.astype(np.int64)
        if len(labels) and (labels.min() < 0 or labels.max() >= self.classes):
            return None
        owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        cells = np.bincount(owner * self.classes + labels, minlength=len(self.sizes) * self.classes)
        return cells.reshape(len(self.sizes), self.classes)


@dataclass(frozen=True, eq=False)
class CohortView:
    """What the server can look at when it measures a cohort; the costly parts are computed once, when asked for."""

    samples: NDArray[np.int64]
    divergence_of: Callable[[], Floats]
    validation_of: Callable[[], ServerTest]

    @cached_property
    def divergence(self) -> Floats:
        """‖Θ − Θ_a‖₂ of every client."""
        return self.divergence_of()

    @cached_property
    def validation(self) -> ServerTest:
        """Every client's model on the server's test set."""
        return self.validation_of()


@dataclass(frozen=True)
class Criterion:
    """One measure of a client's worth; build it with `client_criterion` or `server_criterion`."""

    name: str
    measured_by: MeasuredBy
    about: About
    description: str
    measure: Callable[[LocalData], float | bool] | Callable[[CohortView], Floats]
    maximum: float | None = None
    """Largest raw value that can be true; a client that sends more is refused. The smallest is always 0."""
    needs_models: bool = False
    """Whether the server must see single models; secure aggregation hides them."""
    needs_test_set: bool = False
    """Whether the server must hold a test set of its own to measure it."""
    of_labels: Callable[[Labelled], Floats | None] | None = None
    """The same measure of many clients at once, where it looks at labels alone; None from it means: one by one."""

    def on_client(self, local: LocalData) -> float:
        """Take a client-side measure as a number; booleans become 0 or 1."""
        value = float(self.measure(local))  # type: ignore[arg-type]
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"criterion {self.name}: measured {value} on {local.client}; allowed: a number >= 0")
        return value

    def on_server(self, view: CohortView) -> Floats:
        """Take a server-side measure of the whole cohort."""
        return np.asarray(self.measure(view), dtype=np.float64)  # type: ignore[arg-type]

    def refusal(self, value: float) -> str | None:
        """Say why a value sent by a client cannot be true, or None when it can."""
        top = np.inf if self.maximum is None else self.maximum
        if np.isfinite(value) and 0 <= value <= top:
            return None
        return f"criterion {self.name} = {value}; allowed: 0 to {'any finite number' if top == np.inf else top}"


_registry: dict[str, Criterion] = {}


def client_criterion(
    name: str,
    *,
    about: About = "data",
    description: str = "",
    maximum: float | None = None,
    of_labels: Callable[[Labelled], Floats | None] | None = None,
) -> Callable[[Callable[[LocalData], float | bool]], Callable[[LocalData], float | bool]]:
    """Register a function of LocalData as a criterion that each client measures on itself.

    `of_labels` may give the same for many clients at once; a simulation of thousands then measures faster.
    """

    def register(measure: Callable[[LocalData], float | bool]) -> Callable[[LocalData], float | bool]:
        text = description or (measure.__doc__ or name).strip().splitlines()[0]
        add(Criterion(name, "client", about, text, measure, maximum, of_labels=of_labels))
        return measure

    return register


def server_criterion(
    name: str,
    *,
    about: About = "model",
    description: str = "",
    needs_models: bool = True,
    needs_test_set: bool = False,
) -> Callable[[Callable[[CohortView], Floats]], Callable[[CohortView], Floats]]:
    """Register a function of CohortView as a criterion that the server measures, so that no client can lie about it."""

    def register(measure: Callable[[CohortView], Floats]) -> Callable[[CohortView], Floats]:
        text = description or (measure.__doc__ or name).strip().splitlines()[0]
        add(Criterion(name, "server", about, text, measure, None, needs_models, needs_test_set))
        return measure

    return register


def add(criterion: Criterion) -> None:
    """Put a criterion into the registry; a name that is taken by another function is refused."""
    if not criterion.name or not criterion.name.replace("-", "").replace("_", "").isalnum():
        raise UserError(f"criterion name '{criterion.name}': allowed: letters, digits, '-' and '_'")
    known = _registry.get(criterion.name)
    if known is not None and known.measure.__qualname__ != criterion.measure.__qualname__:
        raise UserError(f"criterion {criterion.name}: registered twice, by {known.measure.__qualname__} and "
                        f"{criterion.measure.__qualname__}; give one of them another name")  # fmt: skip
    _registry[criterion.name] = criterion


def known() -> dict[str, Criterion]:
    """Return all registered criteria by name: built in, from entry points, from loaded scripts."""
    from steelyard.weighing.plugins import load_entry_points, load_module

    load_module("steelyard.weighing.performance")  # registers VP and its kin
    load_entry_points()
    return dict(_registry)


def get(name: str) -> Criterion:
    """Return the criterion of that name, or say which names there are."""
    table = known()
    if name not in table:
        raise UserError(f"criterion '{name}' is not known{nearest(name, table)}; known: {listed(table)}")
    return table[name]


def _distinct(many: Labelled) -> Floats | None:
    counts = many.counts()
    return None if counts is None else (counts > 0).sum(axis=1).astype(np.float64)


@client_criterion(
    "DS",
    description="dataset size: number of training samples",
    of_labels=lambda many: many.sizes.astype(np.float64),
)
def dataset_size(local: LocalData) -> float:
    """Number of training samples (papers 000, 003)."""
    return float(len(local.labels))


@client_criterion("LD", description="label diversity: number of distinct labels", of_labels=_distinct)
def label_diversity(local: LocalData) -> float:
    """Number of distinct labels among the training samples (papers 000, 003)."""
    if len(local.labels) <= FEW_LABELS:
        return float(len(set(local.labels.tolist())))
    return float(len(torch.unique(local.labels)))


@client_criterion("CB", description="class balance: rarer class over commoner class (two classes)", maximum=1.0)
def class_balance(local: LocalData) -> float:
    """min(#pos, #neg) / max(#pos, #neg); 0 for a client that holds one class only (paper 000)."""
    positive = int((local.labels > 0).sum())
    negative = len(local.labels) - positive
    return min(positive, negative) / max(positive, negative, 1)


@client_criterion("IS", description="image sharpness: share of samples marked sharp", maximum=1.0)
def image_sharpness(local: LocalData) -> float:
    """Fraction of the training samples marked sharp; CelebA: not `Blurry` (paper 000)."""
    if "sharp" not in local.marks:
        raise UserError("criterion IS: this data has no mark 'sharp'; allowed: a source that marks sharp samples")
    sharp = local.marks["sharp"]
    return float(np.mean(sharp)) if len(sharp) else 0.0


@server_criterion("EQ", about="data", description="equal say: 1 for every client", needs_models=False)
def equal_say(view: CohortView) -> Floats:
    """1 for every client: plain averaging, or the plain sum of FPL."""
    return np.ones(len(view.samples))


@server_criterion("MD", description="model divergence: 1/sqrt(distance from the global model + 1)", needs_models=True)
def model_divergence(view: CohortView) -> Floats:
    """1 / √(‖Θ − Θ_a‖₂ + 1), the norm over all parameters together (papers 000, 003)."""
    return 1.0 / np.sqrt(view.divergence + 1.0)
