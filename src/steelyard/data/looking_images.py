"""A look at a folder or zip of images: classes and owners by folders or by a table, sizes, grey or colour."""

from __future__ import annotations

import io
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.base.errors import UserError
from steelyard.data.attributes import beside, read_table
from steelyard.data.image_folders import FOLDER, LAYOUT, Folders
from steelyard.data.images import Pictures
from steelyard.data.masks import paired
from steelyard.data.memory import owner_names
from steelyard.data.settings import DataSettings
from steelyard.data.summary import DataSummary, counted, shown, sizes
from steelyard.data.table_columns import in_order

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
    table = read_table(DataSettings(source="images", path=path), path)
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
