"""A run's rounds once more, to find out what each client added: from the updates that it kept, or trained again.

Nothing is written while it goes. Each round's model is held against the digest in the run's chain: values are of the
run that was, bit for bit, or there are none.

Retraining is the truth that estimates are held against: every coalition of clients trained as a federation of its own.
All coalitions of a rule run in lock step, as the rules of a comparison do, from the same first model and with the same
seed. A coalition trains exactly as a run would that never had the other clients.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from typing_extensions import TypedDict

from steelyard.base import files
from steelyard.base.errors import UserError, in_words, listed, nearest
from steelyard.clients.protocol import WrappedClients
from steelyard.contributions.document import UNITS, rule_of
from steelyard.experiment.loading import read_experiment
from steelyard.experiment.parts import Parts, as_begun
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Floats, Task, Updates
from steelyard.proof.signing import model_digest
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.plan import ContributionSettings, Measure, RoundValues
from steelyard.rounds.state import Federation, Plan, RoundRecord, Snapshot, States
from steelyard.rounds.valuing import Test, overall_first, tester
from steelyard.runs.database import reading
from steelyard.runs.history import RETRAINED, History
from steelyard.runs.kept_updates import kept_rounds, read_round
from steelyard.runs.store import add_values
from steelyard.weighing.shapley import Coalitions, shapley_values

if TYPE_CHECKING:
    from steelyard.data.dataset import DatasetOrSeeded
    from steelyard.experiment.loading import Ask


Found = dict[tuple[str, int], tuple[RoundValues, ...]]
"""Values by federation and round."""


class _Enough(Exception):
    """The last round that the run has was repeated."""


class Without(TypedDict):
    """How the model of a run does, and how it would do without one client."""

    run: str
    rule: str
    client: str
    measure: str
    unit: str
    seeds: list[int]
    after: float
    """With everybody."""
    without: float
    low: float
    high: float
    source: str


@dataclass(frozen=True, eq=False)
class Repetition:
    """A rule of a run that is repeated (without one, the main rule), on its own data or on those handed over again.

    `ask` is called with the code that the run's folder names, before it runs.
    """

    folder: Path
    rule: str | None = None
    dataset: DatasetOrSeeded | None = None
    ask: Ask | None = None

    @contextmanager
    def _begun(self, settings: ContributionSettings) -> Generator[tuple[Parts, list[Federation]]]:
        """Put the run's parts together again; with the federations of the rule."""
        files.check_run(self.folder)
        history = History(self.folder)
        chosen = rule_of(history, self.rule)
        check_simulated(history)
        history.require_whole()
        read_experiment(self.folder).check_contributions(settings)
        with as_begun(history, dataset=self.dataset, ask=self.ask) as (parts, _):
            parts.experiment.check_contributions(settings, own_code=True)
            yield parts, [each for each in parts.federations if each.rule_name == chosen]

    def replay(self, settings: ContributionSettings) -> str:
        """Repeat the rounds, measure what each client added, and put that into the run's folder.

        Returns why it could not be written there; empty where it was. Other rules of the run are repeated too, since
        what trains together may round differently alone; only the rule that is asked for is measured.
        """
        with self._begun(settings) as (parts, mains):
            names = frozenset(each.name for each in mains)
            plan = replace(untested(parts), contributions=settings, valued=names)
            kept = kept_rounds(self.folder)
            rounded = kept and parts.experiment.store.keep_as != "float32"
            clients = KeptClients(parts, self.folder) if kept else parts.clients
            last = History(self.folder).chain.round
            recorder = _Recorder(self.folder, None if rounded else _digests(self.folder), last)
            with suppress(_Enough):
                run_rounds(parts.federations, {}, clients, parts.server, plan, recorder)
        return add_values(self.folder, recorder.found, "rounded" if rounded else "kept" if kept else "replay")

    def retrain(self, settings: ContributionSettings) -> str:
        """Train every coalition of the clients and put their Shapley and leave-one-out values into the run's folder.

        Returns why they could not be written there; empty where they were.
        """
        found: Found = {}
        with self._begun(settings) as (parts, mains):
            models = _trained(parts, mains, {main.name: _all_members(main, parts) for main in mains})
            for main in mains:
                names = tuple(parts.clients.names(main.seed))
                test = _test(parts, settings.measure, main)
                found[main.name, parts.plan.rounds] = _values(settings.measure, names, models[main.name], test)
        return add_values(self.folder, found, RETRAINED)

    def without(self, client: str, settings: ContributionSettings) -> Without:
        """Train the run again with and without one client, and say how both models do."""
        with self._begun(settings) as (parts, mains):
            members: dict[str, list[frozenset[str]]] = {}
            for main in mains:
                names = frozenset(parts.clients.names(main.seed))
                check_client(client, sorted(names))
                members[main.name] = [names, names - {client}]
            models = _trained(parts, mains, members)
            levels: list[Floats] = []
            for main in mains:
                good, sizes = _test(parts, settings.measure, main)(models[main.name][1:])
                levels.append(overall_first(good, sizes)[:, 0])
        after, without = np.abs(np.mean(levels, axis=0)).tolist()
        return {
            "run": str(self.folder),
            "rule": mains[0].rule_name,
            "client": client,
            "measure": settings.measure,
            "unit": UNITS[settings.measure],
            "seeds": [main.seed for main in mains],
            "after": after,
            "without": without,
            "low": without,
            "high": without,
            "source": "trained again without it",
        }


def check_simulated(history: History) -> None:
    """Refuse a run whose clients live on other machines: nobody here can train for them."""
    if history.facts.clients == "flower":
        raise UserError(
            f"{history.folder}: its clients are on other machines, so it cannot be repeated here; allowed: a run with "
            "[contributions], which measures while it goes"
        )


def untested(parts: Parts) -> Plan:
    """Return the plan without the clients' tests, where no model depends on them."""
    if tests_decide(parts.federations, stops=parts.plan.stop_at is not None or parts.plan.patience is not None):
        return parts.plan
    return replace(parts.plan, evaluate_every=parts.plan.rounds, detailed=False)


def tests_decide(federations: Sequence[Federation], *, stops: bool) -> bool:
    """Whether a model depends on the clients' tests; `stops`: the run ends once tests reach a target."""
    rules = [federation.rule for federation in federations]
    return stops or any(
        rule.settings.adjust is not None or (rule.policy is not None and rule.policy.needs.client_tests)
        for rule in rules
    )


class KeptClients(WrappedClients):
    """Clients whose answers a run has kept: nobody trains. Tests are done as ever."""

    def __init__(self, parts: Parts, folder: Path) -> None:
        super().__init__(parts.clients)
        self._folder = folder

    def colluders(self, seed: int, round: int) -> Mapping[str, str]:
        """Return nobody: what colluders sent is what was kept."""
        return {}

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        kept = read_round(self._folder, tasks[0].round).updates
        return [self._answer(task, kept) for task in tasks]

    def _answer(self, task: Task, kept: Mapping[str, Updates]) -> Updates:
        found = kept.get(task.federation)
        if found is None or (kept_models := found.payload.dense) is None:
            raise UserError(
                f"{self._folder}: no updates of {in_words(task.federation)} were kept in round {task.round}"
            )
        if kept_models.models.shape[1] != task.parameters.numel():
            raise UserError(f"{self._folder}: the updates kept in round {task.round} are of another model")
        device = task.parameters.device
        payload = DenseModels(kept_models.models.to(device), kept_models.frozen)
        return replace(found, payload=payload, vectors={name: each.to(device) for name, each in found.vectors.items()})


class _Recorder:
    """Keeps the values of rounds, and holds their models against those that the run had."""

    def __init__(self, folder: Path, digests: Mapping[tuple[str, int], str] | None, last: int) -> None:
        self._folder, self._digests, self._last = folder, digests, last
        self.found: Found = {}

    def commit(
        self, round: int, records: Sequence[RoundRecord], states: States, snapshot: Snapshot, *, last: bool
    ) -> None:
        for record in records:
            wanted = None if self._digests is None else self._digests.get((record.federation, round))
            if self._digests is not None and model_digest(states[record.federation].parameters) != wanted:
                raise UserError(
                    f"{self._folder}: repeated here, round {round} of {in_words(record.federation)} gives another "
                    "model than the run had, so nothing can be said about it; allowed: the kind of processor, torch "
                    "and threads of the run, or a run with [contributions] or store.keep = 'updates'"
                )
            if record.contributions:
                self.found[record.federation, round] = record.contributions
        if round >= self._last:
            raise _Enough


def _digests(folder: Path) -> dict[tuple[str, int], str]:
    """Return the digest of each round's model by federation and round."""
    with reading(folder) as connection:
        names: dict[int, str] = dict(connection.rows("federations", ("id", "name")))
        rows = connection.rows("digests", ("federation", "round", "model"))
    return {(names.get(key, ""), round): model for key, round, model in rows}


MOST = 10
"""Clients whose coalitions are all trained at most: 1,024 federations."""


class _Nothing:
    """A recorder that keeps nothing: retrained coalitions are judged by their last models."""

    def commit(
        self, round: int, records: Sequence[RoundRecord], states: States, snapshot: Snapshot, *, last: bool
    ) -> None:
        """Forget a round."""


def _all_members(main: Federation, parts: Parts) -> list[frozenset[str]]:
    """Return all coalitions but the empty one; number k of them holds the clients of k + 1's binary digits."""
    names = parts.clients.names(main.seed)
    if len(names) > MOST:
        raise UserError(
            f"--retrain: this run has {len(names)} clients, and so 2^{len(names)} coalitions to train; allowed: up to "
            f"{MOST} clients, or --without CLIENT --retrain"
        )
    numbers = range(1, 2 ** len(names))
    return [frozenset(name for place, name in enumerate(names) if number >> place & 1) for number in numbers]


def _trained(
    parts: Parts, mains: Sequence[Federation], members: Mapping[str, Sequence[frozenset[str]]]
) -> dict[str, torch.Tensor]:
    """Train coalitions of federations side by side; return the last models of each, after the first model itself."""
    federations = [
        replace(main, name=f"{main.name} {number}", members=inside)
        for main in mains
        for number, inside in enumerate(members[main.name])
    ]
    # A coalition goes on however few give a usable update; nobody's tests decide when it ends.
    plan = replace(untested(parts), min_clients=0, stop_at=None, report=False, contributions=None)
    states = run_rounds(federations, {}, parts.clients, parts.server, plan, _Nothing())
    return {
        main.name: torch.stack(
            [
                parts.server.initial(main.seed),
                *(states[f"{main.name} {number}"].parameters for number in range(len(members[main.name]))),
            ]
        )
        for main in mains
    }


def _test(parts: Parts, measure: Measure, main: Federation) -> Test:
    return tester(measure, main.name, main.seed, parts.plan.rounds, parts.clients, parts.server)


def _values(measure: Measure, names: tuple[str, ...], models: torch.Tensor, test: Test) -> tuple[RoundValues, ...]:
    good, sizes = test(models)
    worths = overall_first(good, sizes)
    places = 1 << np.arange(len(names))

    def worth(coalitions: Coalitions) -> Floats:
        return worths[coalitions @ places]

    found = shapley_values(len(names), worth, lambda: np.random.default_rng(0)).values
    whole = len(worths) - 1
    left_out = worths[whole] - worths[whole - places]
    sign = -1.0 if measure.endswith("loss") else 1.0
    ends = (sign * float(worths[0, 0]), sign * float(worths[whole, 0]))
    none = np.zeros(len(names))
    return (
        RoundValues(measure, "shapley", names, found, none, sizes, *ends),
        RoundValues(measure, "leave-one-out", names, left_out, none, sizes, *ends),
    )


def check_client(client: str, names: Sequence[str]) -> None:
    """Refuse a client that a run does not have, and to leave out the only one."""
    if client not in names:
        shown = listed(names[:5]) + (", ..." if len(names) > 5 else "")
        raise UserError(f"CLIENT: got '{client}'{nearest(client, names)}; allowed: {shown}")
    if len(names) == 1:
        raise UserError(f"CLIENT: got '{client}', the only client of this run; allowed: runs with others")
