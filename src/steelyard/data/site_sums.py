"""What a site tells of its columns of numbers, so that sites agree on one scale: counts, means, deviations; no row.

Everything follows from the site's own training rows and its owner's minimum. Whoever asks chooses nothing: two answers
never differ by a few rows, and a second one says what the first one said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

MOST_ROWS = 10**12
LARGEST, SMALLEST = 1e30, 1e-30
"""Of means and deviations; an experiment holds no larger ones, and a smaller deviation would scale to infinity."""


@dataclass(frozen=True, eq=False)
class SiteSums:
    """The columns of one site, or of several together; each column's numbers stand at its place in `columns`."""

    columns: tuple[str, ...]
    present: Counts
    """Cells that are there; 0 where they are too few to be told."""
    mean: Floats
    deviation: Floats

    @classmethod
    def of(cls, columns: Sequence[str], numbers: Floats, least: int) -> SiteSums:
        """Return what a site tells of rows × columns, NaN for empty cells.

        Nothing rests on fewer than `least` rows: a column with fewer cells is not told, and fewer empty cells than that
        count as full.
        """
        there = ~np.isnan(numbers)
        count = there.sum(axis=0)
        mean = np.where(there, numbers, 0.0).sum(axis=0) / np.maximum(count, 1)
        deviation = np.sqrt(np.square(np.where(there, numbers - mean, 0.0)).sum(axis=0) / np.maximum(count, 1))
        told = count >= max(least, 1)
        present = np.where(len(numbers) - count < least, len(numbers), count)
        return cls(tuple(columns), (present * told).astype(np.int64), mean * told, deviation * told)

    def at_most(self, cells: int) -> SiteSums:
        """Return the same where no column counts for more cells, so that nobody decides by what it claims."""
        return replace(self, present=np.minimum(self.present, cells))

    def fault(self) -> str:
        """Say why no site can have such numbers; empty where one can."""
        if len(set(self.columns)) != len(self.columns):
            return "a column is named twice; allowed: once"
        if not bool(((self.present >= 0) & (self.present <= MOST_ROWS)).all()):
            return f"counts below 0 or above {MOST_ROWS:g}; allowed: numbers of cells"
        spread = (self.deviation == 0) | ((self.deviation >= SMALLEST) & (self.deviation < LARGEST))
        if not bool(((np.abs(self.mean) < LARGEST) & spread).all()):
            return f"a mean or deviation that is no number from {SMALLEST:g} to {LARGEST:g}; allowed: those of cells"
        return ""


def pooled(parts: Sequence[SiteSums]) -> SiteSums:
    """Return what sites with the same columns have together."""
    present = np.sum([part.present for part in parts], axis=0)
    shares = [part.present / np.maximum(present, 1) for part in parts]
    mean = np.sum([share * part.mean for share, part in zip(shares, parts, strict=True)], axis=0)
    squares = [
        share * (np.square(part.deviation) + np.square(part.mean - mean))
        for share, part in zip(shares, parts, strict=True)
    ]
    return SiteSums(parts[0].columns, present, mean, np.sqrt(np.sum(squares, axis=0)))


def scales(together: SiteSums) -> Mapping[str, tuple[float, float]]:
    """Return the mean and deviation by which every site fills and scales each column; 1 for one that never changes."""
    return {
        name: (mean, deviation or 1.0)
        for name, cells, mean, deviation in zip(
            together.columns,
            together.present.tolist(),
            together.mean.tolist(),
            together.deviation.tolist(),
            strict=True,
        )
        if cells
    }
