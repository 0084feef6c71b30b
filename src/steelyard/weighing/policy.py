"""What a policy is: a rule with a name of its own, from measures and a view of the cohort to weights.

A policy is one file in this folder that reads like its paper: a frozen section of parameters with one method, `weigh`.
It names the criteria that it is computed from, so that they are measured, recorded and held against what a run can give
as for any rule, and says what else it needs. What it must remember from round to round goes through `view.remember`
and `view.memory`: plain numbers by client id, which every checkpoint holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypedDict, TypeVar, cast

import numpy as np
from pydantic import BeforeValidator, GetJsonSchemaHandler, PlainSerializer

from steelyard.base.documents import first_line
from steelyard.base.errors import UserError, brief, listed, nearest
from steelyard.base.settings import Section, defaults_of, fields_given, validated
from steelyard.base.tallies import quotient
from steelyard.base.usercode import POLICIES, Registry
from steelyard.messages.updates import Counts as Counts
from steelyard.messages.updates import Floats as Floats
from steelyard.weighing import criterion as registry
from steelyard.weighing.cohort import CohortView as CohortView
from steelyard.weighing.cohort import Memory as Memory
from steelyard.weighing.criterion import NEEDS, NO_NEEDS
from steelyard.weighing.criterion import Needs as Needs
from steelyard.weighing.weights import cut_where
from steelyard.weighing.weights import to_weights as to_weights

if TYPE_CHECKING:
    from steelyard.weighing.rule import WeighingSettings


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

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        text = "Its own parameters, such as `a = 0.5`, stand beside it; `steelyard list policies` has theirs."
        named = {"title": "Name", "type": "string", "description": text}
        return handler(core) | {"properties": {"name": named}, "required": ["name"], "additionalProperties": True}

    @property
    def label(self) -> str:
        """It as `--rules` writes it: "feddisco", "feddisco(a=0.3)"."""
        given = ",".join(f"{name}={value}" for name, value in fields_given(self).items())
        return f"{self.name}({given})" if given else self.name

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
    return quotient(along, lengths, 0.0)


# ---------------------------------------------------------------- [weighing.policy]


def _named(given: object) -> object:
    """Return the policy that a table names, made of the parameters that stand beside the name."""
    if not isinstance(given, Mapping):
        return given
    fields = dict(cast("Mapping[str, object]", given))
    if "name" not in fields:
        raise UserError("name: missing; this field must be given")
    return validated(policy_class(fields.pop("name")), fields, "")


PolicyByName = Annotated[
    Policy,
    BeforeValidator(_named),
    PlainSerializer(lambda made: {"name": made.name, **fields_given(made)}),
]
"""[weighing.policy]: parsed straight to the policy, with the name and the parameters that were given written back."""


def policy_class(name: object) -> type[Policy]:
    """Return the policy of that name, or say which names there are."""
    policies = known()
    if not isinstance(name, str) or name not in policies:
        close = nearest(name, policies) if isinstance(name, str) else ""
        raise UserError(
            f"name: got {brief(name)}{close}; allowed: {listed(policies)}; one of your own: a package that declares it "
            f"under the entry point {POLICIES}, or a criterion in a file that weighing.plugins names"
        )
    return policies[name]


def policy_criteria(document: Any) -> list[str] | None:
    """Return what the policy of a rule's document is computed from; None where it names none that is known."""
    name: object = document.get("name") if isinstance(document, dict) else getattr(document, "name", None)
    policies = known()
    return list(policies[name].criteria) if isinstance(name, str) and name in policies else None


def check_policy(rule: WeighingSettings, policy: Policy) -> None:
    """Refuse what a policy decides itself, and what cannot be made of weights that do not sum to 1."""
    if rule.criteria != policy.criteria:
        raise UserError(
            f"criteria: got {listed(rule.criteria)} with policy '{policy.name}'; allowed: leave them out, it measures "
            f"{listed(policy.criteria)}"
        )
    decided = {
        "score": rule.score != "prioritized",
        "priority": rule.priority is not None,
        "normalise": rule.normalise != "share",
        "adjust": rule.adjust is not None,
        "trained_by": rule.trained_by != "clients",
    }
    for name, given in decided.items():
        if given:
            raise UserError(f"{name}: given with policy '{policy.name}', which weighs by itself; allowed: leave it out")
    robust = rule.defence is not None and rule.defence.robust
    if policy.applies_to != "shares" and (robust or rule.fit is not None):
        raise UserError(
            f"{'defence' if robust else 'fit'}: given with policy '{policy.name}', whose weights do not sum to 1; "
            "allowed: leave it out"
        )


# ---------------------------------------------------------------- a policy in words


class Described(TypedDict):
    """A policy for programs, as `steelyard list policies --format json` prints it."""

    name: str
    description: str
    criteria: list[str]
    needs: list[str]
    applies_to: AppliesTo
    parameters: dict[str, Any]


def described(made: type[Policy]) -> Described:
    """Return a policy in words, with its parameters' defaults."""
    return {
        "name": made.name,
        "description": first_line(made),
        "criteria": list(made.criteria),
        "needs": needs_of(made),
        "applies_to": made().applies_to,
        "parameters": defaults_of(made),
    }


def needs_of(made: type[Policy]) -> list[str]:
    """Return what a policy and its criteria need, in words."""
    every: list[Needs] = [made.needs, *(registry.get(name).needs for name in made.criteria)]
    found = [word for need, (word, _) in NEEDS.items() if word and any(getattr(needs, need) for needs in every)]
    tasks = {needs.task for needs in every if needs.task is not None}
    return [*found, *(f"a task with {task}" for task in sorted(tasks))]


# ---------------------------------------------------------------- steps that policies take over weights


class Adam:
    """Adam (Kingma and Ba 2015, Algorithm 1) in double precision, as torch.optim.Adam takes its steps."""

    def __init__(self, size: int | tuple[int, ...], betas: tuple[float, float]) -> None:
        self._betas = betas
        self._mean, self._square, self._steps = np.zeros(size), np.zeros(size), 0

    def step(self, values: Floats, slopes: Floats, rate: float) -> Floats:
        """Return the values after one step against the slopes."""
        first, second = self._betas
        self._steps += 1
        self._mean = first * self._mean + (1 - first) * slopes
        self._square = second * self._square + (1 - second) * slopes**2
        mean = self._mean / (1 - first**self._steps)
        root = np.sqrt(self._square) / np.sqrt(1 - second**self._steps)
        return values - rate * mean / (root + 1e-8)


def softmax(values: Floats) -> Floats:
    """Return e^x / Σ e^x; the largest is taken off first, which changes nothing and keeps exp within range."""
    grown = np.exp(values - values.max())
    return grown / grown.sum()


def nearest_shares(values: Floats, low: float = 0.0, high: float = 1.0) -> Floats:
    """Return the nearest point, by Euclid, whose coordinates sum to 1 and lie between the bounds: clip(x − τ, l, h).

    Bounds that no point keeps give equal shares. (Wang and Carreira-Perpiñán, arXiv:1309.1541, for bounds 0 and 1.)
    """
    count = len(values)
    if low * count >= 1 or high * count <= 1:
        return np.full(count, 1.0 / count)
    edges = np.concatenate([low - values, high - values])
    found, free = cut_where(lambda added: values + added, edges, low, high, 1.0)
    if free.any():
        found[free] = values[free] + (1.0 - found[~free].sum() - values[free].sum()) / free.sum()
    return np.clip(found, low, high)
