"""A folder or zip of images with an attribute table: CelebA as it comes, or any images described by a CSV file."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from steelyard.data.attributes import Table, read_table
from steelyard.data.dataset import Dataset
from steelyard.data.files import find
from steelyard.data.memory import in_memory, owner_names
from steelyard.data.npz import class_numbers
from steelyard.data.settings import DataSettings
from steelyard.data.subset import share_of_rows
from steelyard.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

ORIGIN = (
    "a folder or .zip of images; CelebA's img_align_celeba and its annotations come from "
    "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html (non-commercial research only)"
)
_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


def read_images(settings: DataSettings) -> Dataset:
    """Return images as uint8 tensors 3×size×size with label, person and marks; use it for CelebA.

    Rows of the attribute table whose image is not there are left out and counted in the notes.
    """
    pictures = Pictures(find(settings.path, ORIGIN))
    table = read_table(settings, pictures.path)
    labels = class_numbers(table.column("labels", settings.labels or "Smiling"), table.path)
    people = _people(table, settings)
    marks = {name: table.mark(name, column) for name, column in _marks(table, settings).items()}
    rows = np.flatnonzero([name in pictures for name in table.images])
    if not len(rows):
        raise UserError(
            f"{table.path}: none of its {len(table.images)} images is in {pictures.path}; expected their names"
        )
    missing = len(table.images) - len(rows)
    if settings.share < 1:
        rows = rows[share_of_rows(None if people is None else people[rows], len(rows), settings.share, settings.seed)]
    dataset = in_memory(
        pictures.read([table.images[row] for row in rows], settings.size),
        labels[rows],
        None if people is None else people[rows],
        marks={name: values[rows] for name, values in marks.items()},
        classes=int(labels.max()) + 1,
        name=pictures.path.stem,
    )
    notes = (f"{missing} of {len(table.images)} rows of {table.path.name} have no image",) if missing else ()
    return replace(dataset, notes=notes)


def _people(table: Table, settings: DataSettings) -> NDArray[np.str_] | None:
    if settings.owner is None and "identity" not in table.columns:
        return None
    name = settings.owner or "identity"
    return owner_names(table.column("owner", name), name)


def _marks(table: Table, settings: DataSettings) -> dict[str, str]:
    return settings.marks or ({"sharp": "not Blurry"} if "Blurry" in table.columns else {})


class Pictures:
    """The images of a folder (with its subfolders) or of a zip, found by name or by their path inside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        names = self._zip_names() if path.is_file() else [str(p.relative_to(path).as_posix()) for p in path.rglob("*")]
        images = [name for name in sorted(names) if PurePosixPath(name).suffix.lower() in _SUFFIXES]
        if not images:
            raise UserError(f"data.path: '{path}' holds no image ({', '.join(_SUFFIXES)}); expected {ORIGIN}")
        self._paths = {PurePosixPath(name).name: name for name in images} | {name: name for name in images}

    def _zip_names(self) -> list[str]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                return archive.namelist()
        except (zipfile.BadZipFile, OSError) as problem:
            raise UserError(f"{self.path}: cannot be read as .zip ({problem}); expected {ORIGIN}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def read(self, names: Sequence[str], size: int) -> NDArray[np.uint8]:
        """Decode these images to RGB, shape (images, 3, size, size)."""
        if find_spec("PIL") is None:
            raise UserError(
                "data.source: reading images needs Pillow; install it with: pip install 'steelyard[images]'"
            )
        decoded = np.empty((len(names), 3, size, size), dtype=np.uint8)
        archive = zipfile.ZipFile(self.path) if self.path.is_file() else None
        try:
            for row, name in enumerate(names):
                decoded[row] = self._decode(archive, name, size)
        finally:
            if archive is not None:
                archive.close()
        return decoded

    def _decode(self, archive: zipfile.ZipFile | None, name: str, size: int) -> NDArray[np.uint8]:
        # For speed of start: few data sets are image files.
        from PIL import Image

        if name not in self._paths:
            raise UserError(f"{self.path}: holds no image '{name}'; expected every image that is named")
        path = self._paths[name]
        try:
            content = (self.path / path).read_bytes() if archive is None else archive.read(path)
            with Image.open(io.BytesIO(content)) as image:
                return np.asarray(_square(image.convert("RGB"), size)).transpose(2, 0, 1)
        # Pillow raises SyntaxError for some broken files and its own error for pictures of absurd size.
        except (
            OSError,
            SyntaxError,
            ValueError,
            EOFError,
            zipfile.BadZipFile,
            zlib.error,
            Image.DecompressionBombError,
        ):
            raise UserError(f"{self.path}: image '{path}' is broken; expected a whole picture") from None


def _square(image: Image, size: int) -> Image:
    """Cut the central square and scale it to size × size."""
    # For speed of start: few data sets are image files.
    from PIL.Image import Resampling

    side = min(image.size)
    if image.size == (size, size):
        return image
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.resize((size, size), Resampling.LANCZOS, box=(left, top, left + side, top + side))
