"""Tables as people keep them, one row per sample: CSV, Parquet, Excel, SPSS or Stata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from steelyard.base.marks import DataFile
from steelyard.base.settings import Section
from steelyard.data.preparation import Column, Preparation, Target
from steelyard.data.sources.source import (
    BY_FILE,
    COMPLETE,
    Cell,
    FileSource,
    SourceCapabilities,
    TaskKind,
    is_pattern,
)

if TYPE_CHECKING:
    # For speed of start: settings are read without torch.
    from steelyard.data.dataset import Dataset
    from steelyard.data.tables import Table


class ColumnSettings(Section):
    """[data.columns.NAME]: how the cells of a column are read, where sites wrote them otherwise.

    What is given for one site alone is a table by site: `factor = { south = 0.1 }`.
    """

    type: Literal["number", "category"] | None = None
    """Whether its cells are numbers or categories; default: by what most of them are."""
    unit: str = ""
    """What it is measured in, for people."""
    factor: float | dict[str, float] = 1.0
    """What its numbers are multiplied by."""
    offset: float | dict[str, float] = 0.0
    """What is added to its numbers, after `factor`."""
    missing: tuple[Cell, ...] = ()
    """Cells that mean that nothing was recorded, numbers as they are in the file."""
    limits: bool = False
    """Whether cells such as <5 or >100 are the number in them; a further 0/1 column "NAME beyond limit" marks them."""
    range: tuple[float, float] | None = None
    """The least and the largest number that can be, after `factor`; what lies outside counts as not recorded."""
    synonyms: dict[str, Annotated[tuple[Cell, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """Other spellings of a value, value = [spellings]."""

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.range is not None and self.range[0] > self.range[1]:
            raise ValueError(f"range: got {list(self.range)}; allowed: the least number, then the largest")
        given = self.factor.values() if isinstance(self.factor, dict) else [self.factor]
        if 0 in given:
            raise ValueError("factor: got 0, which makes all cells alike; allowed: any other number")
        return self


class Csv(FileSource, named="csv"):
    """A table with names of columns, or several; use it for rows of numbers and categories, such as patients."""

    path: Annotated[Path, DataFile("data")] | None = None
    """A table, a folder of tables or a pattern such as sites/*.csv, looked for beside the experiment's file, then in
    the working folder, then in the folder that the environment variable STEELYARD_DATA names, then in ../shared/data;
    included/heart_disease.csv comes with the package."""
    files: tuple[Annotated[Path, DataFile()], ...] = ()
    """Several tables, in place of `path`. Like those of a folder or of a pattern, they are joined by the names of their
    columns."""
    normalise: Literal["unit", "standard", "client"] = "client"
    """client: each client by its own training rows, so that nothing is shared; standard: mean 0 and standard deviation
    1 per column, measured on the training rows of all clients; unit: numbers as they are."""
    scales: dict[str, tuple[float, Annotated[float, Field(gt=0)]]] = Field(default_factory=dict)
    """standard: mean and standard deviation of a column, column = [mean, deviation], in place of those that are
    measured; unit: of these the means, which fill empty cells. Across machines the sites agree on them before round 1,
    as far as their owners allow."""
    agreed: dict[str, Annotated[tuple[Cell, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """The values of categories and of the label on which sites agreed before round 1, column = [values]. Another value
    of a category counts as empty; another label is refused."""
    labels: str
    """The column that is to be predicted."""
    owner: str | None = None
    """The column that says whose row it is, such as a hospital, or "file": each file is one client, named as the file
    (default for a folder, a pattern and `files`)."""
    held_out: str | None = None
    """Name of a column of true/false, 1/0 or test/train that marks the rows of the source's own test part, such as a
    published split."""
    held_out_is: tuple[Cell, ...] = ()
    """The values of the column `held_out` that mark the test part, where they are others: the numbers of folds."""
    task: Literal["classes", "regression", "survival", "multi-label"] = "classes"
    """Whether labels are classes (whole numbers or words), the target of a regression, with `event` the time until
    something happened to a patient (survival), or with `further_labels` several for each row."""
    event: str | None = None
    """Task survival: the column that says whether the event came at that time, as true/false or 1/0; without it the
    patient was last seen then."""
    further_labels: tuple[str, ...] = ()
    """Task multi-label: the columns that are labels beside `labels`; each says true/false, 1/0 or yes/no of a row."""
    positive_above: float | None = None
    """Labels above this number are class 1, all others class 0."""
    positive: Cell | None = None
    """Of two classes the one that sensitivity, specificity, F1, ROC and `rounds.threshold` are about. Default: the
    second one in ascending order."""
    categories: tuple[str, ...] | None = None
    """Columns that become a 0/1 column for each of their values. Default: columns of text and those in levels."""
    levels: dict[str, Annotated[tuple[Cell, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """The values of a category, column = [values], where a file may lack some. Needed where nodes read files of their
    own, so that all have the same columns."""
    ignore: tuple[str, ...] = ()
    """Columns that are no input."""
    missing: Literal["mean", "zero", "drop", "refuse"] = "mean"
    """What becomes of an empty cell. mean: the column's mean, over the same rows as in normalise; zero: 0; drop: its
    row is left out; refuse: the file is refused. An empty category is 0 in all its columns."""
    columns: dict[str, ColumnSettings] = Field(default_factory=dict)
    """How the cells of single columns are read, the label too: `[data.columns.NAME]`."""
    unlabelled: Literal["refuse", "drop"] = "refuse"
    """What becomes of rows without a label, or with a time of 0 or less in task survival. refuse: the file is refused;
    drop: they are left out."""
    duplicates: Literal["keep", "drop"] = "keep"
    """What becomes of a row whose inputs and label are those of a row before it. keep: it is one more row; drop: it is
    left out."""
    indicators: tuple[str, ...] = ()
    """Columns that get one more 0/1 column, 1 where their cell is empty."""
    marks: dict[str, str] = Field(default_factory=dict)
    """Further attributes of each row, as name = "column" or name = "not column", each 0/1. There is always the mark
    "complete": the share of a row's inputs that are not empty, which the criterion completeness reads."""

    @model_validator(mode="before")
    @classmethod
    def _each_file_an_owner(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        found = dict(cast("Mapping[str, Any]", given))
        path = found.get("path")
        if found.get("files") or (isinstance(path, str | Path) and (is_pattern(Path(path)) or not Path(path).suffix)):
            found.setdefault("owner", BY_FILE)
        if isinstance(found.get("na_values"), Mapping) and "columns" not in found:  # as frozen suites write it
            found["columns"] = {name: {"missing": cells} for name, cells in found.pop("na_values").items()}
        return found

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if (self.path is None) == (not self.files):
            got = "nothing" if self.path is None else "some together with path"
            raise ValueError(f"files: got {got}; allowed: one of the two, a table or a folder as path, or files")
        if self.scales and self.normalise == "client":
            raise ValueError("scales: got some with normalise 'client'; allowed with: standard, unit")
        if self.held_out_is and self.held_out is None:
            raise ValueError("held_out_is: got values, and no column that has them; allowed with: held_out")
        if self.positive_above is not None and self.task != "classes":
            raise ValueError(
                f"positive_above: got {self.positive_above} with task '{self.task}'; allowed with: classes"
            )
        if self.positive is not None and (
            self.task != "classes" or self.positive_above is not None or self.classes is not None
        ):
            raise ValueError(
                "positive: got a class that is numbered otherwise; allowed: without task, classes, positive_above"
            )
        roles = {"labels": self.labels, "owner": self.owner, "event": self.event, "held_out": self.held_out}
        for role, name in roles.items():
            if name in self.columns and self.columns[name].type is not None:
                raise ValueError(
                    f"columns.{name}.type: got '{self.columns[name].type}' for data.{role}; allowed: for inputs; "
                    "data.task says what labels are"
                )
        for field, task in (("event", "survival"), ("further_labels", "multi-label")):
            if bool(value := getattr(self, field)) != (self.task == task):
                got = "nothing" if not value else repr(value)
                raise ValueError(f"{field}: got {got} with task '{self.task}'; allowed: columns, with '{task}' alone")
        return self

    def capabilities(self) -> SourceCapabilities:
        return SourceCapabilities(
            self.task,
            classes=self.class_count if self.task == "classes" else 0,
            marks=frozenset({*self.marks, COMPLETE}),
            owners=self.owner is not None,
            held_out=self.held_out is not None,
            splits_owners=self.owner is not None and self.held_out is not None,
        )

    @property
    def class_count(self) -> int | None:
        """How many classes there are, as far as the settings say it."""
        if self.positive_above is not None:
            return 2
        return len(self.agreed[self.labels]) if self.labels in self.agreed else self.classes

    @property
    def pools(self) -> bool:
        """Whether columns are scaled or filled over all clients, by no scales that are given."""
        fills = self.normalise == "unit" and self.missing == "mean"
        return not self.scales and (self.normalise == "standard" or fills)

    def preparation(
        self, columns: list[Column], shape: Sequence[int], task: TaskKind, names: Sequence[str], **known: Any
    ) -> Preparation:
        """Return what rows go through, with what else is `known` of it: a model takes it along."""
        cells = {name: column.model_dump(mode="json", exclude_defaults=True) for name, column in self.columns.items()}
        target = Target(
            task=task,
            label=self.labels,
            names=list(names),
            event=self.event,
            positive_above=self.positive_above,
        )
        return Preparation(
            form="table",
            shape=list(shape),
            target=target,
            columns=columns,
            indicators=list(self.indicators),
            owner=self.owner,
            cells=cells,
            missing=self.missing,
            normalise=self.normalise,
            **known,
        )

    def is_category(self, column: str) -> bool:
        """Whether a column is named as a category."""
        declared = self.columns.get(column)
        return column in {*self.levels, *self.agreed, *(self.categories or ())} or bool(
            declared and declared.type == "category"
        )

    def may_be_text(self, column: str) -> bool:
        """Whether a column of text is a category though nothing names it."""
        declared = self.columns.get(column)
        return self.categories is None and not (declared and declared.type == "number")

    def table(self) -> Table:
        """Read the files as one table, with what `columns` says of their cells done."""
        # For speed of start: settings are read without torch.
        from steelyard.data.mending import mended
        from steelyard.data.tables import read_tables

        roles = {name: getattr(self, name) for name in ("labels", "event", "owner", "held_out")}
        named = {f"data.{role}": column for role, column in roles.items() if column}
        found = read_tables(self.files or (self.path or Path(),), self.owner, named)
        return mended(found, self.columns, self.owner)

    def read(self) -> Dataset:
        # For speed of start: settings are read without torch.
        from steelyard.data.columns import table_dataset

        return table_dataset(self.table(), self)
