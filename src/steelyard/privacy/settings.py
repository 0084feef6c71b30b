"""[privacy]: the section that says which privacy clients are guaranteed, and how.

[privacy.aggregation] lets the server learn the weighted sum of a cohort's updates and no more.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from steelyard.base.errors import UserError
from steelyard.base.settings import Section

AggregationKind = Literal["secure", "ckks"]
FEWEST = 3
"""In a sum of two, each of the two could take its own part away."""


class AggregationSettings(Section):
    """[privacy.aggregation]: updates are summed so that the server sees their weighted sum only, never a single one.

    The criteria come first, from them the weights, and then each client sends its update times its weight, hidden.
    """

    kind: AggregationKind = "secure"
    """secure: masks that cancel in the sum, and survive clients that drop out; ckks: homomorphic encryption under a key
    that the clients share. secure is by far the cheapest."""
    threshold: Annotated[float, Field(gt=0.5, le=1)] | None = None
    """secure: the share of a cohort that must stay to the end; with fewer the round is given up, and fewer than that
    cannot open anything together. Default 2/3."""
    bits: Literal[16, 32, 64] | None = None
    """secure: bits of each number on the wire; more are more precise. Default 32."""
    bound: Annotated[float, Field(gt=0, le=1e6)] = 16.0
    """No parameter may change by more than this in one round: sums are sized by it. A client whose update is larger
    takes no part in that round."""
    largest_weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """A client sends nothing where its share of the weight would be larger: a sum that is nearly one update does not
    hide it."""

    @model_validator(mode="after")
    def _fits(self) -> AggregationSettings:
        for name in ("threshold", "bits"):
            if getattr(self, name) is not None and self.kind != "secure":
                raise UserError(f"{name}: given with kind = '{self.kind}'; allowed only with secure")
        return self

    @property
    def word_bits(self) -> int:
        """Bits of each number, with the default."""
        return 32 if self.bits is None else self.bits

    def least(self, clients: int) -> int:
        """Return how many of so many clients must stay to the end: more than half of them, and at least two."""
        share = 2 / 3 if self.threshold is None else self.threshold
        # 1e-9: 2/3 of 9 is 6 and not 7, whatever a float makes of it.
        return max(2, clients // 2 + 1, math.ceil(share * clients - 1e-9))


LEAST_DELTA = 1e-12
"""Below this, distributions of losses are mostly rounding; no federation has so many clients that it would matter."""
OWNERS_DELTA = 1e-5
"""δ by which the owner of a device counts what it releases, whatever δ a server names."""
SIZE = "DS"
"""The criterion that is a client's number of samples."""
Positive = Annotated[float, Field(gt=0)]
Noise = Annotated[float, Field(ge=1e-3, le=1e6)]
"""A noise multiplier: less guarantees nothing and has no ε that a computer could count, more drowns everything."""


def check_delta(field: str, delta: float, count: float, allow: str, unit: str = "client") -> None:
    """Refuse a δ that guarantees nothing: one over the number of units or more; `allow` names what allows it."""
    count = max(count, 2)  # nobody plans for one alone
    if delta * count >= 1:
        raise UserError(
            f"{field}: got {delta:g} with {count:g} {unit}s, where publishing all data of one {unit} drawn at random "
            f"would still satisfy the guarantee; allowed: below {1 / count:g}, or {allow}"
        )


class BudgetSettings(Section):
    """[privacy.budget]: how much a run may release about any one client, as (ε, δ)."""

    epsilon: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """The run stops before it would pass this ε; default: nothing stops it, and what was spent is shown."""
    delta: Annotated[float, Field(ge=LEAST_DELTA, lt=1)] = 1e-5
    """δ of the guarantee; below one over the number of clients, unless privacy.accept_large_delta says otherwise."""


class CentralSettings(Section):
    """[privacy.central]: the server clips every update and adds noise to their weighted sum; the server is trusted.

    Everything that is computed from the noisy model then costs any one client at most (ε, δ).
    """

    clip: Positive
    """C: no update is longer than this (L2 norm over all parameters); longer ones are shortened."""
    noise: Noise | None = None
    """z: the noise is z·C·w_max on every parameter; default: the least that keeps to privacy.budget.epsilon."""
    weights: Literal["own", "cohort"] = "own"
    """own: a client's weight follows from its own criteria and public references, so that nothing else depends on it;
    cohort: weights are shared out over the cohort as without privacy, and the criteria are public or charged."""
    cohorts: Literal["secret", "public"] = "secret"
    """secret: cohorts are drawn from a cryptographic source and kept by the server, which makes rounds cheaper;
    public: drawn from the seed, and a client is charged for each round in which it takes part."""
    references: dict[str, Positive] = Field(default_factory=dict)
    """weights = "own": a typical client's criterion, by name, such as DS = 600; known beforehand, not measured."""

    @model_validator(mode="after")
    def _fits(self) -> CentralSettings:
        if self.weights == "cohort" and self.cohorts == "secret":
            raise UserError(
                "cohorts: got 'secret' with weights = 'cohort'; a client that takes part then changes all weights, so "
                "that a secret cohort saves no budget; allowed: 'public', or weights = 'own'"
            )
        if self.weights == "cohort" and self.references:
            raise UserError("references: given with weights = 'cohort'; allowed only with weights = 'own'")
        return self


class LocalSettings(Section):
    """[privacy.local]: every device clips its update and adds noise before it sends it; nobody is trusted."""

    clip: Positive
    """C: no update is longer than this (L2 norm over all parameters); longer ones are shortened."""
    noise: Noise | None = None
    """z: the noise is z·2C on every parameter; default: the least that keeps to privacy.budget.epsilon."""


class RecordSettings(Section):
    """[privacy.records]: every client clips the gradient of each sample and adds noise to their sum (DP-SGD).

    What leaves a client then tells little of any one of its samples; nobody is trusted. `training.batch_size` is the
    expected size of a batch: each sample is in it with probability batch_size / samples.
    """

    clip: Positive
    """C: no sample's gradient is longer than this (L2 norm over all parameters); longer ones are shortened."""
    noise: Noise | None = None
    """z: the noise is z·C on every number of a batch's summed gradients; default: for each client the least with which
    its own samples keep to privacy.budget.epsilon."""


class PrivacySettings(Section):
    """[privacy]: which privacy clients are guaranteed; without this section none."""

    central: CentralSettings | None = None
    """The server clips every update and adds noise to their weighted sum."""
    local: LocalSettings | None = None
    """Every device clips its update and adds noise before it sends it."""
    records: RecordSettings | None = None
    """Every client trains so that what it sends tells little of any one of its samples."""
    aggregation: AggregationSettings | None = None
    """The server learns the weighted sum of the updates only, never a single one; by itself this adds no noise."""
    budget: BudgetSettings = BudgetSettings()
    """How much may be spent, and what happens then."""
    accept_large_delta: bool = False
    """Allow a δ of 1/clients or more: it holds even where everything of one client, drawn at random, is published."""
    criteria: Literal["charged", "public"] | None = None
    """Criteria that leave a client, or decide about others' weights, are releases too. charged: they are noised and
    charged to the budget; public: you declare that they are known anyway, and the report says so."""
    criteria_noise: Noise | None = None
    """criteria = "charged": the noise on a criterion is this many times its bound; for all but gaussian ε is one over
    it. Default: as much as on updates."""
    criteria_mechanism: Literal["gaussian", "laplace", "exponential", "randomised-response"] = "gaussian"
    """criteria = "charged": gaussian or laplace noise; exponential draws a level, near ones more often;
    randomised-response sends the true level, or any other by chance."""
    criteria_levels: Annotated[int, Field(ge=2, le=1001)] | None = None
    """exponential, randomised-response: so many values, evenly from 0 to the bound, the nearest one is released."""
    criteria_bounds: dict[str, Positive] = Field(default_factory=dict)
    """criteria = "charged": the largest value that counts, by criterion, where the criterion itself has no maximum."""

    @model_validator(mode="after")
    def _fits(self) -> PrivacySettings:
        if not self.noise and self.aggregation is None:
            raise UserError(
                "central: missing, and so are local and aggregation; allowed: one of the three, or local with "
                "aggregation; records in place of local protects single samples"
            )
        if self.records is not None and (self.central is not None or self.local is not None):
            other = "central" if self.central is not None else "local"
            raise UserError(
                f"records: given together with {other}, but one protects samples and the other clients, and a ledger "
                "counts for one of the two; allowed: one of them"
            )
        if self.central is not None and self.local is not None:
            raise UserError(
                "local: given together with central; allowed: one of the two, since either adds enough noise"
            )
        if self.central is not None and self.aggregation is not None:
            raise UserError(
                "central: given together with aggregation, but the server would have to clip single updates, which "
                "aggregation hides; allowed: one of the two, or local with aggregation"
            )
        self._check_noise()
        self._check_criteria()
        return self

    @property
    def noise(self) -> bool:
        """Whether noise is added, so that there is a budget."""
        return self.source is not None

    @property
    def source(self) -> Literal["central", "local", "records"] | None:
        """The section that adds noise; None where none does."""
        if self.central is not None:
            return "central"
        return "local" if self.local is not None else "records" if self.records is not None else None

    @property
    def noisy(self) -> CentralSettings | LocalSettings | RecordSettings | None:
        """The settings of that section."""
        return self.central or self.local or self.records

    def _check_noise(self) -> None:
        for name, section in (("central", self.central), ("local", self.local), ("records", self.records)):
            if section is not None and section.noise is None and self.budget.epsilon is None:
                raise UserError(f"set privacy.{name}.noise or privacy.budget.epsilon: both are missing")

    def _check_criteria(self) -> None:
        if self.criteria != "charged":
            for name in self.model_dump(exclude_defaults=True):
                if name.startswith("criteria_"):
                    raise UserError(
                        f"{name}: given, but criteria are not charged; allowed: only with criteria = 'charged'"
                    )
        if self.records is not None and self.criteria == "charged" and self.criteria_noise is None:
            raise UserError(
                "criteria_noise: missing with records, whose noise is on small batches and would be little for a "
                "criterion of all samples; allowed: a number, such as 10"
            )
        chooses = self.criteria_mechanism in ("exponential", "randomised-response")
        if chooses and self.criteria_levels is None:
            raise UserError(
                f"criteria_levels: missing, and '{self.criteria_mechanism}' tells one of a few values; allowed: 2 to "
                "1001, 2 for a yes or no"
            )
        if self.criteria_levels is not None and not chooses:
            raise UserError(
                f"criteria_levels: given with criteria_mechanism = '{self.criteria_mechanism}', which tells any number"
                "; allowed only with 'exponential' and 'randomised-response'"
            )
        if self.central is not None and self.central.weights == "own" and self.criteria == "charged":
            raise UserError(
                "criteria: got 'charged' with central.weights = 'own', where a criterion changes only its own client's "
                "weight and is not released; allowed: leave privacy.criteria out, or central.weights = 'cohort'"
            )
