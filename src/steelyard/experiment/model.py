"""Experiment: a federation that trains a model on samples, described in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from steelyard.clients.local.settings import ComputeSettings
from steelyard.data.settings import DataSettings, PartitionSettings, check_together
from steelyard.errors import UserError, listed
from steelyard.experiment.sections import BaseExperiment
from steelyard.learning.models import ModelSettings
from steelyard.learning.training import TrainingSettings
from steelyard.weighing import criteria as registry
from steelyard.weighing.rule import WeighingSettings

if TYPE_CHECKING:
    from steelyard.clients.place import Hosted, Place
    from steelyard.clients.protocol import Clients, Server
    from steelyard.data.dataset import Dataset, Population


class Experiment(BaseExperiment):
    """One description of a run: data, partition, model, local training, rounds, and the rule that weighs clients.

    Build it in Python, or load a recipe or TOML file with `Experiment.load("quickstart")`; `run()` runs it.
    """

    kind: Literal["learning"] = "learning"
    """What is trained: "learning" is a model on samples; recommenders are of kind "recommend"."""
    data: DataSettings = DataSettings()
    partition: PartitionSettings = PartitionSettings(clients=10)
    model: ModelSettings = ModelSettings(name="cnn-digits")
    training: TrainingSettings = TrainingSettings()
    compute: ComputeSettings = ComputeSettings()

    @model_validator(mode="after")
    def _together(self) -> Experiment:
        check_together(self.data, self.partition)
        return self

    def check_criterion(self, criterion: registry.Criterion) -> None:
        """Refuse criteria that this data or partition cannot give, before any of it is read."""
        if criterion.name == "IS" and self.data.source in ("digits", "mnist", "leaf", "diabetes"):
            raise UserError(
                f"weighing.criteria: IS needs samples marked sharp, and data.source = '{self.data.source}' has none; "
                "allowed: a source with marks (images, npz, memory)"
            )
        if criterion.name == "CB" and self.data.source in ("digits", "mnist", "diabetes"):
            raise UserError(
                f"weighing.criteria: CB is for two classes, and data.source = '{self.data.source}' has not two; "
                "allowed: data with two classes"
            )
        if criterion.needs_test_set:
            self._check_server(f"weighing.criteria: {criterion.name} is measured on the server's test set")
        if criterion.name in ("VP", "VS", "VF") and self._regression:
            raise UserError(
                f"weighing.criteria: {criterion.name} measures classes, and data.source = '{self.data.source}' is a "
                "regression; allowed: VE"
            )
        if criterion.name == "VE" and not self._regression and self.data.source != "memory":
            raise UserError(
                f"weighing.criteria: VE measures the error of a regression, and data.source = '{self.data.source}' has "
                "classes; allowed: VP, VS, VF"
            )

    def check_rule(self, rule: WeighingSettings) -> None:
        """Refuse an adaptive loss that this data or partition cannot feed."""
        if rule.loss is None:
            return
        if rule.loss.adapt != "none":
            self._check_server("weighing.loss: it adapts to the server's test set")
        fits = ("barron", "none") if self._regression else ("class-f1",)
        if rule.loss.adapt not in fits and self.data.source != "memory":
            raise UserError(
                f"weighing.loss.adapt: got '{rule.loss.adapt}' with data.source = '{self.data.source}'; "
                f"allowed: {listed(fits)}"
            )
        if rule.loss.adapt in ("barron", "none") and self.training.loss not in ("auto", "barron"):
            raise UserError(
                f"training.loss: got '{self.training.loss}' with weighing.loss.adapt = '{rule.loss.adapt}'; "
                "allowed: auto, barron"
            )

    @property
    def _regression(self) -> bool:
        return self.data.source == "diabetes" or self.data.task == "regression"

    def _check_server(self, need: str) -> None:
        """Refuse a server without rows of its own, or with rows that clients report on, unless the user says so."""
        partition = self.partition
        if partition.server == "none":
            raise UserError(
                f"{need}, and partition.server = 'none' leaves it without one; "
                "allowed: partition.server = 'held-out' or 'fraction'"
            )
        if partition.server == "held-out" and partition.test == "held-out" and partition.server_report == "none":
            raise UserError(
                f"{need}, and partition.server and partition.test both take the held-out rows, so that the rows that "
                "weigh would also report; allowed: partition.server_report = 'apart' (half weighs, half reports) or "
                "'same' (as AdaFed's authors do), partition.server = 'fraction', or another partition.test"
            )

    def populations(self, dataset: Dataset | None = None) -> Callable[[int], Population]:
        """Return the function that shares the data out for a seed; the data are read once."""
        from steelyard.data import load, share_out

        samples = load(self.data) if dataset is None else dataset
        return lambda seed: share_out(samples, self.partition, seed)

    def criteria(self) -> list[registry.Criterion]:
        """Return the criteria of all rules, each once."""
        return [
            registry.get(name) for name in dict.fromkeys(n for rule in self.rules().values() for n in rule.criteria)
        ]

    def assemble(self, dataset: Dataset | None = None) -> tuple[Clients, Server]:
        """Read the data and build simulated clients and their server."""
        from steelyard.clients.local import LocalClients, LocalServer

        clients = LocalClients(self.populations(dataset), self.model, self.training, self.compute, self.criteria())
        return clients, LocalServer(clients)

    def on_node(self, place: Place) -> Hosted:
        """Build the clients that live on one node: their part of the data set, or the node's own file."""
        from steelyard.experiment.across import host

        return host(self, place)

    def at_server(self, about: Mapping[str, int | list[int]]) -> Server:
        """Build the server; it reads data only where the partition gives it a test set of its own."""
        from steelyard.experiment.across import FarServer

        return self.assemble()[1] if self.partition.server != "none" else FarServer(self.model, about)

    @property
    def score_name(self) -> str:
        """Accuracy for classes; for a regression minus the root mean squared error, so that more is better."""
        return "minus RMSE" if self._regression else "accuracy"

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Accuracy lies between 0 and 1; the score of a regression is minus an error."""
        return None if self._regression else (0.0, 1.0)
