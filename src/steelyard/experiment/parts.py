"""What a run is made of: clients, server, federations and the plan; made new, or again from a run's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from steelyard.base.errors import UserError
from steelyard.base.logs import doing
from steelyard.clients.protocol import RemainingClients
from steelyard.clients.ranks.group import current
from steelyard.experiment.code import Ask
from steelyard.experiment.continuing import begun_with, changed_data, changed_experiment, check_rules
from steelyard.experiment.description import Description
from steelyard.experiment.guarantees import private_rounds
from steelyard.experiment.job_array import PART, Part
from steelyard.experiment.loading import RUN_FILE, own_text, read_experiment
from steelyard.rounds.state import Federation, Plan
from steelyard.runs.history import History
from steelyard.tracking import check as check_tracker
from steelyard.weighing.adafed import loss_rule
from steelyard.weighing.order import strategy_of
from steelyard.weighing.rule import Rule

if TYPE_CHECKING:
    from steelyard.clients.protocol import Clients, Server
    from steelyard.data.dataset import DatasetOrSeeded
    from steelyard.rounds.private import PrivateRounds
    from steelyard.weighing.criterion import Criterion

Assembly = Callable[[], "tuple[Clients, Server]"]


def federations_of(
    experiment: Description,
    seeds: Sequence[int] | None = None,
    criteria: Sequence[Criterion] | None = None,
    part: Part | None = None,
) -> list[Federation]:
    """Return every rule of an experiment with every seed as a federation, the main rule first; of a part, its own.

    `criteria` are the experiment's own, where they are looked up already; without them no code of the user's is run.
    """
    chosen = list(seeds) if seeds else [experiment.seed]
    found = [
        Federation(
            f"{name}#{seed}" if len(chosen) > 1 else name,
            name,
            seed,
            Rule(settings, criteria),
            strategy_of(settings.adjust),
            loss_rule(settings.loss, experiment.local_loss),
            (settings.algorithm or experiment.algorithm).made(),
            experiment.momentum,
            experiment.learning_rate,
        )
        for seed in chosen
        for name, settings in experiment.rules().items()
    ]
    return found if part is None else part.share(found, "rules and seeds together")


def part_of(history: History) -> Part | None:
    """Return which part of a comparison a run is; None for a whole one."""
    text = history.info.get(PART)
    return None if text is None else Part.read(text, f"{history.folder}: {PART}")


def plan_of(experiment: Description) -> Plan:
    """Return the loop's settings."""
    rounds = experiment.resolved().rounds
    assert rounds.fraction is not None, "clients are counted before rounds are planned"
    return Plan(
        rounds=rounds.count,
        fraction=rounds.fraction,
        min_clients=rounds.min_clients,
        evaluate_every=rounds.evaluate_every,
        stop_at=(rounds.target, rounds.share, rounds.above) if rounds.stop_at_target else None,
        detailed=rounds.samples,
        report=experiment.reports_on_server,
        poisson=rounds.sampling == "poisson",
        rate=experiment.rate,
        select=rounds.select,
        clocked=experiment.clocked,
        contributions=experiment.contributions,
    )


@dataclass(frozen=True, eq=False)
class Parts:
    """What a run is made of; each part is made once."""

    experiment: Description
    clients: Clients
    server: Server
    federations: Sequence[Federation]
    plan: Plan
    private: PrivateRounds | None

    @classmethod
    def of(
        cls,
        experiment: Description,
        clients: Clients,
        server: Server,
        federations: Sequence[Federation],
        part: Part | None = None,
    ) -> Self:
        plan = replace(plan_of(experiment), part=part is not None)
        private = private_rounds(experiment, plan, federations, clients)
        if private is not None and part is not None:
            raise UserError("--part: got a comparison with [privacy], whose rules share one ledger; allowed: no --part")
        return cls(experiment, clients, server, federations, plan, private)

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(federation.seed for federation in self.federations))

    def begun(self, folder: Path) -> dict[str, str]:
        """Return what a run notes of its experiment and its data when it begins, as they are now."""
        return begun_with(folder, own_text(folder / RUN_FILE), self.clients, self.seeds)


def assembled(
    experiment: Description, dataset: DatasetOrSeeded | None, assemble: Assembly | None
) -> tuple[Clients, Server]:
    """Build clients and server: simulated ones, or those that `assemble` brings."""
    if current() is not None and (assemble is not None or dataset is not None or not experiment.shared_out):
        what = "a data set from Python" if dataset is not None else "clients of this kind"
        raise UserError(f"WORLD_SIZE: several processes were started, and {what} are not shared out; allowed: 1")
    with doing("reading the data" if assemble is None else "waiting for the nodes"):
        clients, server = experiment.assemble(dataset) if assemble is None else assemble()
    withdrawn = experiment.rounds.withdrawn
    return RemainingClients(clients, withdrawn) if withdrawn else clients, server


@contextmanager
def as_begun(
    history: History,
    *,
    dataset: DatasetOrSeeded | None = None,
    assemble: Assembly | None = None,
    ask: Ask | None = None,
    accept: bool = False,
) -> Generator[tuple[Parts, Sequence[str]]]:
    """Build a run's parts again, to go on with it or to repeat it, and close the clients at the end.

    Experiment and data must be those that the run began with; `accept` takes others, and what differs is returned.
    `ask` is called with the code that the folder names, before it runs.
    """
    folder = history.folder
    experiment = read_experiment(folder)
    experiment.check_runs_here(str(folder))
    if history.info.get("in_memory") == "true" and dataset is None:
        raise UserError(f"{folder}: this run was given its data in Python; do this there, with dataset=...")
    changes = changed_experiment(history, accept=accept)
    if ask is not None and (code := experiment.named_code()):
        ask(str(folder), code)
    check_tracker(experiment.tracking)
    seeds = json.loads(history.info.get("seeds", "[]")) or None
    choice = history.info.get("engine_choice")
    if choice:
        experiment = experiment.with_engine(choice)
    part = part_of(history)
    federations = federations_of(experiment, seeds, experiment.criteria(), part)
    check_rules(history, federations)
    clients, server = assembled(experiment, dataset, assemble)
    with closing(clients):
        parts = Parts.of(experiment, clients, server, federations, part)
        changes += changed_data(history, parts.begun(folder), accept=accept)
        yield parts, changes
