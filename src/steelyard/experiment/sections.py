"""The sections of an experiment that belong to no other room: the loop, the store, and what all kinds share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from steelyard.clients.flower.settings import FederateSettings
from steelyard.errors import UserError
from steelyard.settings import Section
from steelyard.weighing import criteria as registry
from steelyard.weighing import plugins
from steelyard.weighing.rule import WeighingSettings, label

if TYPE_CHECKING:
    from steelyard.clients.place import Hosted, Place
    from steelyard.clients.protocol import Clients, Server
    from steelyard.data.dataset import Dataset
    from steelyard.experiment.running import Result

Share = Annotated[float, Field(gt=0, le=1)]


class RoundSettings(Section):
    """[rounds]: how many rounds, how many clients in each, when to evaluate and when to stop."""

    count: int = Field(default=50, ge=1)
    """Number of rounds."""
    fraction: Share = 0.1
    """Share of the clients that train in each round, at least one client."""
    min_clients: int = Field(default=1, ge=0)
    """The run stops (and can be resumed) when fewer clients than this give a usable update; 0 never stops it."""
    evaluate_every: int = Field(default=1, ge=1)
    """Test the model on every client's test set each k rounds; the last round is always tested."""
    target: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Local accuracy that counts as reached, for "rounds to target" and the early stop."""
    share: Share = 0.5
    """Share of the devices that must reach the target."""
    targets: tuple[Share, ...] = ()
    """Targets of the rounds-to-target table; default: `target` alone."""
    shares: tuple[Share, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    """Shares of devices of the rounds-to-target table."""
    stop_at_target: bool = False
    """End the run once `share` of the devices reach `target`."""
    samples: bool = False
    """Also record right or wrong for every single test sample in the last round."""

    @property
    def all_targets(self) -> tuple[float, ...]:
        """The targets of the table."""
        return self.targets or (self.target,)


class StoreSettings(Section):
    """[store]: where the run folder is made and how often a checkpoint is written."""

    folder: Path = Path("runs")
    """Folder in which a run's own folder is made, unless --out names that folder itself."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Write a checkpoint each k rounds; a killed run repeats at most k rounds when resumed, to the same bits."""
    clients_every: int = Field(default=1, ge=1)
    """Write what single clients sent and weighed each k rounds, and in the last; for runs of many short rounds."""


class BaseExperiment(Section):
    """What every kind of experiment has: a name, a seed, rounds, a weighing rule, rules beside it, a store."""

    name: str = Field(default="experiment", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Short name; run folders are named after it."""
    description: str = ""
    """One or two sentences for people."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """The seed of everything: partition, first model, cohorts, order of samples."""
    rounds: RoundSettings = RoundSettings()
    weighing: WeighingSettings = WeighingSettings()
    beside: dict[str, WeighingSettings] = Field(default_factory=dict)
    """Further rules, by name, that run on the same cohorts and the same first model, for comparison."""
    store: StoreSettings = StoreSettings()
    federate: FederateSettings = FederateSettings()

    @model_validator(mode="after")
    def _rules(self) -> BaseExperiment:
        own = label(self.weighing)
        if own in self.beside:
            raise UserError(f"beside.{own}: has the name of the main rule; allowed: any other name")
        for rule in (self.weighing, *self.beside.values()):
            for place in rule.plugins:
                plugins.load_module(place)
            for name in rule.criteria:
                self.check_criterion(registry.get(name))
            if rule.adjust is not None and self.rounds.evaluate_every != 1:
                raise UserError(
                    f"rounds.evaluate_every: got {self.rounds.evaluate_every} with weighing.adjust, which compares "
                    "each round with the last; allowed: 1"
                )
            self.check_rule(rule)
        return self

    def check_criterion(self, criterion: registry.Criterion) -> None:
        """Refuse a criterion that this kind of experiment cannot measure; called for each before any data is read."""

    def check_rule(self, rule: WeighingSettings) -> None:
        """Refuse a rule that this kind of experiment cannot follow; called for each before any data is read."""
        if rule.loss is not None:
            raise UserError("weighing.loss: given, but the loss of this kind of experiment is fixed; allowed: nothing")

    def rules(self) -> dict[str, WeighingSettings]:
        """Return all rules of this run by name, the main one first."""
        return {label(self.weighing): self.weighing, **self.beside}

    def resolved(self) -> BaseExperiment:
        """Return the experiment with what only the data can tell filled in, such as rounds counted in epochs."""
        return self

    def assemble(self, dataset: Dataset | None = None) -> tuple[Clients, Server]:
        """Read the data and build the clients and the server that the loop talks to; every kind says how."""
        raise NotImplementedError(type(self).__name__)

    def on_node(self, place: Place) -> Hosted:
        """Build those clients that live on one node of a federation across machines, from the node's own data."""
        raise UserError(f"kind: '{type(self).__name__}' cannot run across machines yet; allowed: steelyard run")

    def at_server(self, about: Mapping[str, int | list[int]]) -> Server:
        """Build the server of a federation across machines; `about` is what the nodes say of their data."""
        return self.assemble()[1]

    @property
    def score_name(self) -> str:
        """What the clients' local scores are, for headings."""
        return "accuracy"

    @property
    def score_range(self) -> tuple[float, float] | None:
        """The range that a client's local score can have, where there is one; a score beyond it is refused."""
        return None

    @classmethod
    def load(cls, name_or_file: str | Path, changes: Sequence[str] = (), seed: int | None = None) -> BaseExperiment:
        """Load a recipe or a TOML file; `changes` are assignments such as "rounds.count=50"."""
        from steelyard.experiment.loading import load

        return load(name_or_file, changes, seed)

    def run(self, out: str | Path | None = None, *, dataset: Dataset | None = None, progress: bool = False) -> Result:
        """Run the experiment and return its result; `dataset` hands over data built with `steelyard.in_memory`."""
        from steelyard.experiment.running import run

        return run(self, out=out, dataset=dataset, progress=progress)

    def compare(
        self,
        rules: Sequence[str] = (),
        seeds: int = 1,
        out: str | Path | None = None,
        *,
        dataset: Dataset | None = None,
        progress: bool = False,
    ) -> Result:
        """Run several rules on the same cohorts and first models, with some seeds; `result.table` compares them.

        Rules are written as for `steelyard compare`; without any, each criterion, every order of them, and online.
        """
        from steelyard.experiment.comparing import compare

        return compare(self, rules, seeds, out=out, dataset=dataset, progress=progress)

    def changed(self, changes: Mapping[str, Any]) -> BaseExperiment:
        """Return a copy with some fields changed, by dotted name: changed({"rounds.count": 50})."""
        from steelyard.experiment.loading import build, put

        document = self.model_dump(mode="json", exclude_none=True)
        for name, value in changes.items():
            put(document, name.split("."), value, name)
        return build(document)
