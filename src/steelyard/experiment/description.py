"""An experiment as data: its fields, its rules with their algorithms, what a kind of experiment says and can build."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, ValidationInfo, model_validator

from steelyard.algorithms.settings import AlgorithmSettings
from steelyard.base.errors import UserError, expect
from steelyard.base.marks import Code, marked
from steelyard.base.settings import PrintedName, Section, ShortName, fields_given, known_fields, replaced, validated
from steelyard.clients.flower.register import FederateSettings
from steelyard.experiment import checks
from steelyard.experiment.checks import check_private
from steelyard.messages.algorithm import Algorithm
from steelyard.messages.payloads import DENSE, Codec
from steelyard.privacy.settings import PrivacySettings
from steelyard.rounds.plan import ContributionSettings, Measure, RoundSettings
from steelyard.runs.schema import StoreSettings
from steelyard.tracking import TrackingSettings
from steelyard.weighing import criterion as registry
from steelyard.weighing.criterion import Capabilities
from steelyard.weighing.rule import WeighingSettings, criteria_of
from steelyard.weighing.words import label

if TYPE_CHECKING:
    from steelyard.clients.node import NodeClients, NodeConfig
    from steelyard.clients.protocol import Clients, Server
    from steelyard.data.dataset import Dataset, DatasetOrSeeded
    from steelyard.data.preparation import Preparation
    from steelyard.data.sources.csv import Csv
    from steelyard.learning.records import RecordNoise


class FederationSettings(WeighingSettings):
    """A weighing rule and the algorithm that it runs with; use it for what stands beside the main rule."""

    algorithm: AlgorithmSettings | None = None
    """The algorithm of this rule; default: that of the experiment's [algorithm]."""


def stored_settings(text: str) -> FederationSettings | None:
    """Return a rule as a run's folder holds it; None where it is not of this version."""
    try:
        return FederationSettings.model_validate_json(text)
    except (UserError, ValueError):
        return None


def federation_label(settings: FederationSettings) -> str:
    """Name a federation: "LD>DS", "scaffold" for the algorithm with sizes as weights, "scaffold+LD>DS" for both."""
    rule, algorithm = label(settings), settings.algorithm
    if settings.name is not None or algorithm is None or algorithm.name == "fedavg":
        return rule
    return algorithm.label if rule == "DS" else f"{algorithm.label}+{rule}"


# A kind of experiment.


class Kind(Section):
    """Where kinds of experiments differ: clients and server, what criteria are given, scores; without fields.

    `Description` derives from it; a kind overrides what is different there.
    """

    form_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that the form of the live page offers; none names a file or code."""

    @classmethod
    def kind_name(cls) -> str:
        """Return what an experiment's file calls this kind."""
        return str(cls.model_fields["kind"].default)

    @property
    def optimiser(self) -> str | None:
        """How clients take their steps; None where they do not train whole models."""
        return None

    @property
    def momentum(self) -> float:
        """The clients' momentum."""
        return 0.0

    @property
    def learning_rate(self) -> float:
        """The clients' learning rate in the first round; 0 where they have none."""
        return 0.0

    def rate(self, round: int) -> float:
        """Return what the clients' learning rate is multiplied by in a round."""
        return 1.0

    @property
    def all_clients(self) -> int | None:
        """How many clients there are; None where that is known from the data alone."""
        return None

    def capabilities(self) -> Capabilities:
        """Return what this experiment can give to criteria; each kind says what it knows before any data is read."""
        return Capabilities(f"kind = '{type(self).__name__}'")

    def check_rule(self, rule: WeighingSettings) -> None:
        """Refuse a rule that this kind of experiment cannot follow; called for each before any data is read."""
        if rule.defence is not None:
            raise UserError(
                "weighing.defence: given, but clients of this kind do not send whole models; allowed: no "
                "[weighing.defence] (weighing.bound and max_weight work)"
            )
        if rule.fit is not None or rule.trained_by != "clients":
            field = "fit" if rule.fit is not None else "trained_by"
            raise UserError(
                f"weighing.{field}: given, but this kind of server has no rows to learn from; allowed: leave it out"
            )
        if rule.loss is not None:
            raise UserError(
                "weighing.loss: given, but the loss of this kind of experiment is fixed; allowed: leave it out"
            )

    def check_policy(self, rule: WeighingSettings) -> None:
        """Refuse a rule whose policy needs what this experiment cannot give; called for each, as `check_rule` is."""
        checks.check_policy(rule, self.capabilities(), self.optimiser)

    @property
    def lists(self) -> bool:
        """Whether clients are tested by the lists of items that they are recommended."""
        return False

    @property
    def rows_that_chose(self) -> tuple[bool, bool]:
        """Whether the server's reporting rows also weigh clients, and whether the clients' tests are those rows."""
        return False, False

    @property
    def default_measure(self) -> Measure:
        """By what it is measured what clients add, unless a measure is named."""
        return "loss"

    @property
    def weighed_beside(self) -> str:
        """What else than a rule goes into the weights; empty where nothing does."""
        return ""

    @property
    def clients_evaluate(self) -> bool:
        """Whether clients test the new models."""
        return True

    @property
    def measures(self) -> Mapping[str, str]:
        """Further figures of each client's test by which settings can be chosen: name and the name in the records."""
        return {}

    def resolved(self) -> Self:
        """Return the experiment with what is known from the data alone filled in, such as rounds counted in epochs."""
        return self

    def assemble(self, dataset: DatasetOrSeeded | None = None, read: Dataset | None = None) -> tuple[Clients, Server]:
        """Read the data, if they are not `read` yet, and build clients and server; every kind says how."""
        raise NotImplementedError(type(self).__name__)

    def on_node(self, node: NodeConfig) -> NodeClients:
        """Build those clients that live on one node of a federation across machines, from the node's own data."""
        raise UserError(f"kind: '{type(self).__name__}' cannot run across machines yet; allowed: steelyard run")

    def check_runs_here(self, where: str) -> None:
        """Refuse a run that another program carries on; called before a run goes on."""

    @property
    def shared_out(self) -> bool:
        """Whether several processes can train the clients of one run."""
        return False

    @property
    def clocked(self) -> bool:
        """Whether simulated devices have a clock."""
        return False

    def check_contributions(self, settings: ContributionSettings, *, own_code: bool = False) -> None:
        """Refuse to measure what clients add where this kind of experiment, its rows or [privacy] do not allow it."""
        raise UserError(
            "contributions: experiments of this kind do not measure what their clients add; allowed: kind = 'learning'"
        )

    @classmethod
    def check_node(cls, node: NodeConfig) -> None:
        """Refuse tables of a node's own file that make no sense for this kind; called when the node starts."""

    def check_own_rows(self, node: NodeConfig) -> None:
        """Refuse to read a node's own file, or to choose among its rows, otherwise than its owner says."""

    def check_federated(self) -> None:
        """Refuse what works in a simulation only; called on the server and on every node, before anything is sent."""

    @property
    def table(self) -> Csv | None:
        """How a table is read whose columns can be compared before the first round; None of other data."""
        return None

    def unprepared(self, about: Mapping[str, int | list[int]]) -> Preparation | None:
        """Return what is known of the rows of nodes that do not tell what rows go through, by what they must say."""
        return None

    def about_data(self) -> Mapping[str, int | list[int]]:
        """Return what this experiment itself says of the data that nodes hold; what it leaves open, most nodes say."""
        return {}

    def at_server(self, about: Mapping[str, int | list[int]]) -> Server:
        """Build the server of a federation across machines; `about` is what the nodes say of their data."""
        return self.assemble()[1]

    def codec(self) -> Codec:
        """Return how the updates of this kind of experiment travel between machines; whole models unless it says so."""
        return DENSE

    def with_engine(self, choice: str) -> Self:
        """Return the experiment with the engine that an earlier run recorded; kinds without engines ignore it."""
        return self

    def with_dataset(self, dataset: DatasetOrSeeded | None, seed: int) -> tuple[Self, DatasetOrSeeded | None]:
        """Return the experiment with what is known of data that are handed over from Python, and these."""
        return self, dataset

    @property
    def local_loss(self) -> str:
        """The loss that clients train with; "auto" is the one that fits."""
        return "auto"

    @property
    def regression(self) -> bool:
        """Whether a number is learnt, not a class."""
        return False

    @property
    def worth(self) -> str:
        """The criterion by which a model does well on the server's rows."""
        return "VP"

    @property
    def server_figure(self) -> str:
        """The figure of the server's tests by which rules are recommended."""
        return "accuracy"

    @property
    def reports_on_server(self) -> bool:
        """Whether the server has rows that report on each new model."""
        return False

    @property
    def score_name(self) -> str:
        """What the clients' local scores are, for headings."""
        return "accuracy"

    @property
    def score_range(self) -> tuple[float, float] | None:
        """The range that a client's local score can have, where there is one; a score beyond it is refused."""
        return None


# What all kinds have in common.


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
            self.check_policy(rule)
            if not reading:
                checks.check_rule(self.privacy, name, rule, criteria, self.capabilities().classes)
        self._check_caps()
        self.check_algorithms(own_code=False)
        checks.check_selection(self.privacy, self.rounds)
        self.check_leading()
        if self.contributions is not None:
            self.check_contributions(self.contributions)
        if self.store.keep == "updates":
            check_private(self.privacy, "store.keep")
        if self.privacy is not None and not reading and not self._plugins:
            checks.check_names(self.privacy)
        return self

    def check_leading(self) -> None:
        """Refuse a measure that this kind of experiment does not know."""
        if self.rounds.measure is not None:
            raise UserError(
                f"rounds.measure: got '{self.rounds.measure}', which is for experiments that train a model on rows; "
                "allowed: leave it out"
            )

    def _known_criteria(self) -> Mapping[str, registry.Criterion]:
        """Return the criteria that are known without running code; what plugins may define waits for `criteria`."""
        rules = {"weighing": self.weighing, **{f"beside.{name}": rule for name, rule in self.beside.items()}}
        if not self._plugins:
            for field, rule in rules.items():
                _check_known(field, rule.criteria)
        found = [registry.find(name) for rule in rules.values() for name in rule.criteria]
        return {each.name: each for each in found if each is not None and (each.built_in or not self._plugins)}

    @property
    def _plugins(self) -> bool:
        """Whether a rule names code that may define criteria."""
        return any(rule.plugins for rule in (self.weighing, *self.beside.values()))

    @property
    def _main(self) -> FederationSettings:
        """The main rule with the experiment's algorithm."""
        given = self.weighing.model_fields_set | {"algorithm"}
        return FederationSettings.model_construct(given, **dict(self.weighing), algorithm=self.algorithm)

    def check_algorithms(self, *, own_code: bool) -> None:
        """Refuse algorithms that do not go with their rules; `own_code`: the user's own too, whose code is then run."""
        for rule in self.rules().values():
            algorithm = rule.algorithm or self.algorithm
            if own_code or not algorithm.plugins:
                made = algorithm.made()
                checks.check_fits(rule, made, self.optimiser)
                checks.check_algorithm(self.privacy, made)
                checks.check_keeps(self.rounds, made)

    def _check_caps(self) -> None:
        """Refuse a cap under which all clients together could not have all the weight, and a floor that is too much."""
        if self.all_clients is None:
            return
        most = self.rounds.cohort(self.all_clients)
        for name, rule in self.rules().items():
            for field, sign, allowed in (("max_weight", 1, "at least"), ("min_weight", -1, "at most")):
                weight: float | None = getattr(rule, field)
                if weight is not None and sign * (weight * most - 1) < -1e-9:
                    raise UserError(
                        f"weighing.{field}: got {weight:g} in rule '{name}', and cohorts have {most} clients; allowed: "
                        f"{allowed} {1 / most:g}, an equal say"
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
            checks.check_names(self.privacy)
            for name, rule in rules.items():
                criteria = [found[each] for each in rule.criteria]
                checks.check_rule(self.privacy, name, rule, criteria, self.capabilities().classes)
        return list(found.values())

    def algorithms(self) -> list[Algorithm]:
        """Return the algorithm of each rule; loads the code that the experiment names for them."""
        return [(rule.algorithm or self.algorithm).made() for rule in self.rules().values()]

    def named_code(self) -> dict[str, str]:
        """Return the code of the user's own that this experiment names, by field; nothing of it is run."""
        return {field: text for field, mark, text, _ in marked(type(self), self, Code) if mark.named_by(text)}

    def changed(
        self,
        fields: Mapping[str, Any] | None = None,
        *,
        rules: Mapping[str, FederationSettings] | None = None,
        where: str = "experiment",
    ) -> Self:
        """Return the experiment with some fields changed, by dotted name: changed({"rounds.count": 50}).

        `rules`, by name, take the place of its own, the first as its main rule; `where` begins the line of a refusal.
        """
        expect("changed", fields, (Mapping, type(None)), 'fields by name, such as {"rounds.count": 50}')
        document: dict[str, Any] = fields_given(self)
        for name, value in (fields or {}).items():
            expect("changed", name, str, 'fields by name, such as {"rounds.count": 50}')
            document = replaced(document, name.split("."), value, name)
        if rules:
            (first, main), *rest = rules.items()
            named = main if federation_label(main) == first else main.model_copy(update={"name": first})
            document["weighing"] = fields_given(named)
            document["algorithm"] = document["weighing"].pop("algorithm", None) or AlgorithmSettings()
            document["beside"] = dict(rest)
        return validated(type(self), document, where)

    @property
    def round_chosen_by(self) -> Literal["server", "clients"] | None:
        """Whose rows choose the best round; None where none is asked for."""
        return "clients" if self.rounds.chooses else None

    def record_noise(self, most: float | None = None) -> RecordNoise | None:
        """Return what clients do to their samples' gradients; `most` is the ε that the owner of a node allows.

        None where they do nothing, as in all kinds without samples.
        """
        return None

    @property
    def refuses_statistics(self) -> str:
        """Why nodes tell nothing of their columns all the same; empty where they may."""
        if self.privacy is None or not self.privacy.noise:
            return ""
        return "the noise of [privacy] covers single clients, and hides their columns too"

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
            raise UserError(
                f"validation: experiments of kind '{self.kind_name()}' have no validation split; allowed: those of "
                "another kind"
            )
        return self.changed({self.validation_field: share})

    def for_clients(self, count: int) -> Self:
        """Return the experiment with the share of clients in a round filled in, now that they are counted.

        What needs all of them in every round is held against that share here.
        """
        rounds = self.rounds.model_copy(update={"fraction": self.rounds.share_of(count)})
        found = self.model_copy(update={"rounds": rounds})
        for rule in found.rules().values():
            found.check_policy(rule)
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
