"""Writing a run's tables as files that any tool reads."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic_core import to_json

from steelyard.base import files
from steelyard.base.errors import UserError, no_formula, printable, told_as
from steelyard.runs.reader import History

if TYPE_CHECKING:
    import pandas as pd

TABLES = ("federations", "rounds", "clients", "evaluations", "untested", "listening")
_ROWS = 20_000
"""Rows that are written at once: enough for speed, few enough for memory."""


To = Literal["csv", "json", "parquet"]


def export_run(folder: Path, to: To, out: Path | None = None, *, force: bool = False) -> list[Path]:
    """Write each table of a run as one file and return the files; works while the run goes on.

    Files that are there already are refused unless forced: they may be another run's, or edited.
    """
    if to == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError(
            "--to: got 'parquet', which needs pyarrow: pip install 'steelyard[parquet]'; allowed: csv, json"
        )
    history = History(folder)
    target = out or folder / files.EXPORT
    with told_as(f"--out: {target} cannot be made", "a writable folder"):
        files.make_folder(target)
    paths = {target / f"{name}.{to}": name for name in TABLES}
    there = [path for path in paths if files.is_file(path)]
    if there and not force:
        raise UserError(f"{there[0]}: exists already; allowed: another --out, or --force to write over it")
    written = {"csv": csv_lines, "json": _json_lines, "parquet": _parquet}[to]
    with told_as(f"{target}: cannot be written"):
        files.write_all({path: written(getattr(history, name)) for path, name in paths.items()})
    return list(paths)


def _json_lines(frame: pd.DataFrame) -> Iterator[bytes]:
    yield str(frame.to_json(orient="records", double_precision=15)).encode()


def _parquet(frame: pd.DataFrame) -> Iterator[bytes]:
    content = io.BytesIO()
    frame.to_parquet(content, engine="pyarrow", index=False)
    yield content.getvalue()


def csv_lines(frame: pd.DataFrame) -> Iterator[bytes]:
    """Yield a data frame as CSV, as pandas writes it, in a fraction of its time: numbers go through a JSON writer."""
    columns = [frame[name].to_numpy() for name in frame.columns]
    yield (",".join(_quoted(str(name)) for name in frame.columns) + "\n").encode()
    for begin in range(0, len(frame), _ROWS):
        texts = [_texts(column[begin : begin + _ROWS]) for column in columns]
        yield ("\n".join(map(",".join, zip(*texts, strict=True))) + "\n").encode()


def _texts(column: np.ndarray[Any, Any]) -> list[str]:
    if column.dtype.kind in "iuf":
        # The shortest digits that give the same number back; a number that is not known is an empty field.
        return to_json(column.tolist(), inf_nan_mode="null")[1:-1].decode().replace("null", "").split(",")
    values = column.tolist()
    known = {value: "" if value is None or value != value else _quoted(str(value)) for value in set(values)}
    return list(map(known.__getitem__, values))


def _quoted(text: str) -> str:
    text = printable(no_formula(text))
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"') else text
