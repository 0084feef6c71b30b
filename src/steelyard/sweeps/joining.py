"""Putting the parts of a sweep or an arena together: a folder with all of its runs, as if one command had made them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from steelyard.base import files
from steelyard.base.errors import MachineError, UserError, own_folder
from steelyard.experiment.job_array import Part, in_order
from steelyard.sweeps.plan_file import SWEEP_FILE, differing, read_sweep, write_plan
from steelyard.sweeps.running import DIVERGED, finished


@dataclass(frozen=True)
class Share:
    """What one folder holds of several runs that were shared out."""

    part: Part | None
    whole: dict[str, Any]
    """The plan of all runs, as its file holds it without a part."""
    runs: list[str]
    """The folders, in this one, of the runs that are its own."""
    further: Sequence[str] = ()
    """Folders that belong to some of them, where they are there."""


def join_sweeps(folders: Sequence[Path], out: Path) -> Path:
    """Make one sweep in a new folder of all parts of one, given in any order; returns the folder."""
    sweeps = {folder: read_sweep(folder) for folder in folders}
    shares = {
        folder: Share(
            sweep.part, replace(sweep, part=None).document(), [sweep.parts[number].folder for number in sweep.own]
        )
        for folder, sweep in sweeps.items()
    }
    return join_shares("sweep", shares, out, SWEEP_FILE, DIVERGED)


def join_shares(
    kind: Literal["arena", "sweep"], shares: Mapping[Path, Share], out: Path, plan_file: str, failed: str
) -> Path:
    """Make one folder of all shares of one whole, given in any order; returns the folder.

    A run without an end has a file beside it, of its name with the ending `failed`, that says why. The shares stay as
    they are. What is missing, doubled, not done or of another whole is named.
    """
    parts = in_order({folder: share.part for folder, share in shares.items()})
    whole = shares[parts[0]].whole
    runs: dict[str, Path] = {}
    for folder in parts:
        if (field := differing(whole, shares[folder].whole)) is not None:
            raise UserError(
                f"{folder}: is a part of another {kind} than {parts[0]}, which differs in {field}; allowed: parts of "
                "one"
            )
        for run in shares[folder].runs:
            if not finished(folder / run) and not files.is_file(folder / f"{run}{failed}"):
                raise UserError(
                    f"{folder}: {run} is not done; allowed: parts that are (`steelyard resume {folder}` goes on with "
                    "one that was stopped)"
                )
            runs[run] = folder
        runs |= dict.fromkeys(shares[folder].further, folder)
    out = own_folder(out, "--out")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out: {out} is not empty; allowed: a new folder")
    try:
        for run, folder in runs.items():
            if files.is_file(reason := folder / f"{run}{failed}"):
                files.write(out / f"{run}{failed}", files.read_bytes(reason))
            if (folder / run).exists():
                files.refuse_links(folder / run)
                shutil.copytree(folder / run, out / run)
        # Last: a folder without it is no sweep and no arena.
        write_plan(out / plan_file, whole)
    except BaseException as error:
        # The parts are whole: nothing is lost, and the next call finds the folder free.
        shutil.rmtree(out, ignore_errors=True)
        if isinstance(error, OSError):
            raise MachineError(f"{out}: cannot be written: {_reason(error)}; allowed: a writable folder") from error
        raise
    return out


def _reason(error: OSError) -> str:
    """Say why a folder could not be copied: of all its files, the first."""
    if isinstance(error, shutil.Error):
        return str(error.args[0][0][-1])
    return error.strerror or str(error)
