"""A look at somebody's data: a table, images, NumPy arrays or IDX files; an experiment is proposed from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.settings import validated
from steelyard.data.loading import load
from steelyard.data.looking_images import look_at_images
from steelyard.data.looking_tables import MOST_CLASSES, look_at_table
from steelyard.data.npz import read_arrays
from steelyard.data.protocols import INPUTS, LABELS
from steelyard.data.settings import DataSettings
from steelyard.data.source_settings import is_pattern
from steelyard.data.summary import DataSummary, counted, few, of_dataset, shown, sizes

Form = Literal["csv", "parquet", "npz", "images", "idx"]
_TEST_ARRAYS = ("held_out", "is_test", "test")


def look(form: Form, paths: Sequence[Path], label: str | None = None, owner: str | None = None) -> DataSummary:
    """Look at data of one form, of several paths if they are tables; use it before an experiment is proposed."""
    for path in paths:
        if not path.exists() and not (form == "csv" and is_pattern(path)):
            raise UserError(f"--{form}: found no '{path}'; expected {_EXPECTED[form]}")
    path = paths[0]
    match form:
        case "csv" | "parquet":
            if form == "parquet" and path.suffix.lower() not in (".parquet", ".pq"):
                raise UserError(f"--parquet: got '{path}'; expected a .parquet file")
            return look_at_table(paths, label, owner)
        case "images":
            return look_at_images(path, label, owner)
        case "npz":
            return _look_at_arrays(path, label, owner)
        case "idx":
            return _look_at_idx(path, label, owner)


_EXPECTED: dict[Form, str] = {
    "csv": "a table (.csv, .xlsx, .sav, .dta) with names of columns, or a folder of such files",
    "parquet": "a .parquet file",
    "npz": "an .npz file of NumPy arrays",
    "images": "a folder or .zip of images, in a folder for each class",
    "idx": "a folder with four IDX files, named as MNIST's",
}


def _look_at_arrays(path: Path, label: str | None, owner: str | None) -> DataSummary:
    arrays = read_arrays(path)
    features = _largest(path, arrays)
    rows = len(arrays[features])
    single = [name for name, values in arrays.items() if values.shape == (rows,) and name != features]
    further = _further_task(arrays, features, label)
    label = _array_of_labels(path, arrays, single, label) if further is None else further[0]
    fields: dict[str, tuple[Any, str]] = {
        "features": (features, "the array of samples, one in each row"),
        "labels": (label, "the array to predict"),
    }
    if further is not None:
        of_pixels = "a class for each pixel" if further[1] == "segmentation" else "several labels, each 0 or 1"
        fields["task"] = (further[1], of_pixels)
    elif _is_number_to_predict(arrays[label]):
        fields["task"] = ("regression", "a number to predict, not a class")
    if owner is not None:
        fields["owner"] = (owner, "whose row it is: one client each")
    part = next((name for name in _TEST_ARRAYS if name in single and arrays[name].dtype.kind in "bi"), None)
    if part is not None:
        fields["held_out"] = (part, "marks the rows of the test part")
    values = arrays[features]
    if values.dtype != np.uint8 and values.dtype.kind in "iuf" and (values.min() < -1 or values.max() > 1.5):
        fields["normalise"] = ("standard", "mean 0, deviation 1 per column or channel, from the training part")
    document = {"source": "npz", "path": path, **{name: value for name, (value, _) in fields.items()}}
    dataset = load(validated(DataSettings, document, "new"))
    summary = of_dataset(dataset, "npz", fields, [f"{path.name}: arrays {few(list(arrays), 12)}", *dataset.notes])
    return _accounted(summary, f"label '{shown(label)}'", f"owners, by '{shown(owner)}'" if owner else "owners")


def _further_task(
    arrays: dict[str, NDArray[Any]], features: str, label: str | None
) -> tuple[str, Literal["segmentation", "multi-label"]] | None:
    """Return the array of masks or of several labels for each row, where there is one, and which it is."""
    rows = len(arrays[features])
    for name in ("y", "masks", "mask", *LABELS) if label is None else (label,):
        values = arrays.get(name)
        if values is None or name == features or len(values) != rows or values.dtype.kind not in "biu":
            continue
        if values.ndim == 3:
            return name, "segmentation"
        if values.ndim == 2 and bool(((values == 0) | (values == 1)).all()):
            return name, "multi-label"
    return None


def _largest(path: Path, arrays: dict[str, NDArray[Any]]) -> str:
    wide = {name: values for name, values in arrays.items() if values.ndim > 1 and values.dtype.kind in "biuf"}
    usual = next((name for name in ("x", *INPUTS) if name in wide), None)
    if usual is None and not wide:
        raise UserError(f"{path}: has arrays {listed(arrays) or 'none'}; expected one of samples, with a row for each")
    return usual or max(wide, key=lambda name: wide[name].size)


def _array_of_labels(path: Path, arrays: Iterable[str], single: list[str], label: str | None) -> str:
    if label is not None:
        if label not in arrays:
            raise UserError(
                f"--label: found no array '{shown(label)}' in {path}{nearest(label, single)}; allowed: "
                f"{few(single, 12) or 'none of its arrays has one value for each row'}"
            )
        return label
    found = next((name for name in ("y", *LABELS) if name in single), None)
    if found is None:
        raise UserError(
            f"--label: got nothing, and {path} has none of {listed(LABELS)}; allowed: one of its arrays with a value "
            f"for each row ({listed(single) or 'there is none'})"
        )
    return found


def _is_number_to_predict(values: NDArray[Any]) -> bool:
    if values.dtype.kind not in "iuf" or not len(values):
        return False
    return bool((values != np.floor(values)).any()) or (
        values.dtype.kind == "f" and len(np.unique(values)) > MOST_CLASSES
    )


def _look_at_idx(path: Path, label: str | None, owner: str | None) -> DataSummary:
    for option, given in (("label", label), ("owner", owner)):
        if given is not None:
            raise UserError(f"--{option}: got '{shown(given)}' with --idx, whose files say that; allowed: leave it out")
    folder = path if path.is_dir() else path.parent
    try:
        dataset = load(DataSettings(source="mnist", path=folder))
    except UserError as error:
        others = "IDX files by other names or with other classes: save their arrays with numpy.savez and use --npz"
        raise UserError(f"--idx: {error}; {others}") from None
    summary = of_dataset(dataset, "mnist", {}, [f"{folder.name}: four IDX files"])
    return _accounted(summary, "labels", "writers")


def _accounted(summary: DataSummary, label: str, owners: str) -> DataSummary:
    """Add what rows, shapes and labels are."""
    what = (
        f"images of {'×'.join(map(str, summary.shape))}"
        if len(summary.shape) > 1
        else f"{prod(summary.shape)} numbers each"
    )
    lines = [*summary.account, f"{summary.rows:,} rows: {what}"]
    classes = f"{len(summary.classes)} classes: {counted(summary.classes)} rows" if summary.classes else "a number"
    further = {"segmentation": "a class for each pixel", "multi-label": "several, each 0 or 1"}
    lines.append(f"{label}: {further.get(summary.task, classes)}")
    if summary.owners is not None:
        lines.append(sizes(summary.owners, owners))
    if summary.held_out:
        lines.append(f"test part: {summary.held_out:,} rows")
    return replace(summary, account=tuple(lines))
