"""What a site tells of its columns, so that sites agree on scales and compare themselves: sums and counts, no row.

Everything follows from the site's own training rows and its owner's minimum. The bins of the histograms are the same
for everybody, and whoever asks chooses nothing: two answers never differ by a few rows, and a second one says what the
first one said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from steelyard.data.cells import in_order as in_level_order
from steelyard.data.cells import moments, plain
from steelyard.data.findings import Finding, alone, beside, in_order
from steelyard.data.preparation import Column, Preparation, Scale
from steelyard.data.profile import ColumnProfile, SiteProfile, edges_of, profile_column

if TYPE_CHECKING:
    # Only for annotations: the process of a node that speaks to the server does without torch.
    from steelyard.data.dataset import Dataset, Rows
    from steelyard.data.sources.csv import Csv

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_MAGNITUDES: Floats = 10.0 ** (np.arange(-120, 241) / 20)
EDGES: Floats = np.concatenate([-_MAGNITUDES[::-1], _MAGNITUDES])
"""Where bins meet: twenty to each power of ten, from a millionth to a trillion, below and above 0."""
BINS = len(EDGES) + 1
_REACH: Floats = np.maximum(np.abs(np.insert(EDGES, 0, 0.0)), np.abs(np.append(EDGES, 0.0)))
"""The largest magnitude that each bin holds, but for the outermost."""
MOST_ROWS = 10**12
LARGEST, SMALLEST = 1e30, 1e-30
"""Of means and deviations; an experiment holds no larger ones, and a smaller deviation would scale to infinity."""
_POWERS: Floats = np.array([[10.0**power for power in range(-6, 13)], [100.0**power for power in range(-6, 13)]])
"""Units of means and of squares, so that no site has to say how large its numbers are before they are added."""
RARE = "(rare"
"""How the name begins under which a word stands that is too rare to be told."""
_PARTS = 8
"""In so many parts of the others' cells a site compares how its own are spread."""


@dataclass(frozen=True, eq=False)
class SiteSums:
    """The columns of one site, or of several together; a column's numbers stand at its place in `columns`."""

    rows: int
    columns: tuple[str, ...]
    """The columns of numbers, ascending."""
    present: Counts
    """Cells that are there; 0 where they are too few to be told."""
    mean: Floats
    deviation: Floats
    bins: Counts
    """Columns × cells in each bin."""
    words: Mapping[str, Mapping[str, int]]
    """By column of words: rows with each, 0 for one that is too rare to be told. The classes are the label's words."""

    @classmethod
    def of(
        cls, columns: Sequence[str], numbers: Floats, least: int, words: Mapping[str, Mapping[str, int]] | None = None
    ) -> SiteSums:
        """Return what a site tells of rows × columns, NaN for empty cells, and of its counts of words.

        Nothing rests on fewer than `least` rows. A column with fewer cells is not told, and fewer empty cells than that
        count as full; a bin with fewer joins the next, and words with fewer are left out.
        """
        order = sorted(range(len(columns)), key=lambda place: columns[place])
        numbers, least = numbers[:, order], max(least, 1)
        count, mean, deviation = moments(numbers)
        told = count >= least
        present = (np.where(len(numbers) - count < least, len(numbers), count) * told).astype(np.int64)
        bins = [_bins(cells, present, least) for cells, present in zip(numbers.T, present.tolist(), strict=True)]
        return cls(
            rows=len(numbers),
            columns=tuple(columns[place] for place in order),
            present=present,
            mean=mean * told,
            deviation=deviation * told,
            bins=np.array(bins, np.int64).reshape(-1, BINS),
            words={name: _levels(counts, len(numbers), least) for name, counts in (words or {}).items()},
        )

    def without_scales(self) -> SiteSums:
        """Return it without means and deviations."""
        return replace(self, mean=np.zeros_like(self.mean), deviation=np.zeros_like(self.deviation))

    def names_alone(self) -> SiteSums:
        """Return which columns and words there are, and how many rows; no count of any."""
        words = {name: dict.fromkeys(counts, 0) for name, counts in self.words.items()}
        bare = replace(self.without_scales(), present=np.zeros_like(self.present), words=words)
        return replace(bare, bins=np.zeros_like(self.bins))

    def levels(self, name: str) -> list[str]:
        """Return the words of a column that are told by name, in the order that a table's reader gives them."""
        return sorted((word for word in self.words[name] if not word.startswith(RARE)), key=in_level_order)

    def at_most(self, rows: int) -> SiteSums:
        """Return the same as if it had so many rows at most, so that nobody decides by what it claims."""
        return self if self.rows <= rows else self.as_of(rows)

    def as_of(self, rows: int) -> SiteSums:
        """Return the same shares of so many rows."""
        bins = (self.bins * (rows / max(self.rows, 1))).astype(np.int64)
        words = {
            name: {word: int(count * rows / max(self.rows, 1)) for word, count in counts.items()}
            for name, counts in self.words.items()
        }
        return replace(self, rows=rows, present=bins.sum(axis=1), bins=bins, words=words)

    def fault(self) -> str:
        """Say why no site can have such numbers; empty where one can."""
        if len({*self.columns, *self.words}) != len(self.columns) + len(self.words):
            return "a column is named twice; allowed: once"
        worded = [sum(counts.values()) for counts in self.words.values()]
        least = [count for counts in self.words.values() for count in counts.values()]
        counted = [*self.present.tolist(), *worded, *least]
        if not 0 <= self.rows <= MOST_ROWS or not all(0 <= count <= self.rows for count in counted):
            return f"counts below 0 or above the {self.rows} rows; allowed: numbers of rows"
        if bool((self.bins < 0).any()) or not np.array_equal(self.bins.sum(axis=1, dtype=np.float64), self.present):
            return "bins that do not add up to the cells; allowed: each cell in one bin"
        spread = (self.deviation == 0) | ((self.deviation >= SMALLEST) & (self.deviation < LARGEST))
        if not bool(((np.abs(self.mean) < LARGEST) & spread).all()):
            return f"a mean or deviation that is no number from {SMALLEST:g} to {LARGEST:g}; allowed: those of cells"
        return ""

    def minus(self, part: SiteSums) -> SiteSums:
        """Return what the others have, of what all with the same columns have; no count falls below 0."""
        words = {name: Counter(counts) - Counter(part.words.get(name, {})) for name, counts in self.words.items()}
        bins = np.maximum(self.bins - part.bins, 0)
        return replace(self, rows=max(self.rows - part.rows, 0), present=bins.sum(axis=1), bins=bins, words=words)

    def like(self, prepared: Preparation) -> SiteSums:
        """Return these columns with all words that rows have by a preparation, and no counts."""
        levels = {column.name: column.levels for column in prepared.columns} | {
            prepared.target.label: prepared.target.names
        }
        return replace(self.names_alone(), words={name: dict.fromkeys(levels[name], 0) for name in self.words})

    def shares(self) -> Floats:
        """Return it as numbers from -1 to 1, all alike for every site: what hidden sums and noise add up.

        First the shares of the rows in each bin, then those with each word, then means and squares in units of each
        power of ten, cut to 1: of these whoever has the sum takes the power that holds all cells.
        """
        rows = max(self.rows, 1)
        worded = [count for name in sorted(self.words) for count in self.words[name].values()]
        moments = np.stack([self.mean, np.square(self.mean) + np.square(self.deviation)])[..., None]
        cut = np.clip(moments / _POWERS[:, None], -1, 1) * (self.present / rows)[:, None]
        return np.concatenate([self.bins.ravel() / rows, np.array(worded) / rows, cut.ravel()])

    def of_shares(self, shares: Floats, rows: int) -> SiteSums:
        """Return what sites with these columns and words have together, by the weighted sum of their `shares`."""
        count, worded = len(self.columns), sum(map(len, self.words.values()))
        bins, told, moments = np.split(shares, [count * BINS, count * BINS + worded])
        binned = np.rint(np.clip(bins, 0, 1) * rows).astype(np.int64).reshape(count, BINS)
        counts = iter(np.rint(np.clip(told, 0, 1) * rows).astype(np.int64).tolist())
        words = {name: {word: next(counts) for word in self.words[name]} for name in sorted(self.words)}
        there = np.maximum(binned.sum(axis=1) / rows, 1 / rows)
        reach = np.max((binned > 0) * _REACH, axis=1, initial=0.0)
        power = np.minimum(np.searchsorted(_POWERS[0], reach * (1 - 1e-9)), _POWERS.shape[1] - 1)
        first, second = moments.reshape(2, count, -1)[:, np.arange(count), power] / there
        mean = first * _POWERS[0][power]
        spread = np.sqrt(np.maximum(second * _POWERS[1][power] - np.square(mean), 0))
        spread[spread < 1e-6 * np.abs(mean)] = 0  # no more than rounding
        return SiteSums(rows, self.columns, binned.sum(axis=1), mean, spread, binned, words)

    def profile(self, site: str, label: str) -> SiteProfile:
        """Return it as a profile that others can be compared with."""
        columns = {
            name: ColumnProfile(self.rows, self.rows - cells, cells, EDGES, bins, {})
            for name, cells, bins in zip(self.columns, self.present.tolist(), self.bins, strict=True)
        }
        worded = {name: ColumnProfile.of_words(self.rows, +Counter(counts)) for name, counts in self.words.items()}
        labels = worded.pop(label, ColumnProfile.of_words(self.rows, {}))
        return SiteProfile(site, self.rows, label, labels, {**columns, **worded})


def _bins(cells: Floats, present: int, least: int) -> Counts:
    """Count cells in bins; from below, a bin with too few joins the next, and the last ones the one before.

    Cells that count as there and are empty are in the fullest bin.
    """
    found = np.zeros(BINS, np.int64)
    if not present:
        return found
    exact = np.bincount(np.searchsorted(EDGES, cells[~np.isnan(cells)]), minlength=BINS)
    held, last = 0, -1
    for place in np.flatnonzero(exact).tolist():
        held += int(exact[place])
        if held >= least:
            found[place], held, last = held, 0, place
    found[last] += held
    found[int(found.argmax())] += present - int(found.sum())
    return found


def _levels(counts: Mapping[str, int], rows: int, least: int) -> dict[str, int]:
    """Return words without the names of those with too few rows; all of these, where few too, count as the commonest.

    Words keep their places, which are those of the 0/1 columns.
    """
    told = {
        word if count >= least else f"{RARE} {place})": count if count >= least else 0
        for place, (word, count) in enumerate(counts.items())
    }
    rest = rows - sum(told.values())
    if any(told.values()) and rest < least:
        told[max(told, key=lambda word: told[word])] += rest
    return told


def pooled(parts: Sequence[SiteSums]) -> SiteSums:
    """Return what sites with the same columns have together."""
    present = np.sum([part.present for part in parts], axis=0)
    shares = [part.present / np.maximum(present, 1) for part in parts]
    mean = np.sum([share * part.mean for share, part in zip(shares, parts, strict=True)], axis=0)
    squares = [
        share * (np.square(part.deviation) + np.square(part.mean - mean))
        for share, part in zip(shares, parts, strict=True)
    ]
    return SiteSums(
        rows=sum(part.rows for part in parts),
        columns=parts[0].columns,
        present=present,
        mean=mean,
        deviation=np.sqrt(np.sum(squares, axis=0)),
        bins=np.sum([part.bins for part in parts], axis=0),
        words={
            name: {
                word: sum(part.words.get(name, {}).get(word, 0) for part in parts)
                for word in dict.fromkeys(word for part in parts for word in part.words.get(name, {}))
            }
            for name in dict.fromkeys(name for part in parts for name in part.words)
        },
    )


# What sites with a table agree on.


def words_of(data: Csv, known: SiteSums) -> dict[str, list[str]]:
    """Return the values of each category, and the classes, as far as the settings leave them open."""
    said = {*data.levels, *data.agreed, *([] if data.class_count is None else [data.labels])}
    found = {name: known.levels(name) for name in known.words if name not in said}
    if data.positive is not None and len(found.get(data.labels, ())) == 2:
        found[data.labels].sort(key=lambda word: word == plain(str(data.positive)))
    return {name: words for name, words in found.items() if words}


def site_preparation(data: Csv, known: SiteSums, shape: Sequence[int]) -> Preparation:
    """Return what rows of the sites go through: columns by name, categories, classes and scales as agreed."""
    held = {**data.agreed, **data.levels}
    levels = {name: list(map(plain, held.get(name, words))) for name, words in known.words.items()}
    columns = [
        Column(
            name=name,
            kind="category" if name in levels else "number",
            levels=levels.get(name, []),
        )
        for name in sorted({*known.columns, *levels} - {data.labels})
    ]
    scale = None
    if known.columns and set(known.columns) <= set(data.scales):
        agreed = [data.scales[name] for name in known.columns]
        scale = Scale.by(agreed, data.missing, scaled=data.normalise != "unit")
    names = levels.get(data.labels, []) if data.classes is None else [str(number) for number in range(data.classes)]
    return data.preparation(columns, shape, data.task, names, scale=scale)


def scales(together: SiteSums) -> Mapping[str, tuple[float, float]]:
    """Return the mean and deviation by which every site fills and scales each column; 1 for one that never changes."""
    numbers = (together.present.tolist(), together.mean.tolist(), together.deviation.tolist())
    return {
        name: (mean, deviation or 1.0)
        for name, cells, mean, deviation in zip(together.columns, *numbers, strict=True)
        if cells
    }


# One site's training rows, and its place among the others.


@dataclass(frozen=True, eq=False)
class SiteColumns:
    """What one site knows of its columns: what may be told, and what it can look at by itself."""

    label: str
    sums: SiteSums
    own: SiteProfile
    least: int
    """The rows that what is told must rest on."""

    @classmethod
    def of(cls, site: str, dataset: Dataset, train: Rows, least: int) -> SiteColumns:
        """Return what the training rows of a table hold; an empty cell is 0 where it is filled so."""
        raw, described = dataset.raw, dataset.described
        assert raw is not None
        # For speed of start: few nodes have tables.
        import pandas

        numbers = np.nan_to_num(raw.numbers[train]) if raw.missing == "zero" else raw.numbers[train]
        labels, target = dataset.labels.numpy()[train], described.target
        ends = np.cumsum([0, *(len(column.levels) for column in described.columns if column.kind == "category")])
        categories = [column for column in described.columns if column.kind == "category"]
        flags = [raw.flags[train, begin:end].sum(axis=0).astype(int).tolist() for begin, end in pairwise(ends.tolist())]
        words = {
            column.name: dict(zip(column.levels, counts, strict=True))
            for column, counts in zip(categories, flags, strict=True)
        }
        classes = dict[str, int]()
        if dataset.classes:
            counts = np.bincount(labels.astype(np.int64), minlength=len(target.names)).tolist()
            classes = dict(zip(target.names, counts, strict=True))
        given: list[NDArray[np.int64] | Floats] = [labels] if dataset.task is None else []
        if dataset.task == "survival":
            given = [np.abs(labels), (labels > 0).astype(np.int64)]
        columns = {
            name: profile_column(pandas.Series(cells), cells, edges_of(cells), given)
            for name, cells in zip(raw.names, numbers.T, strict=True)
        }
        sums = SiteSums.of(raw.names, numbers, least, {**words, **({target.label: classes} if classes else {})})
        whole = sums.profile(site, target.label)
        return cls(target.label, sums, replace(whole, columns={**whole.columns, **columns}), least)

    def findings(self, others: SiteSums) -> list[Finding]:
        """Return what seems wrong here: in the own rows, and beside the others by what was told of both alone.

        So nobody learns more by sending other numbers for others than there are.
        """
        return in_order([*alone(self.own), *beside(*against(self.sums, others, self.own.site, self.label))])


def against(own: SiteSums, others: SiteSums, site: str, label: str) -> tuple[SiteProfile, SiteProfile]:
    """Return a site and the others as profiles whose cells are counted in a few parts, since bins are folded."""
    mine, theirs = own.profile(site, label), others.profile("others", label)
    columns, usual = dict(mine.columns), dict(theirs.columns)
    for name in own.columns:
        reached = np.cumsum(theirs.columns[name].counts)
        wanted = np.searchsorted(reached, reached[-1] * np.arange(1, _PARTS) / _PARTS)
        cuts = np.unique(np.minimum(wanted, len(EDGES) - 1))
        for found, profile in ((columns, mine), (usual, theirs)):
            column = profile.columns[name]
            counts = np.diff([0, *np.cumsum(column.counts)[cuts].tolist(), column.bulk])
            found[name] = replace(column, quantiles=column.estimated(), edges=EDGES[cuts], counts=counts)
    return replace(mine, columns=columns), replace(theirs, columns=usual)
