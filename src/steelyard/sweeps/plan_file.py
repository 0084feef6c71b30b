"""The file of a sweep's folder: what is swept, written once, read by whatever shows or goes on with the sweep."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tomli_w

from steelyard.base import files
from steelyard.base.errors import UserError, brief, listed, nearest, told_as
from steelyard.base.files import SWEEP_FILE as SWEEP_FILE
from steelyard.base.settings import parse
from steelyard.experiment.code import FOLDER, content_name, keep_code, rename_code, resolve_code
from steelyard.experiment.job_array import PART, Part
from steelyard.experiment.loading import build, own_text
from steelyard.sweeps.plan import Axis, Scalar, Sweep, measures_of


@dataclass(frozen=True)
class ListedRun:
    """What a sweep's file says of one of its runs: its folder, the values of its fields, its rules, the seeds."""

    folder: str
    values: tuple[Scalar, ...]
    rules: tuple[str, ...]
    seeds: tuple[int, ...]


def write_sweep(sweep: Sweep, folder: Path) -> None:
    """Make a folder that of a sweep; the code that its experiment names is copied into it."""
    write_plan(folder / SWEEP_FILE, sweep.document())


def write_plan(path: Path, document: dict[str, Any]) -> None:
    """Write what several runs of one folder are made from, once; the code that its experiment names is kept beside."""
    folder = path.parent
    with told_as(f"{folder}: cannot be written", "a writable folder"):
        folder.mkdir(parents=True, exist_ok=True)
        keep_code(document["experiment"], folder / FOLDER)
        files.write(path, tomli_w.dumps(document).encode())


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds a sweep."""
    return files.is_file(folder / SWEEP_FILE)


def read_sweep(folder: Path) -> Sweep:
    """Return the sweep that a folder holds; none of the code that it names is run."""
    path, document = _read(folder)
    try:
        described = document["experiment"]
        axes = tuple(Axis(str(axis["field"]), _scalars(axis["values"])) for axis in document["over"])
        rules, seeds = tuple(map(str, document["rules"])), tuple(map(int, document["seeds"]))
        measure, share, stacked = str(document["measure"]), float(document["validation"]), bool(document["stacked"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: is cut off or changed ({error!r}); allowed: the file as the sweep wrote it") from None
    experiment = build(described, str(path), reading=True)
    known = measures_of(experiment)
    if measure not in known:
        raise UserError(f"{path}: measure: got {brief(measure)}{nearest(measure, known)}; allowed: {listed(known)}")
    part = Part.read(str(document[PART]), f"{path}: {PART}") if PART in document else None
    return Sweep(experiment, axes, rules, seeds, measure, share, stacked, part)


def read_runs(folder: Path) -> list[ListedRun]:
    """Return the runs of a sweep as its file lists them; unlike its parts, without building their experiments."""
    path, document = _read(folder)
    try:
        fields = len(document["over"])
        return [
            ListedRun(
                _name(run["folder"]),
                _scalars(run["values"], fields),
                tuple(map(str, run["rules"])),
                tuple(map(int, run["seeds"])),
            )
            for run in document["runs"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is cut off or changed ({error!r}); allowed: the file as the sweep wrote it") from None


def _name(value: Any) -> str:
    """Return the name of a run's folder in the sweep's: one that leads elsewhere is no name."""
    if not isinstance(value, str) or value in ("", ".", "..") or any(mark in value for mark in "/\\\0"):
        raise ValueError(f"folder: {brief(value)}")
    return value


def _scalars(values: Any, count: int | None = None) -> tuple[Scalar, ...]:
    """Return the values of a file's list: single ones, and where it is known as many as there are fields."""
    found = cast("list[Any]", values)
    if not isinstance(values, list) or not all(isinstance(each, Scalar) for each in found):
        raise ValueError(f"values: {brief(values)}")
    if len(found) != (len(found) if count is None else count):
        raise ValueError(f"values: {brief(values)} for {count} field{'s' if count != 1 else ''}")
    return tuple(found)


def _read(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / SWEEP_FILE
    if not files.is_file(path):
        raise UserError(f"{folder}: no {SWEEP_FILE} here; allowed: a folder that `steelyard sweep` made")
    return path, read_plan(path)


def read_plan(path: Path) -> dict[str, Any]:
    """Return what several runs of one folder are made from; code that its experiment names is found beside."""
    document = parse(own_text(path), str(path))
    try:
        resolve_code(document["experiment"], path.parent.resolve())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: is cut off or changed ({error!r}); allowed: the file as it was written") from None
    return document


def difference(kept: Sweep, given: Sweep) -> str | None:
    """Return the first field in which a sweep differs from the one that its folder holds; None where they agree."""
    return differing(kept.document(), given.document())


def differing(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Return the first field in which two such documents differ, with the fields of their experiments by name."""
    before, now = _flat(before), _flat(now)
    return next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)


def _flat(document: dict[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in document.items() if name not in ("experiment", "over", "runs")}
    # What is swept by its fields, which say more than the list; the runs follow from it.
    flat |= {f"over {axis['field']}": axis["values"] for axis in document.get("over", ())}
    experiment = deepcopy(document["experiment"])
    # By content: what lies in the folder is run only where it is what was given here.
    rename_code(experiment, content_name)
    for section, fields in experiment.items():
        if isinstance(fields, dict):
            flat |= {f"{section}.{name}": value for name, value in cast("dict[str, Any]", fields).items()}
        else:
            flat[section] = fields
    return flat
