"""Putting the parts of a sweep together: a folder with all of its runs, as if one command had made them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from steelyard import files
from steelyard.errors import UserError, own_folder
from steelyard.experiment.job_array import in_order
from steelyard.sweeps.plan_file import difference, read_sweep, write_sweep
from steelyard.sweeps.running import DIVERGED, diverged, done


def join_sweeps(folders: Sequence[Path], out: Path) -> Path:
    """Make one sweep in a new folder of all parts of one, given in any order; returns the folder.

    The parts stay as they are. What is missing, doubled, not done or of another sweep is named.
    """
    sweeps = {folder: read_sweep(folder) for folder in folders}
    parts = in_order({folder: sweep.part for folder, sweep in sweeps.items()})
    whole = replace(sweeps[parts[0]], part=None)
    runs: dict[str, Path] = {}
    for folder in parts:
        if (field := difference(whole, replace(sweeps[folder], part=None))) is not None:
            raise UserError(
                f"{folder}: is a part of another sweep than {parts[0]}, which differs in {field}; allowed: parts of one"
            )
        mine = [sweeps[folder].parts[number].folder for number in sweeps[folder].own]
        if (left := next((run for run in mine if not done(folder, run)), None)) is not None:
            raise UserError(f"{folder}: {left} is not done; allowed: `steelyard resume {folder}` first")
        runs |= dict.fromkeys(mine, folder)
    out = own_folder(out, "--out")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out: {out} is not empty; allowed: a new folder")
    try:
        for run, folder in runs.items():
            if diverged(folder, run):
                files.write(out / f"{run}{DIVERGED}", files.read_bytes(folder / f"{run}{DIVERGED}"))
            if (folder / run).exists():
                files.refuse_links(folder / run)
                shutil.copytree(folder / run, out / run)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}; allowed: a writable folder") from error
    # Last: a folder without it is no sweep.
    write_sweep(whole, out)
    return out
