"""A folder or zip of images: in a folder for each class, described by a CSV file, or CelebA as it comes."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.data.attributes import Table, beside, read_table
from steelyard.data.dataset import Dataset, share_of_rows
from steelyard.data.files import find
from steelyard.data.image_folders import FOLDER, Folders
from steelyard.data.masks import read_masked
from steelyard.data.memory import in_memory, owner_names
from steelyard.data.npz import class_numbers
from steelyard.data.settings import DataSettings
from steelyard.data.table_columns import numbered

if TYPE_CHECKING:
    from PIL.Image import Image

ORIGIN = (
    "a folder or .zip of images, in a folder for each class or with a table beside them (where data sets come from: "
    "docs/reference/data.md)"
)
MASK = "m"
"""The mode in which masks are read: as they are."""
_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


def read_images(settings: DataSettings) -> Dataset:
    """Return images as uint8 tensors channels×size×size with label, person and marks.

    Use it for images in folders named after their classes, or with an attribute table such as CelebA's. Rows of the
    table whose image is not there are left out and counted in the notes.
    """
    pictures = Pictures(find(settings.path, ORIGIN))
    if settings.task == "segmentation":
        return read_masked(pictures, settings)
    if settings.classes is not None:
        raise UserError(f"data.classes: got {settings.classes} with images in classes; allowed: task = 'segmentation'")
    table = _table(settings, pictures)
    rows = np.flatnonzero([name in pictures for name in table.images])
    if not len(rows):
        raise UserError(
            f"{table.path}: none of its {len(table.images)} images is in {pictures.path}; expected their names"
        )
    missing = len(table.images) - len(rows)
    notes = [f"{missing} of {len(table.images)} rows of {table.path.name} have no image"] if missing else []
    folders = Folders.of(pictures.path, [pictures.inside(table.images[row]) for row in rows])
    labels = _labels(table, settings, rows, folders, notes)
    people = _people(table, settings, rows, folders)
    test = folders.held_out() if settings.held_out == FOLDER else None
    marks = {name: table.mark(name, column)[rows] for name, column in _marks(table, settings).items()}
    kept = share_of_rows(people, len(rows), settings.share, settings.seed)
    dataset = in_memory(
        pictures.read([table.images[row] for row in rows[kept]], settings.size, settings.colours),
        labels[kept],
        None if people is None else people[kept],
        held_out=None if test is None else test[kept],
        marks={name: values[kept] for name, values in marks.items()},
        classes=int(labels.max()) + 1,
        name=pictures.path.stem,
    )
    return replace(dataset, notes=tuple(notes))


def _table(settings: DataSettings, pictures: Pictures) -> Table:
    """The attribute table, or one without attributes where the folders say what the images are."""
    by_folder = settings.labels == FOLDER or (
        settings.labels is None and beside(pictures.path) is None and Folders.of(pictures.path, pictures.names).by_class
    )
    if settings.attributes is None and by_folder:
        return Table(pictures.path, pictures.names, {})
    return read_table(settings, pictures.path)


def _labels(
    table: Table, settings: DataSettings, rows: NDArray[np.int64], folders: Folders, notes: list[str]
) -> NDArray[np.int64]:
    if settings.labels == FOLDER or (settings.labels is None and not table.columns):
        labels, numbered_notes = numbered(folders.classes().tolist(), f"{folders.path.name}: classes")
        notes.extend(numbered_notes)
        return labels
    return class_numbers(table.column("labels", settings.labels or "Smiling"), table.path)[rows]


def _people(table: Table, settings: DataSettings, rows: NDArray[np.int64], folders: Folders) -> NDArray[np.str_] | None:
    if settings.owner == FOLDER:
        return folders.owners()
    if settings.owner is None and "identity" not in table.columns:
        return None
    if not table.columns:
        raise UserError(
            f"data.owner: got '{settings.owner}' without a table of the images; allowed: folder, or data.attributes, "
            "a .csv with a column of image names and one of owners"
        )
    name = settings.owner or "identity"
    return owner_names(table.column("owner", name)[rows], name)


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
        self.names = images
        """All images by their path inside the folder or zip, sorted."""
        counts = Counter(PurePosixPath(name).name for name in images)
        self._repeated = {name for name, count in counts.items() if count > 1}
        self._paths = {PurePosixPath(name).name: name for name in images} | {name: name for name in images}

    def _zip_names(self) -> list[str]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                return archive.namelist()
        except (zipfile.BadZipFile, OSError) as problem:
            raise UserError(f"{self.path}: cannot be read as .zip ({problem}); expected {ORIGIN}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def inside(self, name: str) -> str:
        """Return the path of an image inside the folder or zip; a name that several folders have is refused."""
        if name not in self._paths:
            raise UserError(f"{self.path}: holds no image '{name}'; expected every image that is named")
        if name in self._repeated and name not in self.names:
            raise UserError(f"{self.path}: several folders hold an image '{name}'; expected names with their folder")
        return self._paths[name]

    def read(self, names: Sequence[str], size: int, colours: Literal["rgb", "grey"] = "rgb") -> NDArray[np.uint8]:
        """Decode these images to RGB or grey, shape (images, 3 or 1, size, size)."""
        return self._all(names, size, "L" if colours == "grey" else "RGB")

    def read_masks(self, names: Sequence[str], size: int) -> NDArray[np.uint8]:
        """Decode masks, whose values are classes of pixels: (images, size, size), scaled by nearest pixels."""
        return self._all(names, size, MASK)[:, 0]

    def _all(self, names: Sequence[str], size: int, mode: str) -> NDArray[np.uint8]:
        if find_spec("PIL") is None:
            raise UserError(
                "data.source: reading images needs Pillow; install it with: pip install 'steelyard[images]'"
            )
        decoded = np.empty((len(names), len(mode), size, size), dtype=np.uint8)
        archive = zipfile.ZipFile(self.path) if self.path.is_file() else None
        try:
            for row, name in enumerate(names):
                decoded[row] = self._decode(archive, name, size, mode)
        finally:
            if archive is not None:
                archive.close()
        return decoded

    def _decode(self, archive: zipfile.ZipFile | None, name: str, size: int, mode: str) -> NDArray[np.uint8]:
        # For speed of start: few data sets are image files.
        from PIL import Image

        path = self.inside(name)
        try:
            content = (self.path / path).read_bytes() if archive is None else archive.read(path)
            with Image.open(io.BytesIO(content)) as image:
                if mode == MASK and image.mode not in ("1", "L", "P"):
                    raise UserError(
                        f"{self.path}: mask '{path}' is {image.mode}; expected grey, black and white or a "
                        "palette, each value a class"
                    )
                pixels = np.asarray(_square(image if mode == MASK else image.convert(mode), size, exact=mode == MASK))
                return pixels.reshape(size, size, len(mode)).transpose(2, 0, 1)
        except UserError:
            raise
        # Pillow raises its own error for pictures of absurd size, and SyntaxError for some broken files.
        except Image.DecompressionBombError as problem:
            raise UserError(
                f"{self.path}: image '{path}' is too large ({problem}); expected a smaller picture"
            ) from None
        except (OSError, SyntaxError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
            raise UserError(f"{self.path}: image '{path}' is broken; expected a whole picture") from None


def _square(image: Image, size: int, *, exact: bool = False) -> Image:
    """Cut the central square and scale it to size × size; `exact` takes the nearest pixel, for no value but those."""
    # For speed of start: few data sets are image files.
    from PIL.Image import Resampling

    side = min(image.size)
    if image.size == (size, size):
        return image
    left, top = (image.width - side) // 2, (image.height - side) // 2
    how = Resampling.NEAREST if exact else Resampling.LANCZOS
    return image.resize((size, size), how, box=(left, top, left + side, top + side))
