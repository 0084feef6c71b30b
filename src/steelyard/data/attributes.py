"""Attribute tables of images: a CSV file, or CelebA's own text files."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError, listed, nearest
from steelyard.data.delimited import parse
from steelyard.data.files import find, read_text
from steelyard.data.settings import DataSettings

if TYPE_CHECKING:
    import pandas

ORIGIN = "a .csv with a column of image names, or CelebA's list_attr_celeba.txt, either also as .gz"
_IMAGE_COLUMNS = ("image", "image_id", "file", "filename", "file_name", "name")


@dataclass(frozen=True)
class Table:
    """One row per image: its name and its attributes."""

    path: Path
    images: list[str]
    columns: dict[str, NDArray[Any]]

    def column(self, field: str, name: str) -> NDArray[Any]:
        """Return one column; `field` is the setting that named it, for the error line."""
        if name not in self.columns:
            known = list(self.columns)
            raise UserError(
                f"data.{field}: found no '{name}' in {self.path}{nearest(name, known)}; allowed: {listed(known)}"
            )
        return self.columns[name]

    def mark(self, mark: str, column: str) -> NDArray[np.float64]:
        """Return a column as 0/1 (anything above 0 is 1); `not column` turns it round."""
        values = self.column(f"marks.{mark}", column.removeprefix("not "))
        if values.dtype.kind not in "biuf":
            raise UserError(f"data.marks.{mark}: column '{column}' of {self.path} is text; allowed: columns of numbers")
        return ((values > 0) != column.startswith("not ")).astype(np.float64)


def read_table(settings: DataSettings, images: Path) -> Table:
    """Return the attribute table of these images, joined with the file of identities where there is one."""
    path = find(settings.attributes, ORIGIN, field="attributes") if settings.attributes else _table_beside(images)
    frame = _read_csv(path) if ".csv" in path.suffixes else _read_celeba(path)
    identities = settings.identities and find(
        settings.identities, "CelebA's identity_CelebA.txt, also as .gz", field="identities"
    )
    if identities is None and "identity" not in frame.columns:
        identities = _first([path.parent / f"identity_CelebA.txt{packed}" for packed in ("", ".gz")])
    if identities is not None:
        frame = frame.drop(columns="identity", errors="ignore").join(_read_identities(identities), how="left")
        unknown = np.flatnonzero(frame["identity"].isna().to_numpy())
        if len(unknown):
            name = frame.index[int(unknown[0])]
            raise UserError(f"{identities}: names no identity for image '{name}' of {path}; expected one per image")
        frame["identity"] = frame["identity"].astype("int64")
    columns = {str(name): _plain(frame[name].to_numpy()) for name in frame.columns}
    return Table(path, [str(name) for name in frame.index], columns)


def beside(images: Path) -> Path | None:
    """Return the table that lies in the folder of the images or of their zip, or one above; None if there is none."""
    return _first(_named(images)) or next(iter(_unnamed(images)), None)


def _named(images: Path) -> list[Path]:
    folders = [images, images.parent] if images.is_dir() else [images.parent]
    stem = images.stem if images.is_file() else images.name
    names = [f"{stem}_metadata.csv", f"{stem}.csv", "list_attr_celeba.csv", "list_attr_celeba.txt"]
    return [folder / f"{name}{packed}" for folder in folders for name in names for packed in ("", ".gz")]


def _unnamed(images: Path) -> list[Path]:
    folders = [images, images.parent] if images.is_dir() else [images.parent]
    return [path for folder in folders for path in sorted([*folder.glob("*.csv"), *folder.glob("*.csv.gz")])]


def _table_beside(images: Path) -> Path:
    if found := _first(_named(images)):
        return found
    others = _unnamed(images)
    if len(others) == 1:
        return others[0]
    raise UserError(
        f"data.attributes: got nothing, and beside {images} there are {len(others)} .csv files; allowed: {ORIGIN}"
    )


def _first(paths: list[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _read_csv(path: Path) -> pandas.DataFrame:
    frame = parse(path, io.StringIO(read_text(path)), ORIGIN)
    image = next((name for name in _IMAGE_COLUMNS if name in frame.columns), None)
    if image is None or frame.empty:
        raise UserError(
            f"{path}: has {len(frame)} rows and columns {listed(map(str, frame.columns))}; "
            f"expected rows and a column of image names: {listed(_IMAGE_COLUMNS)}"
        )
    return _by_image(path, frame.rename(columns={image: "image"}))


def _read_celeba(path: Path) -> pandas.DataFrame:
    """The original text: a count, a line of attribute names, then a line per image with -1 or 1 for each."""
    head = read_text(path).split("\n", 2)
    if len(head) < 3 or not head[0].strip().isdigit():
        raise UserError(f"{path}: starts with {head[0][:30]!r}; expected {ORIGIN}, which starts with a count")
    frame = _by_spaces(path, head[2], ["image", *head[1].split()])
    if len(frame) != int(head[0]) or frame.isna().to_numpy().any():
        raise UserError(
            f"{path}: holds {len(frame.dropna())} whole rows (cut off?); expected {int(head[0])}, its first line"
        )
    return _by_image(path, frame)


def _read_identities(path: Path) -> pandas.DataFrame:
    frame = _by_spaces(path, read_text(path), ["image", "identity"])
    if frame.isna().to_numpy().any() or frame["identity"].dtype.kind not in "iu":
        raise UserError(f"{path}: not lines of an image name and a whole number; expected CelebA's identity_CelebA.txt")
    return _by_image(path, frame)


def _by_spaces(path: Path, text: str, names: list[str]) -> pandas.DataFrame:
    return parse(path, io.StringIO(text), ORIGIN, sep=r"\s+", header=None, names=names, index_col=False)


def _by_image(path: Path, frame: pandas.DataFrame) -> pandas.DataFrame:
    frame = frame.set_index("image")
    if not frame.index.is_unique:
        raise UserError(
            f"{path}: names image '{frame.index[frame.index.duplicated()][0]}' twice; expected one row per image"
        )
    return frame


def _plain(values: NDArray[Any]) -> NDArray[Any]:
    return values if values.dtype.kind in "biuf" else values.astype(np.str_)
