"""Experiments of kind "learning": a federation that trains a model on samples.

What is imported inside methods waits there for speed of start: a description is often only shown or checked, and
training imports torch; only what hides updates needs the libraries that do it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

from pydantic import SerializeAsAny, model_validator

from steelyard.algorithms.settings import AlgorithmSettings
from steelyard.base.errors import UserError, listed
from steelyard.base.measures import MEASURES, TASKS, TaskMeasures, measure_of
from steelyard.base.settings import fields_given
from steelyard.base.usercode import NotAllowed
from steelyard.clients.local import ClockSettings, ComputeSettings
from steelyard.data import DataSettings, FlawSettings, PartitionSettings, check_flaws, check_together
from steelyard.data.facts import FactSettings
from steelyard.data.preparation import Preparation, Target
from steelyard.data.sources.csv import Csv
from steelyard.data.sources.source import Memory
from steelyard.experiment.checks import (
    check_cohorts,
    check_common_model,
    check_measure,
    check_private,
    released_by_clients,
)
from steelyard.experiment.description import Description, FederationSettings
from steelyard.experiment.node_rows import as_read, own_partition, own_reading, refuse_other
from steelyard.learning.effective_rows import effective_rows_of
from steelyard.learning.settings import DENSE, NAMES, ModelSettings, TrainingSettings, no_part
from steelyard.messages.algorithm import Algorithm
from steelyard.privacy.hidden import check_installed
from steelyard.privacy.settings import PrivacySettings
from steelyard.rounds.plan import ContributionSettings, Leads, Measure, RoundSettings
from steelyard.weighing.adafed import CLASS_METRICS
from steelyard.weighing.criterion import Capabilities
from steelyard.weighing.rule import WeighingSettings

if TYPE_CHECKING:
    from steelyard.clients.node import NodeClients, NodeConfig
    from steelyard.clients.protocol import Clients, Server
    from steelyard.data.dataset import Dataset, DatasetOrSeeded
    from steelyard.experiment.simulation import LearningSections
    from steelyard.learning.records import RecordNoise
    from steelyard.privacy.clipping import DeviceNoise


class LearningDescription(Description):
    """One description of a run: data, partition, model, local training, rounds, and the rule that weighs clients.

    Use it for models of images or tables; recommenders have a kind of their own.
    """

    form_fields: ClassVar[tuple[str, ...]] = (
        *("seed", "rounds.count", "rounds.fraction", "partition.clients"),
        *("training.learning_rate", "training.epochs", "weighing.priority", "weighing.normalise"),
    )
    kind: Literal["learning"] = "learning"
    """What is trained: "learning" is a model on samples; recommenders are of kind "recommend"."""
    data: SerializeAsAny[DataSettings] = DataSettings()
    partition: SerializeAsAny[PartitionSettings] = PartitionSettings(clients=10)
    flaws: tuple[SerializeAsAny[FlawSettings], ...] = ()
    """Clients of unequal worth: which of them have which flaw, one `[[flaws]]` section each."""
    facts: FactSettings = FactSettings()
    """What is known of simulated clients' devices and users, for criteria about them."""
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    compute: ComputeSettings = ComputeSettings()
    clock: ClockSettings | None = None
    """How long simulated devices take, in simulated seconds; without it rounds take no time."""

    @model_validator(mode="after")
    def _together(self) -> Self:
        check_together(self.data, self.partition)
        check_flaws(self.data, self.partition, self.flaws)
        if self.partition.test == "none":
            check_untested(self.rules(), self.rounds, chosen_by=self.round_chosen_by)
        if self.privacy is not None and self.privacy.aggregation is not None:
            check_cohorts(self.privacy.aggregation, self.rounds, self.all_clients)
        if self.clock is not None and self.clock.late == "next":
            check_late(self.rules(), self.algorithm, self.privacy)
        if self.privacy is not None and self.privacy.records is not None:
            self._check_records()
        for index, flaw in enumerate(self.flaws):
            if flaw.kind == "adaptive" and self.privacy is not None:
                raise UserError(
                    f"flaws.{index}.kind: got 'adaptive' with [privacy], whose noise and hidden sums the colluders "
                    "cannot try out; allowed: the other kinds, or no [privacy]"
                )
        return self

    def _check_records(self) -> None:
        """Refuse what would train on samples in another way than is counted."""
        if self.compute.engine not in ("auto", "loop"):
            raise UserError(
                f"compute.engine: got '{self.compute.engine}' with privacy.records, which takes the gradient of each "
                "sample by itself in an engine of its own; allowed: auto"
            )
        if any(flaw.kind == "few-steps" for flaw in self.flaws):
            raise UserError(
                "flaws: got 'few-steps' with privacy.records, and a client that leaves samples out takes the others "
                "more often than is counted; allowed: the other kinds"
            )

    def check_algorithms(self, *, own_code: bool) -> None:
        super().check_algorithms(own_code=own_code)
        # What a module of the user's own has is seen when it is built.
        built_in = self.model.name in ("auto", *NAMES)
        for settings in [rule.algorithm or self.algorithm for rule in self.rules().values()] if built_in else []:
            part = "nothing" if settings.plugins else settings.made().private
            if part == "norms":
                raise UserError(no_part(settings.name, part))
            if part == "head" and not (self.model.hidden or DENSE.get(self.model.name, "some")):
                raise UserError(no_part(settings.name, part))

    @property
    def clocked(self) -> bool:
        """Whether simulated devices have a clock."""
        return self.clock is not None

    @property
    def optimiser(self) -> str | None:
        """How clients take their steps."""
        return self.training.optimiser

    @property
    def momentum(self) -> float:
        """The clients' momentum."""
        return self.training.momentum

    @property
    def learning_rate(self) -> float:
        """The clients' learning rate in the first round."""
        return self.training.learning_rate

    def rate(self, round: int) -> float:
        """Return what the clients' learning rate is multiplied by in a round."""
        schedule = self.training.schedule
        return 1.0 if schedule is None else schedule.share(round, self.rounds.count)

    def capabilities(self) -> Capabilities:
        """Return what the data and the partition can give to criteria, as far as it is known before reading."""
        data = self.data.capabilities()
        return Capabilities(
            f"data.source = '{self.data.source}'",
            task=data.task,
            classes=data.classes,
            marks=data.marks,
            lacks_test_set=lacks_test_set(self.partition),
            everyone=self._everyone(),
            noise=self.privacy is not None and self.privacy.records is not None,
            client_tests=self.clients_evaluate and self.rounds.evaluate_every == 1,
        )

    def _everyone(self) -> bool:
        """Whether all clients take part in every round, as far as it is known before they are counted."""
        known = self._share()
        late = self.clock is not None and self.clock.deadline is not None
        return (known is None or known >= 1) and not late and not self.rounds.select.available

    def _share(self) -> float | None:
        """Return the share of clients in a round; None where neither the experiment nor their number gives it."""
        return self.rounds.fraction if self.all_clients is None else self.rounds.share_of(self.all_clients)

    def check_rule(self, rule: WeighingSettings) -> None:
        """Refuse a fit, a control or an adaptive loss that this data or partition cannot feed."""
        check_rule(rule, self.data, self.partition, self.training.loss)

    @property
    def shared_out(self) -> bool:
        """Whether several processes can train the clients of one run: they can, with their data in files."""
        return True

    @property
    def rows_that_chose(self) -> tuple[bool, bool]:
        """The server's rows report what they weighed by with `server_report = "same"`."""
        part = self.partition
        same = part.server_report == "same"
        return same, same and part.server == "held-out" and part.test == "held-out"

    @property
    def round_chosen_by(self) -> Literal["server", "clients"] | None:
        """The server's rows, where it has some that do not report."""
        apart = self.partition.server_report != "same" and not lacks_test_set(self.partition)
        return "server" if self.rounds.chooses and apart else super().round_chosen_by

    @property
    def default_measure(self) -> Measure:
        """The loss on the server's rows; on the clients' where it has none."""
        return "local-loss" if self.partition.server == "none" else "loss"

    @property
    def weighed_beside(self) -> str:
        """Updates that come late count less."""
        return "late updates are discounted" if self.clock is not None and self.clock.late == "next" else ""

    @property
    def clients_evaluate(self) -> bool:
        """Whether clients have test rows."""
        return self.partition.test != "none"

    @property
    def measures(self) -> Mapping[str, str]:
        """The errors of a regression; of classes the accuracy is all that each client's test records."""
        return {name: name for name in ("rmse", "mae", "mape")} if self.regression else {}

    @property
    def regression(self) -> bool:
        """Whether the data's labels are numbers to predict, not classes."""
        return self._task == "regression"

    @property
    def worth(self) -> str:
        """Accuracy on the server's rows, 1/(1 + MAPE) for a regression, or what `measures.TASKS` names."""
        return self._measured.criterion

    @property
    def server_figure(self) -> str:
        """Accuracy on the server's rows, the root mean squared error of a regression, or what `TASKS` names."""
        return self._measured.figure

    @property
    def _measured(self) -> TaskMeasures:
        found, leading = TASKS.get(self._task, TASKS["classes"]), self.rounds.leading
        return found if leading is None else replace(found, score=MEASURES[leading.name].name, figure=leading.name)

    def check_leading(self) -> None:
        """Refuse a measure that is not one of the task's."""
        task, measure = self._task or "classes", self.rounds.measure
        fits = {"classes": [each for each in get_args(Leads) if each != "r2"], "regression": ["r2"]}.get(task, [])
        if measure is not None and measure not in fits:
            allowed = listed([*fits, "leave it out"])
            raise UserError(f"rounds.measure: got '{measure}' for data of the task '{task}'; allowed: {allowed}")

    @property
    def _task(self) -> str:
        return self.data.capabilities().task or ""

    @property
    def all_clients(self) -> int | None:
        """The number of clients where the partition says it."""
        return None if any(flaw.kind == "copy" for flaw in self.flaws) else self.partition.client_count

    def assemble(self, dataset: DatasetOrSeeded | None = None, read: Dataset | None = None) -> tuple[Clients, Server]:
        """Read the data and build simulated clients and their server."""
        from steelyard.experiment.simulation import simulate

        hidden = None if self.privacy is None else self.privacy.aggregation
        if hidden is not None:
            check_installed(hidden)
        return simulate(
            self._sections(),
            dataset=dataset,
            read=read,
            clock=self.clock,
            hidden=hidden,
            rounds=self.rounds.count,
            experiment=self.model_dump(mode="json", exclude_none=True),
        )

    def on_node(self, node: NodeConfig) -> NodeClients:
        """Build the clients that live on one node: their part of the data set, or the node's own file."""
        from steelyard.experiment.node import host_learning

        self.check_federated()
        check_flaws_on_node(self.flaws, self._share())
        return host_learning(self._sections(node.epsilon), seed=self.seed, node=node, rows_behind=self._rows_behind)

    def _sections(self, most: float | None = None) -> LearningSections:
        from steelyard.experiment.simulation import LearningSections

        return LearningSections(
            *(self.data, self.partition, self.flaws, self.facts, self.model, self.training, self.compute),
            criteria=self.criteria(),
            noise=self._device_noise(),
            records=self.record_noise(most),
        )

    def _rows_behind(self, size: int, count: int) -> float:
        """Return how many of `count` rows of a client with `size` are behind its updates: the fewest of all."""
        rates = {self.rate(round) for round in range(1, self.rounds.count + 1)}
        return min(effective_rows_of(count, size, self.training, made, sorted(rates)) for made in self.algorithms())

    def record_noise(self, most: float | None = None) -> RecordNoise | None:
        from steelyard.learning.records import RecordNoise

        if self.privacy is None or self.privacy.records is None:
            return None
        criteria = len(released_by_clients(self.privacy, self.criteria()))
        rules = sum(rule.trained_by == "clients" for rule in self.rules().values())
        return RecordNoise(self.privacy, self.training, self.rounds.count, criteria=criteria, most=most, rules=rules)

    def _device_noise(self) -> DeviceNoise | None:
        """Return what devices do to what they send; None where they do nothing."""
        from steelyard.experiment.guarantees import noise_of_devices

        if self.privacy is None or self.privacy.source in (None, "central"):
            return None
        return noise_of_devices(self.privacy, self.criteria(), self.capabilities().classes, self.rounds.count)

    def check_contributions(self, settings: ContributionSettings, *, own_code: bool = False) -> None:
        """Refuse to measure what clients add where rows, [privacy] or the algorithm do not allow it."""
        check_private(self.privacy, "contributions")
        check_measure(settings, self.partition, counted=self._task in ("", "classes"))
        chosen = [rule.algorithm or self.algorithm for rule in self.rules().values()]
        check_common_model([each.made() for each in chosen if own_code or not each.plugins])

    @classmethod
    def check_node(cls, node: NodeConfig) -> None:
        """Refuse a table `[data]` or `[partition]` that would refuse every experiment."""
        if node.reading and "source" not in node.reading:
            raise UserError("node config data.source: missing; allowed: the source, as in an experiment's [data]")
        if node.reading:
            own_reading(DataSettings, node)
        own_partition(node, held_out=False, seed=0)

    def of_table(self, node: NodeConfig) -> Self:
        """Return the experiment on a node's own table alone, split as its owner says."""
        offers = self.data.capabilities()
        part = fields_given(own_partition(node, held_out=offers.held_out, seed=0))
        # A file that names no owners is one client's.
        whole = {} if offers.owners else {"scheme": "iid", "clients": 1}
        return self.changed({"data.path": str(node.data), "partition": part | whole})

    def check_own_rows(self, node: NodeConfig) -> None:
        """Refuse another way to read the file, flaws, another partition, or a validation split."""
        refuse_other("data", self.data, as_read(self.data, node))
        if self.flaws:
            raise NotAllowed(
                "flaws: given, but a server may not choose among the rows of this node's own file; allowed: no "
                "[[flaws]]"
            )
        if node.part is not None:
            refuse_other("partition", self.partition, own_partition(node, held_out=False, seed=0))
        elif self.partition.validation is not None:
            raise NotAllowed(
                "partition.validation: given, but this node decides itself which rows it tests on; allowed: leave it "
                "out"
            )

    def check_federated(self) -> None:
        """Refuse what across machines would disclose single updates, or what only a simulation can do."""
        if self.clock is not None:
            raise UserError("clock: devices across machines take the time they take; allowed there: no [clock]")
        if self._task == "survival" and self.training.batch_size == 1:
            raise UserError(
                "training.batch_size: got 1 with task survival, where the loss compares the rows of a step; allowed: 2 "
                "or more, or full"
            )
        check_federated(self.rules(), self.algorithms(), self.privacy)

    def about_data(self) -> Mapping[str, int | list[int]]:
        """Return the number of classes and the shape of a sample, as far as `[data]` decides them."""
        classes, shape = self.data.capabilities().classes, self.data.shape
        # Of masks and several labels the nodes say how many there are.
        known: dict[str, int | list[int]] = (
            {} if classes is None or self._task in ("segmentation", "multi-label") else {"classes": classes}
        )
        return known if shape is None else {**known, "features": list(shape)}

    @property
    def table(self) -> Csv | None:
        """How the table is read, where the data are one."""
        return self.data if isinstance(self.data, Csv) else None

    def unprepared(self, about: Mapping[str, int | list[int]]) -> Preparation | None:
        """Return the shape of a row as the network takes it, and the task with its classes by number."""
        shape, outputs = about.get("features"), about.get("classes")
        if not isinstance(shape, list) or not isinstance(outputs, int):
            return None
        task = "segmentation" if about.get("pixels") else self.data.capabilities().task or "classes"
        target = Target(task=task, names=[str(number) for number in range(outputs)])
        return Preparation(form="prepared", shape=shape, target=target)

    def at_server(self, about: Mapping[str, int | list[int]]) -> Server:
        """Build the server; it reads data only where the partition gives it a test set of its own."""
        from steelyard.experiment.simulation import RemoteServer

        return self.assemble()[1] if self.partition.server != "none" else RemoteServer(self.model, about)

    def with_engine(self, choice: str) -> Self:
        """Return the experiment with the engine that an earlier run chose, so that a resume gives the same bits."""
        return self.changed({"compute.engine": choice})

    def with_dataset(self, dataset: DatasetOrSeeded | None, seed: int) -> tuple[Self, DatasetOrSeeded | None]:
        """Return the experiment with the task of data from Python, by which scores have their name and interval.

        A function that gives data is called once for a seed: the one that is returned knows this seed's already.
        """
        if dataset is None or not isinstance(self.data, Memory):
            return self, dataset
        # For speed of start: most experiments are given no data.
        from steelyard.experiment.simulation import first_called

        dataset, first = first_called(dataset, seed)
        kind = None if first is None else first.kind
        if kind is not None and self.data.task not in (None, kind):
            raise UserError(f"data.task: got '{self.data.task}' for data that are '{kind}'; allowed: that, or nothing")
        return (self if kind is None else self.changed({"data.task": kind})), dataset

    @property
    def local_loss(self) -> str:
        """The loss that `training.loss` names; "auto" for the user's own, which each process finds where it lies.

        A checkpoint holds it, and a run's own code may lie elsewhere when the run goes on.
        """
        return "auto" if ":" in self.training.loss else self.training.loss

    @property
    def reports_on_server(self) -> bool:
        """Whether `partition.server_report` keeps rows that report on each new model."""
        return self.partition.server_report != "none"

    @property
    def score_name(self) -> str:
        """Accuracy for classes, C-index for survival, minus RMSE for a regression: more is better."""
        return self._measured.score

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Accuracy and C-index lie between 0 and 1; the score of a regression is minus an error."""
        measure = measure_of(self.score_name)
        return (measure.low, measure.high) if measure.bounded else None


# What does not go together, refused before any data is read.


_LOSSES: Mapping[str, Sequence[str]] = {
    "regression": ("barron", "none"),
    **dict.fromkeys(("survival", "segmentation", "multi-label"), ()),
}
"""What `weighing.loss.adapt` may be by task; `CLASS_METRICS` for classes."""


def check_late(
    rules: Mapping[str, FederationSettings], algorithm: AlgorithmSettings, privacy: PrivacySettings | None
) -> None:
    """Refuse updates that join the next round where they would be weighed or sent in a way that knows no such."""
    if privacy is not None and (privacy.central or privacy.local or privacy.aggregation):
        raise UserError(
            "clock.late: got 'next' with [privacy], whose noise and sums are made for the clients of one round; "
            "allowed: drop"
        )
    for name, rule in rules.items():
        settings = rule.algorithm or algorithm
        made = None if settings.plugins else settings.made()
        if rule.adjust is not None:
            raise UserError(f"clock.late: got 'next' with '{name}', which tries other orders; allowed: drop")
        if made is not None and (made.sends or made.listens):
            raise UserError(
                f"clock.late: got 'next' with {made.name}, whose clients give more than their models; allowed: drop"
            )


def check_untested(rules: Mapping[str, WeighingSettings], rounds: RoundSettings, chosen_by: str | None) -> None:
    """Refuse what looks at the clients' accuracy where they have no test rows."""
    if chosen_by == "clients":
        raise UserError(
            f"rounds.{'keep' if rounds.keep == 'best' else 'patience'}: given with partition.test 'none' and no rows "
            "of the server that only choose, so that none choose a round; allowed: partition.test = 'local' or "
            "'held-out', or partition.server"
        )
    if rounds.stop_at_target:
        raise UserError(
            "rounds.stop_at_target: got true with partition.test 'none', which leaves no accuracy to reach a "
            "target; allowed: partition.test = 'local' or 'held-out'"
        )
    for name, rule in rules.items():
        if rule.adjust is not None:
            raise UserError(
                f"weighing.adjust: '{name}' compares accuracies, and partition.test = 'none' leaves "
                "none; allowed: partition.test = 'local' or 'held-out'"
            )


def lacks_test_set(partition: PartitionSettings) -> str:
    """Say why the server has no rows to weigh on: none at all, or those that clients report on; empty if it has."""
    if partition.server == "none":
        return (
            "and partition.server = 'none' leaves it without one; allowed: partition.server = 'held-out' or 'fraction'"
        )
    if partition.server == "held-out" and partition.test == "held-out" and partition.server_report == "none":
        return (
            "and partition.server and partition.test both take the held-out rows, so that the same rows would weigh "
            "and report; allowed: partition.server_report = 'apart' (half weighs, half reports) or 'same' (as AdaFed's "
            "authors do), partition.server = 'fraction', or another partition.test"
        )
    return ""


def check_rule(rule: WeighingSettings, data: DataSettings, partition: PartitionSettings, loss: str) -> None:
    """Refuse a fit, a control or an adaptive loss that this data or partition cannot feed; `loss` is the clients'."""
    lacking = lacks_test_set(partition)
    wants = {
        "fit: weights are fitted to": rule.fit is not None,
        "trained_by: the server trains on": rule.trained_by == "server",
        "defence.rule: fltrust trains on": rule.defence is not None and rule.defence.needs_root,
        "loss: it adapts to": rule.loss is not None and rule.loss.adapt != "none",
    }
    for field, wanted in wants.items():
        if wanted and lacking:
            raise UserError(f"weighing.{field} the server's test set, {lacking}")
    if rule.loss is None:
        return
    task = data.capabilities().task
    fits = _LOSSES.get(task or "", CLASS_METRICS)
    if rule.loss.adapt not in fits and task is not None:
        raise UserError(
            f"weighing.loss.adapt: got '{rule.loss.adapt}' with data.source = '{data.source}'; "
            f"allowed: {listed(fits) or 'no [weighing.loss] with this task'}"
        )
    if rule.loss.adapt in ("barron", "none") and loss not in ("auto", "barron"):
        raise UserError(
            f"training.loss: got '{loss}' with weighing.loss.adapt = '{rule.loss.adapt}'; allowed: auto, barron"
        )


def check_federated(
    rules: Mapping[str, WeighingSettings], algorithms: Sequence[Algorithm], privacy: PrivacySettings | None
) -> None:
    """Refuse what across machines would disclose single updates, or what only a simulation can do."""
    listening = next((made.name for made in algorithms if made.listens), None)
    if listening is not None:
        raise UserError(
            f"algorithm.name: got '{listening}', whose clients test each other's models, which no node sends to "
            "another; allowed across machines: all algorithms but this"
        )
    aggregation = None if privacy is None else privacy.aggregation
    if aggregation is None:
        return
    if aggregation.kind != "secure":
        raise UserError(
            f"privacy.aggregation.kind: got '{aggregation.kind}', whose clients share a key, and nobody hands out keys "
            "across machines; allowed there: secure"
        )
    training = [name for name, rule in rules.items() if rule.trained_by == "clients"]
    if len(training) > 1:
        raise UserError(
            f"beside: {len(training)} rules with privacy.aggregation; in the first round each would give the "
            "server another weighted sum of the same updates; allowed across machines: one rule"
        )


def check_flaws_on_node(flaws: Sequence[FlawSettings], share: float | None) -> None:
    """Refuse flawed clients that look at more than a node sees; `share` of the clients take part in a round."""
    looking = [flaw.kind for flaw in flaws if flaw.needs_models]
    if share != 1 and looking:
        shown = "not given" if share is None else f"= {share:g}"
        raise UserError(
            f"flaws: got kind '{looking[0]}' with rounds.fraction {shown}, and a node does not see the models of "
            "rounds that it sits out; allowed across machines: rounds.fraction = 1"
        )
    seeing = [flaw.kind for flaw in flaws if flaw.sees_others]
    if seeing:
        raise UserError(
            f"flaws: got kind '{seeing[0]}', whose clients see the updates of all others, and a node sees only its "
            "own; allowed across machines: reversed, gaussian, backdoor, labels-flipped"
        )
