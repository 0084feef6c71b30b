"""Reading interactions: MovieLens `.dat` and `u.data`, and TSV or CSV with or without a header; writing them.

The form is seen in the file itself: `::` between fields is MovieLens, a first line that names a user and an item column
is a header, anything else is user, item, rating, time in that order. A name that ends in `.gz` is unpacked on the fly.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from steelyard.base.errors import UserError, listed
from steelyard.data.tables import read_cells
from steelyard.recommend.interactions import Interactions, ascending, numbered

if TYPE_CHECKING:
    import pandas as pd

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
_RECBOLE = re.compile(r"\w+:(token|float)(_seq)?")
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


def read_rows(
    path: Path, expected: str, separator: str | None = None, *, columns: int | None = None, strip: bool = True
) -> pd.DataFrame:
    """Return a file's cells as `read_cells` does; RecBole's own form, `name:type` in the first line, is refused."""
    cells = read_cells(path, expected, separator, columns=columns, strip=strip)
    if any(_RECBOLE.fullmatch(str(cell).strip()) for cell in cells.iloc[0]):
        raise UserError(f"{path}: RecBole's files are no longer read. Run: python -m benchmarks.recbole {path} OUT.tsv")
    return cells


def read_table(path: Path, columns: Mapping[str, str] | None = None) -> Table:
    """Return a file's columns as text; use `read` unless you need the raw text.

    `columns` maps any of user, item, rating and time to the header's own names.
    """
    cells = read_rows(path, EXPECTED, strip=False)
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
    cells = read_rows(path, "one item on each line")
    plain = [str(cell).lower() for cell in cells.iloc[0]]
    header = any(name in KNOWN["item"] for name in plain)
    indices: dict[str, int] = {}
    for name, column in wanted.items():
        if isinstance(column, str) and column.isdigit():
            column = int(column)
        if isinstance(column, int):
            indices[name] = column - 1
        elif header and column.lower() in plain:
            indices[name] = plain.index(column.lower())
        elif name == "item":
            indices[name] = next((i for i, found in enumerate(plain) if found in KNOWN["item"]), 0)
        else:
            known = f"its header has: {listed(plain)}" if header else "it has no header: give the column's number"
            raise UserError(f"{path}: no column '{column}' for {name}; {known}")
    if max(indices.values()) >= cells.shape[1]:
        raise UserError(f"{path}: {cells.shape[1]} columns; allowed: at least {max(indices.values()) + 1}")
    rows = cells.iloc[1:] if header else cells
    return {name: rows.iloc[:, index].tolist() for name, index in indices.items()}


def write_interactions(path: Path, data: Interactions) -> None:
    """Write interactions as a TSV with header user, item, rating, time (where known) and further columns."""
    # For speed of start: much of the package reads no tables.
    import pandas as pd

    frame: dict[str, np.ndarray] = {"user": data.users[data.user], "item": data.items[data.item], "rating": data.rating}
    if data.time is not None:
        frame["time"] = data.time.astype(np.int64) if (data.time % 1 == 0).all() else data.time
    frame |= dict(data.columns)
    pd.DataFrame(frame).to_csv(path, sep="\t", index=False, float_format="%g")
