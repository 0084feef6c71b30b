"""A run's tables: its arrays as data frames, a row per client and round, and files of them that any tool reads."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from pydantic_core import to_json

from steelyard.base import files
from steelyard.base.errors import UserError, no_formula, printable, told_as
from steelyard.messages.updates import Counts, Floats
from steelyard.runs.columns import Cohorts, Tested

if TYPE_CHECKING:
    from steelyard.runs.history import History


Key = tuple[str, int]
"""Rule and seed of a federation."""


def clients_frame(parts: Sequence[tuple[Key, Cohorts]], failures: pd.DataFrame) -> pd.DataFrame:
    """Return all clients that were asked, those left out too, by federation, round and client."""
    criteria = list(dict.fromkeys(name for _, found in parts for name in found.criteria))
    columns: dict[str, Any] = _head(parts)
    for name in ("samples", "loss", "score", "weight", "bytes"):
        columns[name] = _joined([getattr(found, name) for _, found in parts])
    frame = pd.DataFrame(columns)
    frame["failure"] = None
    for kind in ("raw", "normalised"):
        for name in criteria:
            frame[f"{kind}_{name}"] = _joined([_criterion(found, kind, name) for _, found in parts])
    if not len(failures):
        return frame
    return ordered(pd.concat([frame, failures.reindex(columns=frame.columns)]), [key for key, _ in parts])


def evaluations_frame(parts: Sequence[tuple[Key, Tested]]) -> pd.DataFrame:
    """Return all clients that were tested, by federation, round and client; a column for each further metric."""
    columns: dict[str, Any] = _head(parts)
    for name in ("samples", "score", "loss"):
        columns[name] = _joined([getattr(found, name) for _, found in parts])
    for name in dict.fromkeys(name for _, found in parts for name in found.metrics):
        columns[name] = _joined([found.metrics.get(name, np.full(len(found.round), np.nan)) for _, found in parts])
    return pd.DataFrame(columns)


def listening_frame(parts: Sequence[tuple[str, int, int, list[str], Floats]]) -> pd.DataFrame:
    """Return (rule, seed, round, clients, weights [clients, clients]) as a row per round and pair of clients."""
    columns = ("rule", "seed", "round", "client", "hears", "weight")
    frames = [
        pd.DataFrame(
            {
                "rule": rule,
                "seed": seed,
                "round": round,
                "client": np.repeat(clients, len(clients)),
                "hears": np.tile(clients, len(clients)),
                "weight": weights.reshape(-1),
            }
        )
        for rule, seed, round, clients, weights in parts
    ]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(columns))


def _head(parts: Sequence[tuple[Key, Cohorts]] | Sequence[tuple[Key, Tested]]) -> dict[str, Any]:
    rules = _texts([(rule,) for (rule, _), _ in parts], [np.zeros(len(found.round), np.int64) for _, found in parts])
    return {
        "rule": rules,
        "seed": _joined([np.full(len(found.round), seed, np.int64) for (_, seed), found in parts], np.int64),
        "round": _joined([found.round for _, found in parts], np.int64),
        "client": _texts([found.clients for _, found in parts], [found.client for _, found in parts]),
    }


def _texts(words: Sequence[tuple[str, ...]], indices: Sequence[Counts]) -> Any:
    """Return texts given by their indices; through categories, which is far faster than one text after another."""
    distinct = sorted({word for some in words for word in some})
    position = {word: index for index, word in enumerate(distinct)}
    codes = [
        np.array([position[word] for word in some], dtype=np.int64)[index]
        for some, index in zip(words, indices, strict=True)
    ]
    return pd.Categorical.from_codes(_joined(codes, np.int64), pd.Index(distinct, dtype="str")).astype("str")


def _joined(arrays: Sequence[Any], kind: type = np.float64) -> Any:
    return np.concatenate(arrays) if arrays else np.zeros(0, kind)


def _criterion(found: Cohorts, kind: str, name: str) -> Floats:
    if name not in found.criteria:
        return np.full(len(found.round), np.nan)
    return getattr(found, kind)[:, found.criteria.index(name)]


def ordered(frame: pd.DataFrame, federations: Sequence[Key]) -> pd.DataFrame:
    """Return rows of clients in the order of the federations, then by round and client."""
    rank = {key: index for index, key in enumerate(federations)}
    place = [rank[key] for key in zip(frame["rule"], frame["seed"], strict=True)]
    frame = frame.assign(federation=place).sort_values(["federation", "round", "client"], ignore_index=True)
    return frame.drop(columns="federation")


TABLES = ("federations", "rounds", "clients", "evaluations", "untested", "listening")
_ROWS = 20_000
"""Rows that are written at once: enough for speed, few enough for memory."""


To = Literal["csv", "json", "parquet"]


def export_run(history: History, to: To, out: Path | None = None, *, force: bool = False) -> list[Path]:
    """Write each table of a run as one file and return the files; works while the run goes on.

    Files that are there already are refused unless forced: they may be another run's, or edited. Beside drafts they are
    of an export that was killed while it put its files in place.
    """
    if to == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError(
            "--to: got 'parquet', which needs pyarrow: pip install 'steelyard[parquet]'; allowed: csv, json"
        )
    target = out or history.folder / files.EXPORT
    with told_as(f"--out: {target} cannot be made", "a writable folder"):
        files.make_folder(target)
    paths = {target / f"{name}.{to}": name for name in TABLES}
    there = [path for path in paths if files.is_file(path)]
    killed = any(files.is_file(path.with_name(path.name + files.DRAFT)) for path in paths)
    if there and not force and not killed:
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
        texts = [_written(column[begin : begin + _ROWS]) for column in columns]
        yield ("\n".join(map(",".join, zip(*texts, strict=True))) + "\n").encode()


def _written(column: np.ndarray[Any, Any]) -> list[str]:
    if column.dtype.kind in "iuf":
        # The shortest digits that give the same number back; a number that is not known is an empty field.
        return to_json(column.tolist(), inf_nan_mode="null")[1:-1].decode().replace("null", "").split(",")
    values = column.tolist()
    known = {value: "" if value is None or value != value else _quoted(str(value)) for value in set(values)}
    return list(map(known.__getitem__, values))


def _quoted(text: str) -> str:
    text = printable(no_formula(text))
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"') else text
