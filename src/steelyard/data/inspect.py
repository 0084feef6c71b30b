"""A look at somebody's data: a table, images, NumPy arrays or IDX files; an experiment is proposed from it."""

from __future__ import annotations

import io
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.settings import validated
from steelyard.data.dataset import owner_names
from steelyard.data.inspect_tables import (
    MOST_CLASSES,
    DataSummary,
    counted,
    few,
    look_at_table,
    of_dataset,
    shown,
    sizes,
)
from steelyard.data.memory import INPUTS, LABELS
from steelyard.data.scaling import load
from steelyard.data.sources.bundled import Mnist
from steelyard.data.sources.images import FOLDER, LAYOUT, Folders, Images, Pictures, beside, paired, read_table
from steelyard.data.sources.npz import Npz, read_arrays
from steelyard.data.sources.source import in_order, is_pattern

SAMPLED = 64
"""Images that are opened; the others are only counted."""
LARGEST_SIDE = 64
MOST_IMAGES = 20_000
"""More than this many are not needed for a first run."""


def look_at_images(path: Path, label: str | None, owner: str | None) -> DataSummary:
    """Look at images; without a label the folders are the classes, with one it is a column of the table beside them."""
    pictures = Pictures(path)
    pairs, _ = paired(pictures.names)
    if label is None and pairs:
        return _with_masks(pictures, [image for image, _ in pairs], owner)
    folders = Folders.of(path, pictures.names)
    size, grey, dimensions = _sizes(pictures)
    fields: dict[str, tuple[Any, str]] = {}
    if label is None or label == FOLDER:
        if not folders.by_class:
            table = " (there is a table beside them: name its column with --label)" if beside(path) else ""
            raise UserError(f"--images: '{path}' has no folder for each class{table}; expected {LAYOUT}")
        found = _by_folders(folders, owner, fields)
    else:
        found = _by_table(path, pictures, label, owner, fields)
    classes, owners, held_out, owned = found
    fields["size"] = (size, f"pixels; images are {dimensions}")
    if grey:
        fields["colours"] = ("grey", "one channel: all images that were opened are grey")
    rows = sum(classes.values())
    if rows > MOST_IMAGES:
        share = round(MOST_IMAGES / rows, 3)
        fields["share"] = (share, f"of {rows:,} images, for a first run; 1.0 takes all")
    account = [
        f"{path.name}: {rows:,} images, {dimensions}, {'grey' if grey else 'colour'}",
        f"classes{' by folder' if fields['labels'][0] == FOLDER else ''}: {len(classes)}: {counted(classes)} images",
    ]
    if owners is not None:
        account.append(sizes(owners, "owners" + (" by folder" if fields["owner"][0] == FOLDER else "")))
    if held_out:
        account.append(f"test part by folder: {held_out:,} images")
    shape = (1 if grey else 3, size, size)
    return DataSummary("images", rows, shape, "classes", classes, owners, held_out, owned, fields, tuple(account))


def _with_masks(pictures: Pictures, images: list[str], owner: str | None) -> DataSummary:
    """Look at images with masks of the same name: classes of pixels, and owners where folders are around theirs."""
    folders = Folders.of(pictures.path, images)
    size, grey, dimensions = _sizes(pictures)
    fields: dict[str, tuple[Any, str]] = {
        "task": ("segmentation", "a class for each pixel, from a mask of the same name")
    }
    owners, held_out, owned = _owners_and_parts(folders, owner, fields)
    size = max(16, size // 4 * 4)
    fields["size"] = (size, f"pixels, a multiple of 4 for the network; images are {dimensions}")
    if grey:
        fields["colours"] = ("grey", "one channel: all images that were opened are grey")
    account = [f"{pictures.path.name}: {len(images):,} images with masks, {dimensions}, {'grey' if grey else 'colour'}"]
    if owners is not None:
        account.append(sizes(owners, "owners by folder"))
    shape = (1 if grey else 3, size, size)
    found = (owners, held_out, owned, fields, tuple(account))
    return DataSummary("images", len(images), shape, "segmentation", {}, *found)


Found = tuple[dict[str, int], dict[str, int] | None, int, bool]


def _by_folders(folders: Folders, owner: str | None, fields: dict[str, tuple[Any, str]]) -> Found:
    fields["labels"] = (FOLDER, "the class is the folder that holds the image")
    classes = Counter(folders.classes().tolist())
    found = _owners_and_parts(folders, owner, fields)
    return dict(sorted(classes.items(), key=lambda item: in_order(item[0]))), *found


def _owners_and_parts(
    folders: Folders, owner: str | None, fields: dict[str, tuple[Any, str]]
) -> tuple[dict[str, int] | None, int, bool]:
    """Return the rows of each owner, those of the test part, and whether each owner has some of both."""
    if owner not in (None, FOLDER):
        raise UserError(
            f"--owner: got '{shown(owner)}' with images in folders; allowed: folder (as in OWNER/CLASS/IMAGE), or "
            "--label and --owner for columns of a table beside the images"
        )
    owners: dict[str, int] | None = None
    if owner == FOLDER or folders.by_owner:
        fields["owner"] = (FOLDER, "whose image it is: the folder around that of the class")
        owners = dict(sorted(Counter(folders.owners().tolist()).items()))
    held_out, owned = 0, False
    if folders.splits:
        fields["held_out"] = (FOLDER, "train/ and test/ are the source's own two parts")
        tested = folders.held_out()
        held_out = int(tested.sum())
        people = folders.owners() if owners is not None else np.zeros(len(tested))
        owned = owners is not None and all(0 < int(tested[people == name].sum()) < owners[name] for name in owners)
    return owners, held_out, owned


def _by_table(
    path: Path, pictures: Pictures, label: str, owner: str | None, fields: dict[str, tuple[Any, str]]
) -> Found:
    table = read_table(Images(path=path), path)
    rows = np.flatnonzero([name in pictures for name in table.images])
    if not len(rows):
        raise UserError(f"{table.path}: none of its {len(table.images)} images is in {path}; expected their names")
    fields["labels"] = (label, f"the column of {shown(table.path.name)} to predict")
    values = table.column("labels", label)[rows]
    classes = {str(name): int(count) for name, count in zip(*np.unique(values, return_counts=True), strict=True)}
    owner = owner or ("identity" if "identity" in table.columns else None)
    owners: dict[str, int] | None = None
    if owner is not None:
        fields["owner"] = (owner, "whose image it is: one client each")
        owners = dict(Counter(owner_names(table.column("owner", owner)[rows], owner).tolist()))
    return classes, owners, 0, False


def _sizes(pictures: Pictures) -> tuple[int, bool, str]:
    """Open some images: return the side to scale to, whether all are grey, and their sizes in words."""
    picked = [pictures.names[int(index)] for index in np.linspace(0, len(pictures.names) - 1, SAMPLED)]
    kinds = [_kind(pictures, name) for name in dict.fromkeys(picked)]
    sides = [min(width, height) for width, height, _ in kinds]
    several = {(width, height) for width, height, _ in kinds}
    least, most = (f"{w}×{h}" for w, h in (min(several), max(several)))
    size = int(np.clip(np.median(sides), 8, LARGEST_SIDE)) // 4 * 4
    grey = all(mode in ("1", "L", "LA") for _, _, mode in kinds)
    return size, grey, least if len(several) == 1 else f"{least} to {most}"


def _kind(pictures: Pictures, name: str) -> tuple[int, int, str]:
    # For speed of start: few data sets are image files. `read` says what is lacking or broken.
    pictures.read([name], 4)
    from PIL import Image

    path = pictures.path
    if path.is_file():
        with zipfile.ZipFile(path) as archive:
            content = archive.read(name)
    else:
        content = (path / name).read_bytes()
    with Image.open(io.BytesIO(content)) as image:
        return image.width, image.height, image.mode


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
    document = {"path": path, **{name: value for name, (value, _) in fields.items()}}
    dataset = load(validated(Npz, document, "new"))
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
        dataset = load(Mnist(path=folder))
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
