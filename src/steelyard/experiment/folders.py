"""The folder of a new run or sweep: the one that the user names, or one named after the experiment and the time."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from steelyard.base.errors import UserError, own_folder, writable
from steelyard.experiment.description import Description
from steelyard.runs.store import exists


def new_folder(experiment: Description, out: str | Path | None) -> Path:
    """Return the folder of a new run; one that holds a run already is refused, so that nothing is lost."""
    if out is None:
        return unnamed_folder(experiment, experiment.name)
    folder = own_folder(Path(out), "--out")
    if exists(folder):
        raise UserError(f"--out: {folder} holds a run already; allowed: a new folder, or `steelyard resume {folder}`")
    return folder


def unnamed_folder(experiment: Description, name: str) -> Path:
    """Return a folder that is not there yet, of this name and the time, where the experiment keeps its runs."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    first = writable(experiment.store.folder / f"{name}-{stamp}", "store.folder")
    folder, count = first, 1
    while folder.exists():
        count += 1
        folder = first.with_name(f"{first.name}-{count}")
    return folder
