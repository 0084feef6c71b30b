"""A run's rounds once more, to find out what each client added: from the updates that it kept, or trained again.

Nothing is written while it goes. Each round's model is held against the digest in the run's chain: values are of the
run that was, bit for bit, or there are none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.base import files
from steelyard.base.errors import UserError, in_words
from steelyard.clients.protocol import WrappedClients
from steelyard.contributions.document import rule_of
from steelyard.experiment.loading import read_experiment
from steelyard.experiment.parts import Parts, as_begun
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Task, Updates
from steelyard.proof.signing import model_digest
from steelyard.rounds.contributions import ContributionSettings, RoundValues
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import Federation, Plan, RoundRecord, Snapshot, States
from steelyard.runs.chain import require_whole
from steelyard.runs.database import reading
from steelyard.runs.history import History
from steelyard.runs.kept_updates import kept_rounds, read_round
from steelyard.runs.store import add_values

if TYPE_CHECKING:
    from steelyard.data.dataset import DatasetOrSeeded
    from steelyard.experiment.code import Ask

Found = dict[tuple[str, int], tuple[RoundValues, ...]]
"""Values by federation and round."""


class _Enough(Exception):
    """The last round that the run has was repeated."""


def replay(
    folder: str | Path,
    settings: ContributionSettings,
    rule: str | None = None,
    *,
    dataset: DatasetOrSeeded | None = None,
    ask: Ask | None = None,
) -> str:
    """Repeat a run's rounds, measure what each client added, and put that into the run's folder.

    Returns why it could not be written there; empty where it was. Other rules of the run are repeated too, since what
    trains together may round differently alone; only the rule that is asked for is measured.
    """
    folder = Path(folder)
    files.check_run(folder)
    history = History(folder)
    chosen = rule_of(history, rule)
    check_simulated(history)
    require_whole(history.chain, folder, accept=False)
    read_experiment(folder).check_contributions(settings)
    with as_begun(history, dataset=dataset, ask=ask) as (parts, _):
        parts.experiment.check_contributions(settings, own_code=True)
        names = frozenset(each.name for each in parts.federations if each.rule_name == chosen)
        plan = replace(untested(parts), contributions=settings, valued=names)
        kept = kept_rounds(folder)
        rounded = kept and parts.experiment.store.keep_as != "float32"
        clients = KeptClients(parts, folder) if kept else parts.clients
        recorder = _Recorder(folder, None if rounded else _digests(folder), history.chain.round)
        with suppress(_Enough):
            run_rounds(parts.federations, {}, clients, parts.server, plan, recorder)
    return add_values(folder, recorder.found, "rounded" if rounded else "kept" if kept else "replay")


def check_simulated(history: History) -> None:
    """Refuse a run whose clients live on other machines: nobody here can train for them."""
    if history.info.get("clients") == "flower":
        raise UserError(
            f"{history.folder}: its clients are on other machines, so it cannot be repeated here; allowed: a run with "
            "[contributions], which measures while it goes"
        )


def untested(parts: Parts) -> Plan:
    """Return the plan without the clients' tests, where no model depends on them."""
    if tests_decide(parts.federations, stops=parts.plan.stop_at is not None):
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

    def colluders(self, seed: int) -> Mapping[str, str]:
        """Return nobody: what colluders sent is what was kept."""
        return {}

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        kept = read_round(self._folder, tasks[0].round).updates
        return [self._answer(task, kept) for task in tasks]

    def _answer(self, task: Task, kept: Mapping[str, Updates]) -> Updates:
        found = kept.get(task.federation)
        if found is None or not isinstance(found.payload, DenseModels):
            raise UserError(
                f"{self._folder}: no updates of {in_words(task.federation)} were kept in round {task.round}"
            )
        if found.payload.models.shape[1] != task.parameters.numel():
            raise UserError(f"{self._folder}: the updates kept in round {task.round} are of another model")
        device = task.parameters.device
        payload = DenseModels(found.payload.models.to(device), found.payload.frozen)
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
