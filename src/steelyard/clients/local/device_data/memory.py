"""Memory for the models of a cohort: taken once, used again as soon as no tensor refers to it."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref

import torch


class MatrixPool:
    """Gives out matrices in main memory; fresh pages cost more than the numbers written to them, so they are kept.

    Each block is given out as a view that the matrix and all tensors made from it keep alive: the block is free again
    when the view is gone.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._blocks: list[tuple[mmap.mmap, weakref.ref[memoryview]]] = []

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        """Return an uninitialised float32 matrix; beyond the limit it lies in a file that is read as it is used."""
        needed = 4 * rows * columns
        if not needed:
            return torch.empty((rows, columns))
        if needed > self.limit:
            return _in_file(rows, columns)
        block = self._free(needed)
        view = memoryview(block)
        self._blocks.append((block, weakref.ref(view)))
        return torch.frombuffer(view, dtype=torch.float32, count=rows * columns).view(rows, columns)

    def _free(self, needed: int) -> mmap.mmap:
        """Return a block that fits and that nobody uses, or a fresh one; other unused blocks are let go for it."""
        for place, (block, view) in enumerate(self._blocks):
            if view() is None and needed <= len(block) <= 2 * needed:
                del self._blocks[place]
                return block
        self._blocks = [each for each in self._blocks if each[1]() is not None]
        return _fresh(needed)

    def held(self) -> int:
        """Return the bytes of all blocks."""
        return sum(len(block) for block, _ in self._blocks)


def on_large_pages(numbers: int) -> torch.Tensor:
    """Return an uninitialised float32 vector for what is read over and over; it is gone with its last tensor."""
    return torch.frombuffer(_fresh(4 * numbers), dtype=torch.float32, count=numbers)


def _fresh(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    # Large pages: a cohort of models touches tens of thousands of small ones. They are given to private memory only.
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _in_file(rows: int, columns: int) -> torch.Tensor:
    handle, path = tempfile.mkstemp(prefix="steelyard-updates-")
    os.close(handle)
    try:
        matrix = torch.from_file(path, shared=True, size=rows * columns, dtype=torch.float32)
    finally:
        os.unlink(path)  # the mapping keeps the file alive as long as the matrix is
    return matrix.view(rows, columns)
