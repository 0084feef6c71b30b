"""Images with a mask for each: a class for every pixel, 0 is the background; from folders, or made from the digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from steelyard.base import randomness
from steelyard.base.errors import UserError
from steelyard.data.bundled import read_digits
from steelyard.data.dataset import Dataset, share_of_rows
from steelyard.data.image_folders import FOLDER, Folders
from steelyard.data.memory import in_memory
from steelyard.data.settings import DataSettings
from steelyard.data.table_columns import class_note

if TYPE_CHECKING:
    from steelyard.data.images import Pictures

IMAGES = ("images", "image", "imgs")
MASKS = ("masks", "mask", "labels")
LAYOUT = "images/NAME.png with masks/NAME.png beside it, or OWNER/images/NAME.png with OWNER/masks/NAME.png"
SIDE = 16
"""Pixels of a side of the images that are made from digits."""


def read_masked(pictures: Pictures, settings: DataSettings) -> Dataset:
    """Return images with the masks of the same name; use it for folders of pairs, one around those of each client.

    Masks are grey, black and white or with a palette; their values are the classes, in ascending order, unless
    `data.classes` says how many there are: then each value is the number of its class.
    """
    pairs, alone = paired(pictures.names)
    if not pairs:
        raise UserError(f"data.path: '{pictures.path}' holds no image with a mask; expected {LAYOUT}")
    folders = Folders.of(pictures.path, [image for image, _ in pairs])
    people = folders.owners() if settings.owner == FOLDER else None
    test = folders.held_out() if settings.held_out == FOLDER else None
    kept = share_of_rows(people, len(pairs), settings.share, settings.seed)
    chosen = [pairs[row] for row in kept.tolist()]
    masks, notes = _numbered(pictures.read_masks([mask for _, mask in chosen], settings.size), settings, pictures)
    dataset = in_memory(
        pictures.read([image for image, _ in chosen], settings.size, settings.colours),
        masks,
        None if people is None else people[kept],
        held_out=None if test is None else test[kept],
        classes=settings.classes,
        name=pictures.path.stem,
    )
    if alone:
        notes.append(f"{len(alone)} pictures have no mask or no image of the same name, such as {alone[0]}: left out")
    return replace(dataset, notes=tuple(notes))


def paired(names: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return (image, mask) of the same name in folders beside each other, and what has no partner."""
    images: dict[tuple[str, ...], str] = {}
    masks: dict[tuple[str, ...], str] = {}
    alone: list[str] = []
    for name in names:
        path = PurePosixPath(name)
        folders = path.parent.parts
        kind = folders[-1].lower() if folders else ""
        where = images if kind in IMAGES else masks if kind in MASKS else None
        if where is None:
            alone.append(name)
        else:
            where[*folders[:-1], path.stem] = name
    alone += [
        name for one, other in ((images, masks), (masks, images)) for key, name in one.items() if key not in other
    ]
    return [(images[key], masks[key]) for key in sorted(images.keys() & masks.keys())], alone


def _numbered(
    values: NDArray[np.uint8], settings: DataSettings, pictures: Pictures
) -> tuple[NDArray[np.uint8], list[str]]:
    """Return masks as numbers of classes, and what they stand for where the files hold others."""
    levels: list[Any] = np.unique(values).tolist()
    if settings.classes is not None:
        if levels[-1] >= settings.classes:
            raise UserError(
                f"{pictures.path}: masks hold {levels[-1]}; expected classes 0 to {settings.classes - 1} (data.classes)"
            )
        return values, []
    if levels[0] != 0:
        levels = [0, *levels]
    if len(levels) < 2:
        raise UserError(f"{pictures.path}: masks hold the background, 0, alone; expected a class of pixels beside it")
    numbers = np.searchsorted(levels, values).astype(np.uint8)
    named = [class_note(f"{pictures.path.name}: classes of pixels", levels)]
    return numbers, [] if levels == list(range(len(levels))) else named


def read_digit_masks(settings: DataSettings) -> Dataset:
    """Return scikit-learn's digits, each somewhere on a larger image with its strokes as the mask; for a first try.

    A pixel of digit d is class d + 1 where it is at least half as bright as can be, all others are background. Where
    each digit lies is drawn once, the same on every machine.
    """
    digits = read_digits(settings)
    pixels, labels = digits.features.numpy()[:, 0], digits.labels.numpy()
    side = pixels.shape[-1]
    corners = randomness.generator(0, purpose="data/digit-masks").integers(0, SIDE - side + 1, size=(len(pixels), 2))
    images = np.zeros((len(pixels), 1, SIDE, SIDE), dtype=np.float32)
    masks = np.zeros((len(pixels), SIDE, SIDE), dtype=np.uint8)
    for row, (top, left) in enumerate(corners.tolist()):
        images[row, 0, top : top + side, left : left + side] = pixels[row]
        masks[row, top : top + side, left : left + side] = (pixels[row] >= 0.5) * (labels[row] + 1)
    return in_memory(images, masks, classes=11, name="digit-masks")
