"""What a table holds at one site, in counts and sums: enough to compare sites, and nothing of a single row is needed.

Profiles of sites add up. A site compares its own with the sum of the others (`findings`), in a simulation as on a node.
pandas is imported inside functions, for speed of start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from steelyard.data.cells import LARGEST, parse_numbers, plain

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
QUANTILES: Floats = np.array([0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95])
MOST_WORDS = 100
"""Of more different texts in a column than this, the commonest are counted by name, the rest together."""
OTHERS = "(others)"
"""The name under which the rest is counted."""
CODES = frozenset({0.0, -1.0, 777.0, 888.0, 7777.0, 8888.0} | {s * (10.0**d - 1) for s in (1, -1) for d in range(1, 7)})
"""Numbers that often mean that nothing was recorded."""
_FEWEST = 8
_MOST_STRANGE = 4
_FAR = 100.0
_BINS = 20
_SAMPLED = 50_000
_FEWER, _ENOUGH, _RULED_OUT = 10_000, 100, 0.6
"""A column that saves less than this in so many guesses that would be wrong does not give the label away."""


@dataclass(frozen=True, eq=False)
class ColumnProfile:
    """One column of one site, or of several together; the fields from `quantiles` on are of one site alone."""

    rows: int
    missing: int
    numbers: int
    """Cells that are finite numbers, those of `strange` too."""
    edges: Floats
    """Ascending; the same at all sites that are compared."""
    counts: Ints
    """How many of the numbers that are not strange lie up to the first edge, between two, and above the last."""
    words: Mapping[str, int]
    """Cells that are no numbers: the text and how many rows have it; of labels, all cells."""
    quantiles: Floats | None = None
    """At `QUANTILES`, of the numbers that are not strange; None where there are none, or of several sites."""
    least: float = np.nan
    most: float = np.nan
    strange: Mapping[float, int] = field(default_factory=dict[float, int])
    """Numbers far from all others, or that stand for "not recorded" and lie apart, and how many rows have each."""
    agreement: float = 0.0
    """How far the column alone gives the label: the share of wrong guesses that it saves, or |correlation|."""
    first: Mapping[str, int] = field(default_factory=dict[str, int])
    """The row of the table, from 0, where each text stands first; without texts, under "" the first number's."""

    @classmethod
    def of_words(cls, rows: int, words: Mapping[str, int], first: Mapping[str, int] | None = None) -> ColumnProfile:
        """Return a column without numbers, where rows that have none of the words are empty."""
        none, nothing = np.zeros(0), np.zeros(1, np.int64)
        return cls(rows, rows - sum(words.values()), 0, none, nothing, words, first=first or {})

    @property
    def bulk(self) -> int:
        """How many numbers are not strange."""
        return int(self.counts.sum())

    def plus(self, other: Self, sign: int = 1) -> ColumnProfile:
        """Return both together, or with `sign` -1 what is left of this one without the other."""
        words = {
            text: self.words.get(text, 0) + sign * other.words.get(text, 0) for text in {**self.words, **other.words}
        }
        return ColumnProfile(
            self.rows + sign * other.rows,
            self.missing + sign * other.missing,
            self.numbers + sign * other.numbers,
            self.edges,
            self.counts + sign * other.counts,
            {text: count for text, count in words.items() if count > 0},
        )

    def estimated(self) -> Floats | None:
        """Return the quantiles: a site's own, else as far as the counts tell; None where there are no numbers."""
        if self.quantiles is not None or self.bulk < 1 or not len(self.edges):
            return self.quantiles
        reached = np.cumsum(np.maximum(self.counts[:-1], 0)) / self.bulk
        return np.interp(QUANTILES, reached, self.edges)


@dataclass(frozen=True, eq=False)
class SiteProfile:
    """The columns of one site that an experiment uses, or of several sites together."""

    site: str
    rows: int
    label: str
    """The column to predict."""
    labels: ColumnProfile
    columns: Mapping[str, ColumnProfile]
    """The inputs by name; a site without a column has none of that name."""
    repeated: int = 0
    """Rows that are there before, at the same site."""

    def plus(self, other: Self, sign: int = 1, site: str = "all") -> SiteProfile:
        """Return both together, or with `sign` -1 the others without one of them."""
        columns = dict(self.columns)
        for name, column in other.columns.items():
            columns[name] = columns[name].plus(column, sign) if name in columns else column
        labels = self.labels.plus(other.labels, sign)
        return SiteProfile(site, self.rows + sign * other.rows, self.label, labels, columns)


def together(profiles: Sequence[SiteProfile]) -> SiteProfile:
    """Return the sum of all sites; `together(all).plus(one, -1)` are the others of one."""
    found = profiles[0]
    for profile in profiles[1:]:
        found = found.plus(profile)
    return found


def edges_of(numbers: Floats) -> Floats:
    """Return what divides numbers of all sites into bins with about as many: their values where they are few."""
    values = numbers[np.isfinite(numbers)]
    values = values[:: max(1, len(values) // _SAMPLED)]
    if not len(values):
        return np.zeros(0)
    distinct = np.unique(values)
    if len(distinct) <= _BINS:
        return distinct
    return np.unique(np.quantile(values, [0.002, *np.arange(1, _BINS) / _BINS, 0.998]))


def profile_labels(cells: Any, *, classes: bool) -> ColumnProfile:
    """Return the profile of a site's labels: texts with their counts, or numbers where these are predicted."""
    if not classes:
        return profile_column(cells, parse_numbers(cells), np.zeros(0))
    return ColumnProfile.of_words(len(cells), *_words(cells[cells.notna()]))


def profile_column(cells: Any, numbers: Floats, edges: Floats, labels: Sequence[Ints | Floats] = ()) -> ColumnProfile:
    """Return the profile of a column at one site; `numbers` are its cells as `parse_numbers` has them.

    `labels` are what the rows' column may give away: classes by number, or a number to predict.
    """
    finite = np.abs(numbers) < LARGEST
    words: dict[str, int] = {}
    first: dict[str, int] = {}
    missing = len(numbers) - int(finite.sum())
    # A number beyond all counting is as good as a word.
    odd = ~finite & (~np.isnan(numbers) if cells.dtype.kind in "iufb" else cells.notna().to_numpy())
    if odd.any():
        missing -= int(odd.sum())
        words, first = _words(cells[odd])
    values = numbers if finite.all() else numbers[finite]
    ascending = np.sort(values)
    low, high, strange = _apart(ascending)
    kept = ascending[low:high]
    bounds = np.searchsorted(kept, edges, side="right")
    if not words and finite.any():
        first = {"": int(cells.index[finite.argmax()])}
    return ColumnProfile(
        len(numbers),
        missing,
        len(values),
        edges,
        np.diff([0, *bounds, len(kept)]),
        words,
        _quantiles(kept),
        float(kept[0]) if len(kept) else np.nan,
        float(kept[-1]) if len(kept) else np.nan,
        strange,
        max((_agreement(each, cells if words else None, finite, numbers, edges) for each in labels), default=0.0),
        first,
    )


def _words(texts: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Count texts as the reader sees them, and say where each stands first."""
    import pandas

    try:
        codes, found = pandas.factorize(texts)
    except TypeError:
        return {OTHERS: len(texts)}, {}  # lists in cells
    counts, places = np.bincount(codes, minlength=len(found)), np.unique(codes, return_index=True)[1]
    rows = np.asarray(texts.index)[places]
    words: dict[str, int] = {}
    first: dict[str, int] = {}
    for rank, code in enumerate(np.argsort(-counts, kind="stable").tolist()):
        text = plain(str(found[code])) if rank < MOST_WORDS else OTHERS
        words[text] = words.get(text, 0) + int(counts[code])
        first.setdefault(text, int(rows[code]))
    return words, first


def _quantiles(ascending: Floats) -> Floats | None:
    return ascending[np.rint(QUANTILES * (len(ascending) - 1)).astype(int)] if len(ascending) else None


def _apart(ascending: Floats) -> tuple[int, int, dict[float, int]]:
    """Return where the numbers that belong together begin and end, and the strange ones with their counts."""
    low, high, strange = 0, len(ascending), dict[float, int]()
    again = True
    while again and len(strange) < _MOST_STRANGE:
        again = False
        for lowest in (True, False):
            part = ascending[low:high]
            if len(part) < _FEWEST or part[0] == part[-1]:
                continue
            value = float(part[0] if lowest else part[-1])
            count = (
                int(np.searchsorted(part, value, "right")) if lowest else len(part) - int(np.searchsorted(part, value))
            )
            rest = part[count:] if lowest else part[:-count]
            if _is_strange(value, count, rest, abs(float(rest[0] if lowest else rest[-1]) - value)):
                strange[value] = count
                low, high = (low + count, high) if lowest else (low, high - count)
                again = True
    return low, high, strange


def _is_strange(value: float, count: int, rest: Floats, gap: float) -> bool:
    """Whether a value lies far from all others, or is a usual code for "not recorded" and lies apart from them."""
    if len(rest) < _FEWEST - 1 or rest[0] == rest[-1]:
        return False
    found = _quantiles(rest)
    assert found is not None
    half = float(found[4] - found[2]) or float(found[6] - found[0]) or float(rest[-1] - rest[0])
    wide = max(float(found[6] - found[0]), half)
    return (value in CODES and gap > half and (count > 1 or abs(value) >= 99)) or gap > _FAR * wide


def _agreement(labels: Ints | Floats, words: Any, finite: NDArray[np.bool_], numbers: Floats, edges: Floats) -> float:
    """Return how far a column gives the labels; to be empty is a value, too. `words`: its cells, where some are."""
    if labels.dtype.kind != "i":
        known = finite & np.isfinite(labels)
        values, targets = numbers[known], labels[known]
        if words is not None or len(values) < _FEWEST or np.ptp(values) == 0 or np.ptp(targets) == 0:
            return 0.0
        return abs(float(np.corrcoef(values, targets)[0, 1]))
    known, classes = np.flatnonzero(labels >= 0), labels.astype(np.int64, copy=False)
    some = known[:: len(known) // _FEWER + 1]
    # Where there are many rows, some of them rule most columns out.
    if len(some) < len(known) and len(some) - np.bincount(classes[some]).max() >= _ENOUGH:
        saved = _saved(_values(words, finite[some], numbers[some], edges, some), classes[some])
        if saved < _RULED_OUT:
            return saved
    return _saved(_values(words, finite[known], numbers[known], edges, known), classes[known])


def _values(words: Any, finite: NDArray[np.bool_], numbers: Floats, edges: Floats, rows: Ints) -> Ints:
    """Return the values of some rows by number, numbers by their bin; 0 for an empty cell."""
    import pandas

    if words is None:
        return np.where(finite, np.searchsorted(edges, numbers) + 1, 0)
    try:
        return pandas.factorize(words.iloc[rows])[0] + 1
    except TypeError:
        return np.zeros(len(rows), np.int64)  # lists in cells


def _saved(bins: Ints, labels: Ints) -> float:
    """Return the share of wrong guesses that knowing the bin saves; 0 where the bins are too many to say."""
    if not len(bins):
        return 0.0
    classes = int(labels.max()) + 1
    table = np.bincount(bins * classes + labels, minlength=(int(bins.max()) + 1) * classes).reshape(-1, classes)
    wrong = len(bins) - int(table.sum(axis=0).max())
    if wrong < 3 or len(bins) < 5 * int(table.any(axis=1).sum()):
        return 0.0
    return 1.0 - (len(bins) - int(table.max(axis=1).sum())) / wrong


# Rows that are counted, and rows that are there twice.


_NUMBERING = re.compile(r"(^|[_ -])(id|key|index|nr|no|number|uuid|guid)$|[a-z]Id$|[a-z]ID$|^Unnamed")


def counts_rows(numbers: Floats, name: str) -> bool:
    """Whether a column only counts the rows, or is an identifier by its name: another whole number in each row."""
    for some in (numbers[:1000], numbers):
        if len(some) < 10 or bool((some != np.floor(some)).any()) or len(np.unique(some)) < len(some):
            return False
    steps = np.diff(np.sort(numbers))
    return bool((steps == steps[0]).all()) or bool(_NUMBERING.search(name))


def row_marks(columns: Sequence[Any]) -> NDArray[np.uint64]:
    """Return a number for each row that is the same for equal rows, and else hardly ever; `columns` are series."""
    import pandas

    found = np.zeros(len(columns[0]), dtype=np.uint64)
    for cells in columns:
        values = np.asarray(cells)
        if values.dtype.kind not in "iufb":
            codes, texts = pandas.factorize(cells)
            values = np.array([*(hash(plain(str(text))) for text in texts), 0])[codes]
        bits = (np.ascontiguousarray(values, dtype=np.float64) + 0.0).view(np.uint64)
        found = (found ^ bits) * np.uint64(0x9E3779B97F4A7C15)
        found ^= found >> np.uint64(29)
    return found


def repeats(marks: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which rows are there before."""
    import pandas

    return pandas.Series(marks).duplicated().to_numpy()


def by_chance(columns: Sequence[Any]) -> float:
    """Return how many pairs of rows would be equal if columns had nothing to do with each other."""
    import pandas

    rows, share = len(columns[0]), 1.0
    for cells in columns:
        part = cells.iloc[:: max(1, rows // 10_000)]
        counts = np.bincount(pandas.factorize(part, use_na_sentinel=False)[0]).astype(np.float64)
        share *= float((counts * (counts - 1)).sum()) / max(1.0, counts.sum() * (counts.sum() - 1))
    return share * rows * (rows - 1) / 2
