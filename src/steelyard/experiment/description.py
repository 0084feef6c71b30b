"""What every kind of experiment has in common: its fields, its rules, and how they are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, ValidationInfo, model_validator

from steelyard.algorithms.settings import AlgorithmSettings
from steelyard.base.errors import UserError
from steelyard.base.settings import PrintedName, ShortName, known_fields, put, validated
from steelyard.clients.flower.register import FederateSettings
from steelyard.experiment import privacy_checks
from steelyard.experiment.code import named_code
from steelyard.experiment.contribution_checks import check_private
from steelyard.experiment.federations import FederationSettings, check_algorithm, check_policy, federation_label
from steelyard.experiment.kind import Kind
from steelyard.messages.algorithm import Algorithm
from steelyard.privacy.settings import PrivacySettings
from steelyard.rounds.contributions import ContributionSettings
from steelyard.rounds.plan import RoundSettings
from steelyard.runs.schema import StoreSettings
from steelyard.tracking import TrackingSettings
from steelyard.weighing import criterion as registry
from steelyard.weighing.rule import WeighingSettings, criteria_of

READING: Mapping[str, Any] = {"reading": True}
"""Context of a check that only reads a run: criteria that this process does not know are no mistake there."""


class Description(Kind):
    """One experiment as data: a name, a seed, rounds, a weighing rule, rules beside it, a store.

    Derive a class per kind of experiment; `kinds` lists them. A description says what a run is made of and can build
    its parts; running, comparing and reporting stand above and are never called from here.
    """

    name: ShortName = "experiment"
    """Short name; run folders are named after it."""
    description: str = ""
    """One or two sentences for people."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """The seed of everything: partition, first model, cohorts, order of samples."""
    rounds: RoundSettings = RoundSettings()
    weighing: WeighingSettings = WeighingSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    beside: dict[PrintedName, FederationSettings] = Field(default_factory=dict)
    """Further rules, by name, that run on the same cohorts and the same first model, for comparison; each may have an
    algorithm of its own, as `[beside.NAME.algorithm]`."""
    left_out: dict[PrintedName, str] = Field(default_factory=dict)
    """Rules that `--rules all` asked for and that cannot run in this experiment, each with the reason; a comparison
    writes it."""
    privacy: PrivacySettings | None = None
    """Which privacy clients are guaranteed; without it none."""
    contributions: ContributionSettings | None = None
    """Whether every round measures what each client added; without it `steelyard contributions` finds it afterwards."""
    store: StoreSettings = StoreSettings()
    tracking: TrackingSettings = TrackingSettings()
    federate: FederateSettings = FederateSettings()

    @model_validator(mode="wrap")
    @classmethod
    def _unknown_criteria_first(
        cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        """Name an unknown criterion as that, not as an order or a weight that does not fit it.

        A field that does not exist goes before it: `plugins` in the wrong section leaves a criterion unknown.
        """
        try:
            return handler(value)
        except ValidationError as error:
            misplaced = any(problem["type"] == "extra_forbidden" for problem in error.errors(include_url=False))
            for field, rule in _rule_tables(value).items() if info.context != READING and not misplaced else ():
                names = () if rule.get("plugins") else rule.get("criteria")
                _check_known(field, cast("Sequence[Any]", names) if isinstance(names, list | tuple) else ())
            raise

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Self:
        rules, reading = self.rules(), info.context == READING
        if len(rules) == len(self.beside):
            raise UserError(f"beside.{next(iter(rules))}: has the name of the main rule; allowed: any other name")
        known = {} if reading else self._known_criteria()
        for name, rule in rules.items():
            criteria = [known[each] for each in rule.criteria if each in known]
            for criterion in criteria:
                self.check_criterion(criterion)
            if rule.adjust is not None and self.rounds.evaluate_every != 1:
                raise UserError(
                    f"rounds.evaluate_every: got {self.rounds.evaluate_every} with weighing.adjust, which compares "
                    "each round with the last; allowed: 1"
                )
            self.check_rule(rule)
            check_policy(rule, self.capabilities(), self.optimiser)
            if not reading:
                privacy_checks.check_rule(self.privacy, name, rule, criteria, self.capabilities().classes)
        self._check_caps()
        self.check_algorithms(own_code=False)
        privacy_checks.check_selection(self.privacy, self.rounds)
        if self.contributions is not None:
            self.check_contributions(self.contributions)
        if self.store.keep == "updates":
            check_private(self.privacy, "store.keep")
        if self.privacy is not None and not reading and not self._plugins:
            privacy_checks.check_names(self.privacy)
        return self

    def _known_criteria(self) -> Mapping[str, registry.Criterion]:
        """Return the criteria that are known without running code; what plugins may define waits for `criteria`."""
        if self._plugins:
            return {name: criterion for name, criterion in registry.known().items() if criterion.built_in}
        _check_known("weighing", self.weighing.criteria)
        for name, rule in self.beside.items():
            _check_known(f"beside.{name}", rule.criteria)
        return registry.known()

    @property
    def _plugins(self) -> bool:
        """Whether a rule names code that may define criteria."""
        return any(rule.plugins for rule in (self.weighing, *self.beside.values()))

    @property
    def _main(self) -> FederationSettings:
        """The main rule with the experiment's algorithm."""
        return FederationSettings.model_construct(**dict(self.weighing), algorithm=self.algorithm)

    def check_algorithms(self, *, own_code: bool) -> None:
        """Refuse algorithms that do not go with their rules; `own_code`: the user's own too, whose code is then run."""
        for rule in self.rules().values():
            algorithm = rule.algorithm or self.algorithm
            if own_code or not algorithm.plugins:
                made = algorithm.made()
                check_algorithm(rule, made, self.optimiser)
                privacy_checks.check_algorithm(self.privacy, made)

    def _check_caps(self) -> None:
        """Refuse a cap under which all clients together could not have all the weight, and a floor that is too much."""
        most = None if self.all_clients is None else self.rounds.cohort(self.all_clients)
        for name, rule in self.rules().items():
            if most is not None and rule.max_weight is not None and rule.max_weight * most < 1 - 1e-9:
                raise UserError(
                    f"weighing.max_weight: got {rule.max_weight:g} in rule '{name}', and cohorts have {most} clients; "
                    f"allowed: at least {1 / most:g}, an equal say"
                )
            if most is not None and rule.min_weight is not None and rule.min_weight * most > 1 + 1e-9:
                raise UserError(
                    f"weighing.min_weight: got {rule.min_weight:g} in rule '{name}', and cohorts have {most} clients; "
                    f"allowed: at most {1 / most:g}, an equal say"
                )

    def check_criterion(self, criterion: registry.Criterion) -> None:
        """Refuse a criterion whose needs this experiment does not meet; called for each before any data is read."""
        registry.check(criterion, self.capabilities())

    def rules(self) -> dict[str, FederationSettings]:
        """Return all rules of this run by name, each with its algorithm, the main one first."""
        main = self._main
        return {federation_label(main): main, **self.beside}

    def criteria(self) -> list[registry.Criterion]:
        """Return the criteria of all rules, each once; loads the code that the experiment names for them.

        Whatever runs an experiment calls it first, so this is where criteria from plugins are held against the data.
        """
        self.check_algorithms(own_code=True)
        rules = self.rules()
        found = {criterion.name: criterion for criterion in criteria_of(rules.values())}
        for criterion in found.values():
            self.check_criterion(criterion)
        if self.privacy is not None:
            privacy_checks.check_names(self.privacy)
            for name, rule in rules.items():
                criteria = [found[each] for each in rule.criteria]
                privacy_checks.check_rule(self.privacy, name, rule, criteria, self.capabilities().classes)
        return list(found.values())

    def algorithms(self) -> list[Algorithm]:
        """Return the algorithm of each rule; loads the code that the experiment names for them."""
        return [(rule.algorithm or self.algorithm).made() for rule in self.rules().values()]

    def named_code(self) -> dict[str, str]:
        """Return the code of the user's own that this experiment names, by field; nothing of it is run."""
        return named_code(self.model_dump(mode="json", exclude_none=True))

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with some fields changed, by dotted name: changed({"rounds.count": 50})."""
        document = self.model_dump(mode="json", exclude_none=True)
        for name, value in changes.items():
            put(document, name.split("."), value, name)
        return validated(type(self), document, "experiment")

    @property
    def validation_field(self) -> str:
        """The field, by dotted name, whose share makes this kind test on a validation split; empty where it has none.

        It is the field `validation` of the section that says how the data are split.
        """
        for section in ("partition", "interactions"):
            if "validation" in known_fields(type(self), [section]):
                return f"{section}.validation"
        return ""

    @property
    def validation(self) -> float | None:
        """The share of the training data that is tested on in place of the test set; None: the test set is used."""
        section, _, name = self.validation_field.partition(".")
        return getattr(getattr(self, section), name) if section else None

    def on_validation(self, share: float | None) -> Self:
        """Return the same experiment tested on a validation split of this share, or, with None, on the test set.

        Use it wherever settings are chosen: what is chosen on the test set tells nothing of other data.
        """
        if not self.validation_field:
            kind = self.model_dump().get("kind")
            raise UserError(
                f"validation: experiments of kind '{kind}' have no validation split; allowed: experiments of another "
                "kind"
            )
        return self.changed({self.validation_field: share})

    def for_clients(self, count: int) -> Self:
        """Return the experiment with the share of clients in a round filled in, now that they are counted.

        What needs all of them in every round is held against that share here.
        """
        rounds = self.rounds.model_copy(update={"fraction": self.rounds.share_of(count)})
        found = self.model_copy(update={"rounds": rounds})
        for rule in found.rules().values():
            check_policy(rule, found.capabilities(), self.optimiser)
        return found


def _rule_tables(document: Any) -> dict[str, Mapping[str, Any]]:
    """Return the rules of a document that may be wrong in any way, by the name of their table."""
    if not isinstance(document, Mapping):
        return {}
    given = cast("Mapping[str, Any]", document)
    beside = given.get("beside")
    others = cast("Mapping[str, Any]", beside) if isinstance(beside, Mapping) else {}
    rules = {"weighing": given.get("weighing"), **{f"beside.{name}": rule for name, rule in others.items()}}
    return {field: cast("Mapping[str, Any]", rule) for field, rule in rules.items() if isinstance(rule, Mapping)}


def _check_known(field: str, names: Sequence[Any]) -> None:
    for name in names:
        if isinstance(name, str):
            try:
                registry.get(name)
            except UserError as error:
                raise UserError(
                    f"{field}.criteria: {error}; one of your own: name its file in {field}.plugins"
                ) from None
