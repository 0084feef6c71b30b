"""A model as named arrays, and updates as two flat vectors in files: what frameworks send."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.messages.payloads import ServerTest, SingleModels, spans

Arrays = Mapping[str, NDArray[Any]]


def described(arrays: Arrays) -> dict[str, list[str | int]]:
    """Return each array's type and shape by its name, as a run's facts have them."""
    return {name: [array.dtype.name, *array.shape] for name, array in arrays.items()}


VARIANCES = ("running_var", "moving_variance")
"""How names end of the variances that batch norm keeps, below 0 of which a network gives NaN."""
_PIECE = 1 << 22
"""Numbers of an array that are worked on in one go: an array may be as large as the whole model."""


@dataclass(frozen=True)
class Layout:
    """Names, shapes and types of a model's arrays.

    An update is what a client changed. Floating arrays make up the vector that is weighed; whole numbers and truth
    values, such as batch norm's counter, make up a second one, which is averaged exactly and rounded.
    """

    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, np.dtype[Any]]

    @classmethod
    def of(cls, arrays: Arrays) -> Layout:
        """Return the layout of a model."""
        for name, array in arrays.items():
            if array.dtype.kind not in "fiub":
                raise UserError(f"model: array {name} is of type {array.dtype}; allowed: floating point, whole numbers")
        return cls({n: a.shape for n, a in arrays.items()}, {n: a.dtype for n, a in arrays.items()})

    @classmethod
    def read(cls, described: Mapping[str, Sequence[str | int]]) -> Layout:
        """Return the layout that `described` wrote down; ValueError or TypeError where it is none."""
        shapes = {name: tuple(map(int, shape)) for name, (_, *shape) in described.items()}
        return cls(shapes, {name: np.dtype(str(kind)) for name, (kind, *_) in described.items()})

    @property
    def floating(self) -> list[str]:
        """Names of the arrays that make up the vector, in order."""
        return [name for name, kind in self.types.items() if kind.kind == "f"]

    @property
    def counting(self) -> list[str]:
        """Names of the arrays of whole numbers and truth values, in order."""
        return [name for name, kind in self.types.items() if kind.kind != "f"]

    @property
    def precision(self) -> np.dtype[Any]:
        """What the vector is computed in: float64 where any array is, float32 otherwise (half precision too)."""
        wide = any(self.types[name].itemsize > 4 for name in self.floating)
        return np.dtype(np.float64 if wide else np.float32)

    def size(self, names: Sequence[str]) -> int:
        """Return how many numbers these arrays hold."""
        return sum(prod(self.shapes[name]) for name in names)

    def refusal(self, arrays: Arrays) -> str:
        """Say why another model is not of this layout; empty where it is."""
        for name in self.types:
            if name not in arrays:
                return f"array {name} is missing"
            if arrays[name].shape != self.shapes[name]:
                return f"array {name} has shape {arrays[name].shape}, and {self.shapes[name]} was sent"
            kind = arrays[name].dtype.kind
            if (kind == "f") != (self.types[name].kind == "f") or kind not in "fiub":
                return f"array {name} is of type {arrays[name].dtype}, and {self.types[name]} was sent"
        extra = [name for name in arrays if name not in self.types]
        return f"array {extra[0]} was not sent" if extra else ""

    def changes(self, names: Sequence[str], arrays: Arrays, sent: Arrays | None) -> Iterator[NDArray[Any]]:
        """Yield what arrays changed of those that were sent, piece by piece; without these, they are changes already.

        Whole numbers are subtracted as such, so that even a counter beyond 2⁵³ loses nothing.
        """
        for name in names:
            kind = self.precision if self.types[name].kind == "f" else np.dtype(np.int64)
            flat = arrays[name].reshape(-1)
            base = None if sent is None else sent[name].reshape(-1)
            for begin in range(0, len(flat), _PIECE):
                piece = flat[begin : begin + _PIECE].astype(kind)
                if base is not None:
                    # An overflow is no number, and as such it is refused with its reason.
                    with np.errstate(over="ignore", invalid="ignore"):
                        piece -= base[begin : begin + _PIECE].astype(kind)
                yield piece

    def arrays(
        self, vector: torch.Tensor, counted: torch.Tensor | None, sent: Arrays | None
    ) -> dict[str, NDArray[Any]]:
        """Return changes as arrays of the layout's types, added to what was sent; the vectors are used up.

        Without `counted`, arrays of whole numbers are left out; without `sent`, the result is the changes.
        """
        found: dict[str, NDArray[Any]] = {}
        for names, values in ((self.floating, vector), (self.counting, counted)):
            begin = 0
            for name in () if values is None else names:
                assert values is not None
                part = values[begin : begin + prod(self.shapes[name])].detach().numpy().reshape(self.shapes[name])
                begin += part.size
                if self.types[name].kind != "f":
                    part = np.rint(part, out=part).astype(np.int64)
                if sent is not None:
                    part += sent[name].astype(part.dtype, copy=False)
                found[name] = part.astype(self.types[name], copy=False)
        return {name: found[name] for name in self.types if name in found}


# A cohort's updates, taken in one by one into a file.


class Spill:
    """Takes the updates of a round, each in pieces, into a file without a name: it is gone when nobody holds it.

    `folder` is where the file lies; the system keeps in memory what there is room for.
    """

    def __init__(self, size: int, kind: np.dtype[Any], folder: Path | None) -> None:
        self.size, self.kind, self.folder, self._count = size, kind, folder, 0
        with self._told():
            # It stays open as long as somebody adds.
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115

    def add(self, pieces: Iterable[NDArray[Any]]) -> None:
        """Take the next client's numbers."""
        with self._told():
            for piece in pieces:
                view = np.ascontiguousarray(piece, dtype=self.kind).data.cast("B")
                while view:
                    view = view[self._file.write(view) :]
        self._count += 1

    @contextmanager
    def _told(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            where = tempfile.gettempdir() if self.folder is None else self.folder
            raise UserError(
                f"folder: an update of {self.size * self.kind.itemsize} bytes cannot be put into {where} "
                f"({error.strerror}); allowed: a folder on a disk with room for every client of a round"
            ) from error

    def models(self, rows: Sequence[int]) -> MappedModels:
        """Return the updates of some clients, by the order in which they came."""
        shape = (self._count, self.size)
        whole = np.memmap(self._file, self.kind, "r", shape=shape) if self.size and self._count else np.empty(shape)
        return MappedModels(whole.view(np.ndarray), np.asarray(rows, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class MappedModels(SingleModels):
    """Updates in a file that is mapped into memory: they are read as they are used, some parameters at a time."""

    whole: NDArray[Any]
    rows: NDArray[np.int64]

    @property
    def like(self) -> torch.Tensor:
        return torch.from_numpy(np.empty((len(self.rows), 0), dtype=self.whole.dtype))

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        for span in spans(self.whole.shape[1], len(self.rows)):
            yield span, torch.from_numpy(self.whole[self.rows, span])

    def select(self, keep: Sequence[int]) -> MappedModels:
        return MappedModels(self.whole, self.rows[list(keep)])

    def tested(self, test: Callable[[torch.Tensor], ServerTest]) -> ServerTest:
        return ServerTest.joined([test(torch.from_numpy(self.whole[[row]])) for row in self.rows.tolist()])

    def content(self) -> None:
        """Return nothing: what lies on a disk for the length of a round has no digests."""
        return
