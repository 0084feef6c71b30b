"""A run's arrays as data frames: a row per client and round, for those who want to ask anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from steelyard.messages.updates import Counts, Floats
from steelyard.runs.columns import Cohorts, Tested

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
    return _with_failures(frame, failures, [key for key, _ in parts]) if len(failures) else frame


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


def _with_failures(frame: pd.DataFrame, failures: pd.DataFrame, order: Sequence[Key]) -> pd.DataFrame:
    joined = pd.concat([frame, failures.reindex(columns=frame.columns)])
    rank = {key: index for index, key in enumerate(order)}
    joined["federation"] = [rank[key] for key in zip(joined["rule"], joined["seed"], strict=True)]
    joined = joined.sort_values(["federation", "round", "client"], ignore_index=True)
    return joined.drop(columns="federation")
