"""A weighing rule: which criteria, which score, in which order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import SerializeAsAny, model_validator

from steelyard.base.errors import UserError, brief, expect, listed, nearest
from steelyard.base.marks import Code
from steelyard.base.settings import PrintedName
from steelyard.defence.robust import DefenceSettings
from steelyard.messages.updates import Counts, Floats
from steelyard.weighing import criterion as registry
from steelyard.weighing.adafed import LossSettings
from steelyard.weighing.cohort import CohortView
from steelyard.weighing.criterion import Criterion
from steelyard.weighing.fitted import FitSettings
from steelyard.weighing.order import AdjustSettings
from steelyard.weighing.policy import PolicyByName, check_policy, policy_criteria
from steelyard.weighing.scores import ScoreSettings
from steelyard.weighing.weights import LimitSettings, Normalising, Weighing, cap_of, normalise, to_weights


class WeighingSettings(ScoreSettings, LimitSettings):
    """How the clients of a cohort are weighed: criteria, score function and its parameters.

    >>> settings = steelyard.WeighingSettings(criteria=["LD", "DS"], priority="DS>LD", normalise="max")
    >>> steelyard.weigh({"ann": {"DS": 3, "LD": 1}, "bob": {"DS": 1, "LD": 1}}, settings).weights
    array([0.75, 0.25])

    Raises:
        UserError: a field is unknown or does not fit the others.
    """

    when_zero: Literal["uniform", "keep"] = "uniform"
    """When all scores of a cohort are 0: weigh all clients alike, or keep the old model (as AdaFed does)."""
    plugins: tuple[Annotated[str, Code()], ...] = ()
    """Python files or modules that define criteria of your own; loaded before the criteria are looked up."""
    name: PrintedName | None = None
    """What the rule is called in tables; default: by what it does, such as "DS>LD>MD" or "online(DS>LD>MD)"."""
    adjust: AdjustSettings | None = None
    """For prioritized: find the order while the federation learns; default: the order stays fixed."""
    normalise: Normalising = "share"
    """How a criterion is brought to [0, 1] over the cohort: share (its sum is 1, as in the papers), max (the best
    client has 1, so that priorities do not fade as cohorts grow), or rank."""
    policy: PolicyByName | None = None
    """Weights by a rule with a name of its own, such as FedDisco's; it brings its criteria, and has no score."""
    fit: FitSettings | None = None
    """Fit the weights to the server's own rows, starting from this rule's; default: the rule's weights as they are."""
    trained_by: Literal["clients", "server"] = "clients"
    """server: no client is asked, the server trains on its own rows alone; the control to hold every rule against."""
    loss: SerializeAsAny[LossSettings] | None = None
    """AdaFed: let the clients' loss adapt between rounds; default: the same loss every round."""

    defence: SerializeAsAny[DefenceSettings] | None = None
    """A robust rule that combines the weighted updates where clients may be hostile; default: their weighted sum."""

    @model_validator(mode="before")
    @classmethod
    def _criteria_of_policy(cls, value: Any) -> Any:
        """A policy says itself what it is computed from."""
        if isinstance(value, dict) and "criteria" not in value and (own := policy_criteria(value.get("policy"))):
            return {**value, "criteria": own}
        return value

    @model_validator(mode="after")
    def _check(self) -> WeighingSettings:
        if self.adjust is not None and (self.score != "prioritized" or len(self.criteria) < 2):
            raise UserError(
                f"adjust: given with score = '{self.score}' and {len(self.criteria)} criteria; "
                "allowed only with prioritized and two criteria or more, since it changes their order"
            )
        if self.fit is not None and self.adjust is not None:
            raise UserError(
                "fit: given together with adjust; allowed: one of the two, since fitted weights have no order to adjust"
            )
        if self.trained_by == "server" and (self.fit, self.adjust, self.loss, self.defence) != (None,) * 4:
            raise UserError("trained_by: got 'server' with fit, adjust, loss or defence; allowed: none of these four")
        for name in self.attested:
            if name not in self.criteria:
                raise UserError(
                    f"attested: got '{name}'{nearest(name, self.criteria)}; allowed: {listed(self.criteria)}"
                )
        if self.policy is not None:
            check_policy(self, self.policy)
        self.check_limits()
        return self


def criteria_of(rules: Iterable[WeighingSettings]) -> list[registry.Criterion]:
    """Look up the criteria of all rules, each once, in the order of naming, after loading the plugins they name."""
    rules = list(rules)
    if sources := list(dict.fromkeys(source for rule in rules for source in rule.plugins)):
        registry.load_plugins(sources)
    return [registry.get(name) for name in dict.fromkeys(name for rule in rules for name in rule.criteria)]


class Rule:
    """A weighing rule ready for use: pure functions from raw criteria to weights.

    `known` are criteria that were looked up already, at least this rule's own; a run looks all of its criteria up once.

        >>> rule = steelyard.Rule(steelyard.WeighingSettings(criteria=["DS"]))
        >>> rule.weigh(numpy.array([[30.0], [10.0]])).weights  # raw measures [clients, criteria] in, [clients] out
        array([0.75, 0.25])

    Raises:
        UserError: (in `weigh`) the array is not [clients, criteria], or holds negative or infinite numbers.
    """

    def __init__(self, settings: WeighingSettings, known: Iterable[registry.Criterion] | None = None) -> None:
        expect("Rule", settings, WeighingSettings, "WeighingSettings, such as WeighingSettings(criteria=['DS'])")
        if known is not None:
            known = _criteria_given(known)
            if missing := set(settings.criteria) - {criterion.name for criterion in known}:
                raise UserError(f"Rule: known: lacks {listed(sorted(missing))}; allowed: at least the rule's own")
        self.settings = settings
        self.names = settings.criteria
        self._known = None if known is None else {criterion.name: criterion for criterion in known}
        self.start_order = settings.order()
        self.policy = settings.policy
        self._score = settings.score_function()

    @property
    def ordered(self) -> bool:
        """Whether the order of the criteria matters to this rule."""
        return self.settings.score == "prioritized" and self.policy is None

    @cached_property
    def criteria(self) -> list[registry.Criterion]:
        """The criteria, in the order of naming; looked up at the first call, after loading the plugins they are in."""
        return criteria_of([self.settings]) if self._known is None else [self._known[name] for name in self.names]

    def score(self, values: Floats, order: Sequence[int] | None = None) -> Floats:
        """Return the scores of values [clients, criteria] given in the listed order of the criteria."""
        values = values_of(values, self.names)
        if not self.ordered:
            return self._score(values)
        return self._score(values[..., order_of(self.start_order if order is None else order, self.names)])

    def weigh(
        self,
        raw: Floats,
        order: Sequence[int] | None = None,
        how: Normalising | Literal["rule"] | None = "rule",
        clients: Sequence[str] = (),
        view: CohortView | None = None,
        scores: Floats | None = None,
    ) -> Weighing:
        """Weigh a cohort from its raw measures [clients, criteria]: normalise, score, divide by the sum.

        `how` it is normalised: as the rule says, in another way, or not at all (None: values are in [0, 1] already).
        `clients` are their names, which floors of single clients look at; `view` is what a policy looks at. `scores`
        where they are known already.
        """
        raw = measures_of(raw, self.names)
        check_how(how)
        believed = raw if self.settings.bound is None else bounded(raw, self.criteria, self.settings)
        how = self.settings.normalise if how == "rule" else how
        normalised, zero = (believed, np.zeros(raw.shape[1])) if how is None else normalise(believed, how)
        if scores is not None:
            found = scores
        elif self.policy is not None:
            looked_at = view or CohortView(np.ones(len(believed), np.int64), clients=tuple(clients))
            found = self.policy.weigh({name: believed[:, column] for column, name in enumerate(self.names)}, looked_at)
        else:
            found = self.score(normalised, order)
        weights, uniform = to_weights(found)
        if self.policy is not None and self.policy.applies_to != "shares" and not uniform:
            weights = found
        weights = self.settings.limited(weights, clients)
        all_zero = tuple(name for column, name in enumerate(self.names) if zero[column])
        return Weighing(self.names, raw, normalised, found, weights, all_zero, uniform)

    def candidates(self, normalised: Floats, orders: Sequence[Sequence[int]], clients: Sequence[str] = ()) -> Floats:
        """Return the weights [orders, clients] of one cohort under several priority orders."""
        weights = [to_weights(self.score(normalised, order))[0] for order in orders]
        return np.stack([self.settings.limited(each, clients) for each in weights])

    def samples(self, claimed: Counts) -> Counts:
        """Return the numbers of samples that criteria of the server may use: as claimed, cut at the bound."""
        return bounded_samples(claimed, self.settings)


# ---------------------------------------------------------------- what is handed over in Python


def values_of(values: object, names: Sequence[str], where: str = "values") -> Floats:
    """Return an array whose last axis has a number for each of the criteria."""
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = None
    if found is None or not found.ndim or found.shape[-1] != len(names):
        raise UserError(
            f"{where}: got {brief(values)}; allowed: an array [clients, {len(names)}], a number for each of "
            f"{listed(names)}"
        )
    return found


def measures_of(raw: object, names: Sequence[str]) -> Floats:
    """Return raw measures [clients, criteria], each a finite number from 0 on."""
    found = values_of(raw, names, "raw")
    if found.ndim != 2 or not len(found) or not bool((np.isfinite(found) & (found >= 0)).all()):
        raise UserError(
            f"raw: got {brief(found.tolist())}; allowed: an array [clients, criteria] of finite numbers from 0 on"
        )
    return found


def order_of(order: object, names: Sequence[str]) -> list[int]:
    """Return an order of the criteria, as their positions."""
    places = list(range(len(names)))
    found = list[Any](order) if isinstance(order, list | tuple) else []
    if not all(isinstance(place, Integral) for place in found) or sorted(found) != places:
        raise UserError(f"order: got {brief(order)}; allowed: the positions 0 to {len(names) - 1}, each once")
    return found


def check_how(how: object) -> None:
    """Refuse a way of normalising that there is not."""
    if not isinstance(how, str | None) or how not in (None, "rule", *get_args(Normalising)):
        raise UserError(f"how: got {brief(how)}; allowed: rule, {listed(get_args(Normalising))}, None")


def _criteria_given(values: object) -> list[registry.Criterion]:
    """Return the criteria that a user gave in some order."""
    allowed = "criteria, or None to look them up"
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise UserError(f"Rule: known: got {brief(values)}; allowed: {allowed}")
    try:
        found: list[Any] = list[Any](values)
    except (RuntimeError, TypeError):
        found = [None]
    for value in found:
        expect("Rule: known", value, registry.Criterion, allowed)
    return found


# ---------------------------------------------------------------- trust
#
# How far a criterion can be trusted, and bounds on what clients say of themselves.
#
# | kind | who vouches for the number |
# |---|---|
# | measured | the server took it from the update itself or from rows of its own |
# | bounded | the client says it, but it counts no more than the task can hold or a multiple of the cohort's median |
# | attested | the client says it, and whoever runs the federation declares that it can be believed |
# | self-reported | the client says it, and nothing limits what it says: such a criterion is named in the run's notes |


Trust = Literal["measured", "bounded", "attested", "self-reported"]


def trust_of(criterion: Criterion, settings: WeighingSettings) -> Trust:
    """Return how far a criterion can be trusted under a rule."""
    if criterion.measured_by == "server" and not criterion.uses_claims:
        return "measured"
    if criterion.name in settings.attested:
        return "attested"
    limited = criterion.maximum is not None or criterion.at_most_classes
    return "bounded" if limited or settings.bound is not None else "self-reported"


def trusted(rule: Rule) -> dict[str, Trust]:
    """Return how far each criterion of a rule can be trusted, by name."""
    return {criterion.name: trust_of(criterion, rule.settings) for criterion in rule.criteria}


def limit_of(values: Floats, bound: float) -> float:
    """Return what a value counts at most: `bound` times the cohort's median, or where that is 0 of values above 0."""
    middle = float(np.median(values)) if len(values) else 0.0
    if middle <= 0:
        above = values[values > 0]
        middle = float(np.median(above)) if len(above) else 0.0
    return bound * middle


def bounded(raw: Floats, criteria: Sequence[Criterion], settings: WeighingSettings) -> Floats:
    """Return raw measures [clients, criteria] in which what clients say of themselves is cut at its bound."""
    if settings.bound is None:
        return raw
    found = raw.copy()
    for column, criterion in enumerate(criteria):
        # Losses and label counts are what clients say too, although the server makes the measure of them.
        said = criterion.measured_by == "client" or criterion.needs.first_losses or criterion.needs.label_counts
        if said and criterion.name not in settings.attested:
            found[:, column] = np.minimum(found[:, column], limit_of(found[:, column], settings.bound))
    return found


def bounded_samples(samples: Counts, settings: WeighingSettings) -> Counts:
    """Return the numbers of samples that clients claim, cut likewise, for criteria of the server that use them."""
    if settings.bound is None or "DS" in settings.attested or not len(samples):
        return samples
    most = max(1, int(limit_of(samples.astype(np.float64), settings.bound)))
    return np.minimum(samples, most)


def trust_warnings(rules: Iterable[Rule]) -> list[str]:
    """Return one line that names the criteria of some rules which nothing limits; none where there are none."""
    return unlimited((rule.settings, trusted(rule)) for rule in rules)


def unlimited(rules: Iterable[tuple[WeighingSettings, Mapping[str, str]]]) -> list[str]:
    """Return the same where it is noted already how far the criteria of each rule can be trusted."""
    found = dict.fromkeys(
        name
        for settings, trust in rules
        if settings.trained_by == "clients" and not settings.capped
        for name, trusted_as in trust.items()
        if trusted_as == "self-reported"
    )
    if not found:
        return []
    names = ", ".join(found)
    return [f"{names}: self-reported without a bound; a malicious client could claim any weight (see weighing.bound)"]


# ---------------------------------------------------------------- weights of a client alone
#
# Weights that follow from a client alone, for guarantees under which no client's data may move another's weight.
#
# Every other rule shares weight out over a cohort, so whoever comes, leaves or changes moves everybody's. Here the
# cohort's sums are replaced by numbers that are known beforehand: a typical client's criteria ĉ and the expected number
# of clients m. A client like the typical one gets 1/m, and
#
#     w_a = min(w_max, f(c_a / ĉ m) / (m · f(1/m, ..., 1/m)))        normalise = "share"
#     w_a = min(w_max, f(min(1, c_a / ĉ)) / (m · f(1, ..., 1)))      normalise = "max"
#
# The weights sum to about 1, not to 1: what is missing, or too much, is a shorter or longer step.


def own_cap(rule: Rule, expected: float) -> float:
    """Return w_max in cohorts of so many clients on average; a rule without a cap is refused."""
    settings = rule.settings
    if not settings.capped:
        raise UserError(
            "weighing.max_weight: missing; allowed: max_weight or max_shares, one of which must bound the weights"
        )
    by_shares = np.inf if settings.max_shares is None else settings.max_shares / expected
    return float(min(by_shares, cap_of(1, settings.max_weight)))


def weigh_alone(
    rule: Rule, raw: Floats, references: Floats, expected: float, order: Sequence[int] | None = None
) -> Weighing:
    """Weigh each client by itself, from raw measures [clients, criteria] and those of a typical client [criteria]."""
    if rule.settings.normalise == "share":
        normalised, typical = raw / (references * expected), np.full(len(references), 1.0 / expected)
    else:
        normalised, typical = np.minimum(1.0, raw / references), np.ones(len(references))
    standard = float(rule.score(typical[None], order)[0])
    if standard <= 0:
        raise UserError(
            "weighing.score: is 0 for a typical client; allowed with privacy.central.weights = 'own': scores above 0"
        )
    scores = rule.score(normalised, order)
    weights = np.minimum(scores / (standard * expected), own_cap(rule, expected))
    return Weighing(rule.names, raw, normalised, scores, weights, (), False)
