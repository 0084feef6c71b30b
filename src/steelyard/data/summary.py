"""What a look at somebody's data found: enough to propose an experiment, and to say so in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from steelyard.base.errors import without_controls
from steelyard.data.dataset import Dataset
from steelyard.data.sources import TaskKind

MOST_NAMED = 5
LONGEST = 40


@dataclass(frozen=True)
class DataSummary:
    """One data set as it was found; `fields` are those of `[data]` beside its source and path, with their comments."""

    source: str
    rows: int
    shape: tuple[int, ...]
    task: TaskKind
    classes: Mapping[str, int]
    """Rows of each class, in the order of the classes; empty for a regression."""
    owners: Mapping[str, int] | None
    """Rows of each owner."""
    held_out: int
    """Rows of the data's own test part."""
    owners_held_out: bool
    """Whether each owner has rows in it."""
    fields: Mapping[str, tuple[Any, str]]
    account: tuple[str, ...]
    """Lines for people."""
    empty: float = 0.0
    """Share of the input cells that are empty."""
    positive: bool = False
    """Whether a regression's target is above 0 in every row."""
    hints: tuple[str, ...] = field(default=())
    """What the user may want to do next about the data."""


def shown(text: object) -> str:
    """Return a name from somebody's data as a line can show it: no control characters, not too long."""
    plain = without_controls(str(text))
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 3]}..."


def few(names: Sequence[object], most: int = MOST_NAMED) -> str:
    """List some names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(shown(name) for name in names[:most]) + more


def counted(counts: Mapping[str, int]) -> str:
    """Say how many rows each of some classes or owners has, the biggest first."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return few([f"{shown(name)} {count:,}" for name, count in ordered])


def sizes(counts: Mapping[str, int], word: str) -> str:
    """Say how many owners there are and how large."""
    return f"{word}: {len(counts):,}, of {min(counts.values()):,} to {max(counts.values()):,} rows: {counted(counts)}"


def of_dataset(
    dataset: Dataset, source: str, fields: Mapping[str, tuple[Any, str]], account: Sequence[str]
) -> DataSummary:
    """Return what a data set that was read whole holds."""
    labels = dataset.labels.numpy()
    tested = np.zeros(len(labels), dtype=np.bool_) if dataset.held_out is None else dataset.held_out
    owners, owned = None, False
    if dataset.owners is not None:
        owners = dict(sorted(Counter(dataset.owners.tolist()).items()))
        # Each owner has rows of both parts.
        owned = all(set(dataset.owners[rows].tolist()) == set(owners) for rows in (tested, ~tested))
    complete = dataset.marks.get("complete")
    classes = {str(number): int((labels == number).sum()) for number in range(dataset.classes)}
    return DataSummary(
        source=source,
        rows=len(dataset),
        shape=dataset.shape,
        task=dataset.kind,
        classes=classes,
        owners=owners,
        held_out=int(tested.sum()),
        owners_held_out=owned,
        fields=fields,
        account=tuple(account),
        empty=0.0 if complete is None else 1.0 - float(complete.mean()),
        positive=dataset.kind == "regression" and bool((labels > 0).all()),
    )
