"""A client withdraws: the run again without it, as a run of its own that both folders name.

It goes on from the last checkpoint before the client first took part, where the run has such a one, else from the first
model.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.base import files
from steelyard.contributions.replaying import check_client, check_simulated, tests_decide
from steelyard.experiment.description import Description
from steelyard.experiment.loading import RUN_FILE, new_folder, run_file
from steelyard.experiment.parts import experiment_again, federations_of
from steelyard.experiment.running import resume, run
from steelyard.proof.signing import head_key
from steelyard.runs.database import reading
from steelyard.runs.facts import RunFacts
from steelyard.runs.history import History
from steelyard.runs.kept_updates import path_of_round
from steelyard.runs.store import Store

if TYPE_CHECKING:
    from steelyard.data.dataset import DatasetOrSeeded
    from steelyard.experiment.loading import Ask
    from steelyard.rounds.loop import Progress


def withdraw(
    folder: str | Path,
    client: str,
    *,
    out: str | Path | None = None,
    dataset: DatasetOrSeeded | None = None,
    ask: Ask | None = None,
    progress: bool | Progress = False,
) -> Path:
    """Run a run's experiment again without one client, into a new folder, which is returned.

    The client is neither asked nor tested. The old run stays as it is, but for a note of the new one: whoever must also
    forget what the client sent deletes it.
    """
    folder = Path(folder)
    history = History(folder)
    check_simulated(history)
    cohorts = [history.cohorts(rule, int(seed)).clients for rule, seed in _federations(history)]
    asked = {name for names in cohorts for name in names} | set(history.failures_after()["client"])
    asked |= set(history.evaluations["client"])
    check_client(client, sorted(asked))
    experiment = experiment_again(history, dataset, ask)
    gone = (*experiment.rounds.withdrawn, client)
    again = experiment.changed({"rounds.withdrawn": list(gone)})
    seeds = history.facts.seeds or None
    begun = _checkpoint_before(history, experiment, client)
    lineage: dict[str, str | int] = {
        "run": str(folder.resolve()),
        "head": history.chain.head,
        "client": client,
        "round": begun or 0,
    }
    if begun is None:
        made = run(again, out=out, seeds=seeds, dataset=dataset, progress=progress)
        _note(made, RunFacts(withdrawn_from={**lineage, "from": "the first model"}))
    else:
        made = new_folder(again, out)
        lineage["from"] = f"the checkpoint after round {begun}"
        _copied(folder, made, begun, again, RunFacts(withdrawn_from=lineage, withdrawals=[], status="stopped"))
        resume(made, dataset=dataset, progress=progress)
    known = history.facts.withdrawals
    _note(folder, RunFacts(withdrawals=[*known, {"client": client, "run": str(made.resolve())}]))
    return made


def _checkpoint_before(history: History, experiment: Description, client: str) -> int | None:
    """Return the last round before a client first took part that has a checkpoint; None where there is none.

    Where tests decide something, a client that is tested takes part. A promise of privacy holds for a run as a whole.
    """
    stops = experiment.rounds.stop_at_target or experiment.rounds.chooses
    if experiment.privacy is not None or tests_decide(federations_of(experiment), stops=stops):
        return None
    first = [int(round) for round in history.failures_after().query("client == @client")["round"]]
    for rule, seed in _federations(history):
        cohorts = history.cohorts(rule, seed)
        if client in cohorts.clients:
            first.append(int(cohorts.round[cohorts.client == cohorts.clients.index(client)].min()))
    with reading(history.folder) as db:
        rounds = [round for (round,) in db.execute("SELECT round FROM checkpoints").fetchall()]
    before = [round for round in rounds if 0 < round < min(first, default=round + 1)]
    return max(before, default=None)


def _copied(folder: Path, made: Path, last: int, experiment: Description, facts: RunFacts) -> None:
    """Copy a run up to a round that has a checkpoint into a new folder, as the run of another experiment."""
    for name in (files.CHECKPOINTS, files.UPDATES):
        if (folder / name).is_dir():
            shutil.copytree(folder / name, made / name)
    for kept in files.names_in(made / files.UPDATES):
        if kept > path_of_round(made, last).name:
            files.remove(made / files.UPDATES / kept)
    text = run_file(experiment, made)
    files.write(made / RUN_FILE, text.encode())
    with reading(folder) as db, closing(sqlite3.connect(made / files.DATABASE)) as copy:
        db.backup(copy)
    with closing(Store(made, signer=head_key())) as store:
        store.forget_after(last)
        store.note(facts.also(RunFacts(experiment_text=text)))


def _federations(history: History) -> list[tuple[str, int]]:
    frame = history.federations
    return list(zip(frame["rule"], frame["seed"], strict=True))


def _note(folder: Path, facts: RunFacts) -> None:
    with closing(Store(folder, signer=head_key())) as store:
        store.note(facts)
