"""NumPy archives with an array of features, one of labels and one that says whose row it is."""

from __future__ import annotations

import struct
import tokenize
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.marks import DataFile
from steelyard.data.cells import class_numbers, marked, numbering
from steelyard.data.files import find
from steelyard.data.sources.source import FileSource, SourceCapabilities

if TYPE_CHECKING:
    # For speed of start: settings are read without torch.
    from steelyard.data.dataset import Dataset

ORIGIN = "an .npz file with arrays of features, labels and owners (numpy.savez), one row each"
_OWNERS = ("writer", "user", "owner", "identity")


class Npz(FileSource, named="npz"):
    """NumPy arrays in one file; use it for UNIPEN-62, FEMNIST or any data packed by writer or user.

    Images may be (rows, height, width) or have channels last or first; they become channels first. A file with arrays
    `attributes` and `attribute_names` also offers each of those names as an array.
    """

    path: Annotated[Path, DataFile("data")]
    """The .npz file, looked for beside the experiment's file, then in the working folder, then in the folder that the
    environment variable STEELYARD_DATA names, then in ../shared/data."""
    features: str = "x"
    """Name of the array with one sample per row."""
    labels: str = "y"
    """Name of the array of labels."""
    owner: str | None = None
    """Name of the array that says whose row it is. Default: the first there is of writer, user, owner, identity."""
    held_out: str | None = None
    """Name of a true/false array that marks the rows of the source's own test part."""
    task: Literal["classes", "regression", "segmentation", "multi-label"] = "classes"
    """Whether labels are classes (whole numbers or words), the target of a regression, masks (rows, height, width), or
    several for each row (rows, labels), 0 or 1."""
    marks: dict[str, str] = Field(default_factory=dict)
    """Further attributes of each row, as name = "array" or name = "not array", each 0/1."""

    def capabilities(self) -> SourceCapabilities:
        return SourceCapabilities(
            self.task,
            classes=self.classes if self.task == "classes" else 0,
            marks=frozenset(self.marks),
            owners=True,
            held_out=self.held_out is not None,
            splits_owners=True,
        )

    def read(self) -> Dataset:
        # For speed of start: settings are read without torch.
        from steelyard.data.dataset import of_arrays, owner_names

        path = find(self.path, ORIGIN)
        arrays = read_arrays(path)
        features = channels_first(_column(path, arrays, "features", self.features))
        if features.ndim < 2:
            raise UserError(
                f"{path}: data.features has shape {features.shape}; expected (rows, ...) with two or more axes"
            )
        raw = _column(path, arrays, "labels", self.labels)
        rows = len(features)
        notes, names = (), list[str]()
        axes, shown = 1, f"({rows},), one per row"
        if self.task == "segmentation":
            axes, shown = 3, f"({rows}, height, width), a mask per row"
        elif self.task == "multi-label":
            axes, shown = 2, f"({rows}, labels), 0 or 1 each"
        if raw.ndim != axes or len(raw) != rows:
            raise UserError(f"{path}: data.labels has shape {raw.shape}; expected {shown}")
        if axes > 1:
            labels = raw
        elif self.task == "regression":
            labels = raw.astype(np.float32) if raw.dtype.kind in "biuf" else raw
        else:
            labels, names = class_numbers(raw, path)
            notes = tuple(numbering(f"{path.name}: classes of '{self.labels}'", names))
        owner = self.owner or next((name for name in _OWNERS if name in arrays), None)
        people = None if owner is None else owner_names(_column(path, arrays, "owner", owner), owner)
        test = None if self.held_out is None else _column(path, arrays, "held_out", self.held_out)
        marks = {
            name: marked(_column(path, arrays, f"marks.{name}", column.removeprefix("not ")), name, column, path)
            for name, column in self.marks.items()
        }
        dataset = of_arrays(features, labels, people, held_out=test, marks=marks, classes=self.classes, name=path.name)
        target = dataset.described.target
        named = [*names, *target.names[len(names) :]]
        target = target.model_copy(update={"label": self.labels, "names": named})
        prepared = dataset.described.model_copy(update={"target": target})
        return replace(dataset, notes=(*dataset.notes, *notes), preparation=prepared)


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an npz file by name; nothing is ever unpickled."""
    try:
        archive: Any = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise UserError(f"{path}: holds one bare array; expected an .npz archive")
        with archive:
            return {name: _native(archive[name]) for name in archive.files}
    # NotImplementedError: a zip with a password or an unknown way of packing; SyntaxError and the like: a header.
    except (OSError, ValueError, EOFError, KeyError, TypeError, SyntaxError, NotImplementedError) as problem:
        raise _unreadable(path, problem) from None
    except (zipfile.BadZipFile, zlib.error, struct.error, RuntimeError, MemoryError, tokenize.TokenError) as problem:
        raise _unreadable(path, problem) from None


def _unreadable(path: Path, problem: BaseException) -> UserError:
    if isinstance(problem, UserError):
        return problem
    if "pickle" in str(problem):
        # NumPy would advise to unpickle, which runs whatever code the file holds.
        why = "it holds Python objects, or is no such file at all"
    elif isinstance(problem, MemoryError):
        why = "an array larger than the memory"
    elif isinstance(problem, OSError) and problem.strerror:
        why = problem.strerror
    else:
        why = "it is cut off or damaged"
    return UserError(f"{path}: cannot be read as npz ({why}); expected an archive of plain arrays of numbers and text")


def _native(array: Any) -> NDArray[Any]:
    """Return an array in this machine's byte order; what is no array in the archive is refused."""
    if not isinstance(array, np.ndarray):
        raise ValueError("not an array")
    kept: NDArray[Any] = array
    return kept if kept.dtype.isnative else kept.astype(kept.dtype.newbyteorder("="))


def _column(path: Path, arrays: dict[str, NDArray[Any]], field: str, name: str) -> NDArray[Any]:
    if name in arrays:
        return arrays[name]
    names = arrays.get("attribute_names")
    table = arrays.get("attributes")
    known = list(arrays)
    if names is not None and table is not None and names.ndim == 1 and table.ndim == 2:
        columns = [str(word) for word in names.tolist()]
        if name in columns and len(columns) == table.shape[1]:
            return table[:, columns.index(name)]
        known += columns
    allowed = listed(known) or "none, since it holds no array"
    raise UserError(f"data.{field}: found no '{name}' in {path}{nearest(name, known)}; allowed: {allowed}")


def channels_first(features: NDArray[Any]) -> NDArray[Any]:
    """Return images (rows, height, width) or with channels last as (rows, channels, height, width); others stay."""
    if features.ndim == 3:
        return features[:, None]
    if features.ndim == 4 and features.shape[-1] in (1, 3) and features.shape[1] not in (1, 3):
        return features.transpose(0, 3, 1, 2)
    return features
