"""A pandas frame, however it came about, in the form that tables are read from: plain names, cells and empties."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from steelyard.errors import UserError

if TYPE_CHECKING:
    import pandas

EMPTY = ("", "?", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "<NA>", "#N/A")
"""Cells that say that nothing was recorded; in the owner's column only the empty cell does, since NA may be a name."""


def tidy(frame: pandas.DataFrame, where: object, owner: str | None = None) -> pandas.DataFrame:
    """Return a frame with rows counted from 0, names as text, moments and durations in days, words for "empty" empty.

    Use it for frames that no CSV was read for: Parquet, or a frame that a user hands over; `where` begins the errors.
    """
    # For speed of start: much of the package reads no tables.
    import pandas

    frame = frame.reset_index(drop=True)
    frame.columns = [str(name).strip() for name in frame.columns]
    for name, count in Counter(frame.columns).items():
        if count > 1:
            raise UserError(f"{where}: names column '{name}' {count} times; expected each name once")
    if not len(frame):
        raise UserError(f"{where}: holds no rows; expected at least one")
    changed: dict[str, Any] = {}
    for name in frame.columns:
        cells: Any = frame[name]
        kind = cells.dtype
        if pandas.api.types.is_datetime64_any_dtype(kind):
            naive = cells.dt.tz_convert("UTC").dt.tz_localize(None) if getattr(kind, "tz", None) is not None else cells
            changed[name] = (naive - pandas.Timestamp(0)) / pandas.Timedelta(days=1)
        elif pandas.api.types.is_timedelta64_dtype(kind):
            changed[name] = cells / pandas.Timedelta(days=1)
        elif pandas.api.types.is_object_dtype(kind) or pandas.api.types.is_string_dtype(kind):
            empty = {"", *(() if name == owner else EMPTY)}
            words = [isinstance(cell, str) and cell.strip() in empty for cell in cells.tolist()]
            changed[name] = cells.mask(pandas.Series(words, dtype=bool))
    return frame.assign(**changed)
