# ruff: noqa: RUF012  pydantic gives each model its own copy of a default
"""What rows went through before a model saw them: columns, categories, fill values, scales, names of classes.

A source says what it reads; `scaling` adds how it scaled. `new_rows` prepares further rows in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from steelyard.base.documents import Document
from steelyard.data.cells import moments
from steelyard.data.sources.source import TaskKind

Floats = NDArray[np.float64]
Few = Annotated[int, Field(ge=0, le=100_000_000)]
Values = Literal["numbers", "bytes", "tokens"]
MOST_SITES = 5_000
"""Numbers for scaling at most that a run notes of single sites; of more sites it notes none."""


class Column(Document):
    """One input column of a table."""

    name: str
    kind: Literal["number", "category"]
    levels: list[str] = []
    """The values of a category, each of which is a 0/1 column."""
    low: float | None = None
    """The least number that was trained on; None where the run does not tell."""
    high: float | None = None
    """The largest one."""


class Scale(Document):
    """What fills and scales numbers: an empty cell becomes `fill`, then all are (number - mean) / deviation."""

    fill: list[float] = []
    """One for each column of numbers; none for images and arrays, which have no empty cells."""
    mean: list[float]
    deviation: list[float]

    @classmethod
    def of(cls, seen: Floats, missing: str, *, scaled: bool) -> Scale:
        """Return what cells of training rows say: mean and deviation of those that are there, or 0 and 1 unscaled.

        A column of which they hold nothing has mean 0.
        """
        if missing == "zero":
            seen = np.nan_to_num(seen)
        _, mean, deviation = moments(seen)
        deviation[deviation == 0] = 1
        return cls.by(list(zip(mean.tolist(), deviation.tolist(), strict=True)), missing, scaled=scaled)

    @classmethod
    def by(cls, scales: Sequence[tuple[float, float]], missing: str, *, scaled: bool) -> Scale:
        """Return what the mean and deviation of each column say, as they were measured or agreed on."""
        mean, deviation = [mean for mean, _ in scales], [deviation for _, deviation in scales]
        fill = [0.0] * len(mean) if missing == "zero" else mean
        if not scaled:
            mean, deviation = [0.0] * len(mean), [1.0] * len(mean)
        return cls(fill=fill, mean=mean, deviation=deviation)

    def apply(self, values: Floats) -> Floats:
        """Return rows × columns filled and scaled."""
        return (np.where(np.isnan(values), self.fill, values) - self.mean) / self.deviation


class Target(Document):
    """What the outputs of a model mean."""

    task: TaskKind
    label: str = ""
    """The column that was learnt, where the data had a name for it."""
    names: list[str] = []
    """The classes by number, of a row or of a pixel; or the columns that are labels of a row."""
    event: str | None = None
    """Survival: the column that says whether the event came."""
    positive_above: float | None = None
    """Labels above this number are the second class, all others the first."""


class Preparation(Document):
    """How rows become what a model takes, and what its outputs mean; `model_dump_json` and back.

    >>> steelyard.data.load(steelyard.data.DataSettings(source="digits")).described.shape
    [1, 8, 8]
    """

    form: Literal["table", "images", "characters", "words", "array", "prepared"]
    """What a row is read from. array: numbers as they are handed over; prepared: numbers as nodes make them, which do
    not tell how."""
    values: Values = "numbers"
    """bytes: pixels from 0 to 255, divided by 255."""
    shape: Annotated[list[Few], Field(min_length=1, max_length=8)]
    """Of one row as the model takes it. images: channels, height, width; characters and words: the length of a text."""
    target: Target
    columns: list[Column] = []
    """table: the input columns in their order."""
    indicators: list[str] = []
    """table: columns of which a further 0/1 column says where the cell is empty, in the order of these."""
    known: list[str] = []
    """table: columns that the training table had and that are no input."""
    owner: str | None = None
    """table: the column that says whose row it is."""
    cells: dict[str, dict[str, Any]] = {}
    """table: by column, how its cells are read: the fields of `[data.columns.NAME]`."""
    missing: Literal["mean", "zero", "drop", "refuse"] = "mean"
    """table: what became of rows with an empty cell."""
    normalise: Literal["unit", "standard", "client"] = "unit"
    """client: each site by its own training rows, so that a new site must scale by rows of its own."""
    scale: Scale | None = None
    """What all rows are scaled by: of a table's columns of numbers, or of each channel or column; None: nothing."""
    sites: dict[str, Scale] = {}
    """By site, what its rows are scaled by; empty where that stays with the sites."""
    low: float | None = None
    """images and array: the least number that was trained on, before it was scaled."""
    high: float | None = None
    vocabulary: Few = 0
    """words: number of tokens that words are hashed to."""

    @property
    def numbers(self) -> list[Column]:
        """The columns of numbers, which come first in a row."""
        return [column for column in self.columns if column.kind == "number"]

    def with_ranges(self, low: Floats, high: Floats) -> Preparation:
        """Return it with the least and largest number of each column of numbers; NaN where there was none."""
        ends = iter(zip(low.tolist(), high.tolist(), strict=True))
        columns = [
            column if column.kind != "number" else column.model_copy(update=_range(*next(ends)))
            for column in self.columns
        ]
        return self.model_copy(update={"columns": columns})

    def without_rows(self) -> Preparation:
        """Return it without what tells of single rows or of single sites: for runs that promise privacy."""
        columns = [column.model_copy(update={"low": None, "high": None}) for column in self.columns]
        return self.model_copy(update={"columns": columns, "sites": {}, "low": None, "high": None})


def _range(low: float, high: float) -> dict[str, float | None]:
    return {"low": None, "high": None} if np.isnan(low) else {"low": low, "high": high}
