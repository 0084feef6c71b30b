"""Updates of a cohort that are taken in one by one: in memory while they are small, in temporary files beyond that."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.messages.payloads import Floats, ServerTest, SingleModels, spans


@dataclass(eq=False)
class _Row:
    """One client's numbers: an array, or a file without a name, which is gone as soon as nobody holds it."""

    values: NDArray[Any] | IO[bytes]
    finite: bool

    def read(self, span: slice, kind: np.dtype[Any]) -> NDArray[Any]:
        if isinstance(self.values, np.ndarray):
            return self.values[span]
        found = np.empty(span.stop - span.start, dtype=kind)
        view, offset = found.data.cast("B"), span.start * kind.itemsize
        while view:
            count = os.preadv(self.values.fileno(), [view], offset)
            if not count:
                raise UserError("spilled updates: a temporary file was cut while it was in use")
            view, offset = view[count:], offset + count
        return found


@dataclass(eq=False)
class Spill:
    """Takes the updates of a round, each in pieces; `folder` is where those go that do not fit into `memory` bytes."""

    size: int
    kind: np.dtype[Any]
    folder: Path | None
    memory: int
    rows: list[_Row] = field(default_factory=list[_Row])

    def add(self, pieces: Iterable[NDArray[Any]]) -> None:
        """Take the next client's numbers."""
        finite = True

        def checked() -> Iterator[NDArray[Any]]:
            nonlocal finite
            for piece in pieces:
                finite = finite and bool(np.isfinite(piece).all())
                yield piece.astype(self.kind, copy=False)

        length = self.size * self.kind.itemsize
        if length <= self.memory:
            self.memory -= length
            values: Any = np.empty(self.size, dtype=self.kind)
            begin = 0
            for piece in checked():
                values[begin : begin + len(piece)] = piece
                begin += len(piece)
        else:
            values = self._file(checked())
        self.rows.append(_Row(values, finite))

    def _file(self, pieces: Iterable[NDArray[Any]]) -> IO[bytes]:
        try:
            # It stays open as long as somebody holds it.
            file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
            for piece in pieces:
                view = np.ascontiguousarray(piece).data.cast("B")
                while view:
                    view = view[file.write(view) :]
        except OSError as error:
            where = tempfile.gettempdir() if self.folder is None else self.folder
            raise UserError(
                f"folder: an update of {self.size * self.kind.itemsize} bytes cannot be put into {where} "
                f"({error.strerror}); allowed: a folder on a disk with room for every client of a round"
            ) from error
        return file

    def models(self, rows: Sequence[int]) -> SpilledModels:
        """Return the updates of some clients, by the order in which they came."""
        return SpilledModels(tuple(self.rows[row] for row in rows), self.size, self.kind)


@dataclass(frozen=True, eq=False)
class SpilledModels(SingleModels):
    """Updates that lie somewhere else: whatever is done with them is done with some parameters of all at a time."""

    rows: tuple[_Row, ...]
    size: int
    kind: np.dtype[Any]

    @property
    def like(self) -> torch.Tensor:
        return torch.from_numpy(np.empty((len(self.rows), 0), dtype=self.kind))

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        for span in spans(self.size, len(self.rows)):
            yield span, torch.from_numpy(np.stack([row.read(span, self.kind) for row in self.rows]))

    def combine(self, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
        given = torch.as_tensor(weights, dtype=self.like.dtype)
        found = torch.empty((*given.shape[:-1], self.size), dtype=given.dtype)
        for span, models in self.blocks():
            found[..., span] = given @ models
        return found

    def divergence(self, parameters: torch.Tensor) -> Floats:
        total = torch.zeros(len(self.rows), dtype=torch.float64)
        for span, models in self.blocks():
            total += torch.linalg.vector_norm(models - parameters[span], dim=1, dtype=torch.float64).square()
        return total.sqrt().numpy()

    def select(self, keep: Sequence[int]) -> SpilledModels:
        return SpilledModels(tuple(self.rows[row] for row in keep), self.size, self.kind)

    def finite(self) -> NDArray[np.bool_]:
        return np.array([row.finite for row in self.rows], dtype=bool)

    def tested(self, test: Callable[[torch.Tensor], ServerTest]) -> ServerTest:
        found = [test(torch.from_numpy(row.read(slice(0, self.size), self.kind))[None]) for row in self.rows]
        return ServerTest.joined(found)

    def content(self) -> None:
        """Return nothing: what lies on a disk for the length of a round has no digests."""
        return
