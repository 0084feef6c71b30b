"""Who took what: interactions of users with items; filters that account for what they drop; splits; reading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError, brief, listed
from steelyard.base.randomness import stream_keys, words
from steelyard.data.tables import read_cells

if TYPE_CHECKING:
    import pandas as pd


Codes = NDArray[np.int64]
Flags = NDArray[np.bool_]
Names = NDArray[np.str_]
SECOND_FILE = "second_file"
"""Column of joined interactions that says where a row came from: "yes" or "no"."""


@dataclass(frozen=True)
class Dropped:
    """One step of a filter: how much it took away and why; read it to see what an experiment does not contain."""

    why: str
    interactions: int
    users: int
    items: int

    def __str__(self) -> str:
        return f"{self.why}: dropped {self.interactions:,} interactions, {self.users:,} users, {self.items:,} items"


@dataclass(frozen=True, eq=False)
class Interactions:
    """A table of interactions with users and items numbered in ascending order of their ids.

    Ids that are all whole numbers ascend as numbers, others as text, so "ties by ascending id" is "ties by number"
    everywhere. Use it as the one form in which the recommenders, the metrics and the baselines see data.
    """

    users: Names
    items: Names
    user: Codes
    """The user of each row, as a position in `users`."""
    item: Codes
    rating: NDArray[np.float64]
    """The rating of each row; 1 where the source has none."""
    time: NDArray[np.float64] | None = None
    """Seconds since 1970, or whatever number the source orders its rows by."""
    columns: Mapping[str, Names] = field(default_factory=dict[str, Names])
    """Further columns of the source, as text (a venue's category, a user's own π)."""
    dropped: tuple[Dropped, ...] = ()

    def __len__(self) -> int:
        return len(self.user)

    def __str__(self) -> str:
        return f"{len(self):,} interactions of {len(self.users):,} users with {len(self.items):,} items"

    def select(self, keep: Flags, why: str = "", *, renumber: bool = True) -> Interactions:
        """Return some of the rows; with a reason, what is gone is added to `dropped`.

        With `renumber=False` users and items keep their numbers even when none of their rows is left: that is what
        the two sides of a split need.
        """
        rows = np.flatnonzero(keep)
        kept = replace(
            self,
            user=self.user[rows],
            item=self.item[rows],
            rating=self.rating[rows],
            time=None if self.time is None else self.time[rows],
            columns={name: values[rows] for name, values in self.columns.items()},
        )
        if renumber:
            users, user = np.unique(kept.user, return_inverse=True)
            items, item = np.unique(kept.item, return_inverse=True)
            kept = replace(kept, users=self.users[users], items=self.items[items], user=user, item=item)
        if why:
            note = Dropped(
                why,
                len(self) - len(kept),
                len(self.users) - len(kept.users),
                len(self.items) - len(kept.items),
            )
            kept = replace(kept, dropped=(*self.dropped, note))
        return kept

    def per_user(self) -> Codes:
        """Return the number of rows of each user."""
        return np.bincount(self.user, minlength=len(self.users))

    def per_item(self) -> Codes:
        """Return the number of rows of each item: its popularity."""
        return np.bincount(self.item, minlength=len(self.items))

    def report(self) -> list[str]:
        """Return what was dropped and what is left, one line each, for people to read."""
        return [*(str(step) for step in self.dropped), f"left: {self}"]


def ascending(names: Iterable[str]) -> list[str]:
    """Return distinct ids in ascending order: as numbers if all are whole numbers, else as text."""
    distinct = set(names)
    # Python counts in numbers of up to 4,300 digits; longer ids are names.
    if all(name.isascii() and name.isdigit() and len(name) <= 4000 for name in distinct):
        return sorted(distinct, key=lambda name: (int(name), name))
    return sorted(distinct)


def numbered(names: Sequence[str] | NDArray[np.object_], vocabulary: Sequence[str] | Names) -> Codes:
    """Return the position of each name in the vocabulary, -1 for a name that is not in it."""
    # For speed of start: much of the package reads no tables.
    import pandas as pd

    return np.asarray(pd.Index(np.asarray(vocabulary, dtype=object)).get_indexer(pd.Index(names)), dtype=np.int64)


def build(
    users: Sequence[str],
    items: Sequence[str],
    rating: Sequence[float] | None = None,
    time: Sequence[float] | None = None,
    columns: Mapping[str, Sequence[str]] | None = None,
    *,
    all_users: Iterable[str] = (),
    all_items: Iterable[str] = (),
) -> Interactions:
    """Make interactions from columns in memory; `all_users` and `all_items` may add ids that have no row.

    Use it where the data does not come from a file, or where several tables must share one numbering.
    """
    user_names = np.array(ascending([*map(str, set(users)), *all_users]), dtype=np.str_)
    item_names = np.array(ascending([*map(str, set(items)), *all_items]), dtype=np.str_)
    return Interactions(
        users=user_names,
        items=item_names,
        user=numbered(np.asarray([str(u) for u in users], dtype=object), user_names),
        item=numbered(np.asarray([str(i) for i in items], dtype=object), item_names),
        rating=np.ones(len(users)) if rating is None else np.asarray(rating, dtype=np.float64),
        time=None if time is None else np.asarray(time, dtype=np.float64),
        columns={name: np.asarray(values, dtype=np.str_) for name, values in (columns or {}).items()},
    )


def joined(first: Interactions, second: Interactions) -> Interactions:
    """Return the rows of two tables, one after the other, in one numbering; `SECOND_FILE` tells them apart.

    Use it for data that comes as a training and a test file. Times and further columns stay where both have them.
    """
    tables = (first, second)
    users = [str(name) for table in tables for name in table.users[table.user]]
    items = [str(name) for table in tables for name in table.items[table.item]]
    times = [table.time for table in tables if table.time is not None]
    shared = [name for name in first.columns if name in second.columns]
    columns: dict[str, Sequence[str]] = {
        name: [str(value) for table in tables for value in table.columns[name]] for name in shared
    }
    columns[SECOND_FILE] = ["no"] * len(first) + ["yes"] * len(second)
    return build(
        users,
        items,
        np.concatenate([table.rating for table in tables]).tolist(),
        np.concatenate(times).tolist() if len(times) == len(tables) else None,
        columns,
    )


# Filters: what is kept of the interactions before they are split.


Duplicates = Literal["first", "last", "mean", "keep"]


def single(data: Interactions, keep: Duplicates = "first") -> Interactions:
    """Leave one row per user and item: the earliest, the latest, or the first with the mean rating.

    Use it on check-ins and other logs in which a pair may repeat: a pair on both sides of a split would be a leak.
    Without times, earlier means higher up in the file.
    """
    if keep == "keep" or not len(data):
        return data
    pair = data.user * len(data.items) + data.item
    order = np.arange(len(data)) if data.time is None else np.argsort(data.time, kind="stable")
    if keep == "last":
        order = order[::-1]
    pairs, first, inverse = np.unique(pair[order], return_index=True, return_inverse=True)
    if len(pairs) == len(data):
        return data
    flags = np.zeros(len(data), dtype=np.bool_)
    flags[order[first]] = True
    if keep == "mean":
        sums = np.bincount(inverse, weights=data.rating[order])
        means = np.empty(len(data))
        means[order] = (sums / np.bincount(inverse))[inverse]
        data = replace(data, rating=means)
    return data.select(flags, f"repeated pairs (kept: {keep})")


def at_least(data: Interactions, threshold: float) -> Interactions:
    """Keep the rows with a rating of at least the threshold; use it to read likes out of ratings."""
    keep = data.rating >= threshold
    return data if keep.all() else data.select(keep, f"rating below {threshold:g}")


def core(data: Interactions, users: int = 0, items: int = 0) -> Interactions:
    """Keep users with at least `users` rows and items with at least `items`, again and again until both hold.

    With the same number for both this is the k-core; with `items=0` it is a plain minimum per user.
    """
    user_alive = np.ones(len(data.users), dtype=np.bool_)
    item_alive = np.ones(len(data.items), dtype=np.bool_)
    alive = np.ones(len(data), dtype=np.bool_)
    while True:
        user_alive = np.bincount(data.user[alive], minlength=len(data.users)) >= max(users, 1)
        item_alive = np.bincount(data.item[alive], minlength=len(data.items)) >= max(items, 1)
        still = alive & user_alive[data.user] & item_alive[data.item]
        if np.array_equal(still, alive):
            break
        alive = still
    if alive.all():
        return data
    return data.select(alive, f"core: users with fewer than {users}, items with fewer than {items}")


# Splits: what each user trains on and what she is tested on.


@dataclass(frozen=True, eq=False)
class Split:
    """The two sides of a split, which share one numbering of users and items."""

    train: Interactions
    test: Interactions

    @property
    def users(self) -> int:
        return len(self.train.users)

    @property
    def items(self) -> int:
        return len(self.train.items)


def by_flag(data: Interactions, test: Flags) -> Split:
    """Split by a flag per row; use it where the split comes from elsewhere."""
    return Split(data.select(~test, renumber=False), data.select(test, renumber=False))


def temporal(data: Interactions, share: float = 0.2) -> Split:
    """Test on the newest int(share · n) of each user's n interactions; of equal times, those higher up in the file.

    Use it by default: it asks for what a user took later, given what she took before (thesis §4.5.3, share 0.2).
    """
    return _latest(data, "temporal", (data.per_user() * _share(share)).astype(np.int64))


def newest(data: Interactions, count: int = 1) -> Split:
    """Test on each user's newest `count` interactions (leave-one-out); users with no more than that are not tested."""
    counts = data.per_user()
    return _latest(data, "newest", np.where(counts > count, count, 0))


def _latest(data: Interactions, split: str, held: Codes) -> Split:
    """Test on so many of each user's latest rows."""
    if data.time is None:
        raise UserError(f"split: got '{split}', but the data has no time column; allowed: random, shuffled")
    return by_flag(data, _rank(data, -data.time) < held[data.user])


def random(data: Interactions, share: float = 0.2, seed: int = 1, purpose: str = "split") -> Split:
    """Test on int(share · n) of each user's interactions, drawn from her own stream.

    Use it where there are no times; adding or removing other users does not change a user's draw.
    """
    counts = data.per_user()
    held = (counts * _share(share)).astype(np.int64)
    position = _rank(data, np.zeros(len(data)))
    keys = stream_keys(seed, 0, data.users.tolist(), purpose)
    drawn = words(keys[data.user] + position.astype(np.uint64), 1)[:, 0]
    return by_flag(data, _rank(data, drawn) < held[data.user])


def shuffled(data: Interactions, share: float = 0.2, seed: int = 42) -> Split:
    """Split as the public comparisons of KGFlex do: one NumPy RandomState for all users, in ascending order.

    Per user [0]·floor((1 − share)·n) + [1]·rest is shuffled and laid over her rows in the file's order. Use it to
    meet published figures; `random` is the better split otherwise.
    """
    source = np.random.RandomState(seed)
    test = np.zeros(len(data), dtype=np.bool_)
    order = np.argsort(data.user, kind="stable")
    for rows in np.split(order, np.cumsum(data.per_user())[:-1]):
        train = int(np.floor(len(rows) * (1 - _share(share))))
        marks = np.array([0] * train + [1] * (len(rows) - train))
        source.shuffle(marks)
        test[rows] = marks == 1
    return by_flag(data, test)


def _share(share: float) -> float:
    if not 0 < share < 1:
        raise UserError(f"split share: got {share}; allowed: above 0 and below 1")
    return share


def _rank(data: Interactions, key: np.ndarray) -> np.ndarray:
    """Return each row's rank from 0 among its user's rows, ordered by the key (ties: the file's order)."""
    rank = np.empty(len(data), dtype=np.int64)
    rank[np.lexsort((key, data.user))] = places_in(data.per_user())
    return rank


def places_in(counts: Codes) -> Codes:
    """Return 0 .. counts[0] − 1, then 0 .. counts[1] − 1, and so on: the place of each entry in its own stretch."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


# Reading and writing: MovieLens `.dat` and `u.data`, and TSV or CSV with or without a header. The form is seen in the
# file itself: `::` between fields is MovieLens, a first line that names a user and an item column is a header, anything
# else is user, item, rating, time in that order. A name that ends in `.gz` is unpacked on the fly.


KNOWN: Mapping[str, tuple[str, ...]] = {
    "user": ("user", "user_id", "userid", "users", "uid", "reviewerid"),
    "item": (
        *("item", "item_id", "itemid", "items", "iid", "movie_id", "movieid", "venue_id", "venueid", "book_id"),
        *("artist_id", "business_id", "product_id", "asin"),
    ),
    "rating": ("rating", "ratings", "score", "value", "stars", "overall", "preference", "weight"),
    "time": ("time", "timestamp", "utc", "date", "datetime", "ts", "unixreviewtime"),
}
"""Names under which a header may give a column; compared in lower case."""
EXPECTED = "interactions, with the same number of fields on each line (.dat, .data, .tsv or .csv, plain or .gz)"
_ORDER = ("user", "item", "rating", "time")
_FOURSQUARE = "%a %b %d %H:%M:%S %z %Y"


@dataclass(frozen=True, eq=False)
class Table:
    """A file's columns as text, named user, item, rating, time, or by their own names where these are others."""

    path: Path
    frame: pd.DataFrame
    first_line: int
    """The line of the file on which the first row stands: 2 under a header."""

    def __contains__(self, name: str) -> bool:
        return name in self.frame.columns

    def texts(self, name: str) -> np.ndarray:
        """Return a column as it stands; an empty cell is the user's error."""
        values = self.frame[name].to_numpy(dtype=object)
        if "" in self.frame[name].unique():
            self._refuse(name, int(np.flatnonzero(values == "")[0]), "a value")
        return values

    def numbers(self, name: str) -> np.ndarray:
        """Return a column as numbers; a cell that is none is the user's error, with its line."""
        # For speed of start: much of the package reads no tables.
        import pandas as pd

        values = np.array(pd.to_numeric(self.frame[name], errors="coerce"), dtype=np.float64)
        if not np.isfinite(values).all():
            self._refuse(name, int(np.flatnonzero(~np.isfinite(values))[0]), "a number")
        return values

    def times(self) -> np.ndarray:
        """Return the column `time` as seconds since 1970, from numbers, ISO 8601 or Foursquare's form."""
        # For speed of start: much of the package reads no tables.
        import pandas as pd

        name = "time"
        column = self.frame[name]
        sample = str(column.iloc[0])
        if sample.replace(".", "", 1).lstrip("-").isdigit():
            return self.numbers(name)
        style = _FOURSQUARE if sample[:1].isalpha() else "ISO8601"
        parsed = pd.to_datetime(column, format=style, utc=True, errors="coerce")
        if parsed.isna().any():
            allowed = "seconds since 1970, 2012-04-03T18:07:30Z, or Tue Apr 03 18:07:30 +0000 2012"
            self._refuse(name, int(np.flatnonzero(parsed.isna())[0]), allowed)
        return np.asarray((parsed - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(seconds=1), dtype=np.float64)

    def _refuse(self, name: str, row: int, allowed: str) -> None:
        hint = " (if line 1 is a header, name its user and item columns)" if row + self.first_line == 1 else ""
        value = self.frame[name].iloc[row]
        raise UserError(f"{self.path}: line {row + self.first_line}: {name} is {value!r}; allowed: {allowed}{hint}")


_TABLES = {".tsv", ".csv"}
"""How the files of a folder end that are tables; they may be packed as well."""


def read_table(path: Path, columns: Mapping[str, str] | None = None) -> Table:
    """Return a file's columns as text; use `read` unless you need the raw text.

    `columns` maps any of user, item, rating and time to the header's own names. Of a folder it is all its tables, by
    name, one after the other.
    """
    if path.is_dir():
        found = [read_table(file, columns).frame for file in sorted(path.iterdir()) if _TABLES & set(file.suffixes)]
        if not found:
            raise UserError(f"{path}: no table in this folder; allowed: files that end in {listed(sorted(_TABLES))}")
        import pandas as pd  # For speed of start, as below.

        return Table(path, pd.concat(found, ignore_index=True), 2)
    cells = read_cells(path, EXPECTED, strip=False)
    if cells.shape[1] == 1:
        first = str(cells.iloc[0, 0])
        raise UserError(f"{path}: line 1 is {first[:60]!r}; allowed separators: tab, '::', comma, ';', '|'")
    header = _header([str(cell) for cell in cells.iloc[0]], columns or {}, path)
    frame = cells.iloc[1:] if header else cells
    if frame.empty:
        raise UserError(f"{path}: a header and no rows; allowed: at least one row")
    usual = [*_ORDER, *(f"column{number}" for number in range(len(_ORDER) + 1, cells.shape[1] + 1))]
    frame = frame.set_axis(header or usual[: cells.shape[1]], axis="columns").reset_index(drop=True)
    return Table(path, frame, 2 if header else 1)


def _header(cells: list[str], wanted: Mapping[str, str], path: Path) -> list[str] | None:
    """Return the columns' names if the first line is a header, else None."""
    plain = [cell.strip().strip('"') for cell in cells]
    unknown = [f"{key}={name}" for key, name in wanted.items() if name not in plain]
    if unknown:
        raise UserError(f"{path}: columns {listed(unknown)}: not in the header; it has: {listed(plain)}")
    given = {name: key for key, name in wanted.items()}
    names = [given.get(cell, cell) for cell in plain]
    for key, known in KNOWN.items():
        if key not in names:
            found = [i for i, name in enumerate(names) if name.lower() in known]
            if found:
                names[found[0]] = key
    twice = [name for name, times in Counter(names).items() if times > 1 and name in _ORDER]
    if twice:
        raise UserError(f"{path}: the header names '{twice[0]}' more than once; allowed: each column once")
    if "user" in names and "item" in names:
        return names
    if wanted:
        raise UserError(f"{path}: no user and item columns; the header has: {listed(plain)}")
    return None


def number_rows(table: Table, users: list[str], items: list[str]) -> Interactions:
    """Return a table's rows by the positions of their users and items in these lists; without ratings all are 1."""
    user, item = table.texts("user"), table.texts("item")
    return Interactions(
        users=np.array(users, dtype=np.str_),
        items=np.array(items, dtype=np.str_),
        user=numbered(user, users),
        item=numbered(item, items),
        rating=table.numbers("rating") if "rating" in table else np.ones(len(user)),
    )


def read(path: str | Path, columns: Mapping[str, str] | None = None) -> Interactions:
    """Read one file of interactions in any of the known forms; the usual way in.

    `columns` names the header's columns where they are not the usual ones: `{"user": "reader", "item": "book"}`.
    """
    table = read_table(Path(path), columns)
    return replace(
        number_rows(table, ascending(table.texts("user")), ascending(table.texts("item"))),
        time=table.times() if "time" in table else None,
        columns={
            str(name): table.frame[name].to_numpy(dtype=np.str_) for name in table.frame.columns if name not in _ORDER
        },
    )


def read_columns(path: str | Path, wanted: Mapping[str, str | int]) -> dict[str, list[str]]:
    """Read some columns of a table about items: a catalogue, titles, categories; each by header name or number from 1.

    A first line that names an item column is a header. Use it for what is known of items rather than of interactions.
    """
    path = Path(path)
    cells = read_cells(path, "one item on each line")
    plain = [str(cell).lower() for cell in cells.iloc[0]]
    headed = any(name in KNOWN["item"] for name in plain)
    rows, header = (cells.iloc[1:], plain) if headed else (cells, [])
    found: dict[str, list[str]] = {}
    for name, column in wanted.items():
        guessed = name == "item" and isinstance(column, str) and not column.isdigit() and column.lower() not in header
        index = item_column(header) if guessed else column_at(path, name, column, header, cells.shape[1])
        found[name] = rows.iloc[:, index].tolist()
    return found


def item_column(header: Sequence[str]) -> int:
    """Return the column of the items' ids: the first with a known name, in lower case, else the first of all."""
    return next((index for index, name in enumerate(header) if name in KNOWN["item"]), 0)


def column_at(path: Path, name: str, column: str | int, header: Sequence[str], width: int) -> int:
    """Return where a column stands that is asked for by its number from 1, or by its name in a header (lower case)."""
    if isinstance(column, str) and column.isascii() and column.isdigit() and len(column) < 9:
        column = int(column)
    if isinstance(column, str) and column.lower() in header:
        return header.index(column.lower())
    if isinstance(column, int) and 1 <= column <= width:
        return column - 1
    named = header and isinstance(column, str)
    known = f"its header has: {listed(header)}" if named else f"allowed: a number from 1 to {width}"
    raise UserError(f"{path}: no column {brief(str(column))} for {name}; {known}")


def write_interactions(path: Path, data: Interactions) -> None:
    """Write interactions as a TSV with header user, item, rating, time (where known) and further columns."""
    # For speed of start: much of the package reads no tables.
    import pandas as pd

    frame: dict[str, np.ndarray] = {"user": data.users[data.user], "item": data.items[data.item], "rating": data.rating}
    if data.time is not None:
        frame["time"] = data.time.astype(np.int64) if (data.time % 1 == 0).all() else data.time
    frame |= dict(data.columns)
    pd.DataFrame(frame).to_csv(path, sep="\t", index=False, float_format="%g")
