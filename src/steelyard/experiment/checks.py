"""What does not go together in any kind of experiment, refused before any data is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from steelyard.base.errors import UserError, listed
from steelyard.data import PartitionSettings
from steelyard.messages.algorithm import Algorithm
from steelyard.privacy.hidden import check_cohort
from steelyard.privacy.settings import FEWEST, SIZE, AggregationSettings, CentralSettings, PrivacySettings
from steelyard.rounds.plan import ContributionSettings, RoundSettings
from steelyard.weighing import criterion as registry
from steelyard.weighing.criterion import Capabilities, unmet
from steelyard.weighing.rule import WeighingSettings


def check_rule(
    privacy: PrivacySettings | None,
    name: str,
    rule: WeighingSettings,
    criteria: Sequence[registry.Criterion],
    classes: int | None,
) -> None:
    """Refuse a rule under which the guarantee of [privacy] could not hold; call it for each rule.

    `criteria` are those of the rule that are known: what a plugin defines is checked once that is loaded.
    """
    if privacy is None or rule.trained_by != "clients":
        return
    checked = _Rule(name, rule, criteria, classes)
    if privacy.central is not None:
        checked.with_central(privacy, privacy.central)
    if privacy.local is not None or privacy.records is not None:
        checked.releases(privacy, released_by_clients(privacy, criteria))
        checked.with_local(privacy)
    if privacy.aggregation is not None:
        checked.with_aggregation(privacy)


def released_by_clients(privacy: PrivacySettings, criteria: Sequence[registry.Criterion]) -> list[registry.Criterion]:
    """Return the criteria that clients measure and release; with records it is known how many samples each has."""
    known = SIZE if privacy.records is not None else ""
    return [criterion for criterion in criteria if criterion.measured_by == "client" and criterion.name != known]


@dataclass(frozen=True)
class _Rule:
    """One rule of an experiment; each check below is one sentence that says why."""

    name: str
    settings: WeighingSettings
    criteria: Sequence[registry.Criterion]
    classes: int | None

    def _refuse(self, field: str, why: str, allowed: str) -> NoReturn:
        raise UserError(f"{field}: rule '{self.name}' {why}; allowed: {allowed}")

    @property
    def _defence(self) -> str:
        """The robust rule; empty for the plain weighted sum."""
        defence = self.settings.defence
        return defence.rule if defence is not None and defence.robust else ""

    def with_central(self, privacy: PrivacySettings, central: CentralSettings) -> None:
        """Refuse what the noise of the server could not cover."""
        if not self.settings.capped:
            self._refuse(
                "weighing.max_weight",
                "gives weights without a cap, and the noise of privacy.central must cover the largest one",
                "max_weight or max_shares",
            )
        if self.settings.policy is not None:
            self._refuse(
                "weighing.policy",
                f"weighs by '{self.settings.policy.name}', under which one client moves the weights of all others",
                "criteria with a score, or privacy.local",
            )
        if self.settings.floors:
            self._refuse(
                "weighing.floors",
                "names clients, so that its weights say who takes part",
                "min_weight or min_shares, or privacy.local",
            )
        if self._defence:
            self._refuse(
                "weighing.defence",
                f"combines by '{self._defence}', which may follow a single update, so that no noise covers it",
                "no defence (privacy.central clips already), or privacy.local",
            )
        if self.settings.fit is not None:
            self._refuse(
                "weighing.fit",
                "fits weights to single updates, which then decide about the weights of all others",
                "without it, or privacy.local",
            )
        if self.settings.adjust is not None:
            self._refuse(
                "weighing.adjust",
                "tests many weightings of the same updates, and each of them would be charged to the budget",
                "a fixed order, or privacy.local",
            )
        for criterion in self.criteria:
            if not criterion.of_one:
                self._refuse(
                    "weighing.criteria",
                    f"uses {criterion.name}, which the server measures from a whole cohort, so that one client moves "
                    "the weights of others beyond any bound",
                    "criteria that follow from a client alone, or privacy.local",
                )
        if central.weights == "own":
            self._with_own_weights(central)
        else:
            self.releases(privacy, self.criteria)

    def with_local(self, privacy: PrivacySettings) -> None:
        """Refuse what devices with noise do not release."""
        for criterion in self.criteria:
            if criterion.needs.label_counts and privacy.criteria != "public":
                self._refuse(
                    "weighing.criteria",
                    f"uses {criterion.name}, for which clients send how many samples of each class they have, and no "
                    "noise covers that",
                    "criteria that do not need it, or privacy.criteria = 'public', which declares them known",
                )
            if criterion.needs.first_losses:
                self._refuse(
                    "weighing.criteria",
                    f"uses {criterion.name}, the losses before training, which devices with noise do not send",
                    "criteria that do not need them",
                )
        if self.settings.policy is not None and self.settings.policy.applies_to != "shares":
            self._refuse(
                "weighing.policy",
                f"weighs by '{self.settings.policy.name}', whose weights do not sum to 1, so that noise is scaled too",
                "policies whose weights sum to 1",
            )

    def _with_own_weights(self, central: CentralSettings) -> None:
        if self.settings.floored:
            self._refuse(
                "weighing.min_weight",
                "has floors, which the weights of other clients pay for",
                "no floors, or privacy.central.weights = 'cohort'",
            )
        if self.settings.normalise == "rank":
            self._refuse("weighing.normalise", "ranks clients by one another", "share or max, or weights = 'cohort'")
        if self.settings.bound is not None:
            self._refuse(
                "weighing.bound",
                "cuts criteria at the cohort's median, which follows from other clients",
                "without it (max_weight bounds each client), or privacy.central.weights = 'cohort'",
            )
        for criterion in self.criteria:
            if criterion.name not in central.references and criterion.name != "EQ":
                self._refuse(
                    f"privacy.central.references.{criterion.name}",
                    "needs a typical value to weigh a client by itself, known beforehand and not measured on clients",
                    "a number, or privacy.central.weights = 'cohort'",
                )

    def with_aggregation(self, privacy: PrivacySettings) -> None:
        """Refuse what looks at single updates, or would take several sums of the same ones."""
        if self._defence:
            self._refuse(
                "weighing.defence",
                f"combines by '{self._defence}', which looks at single updates, and privacy.aggregation hides them",
                "no defence (weighing.bound and weighing.max_weight work)",
            )
        if self.settings.fit is not None:
            self._refuse(
                "weighing.fit",
                "fits weights to single models, and privacy.aggregation hides them",
                "weights from criteria alone",
            )
        if self.settings.adjust is not None:
            self._refuse(
                "weighing.adjust",
                "tries several weightings of the same updates, and each sum would be one more equation from which the "
                "server could solve for single updates, which privacy.aggregation hides",
                "a fixed order",
            )
        policy = self.settings.policy
        if policy is not None and (policy.needs.models or policy.applies_to != "shares"):
            why = "looks at single updates" if policy.needs.models else "has weights that do not sum to 1"
            self._refuse(
                "weighing.policy",
                f"weighs by '{policy.name}', which {why}, and privacy.aggregation gives the server one weighted mean",
                "policies of measures alone, or criteria that clients measure",
            )
        for criterion in self.criteria:
            if criterion.about == "user" and privacy.criteria is None:
                self._refuse(
                    "weighing.criteria",
                    f"uses {criterion.name}, which tells of a person what privacy.aggregation does not hide",
                    "criteria of rows or devices, or privacy.criteria = 'public', which declares them known",
                )
            if criterion.needs.models:
                self._refuse(
                    "weighing.criteria",
                    f"uses {criterion.name}, which the server measures on single models, and privacy.aggregation hides "
                    "them",
                    "criteria that clients measure, such as DS and LD",
                )

    def releases(self, privacy: PrivacySettings, criteria: Sequence[registry.Criterion]) -> None:
        """Refuse criteria that would be released without being declared public or charged."""
        released = [criterion for criterion in criteria if criterion.name != "EQ"]
        if released and privacy.criteria is None:
            self._refuse(
                "privacy.criteria",
                f"tells {', '.join(criterion.name for criterion in released)} of each client, which is a release too",
                "'charged' or 'public'",
            )
        for criterion in released:
            # Such a measure follows from the training of this round (a loss, a distance).
            if privacy.criteria == "public" and criterion.measured_by == "server" and criterion.needs.models:
                self._refuse(
                    "privacy.criteria",
                    f"uses {criterion.name}, which comes out of this round's training and cannot be public beforehand",
                    "'charged', or criteria of the data such as DS",
                )
            unbounded = math.isinf(criterion.most(self.classes)) and criterion.name not in privacy.criteria_bounds
            if privacy.criteria == "charged" and unbounded:
                self._refuse(
                    f"privacy.criteria_bounds.{criterion.name}",
                    "charges a criterion that has no largest value, and noise must cover the whole range",
                    "a number",
                )


def check_cohorts(aggregation: AggregationSettings, rounds: RoundSettings, clients: int | None) -> None:
    """Refuse rounds whose cohorts could be too small to hide in, or too large for the words; `clients` where known.

    By Poisson sampling a cohort may have any size from `rounds.min_clients` to all clients.
    """
    if rounds.sampling == "poisson" and rounds.min_clients < FEWEST:
        raise UserError(
            f"rounds.min_clients: got {rounds.min_clients} with rounds.sampling = 'poisson' and privacy.aggregation, "
            "and a cohort of one or two clients, which may be drawn, hides nobody; allowed: at least "
            f"{FEWEST} (a smaller cohort is then drawn again), or rounds.sampling = 'fixed'"
        )
    if clients is None:
        return
    most = clients if rounds.sampling == "poisson" else rounds.cohort(clients)
    check_cohort(aggregation, most)


def check_names(privacy: PrivacySettings) -> None:
    """Refuse numbers given for criteria that do not exist; call it once plugins are loaded, or where there are none.

    A wrong name would be passed over, and the guarantee would not be the one that was meant.
    """
    references = {} if privacy.central is None else privacy.central.references
    for field, given in (("central.references", references), ("criteria_bounds", privacy.criteria_bounds)):
        for name in given:
            if registry.find(name) is None:
                raise UserError(
                    f"privacy.{field}: got '{name}', which is no criterion; allowed: {listed(registry.known())}"
                )


def check_selection(privacy: PrivacySettings | None, rounds: RoundSettings) -> None:
    """Refuse cohorts that are chosen where a guarantee counts on cohorts that are drawn, or on clients that say nothing
    of themselves.
    """
    if privacy is None or rounds.select.plain:
        return
    for field in ("central", "local", "records"):
        if getattr(privacy, field) is not None:
            what = f"by = '{rounds.select.by}'" if rounds.select.by != "uniform" else "clients that come and go"
            raise UserError(
                f"rounds.select: got {what} with privacy.{field}, whose guarantee holds for cohorts that are drawn "
                "evenly from all clients; allowed: uniform, all clients always there"
            )


def check_keeps(rounds: RoundSettings, algorithm: Algorithm) -> None:
    """Refuse to keep a round's model where the rest of it stays with the clients, who go on with theirs."""
    if rounds.keep == "best" and algorithm.personal and algorithm.keeps:
        raise UserError(
            f"rounds.keep: got 'best' with {algorithm.name}, whose clients keep models of their own, and those of the "
            "last round alone; allowed: last (patience works)"
        )


def check_algorithm(privacy: PrivacySettings | None, algorithm: Algorithm) -> None:
    """Refuse an algorithm whose server needs more than one noisy or hidden sum of a round."""
    if privacy is None:
        return
    if privacy.records is not None:
        _check_records(algorithm)
    fields = {"central": privacy.central, "local": privacy.local, "aggregation": privacy.aggregation}
    field = next((name for name, section in fields.items() if section is not None), None)
    if field is None:
        return
    if algorithm.sends:
        raise UserError(
            f"privacy.{field}: {algorithm.name} has clients send {listed(algorithm.sends)} beside their models, and "
            "only the models are protected; allowed: an algorithm that sends models alone"
        )
    if algorithm.listens:
        raise UserError(
            f"privacy.{field}: clients of {algorithm.name} are given each other's models as they are; "
            "allowed: an algorithm whose models go to the server alone"
        )
    if algorithm.private != "nothing":
        kept = {"head": "the head", "norms": "the batch norms", "everything": "all"}.get(algorithm.private, "a part")
        raise UserError(
            f"privacy.{field}: clients of {algorithm.name} keep {kept} of their models to themselves, and what is "
            "protected here are whole models; allowed: an algorithm that sends whole models"
        )
    if algorithm.counts_steps and field == "local":
        raise UserError(
            f"privacy.local: the server of {algorithm.name} counts the steps of each client, which devices with noise "
            "do not report; allowed: an algorithm that counts none"
        )
    if algorithm.sees == "models" and field != "local":
        raise UserError(
            f"privacy.{field}: the server of {algorithm.name} needs single updates, and here it has only their sum; "
            "allowed: an algorithm that needs the sum alone"
        )


def _check_records(algorithm: Algorithm) -> None:
    """Refuse an algorithm whose clients look at their samples more often than the steps that are counted.

    What an algorithm keeps or sends beside the models (SCAFFOLD's control variates) follows from noisy models alone.
    """
    why = {
        "takes its steps itself, in a way of its own": algorithm.by_hand,
        "has clients train a second time in each round": type(algorithm).again is not Algorithm.again,
        "has clients train once more before they test": algorithm.tunes,
        "has clients try each other's models on their samples": algorithm.listens or algorithm.held_back > 0,
    }
    for what, does in why.items():
        if does:
            raise UserError(
                f"privacy.records: {algorithm.name} {what}, which the privacy ledger does not count; allowed: fedavg, "
                "fedprox, scaffold and others whose clients train once in a round"
            )


# Whether a run can say what its clients added.


def check_private(privacy: PrivacySettings | None, field: str, *, again: bool = False) -> None:
    """Refuse whatever would disclose more of single updates than [privacy] guarantees; `again`: a run is repeated."""
    if privacy is None:
        return
    if again and privacy.records is not None:
        raise UserError(
            f"{field}: this run has [privacy.records], and to train again is a release that its ledger does not count; "
            "allowed: [contributions] in the experiment, measured while it runs"
        )
    if privacy.central is not None or privacy.local is not None:
        section = "central" if privacy.central is not None else "local"
        raise UserError(
            f"{field}: this run has [privacy.{section}], and what is read from single updates is a release that its "
            "budget does not count; allowed: runs without differential privacy"
        )
    if privacy.aggregation is not None:
        raise UserError(
            f"{field}: this run has [privacy.aggregation], kind '{privacy.aggregation.kind}', which hides single "
            "updates from the server; allowed: runs whose server sees them"
        )


def check_measure(
    settings: ContributionSettings, partition: PartitionSettings, *, counted: bool, field: str = "contributions"
) -> None:
    """Refuse a measure for which the run has no rows, and one that only classes have."""
    if settings.method == "classes":
        if not counted:
            raise UserError(
                f"{field}.method: got 'classes' for data without classes; allowed: shapley, leave-one-out, with a loss"
            )
        return
    if settings.measure.endswith("accuracy") and not counted:
        raise UserError(
            f"{field}.measure: got '{settings.measure}' for data without classes; allowed: loss, local-loss"
        )
    if not settings.on_clients and partition.server == "none":
        raise UserError(
            f"{field}.measure: got '{settings.measure}', and partition.server = 'none' leaves the server without rows; "
            "allowed: local-loss, local-accuracy, or partition.server = 'fraction' or 'held-out'"
        )
    if settings.on_clients and partition.test == "none":
        raise UserError(
            f"{field}.measure: got '{settings.measure}', and partition.test = 'none' leaves clients without test rows; "
            "allowed: loss, accuracy, or partition.test = 'local' or 'held-out'"
        )


def check_common_model(algorithms: Sequence[Algorithm]) -> None:
    """Refuse algorithms whose clients use models of their own: what they add to the global one says little."""
    personal = next((made.name for made in algorithms if made.personal), None)
    if personal is not None:
        raise UserError(
            f"contributions: the clients of '{personal}' use models of their own, not the global one; allowed: "
            "algorithms with one model for all"
        )


# What does not go with a rule.


def check_fits(settings: WeighingSettings, made: Algorithm, optimiser: str | None) -> None:
    """Refuse an algorithm that does not go with its rule or the local optimiser (None where no model is trained)."""
    if optimiser is None:
        if made.name != "fedavg":
            raise UserError(
                f"algorithm.name: got '{made.name}', but clients of this kind do not send whole models; allowed: fedavg"
            )
        return
    if settings.trained_by == "server" and made.name != "fedavg":
        raise UserError(
            f"algorithm.name: got '{made.name}' with weighing.trained_by = 'server', where no client trains; "
            "allowed: fedavg"
        )
    if optimiser not in made.optimisers:
        raise UserError(
            f"training.optimiser: got '{optimiser}', for which {made.name} is not defined; "
            f"allowed: {listed(made.optimisers)}"
        )
    policy = settings.policy
    if policy is not None and policy.applies_to != "shares" and made.name != "fedavg":
        raise UserError(
            f"algorithm.name: got '{made.name}' with policy '{policy.name}', which decides the server's step itself; "
            "allowed: fedavg"
        )
    defence = settings.defence
    if defence is not None and defence.robust and made.listens:
        raise UserError(
            f"weighing.defence: got '{defence.rule}' with {made.name}, whose clients weigh single models themselves; "
            "allowed: no [weighing.defence], or another algorithm"
        )
    if defence is not None and defence.robust and made.sees == "models":
        raise UserError(
            f"weighing.defence: got '{defence.rule}' with {made.name}, whose server needs single updates, while a "
            "robust "
            "rule gives it one sum; allowed: no [weighing.defence], or an algorithm that needs the sum alone"
        )


def check_policy(rule: WeighingSettings, available: Capabilities, optimiser: str | None) -> None:
    """Refuse a policy whose needs an experiment does not meet; `optimiser` is None where no whole model is trained."""
    if rule.policy is None:
        return
    fault = unmet(rule.policy.needs, available, {})
    if fault is None and rule.policy.applies_to != "shares" and optimiser is None:
        fault = "changes the length of the step, and clients of this kind do not send whole models; allowed: others"
    if fault is not None:
        raise UserError(f"weighing.policy: {rule.policy.name} {fault}")
