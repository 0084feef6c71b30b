"""A client withdraws: the run again without it, from the first model, as a run of its own that both folders name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.contributions.replaying import check_simulated
from steelyard.contributions.retraining import check_client
from steelyard.errors import UserError
from steelyard.experiment.loading import read_experiment
from steelyard.experiment.running import run
from steelyard.runs.reader import History
from steelyard.runs.store import Store

if TYPE_CHECKING:
    from steelyard.data.dataset import DatasetOrSeeded
    from steelyard.experiment.code import Ask
    from steelyard.rounds.loop import Progress

FROM, TO = "withdrawn_from", "withdrawals"
"""Facts in the databases of both runs: which run this one repeats without whom; which runs repeat this one so."""


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
    experiment = read_experiment(folder)
    experiment.check_runs_here(str(folder))
    if history.info.get("in_memory") == "true" and dataset is None:
        raise UserError(f"{folder}: this run was given its data in Python; do this there, with dataset=...")
    cohorts = [history.cohorts(rule, int(seed)).clients for rule, seed in _federations(history)]
    asked = {name for names in cohorts for name in names} | set(history.failures_after()["client"])
    asked |= set(history.evaluations["client"])
    check_client(client, sorted(asked))
    if ask is not None and (code := experiment.named_code()):
        ask(str(folder), code)
    gone = (*experiment.rounds.withdrawn, client)
    again = experiment.changed({"rounds.withdrawn": list(gone)})
    seeds = json.loads(history.info.get("seeds", "[]")) or None
    made = run(again, out=out, seeds=seeds, dataset=dataset, progress=progress)
    head = history.chain.head
    _note(made, **{FROM: {"run": str(folder.resolve()), "head": head, "client": client, "round": 0}})
    known = json.loads(history.info.get(TO, "[]"))
    _note(folder, **{TO: [*known, {"client": client, "run": str(made.resolve())}]})
    return made


def _federations(history: History) -> list[tuple[str, int]]:
    frame = history.federations
    return list(zip(frame["rule"], frame["seed"], strict=True))


def _note(folder: Path, **facts: object) -> None:
    store = Store(folder)
    try:
        store.note(**facts)
    finally:
        store.close()
