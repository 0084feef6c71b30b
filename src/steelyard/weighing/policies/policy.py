"""What a policy is: a rule with a name of its own, from measures and a view of the cohort to weights.

A policy is one file in this folder that reads like its paper: a frozen section of parameters with one method, `weigh`.
It names the criteria that it is computed from, so that they are measured, recorded and held against what a run can give
as for any rule, and says what else it needs. What it must remember from round to round goes through `view.remember`
and `view.memory`: plain numbers by client id, which every checkpoint holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, TypeVar

import numpy as np

from steelyard.base.errors import UserError
from steelyard.base.settings import Section
from steelyard.base.usercode import POLICIES, Registry
from steelyard.messages.updates import Floats
from steelyard.weighing.needs import NO_NEEDS, Needs
from steelyard.weighing.view import CohortView, Memory

Measures = Mapping[str, Floats]
"""The raw criteria of a cohort by name, one number for each client."""

AppliesTo = Literal["shares", "updates", "models"]
"""What weights are of: shares of all weight, which sum to 1; factors of updates, Θ + Σ wᵢ(θᵢ − Θ); or factors of whole
models, Σ wᵢθᵢ. The last two may sum to anything."""


class Policy(Section):
    """The base of every policy; fields of a class are its parameters, with their defaults."""

    name: ClassVar[str] = ""
    """The name that experiments use; `@policy` sets it."""
    criteria: ClassVar[tuple[str, ...]] = ("DS",)
    """What it is computed from: measured, recorded, and refused where a run cannot give it."""
    needs: ClassVar[Needs] = NO_NEEDS
    """What it needs beyond its criteria."""
    of_measures: ClassVar[bool] = False
    """Whether the weights follow from the criteria alone, without a memory: such a policy weighs tables too."""

    @property
    def applies_to(self) -> AppliesTo:
        """What the weights are of; other than shares they go with no privacy, no hidden sum and no robust rule."""
        return "shares"

    def weigh(self, measures: Measures, view: CohortView) -> Floats:
        """Return a weight >= 0 for each client; shares are divided by their sum afterwards."""
        raise NotImplementedError(f"{type(self).__name__}.weigh")

    def after_tests(self, memory: Mapping[str, Memory], scores: Mapping[str, float]) -> dict[str, Memory]:
        """Return what to remember of how each client scored the model without itself.

        Called at the end of a round for policies with `needs.client_tests`.
        """
        return {}


PolicyT = TypeVar("PolicyT", bound=type[Policy])
_registry: Registry[type[Policy]] = Registry("policy", POLICIES, lambda made: made.__qualname__)


def policy(name: str) -> Callable[[PolicyT], PolicyT]:
    """Register a class under the name that experiments and `--rules` use; decorate each policy with it."""
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,39}", name):
        raise UserError(f'@policy: got {name!r}; allowed: @policy("name"), in lower-case letters, digits and "-"')

    def register(made: PolicyT) -> PolicyT:
        _registry.add(name, made)
        made.name = name
        return made

    return register


def known() -> Mapping[str, type[Policy]]:
    """Return every policy whose file was read: use it from `catalogue`, which reads the built-in ones first."""
    return _registry.known()


def by_client(memory: Mapping[str, Memory], name: str, view: CohortView, start: float | Floats) -> Floats:
    """Return what was remembered of this cohort's clients under a name; `start` for those that are new."""
    kept = memory.get(name, {})
    first = np.broadcast_to(start, len(view.clients))
    return np.array([float(kept.get(client, first[row])) for row, client in enumerate(view.clients)])


def remember(view: CohortView, name: str, values: Floats) -> None:
    """Remember a number of each of this cohort's clients; those of clients that are not here stay."""
    view.remember(name, {**view.memory.get(name, {}), **by_name(view.clients, values)})


def by_name(clients: Sequence[str], values: Floats) -> dict[str, float]:
    """Return a number of each client by the client's name, as memories hold it."""
    return {client: float(values[row]) for row, client in enumerate(clients)}


def cosines(gram: Floats, weights: Floats) -> Floats:
    """Return cos(Δ_a, Σ w_b Δ_b) of every client from the inner products of the updates; 0 where one has no length."""
    along = gram @ weights
    lengths = np.sqrt(np.maximum(np.diag(gram), 0.0) * max(float(weights @ along), 0.0))
    return np.divide(along, lengths, out=np.zeros_like(along), where=lengths > 0)
