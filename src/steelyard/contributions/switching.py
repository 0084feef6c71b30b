"""A run that was stopped goes on with [contributions], which it began without."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import tomli_w

from steelyard.base import files
from steelyard.base.errors import UserError
from steelyard.contributions.finding import default_measure
from steelyard.contributions.replaying import check_simulated
from steelyard.experiment.continuing import TEXT, changed_experiment
from steelyard.experiment.loading import RUN_FILE, own_text, read_experiment
from steelyard.runs.history import History
from steelyard.runs.store import Store


def switch_on(folder: Path) -> None:
    """Have a run measure what each client adds, from the round with which it goes on; one that does stays as it is.

    The section is added to the run's own experiment file. No model changes by it.
    """
    files.check_run(folder)
    experiment = read_experiment(folder)
    if experiment.contributions is not None:
        return
    history = History(folder)
    check_simulated(history)
    if history.info.get("status") == "finished":
        raise UserError(
            f"--contributions: {folder} has finished; allowed: a run that goes on, or `steelyard contributions "
            f"{folder}`, which finds it out afterwards"
        )
    changed_experiment(history, accept=False)
    section = {"contributions": {"measure": default_measure(experiment)}}
    experiment.changed(section)  # refuses what cannot be measured
    with closing(Store(folder)) as store:
        text = f"{own_text(folder / RUN_FILE)}\n{tomli_w.dumps(section)}"
        files.write(folder / RUN_FILE, text.encode())
        store.note(**{TEXT: text})
