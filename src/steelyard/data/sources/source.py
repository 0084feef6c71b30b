"""The `[data]` section of an experiment, and the sources that it may name: who reads each, and what it offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, PositiveFloat, model_validator

from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.settings import Section

FurtherTask = Literal["survival", "segmentation", "multi-label"]
TaskKind = Literal["classes", "regression"] | FurtherTask


def without_classes(task: TaskKind) -> tuple[str, ...]:
    """Return the schemes that cannot share out rows of this task: those by class, and those that sort rows by label."""
    by_class = ("dirichlet", "labels", "table")
    return (*by_class, "shard") if task in ("segmentation", "multi-label") else by_class


NO_MARKS: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SourceCapabilities:
    """What a source can give; None where only the data can tell. `DataSettings.capabilities` adds settings."""

    reader: str
    """The function that reads it, "module:function"; it takes the settings and returns a `Dataset`."""
    fields: tuple[str, ...] = ()
    """The fields of [data] that it has beside `source` and `normalise`."""
    needs_path: str | None = None
    """What `path` must be, where it has to be given."""
    task: TaskKind | None = "classes"
    """Whether labels are classes, the target of a regression, times to an event, masks, or several for a row."""
    classes: int | None = None
    """Number of classes; 0 for a regression."""
    marks: frozenset[str] | None = NO_MARKS
    """Names of the further attributes of its rows, such as "sharp"."""
    owners: bool = False
    """Whether it may know whose row each is."""
    held_out: bool = False
    """Whether it may have a test part of its own."""
    splits_owners: bool = False
    """Whether that test part may hold rows of each owner."""


_sources: dict[str, SourceCapabilities] = {}
"""By name. No `Registry`: that loads users' code, and settings must be quick to import."""


def add_source(name: str, source: SourceCapabilities) -> None:
    """Make a source known by this name, as `data.source`."""
    if name in _sources:
        raise UserError(f"data source {name}: registered twice; give one of them another name")
    _sources[name] = source


def sources() -> dict[str, SourceCapabilities]:
    """Return all sources by name."""
    return _sources


def checked_source(name: str) -> str:
    """Return the name of a source, or say which there are."""
    names = sources()
    if name not in names:
        raise UserError(f"source: got '{name}'{nearest(name, names)}; allowed: {listed(names)}")
    return name


_ROWS = ("path", "classes", "share")
_LABELLED = ("labels", "owner", "marks", "held_out")
_TABLE = ("positive_above", "categories", "levels", "ignore", "missing", "na_values", "indicators")
_IMAGES = ("path", "classes", "share", *_LABELLED, "task", "colours", "attributes", "identities", "size")
_ARRAYS = (*_ROWS, *_LABELLED, "features", "task")
_COLUMNS = (*_ROWS, "files", *_LABELLED, "task", "event", "further_labels", *_TABLE)
_HERE = "steelyard.data."
_PEOPLE: dict[str, Any] = {"owners": True, "held_out": True, "splits_owners": True}


def _add(name: str, reader: str, fields: tuple[str, ...] = (), needs_path: str | None = None, **known: Any) -> None:
    add_source(name, SourceCapabilities(_HERE + reader, fields, needs_path, **known))


_add("digits", "sources.bundled:read_digits", classes=10)
_add("mnist", "sources.bundled:read_mnist", ("path",), classes=10, owners=True, held_out=True)
_add(
    "leaf",
    "sources.leaf:read_leaf",
    (*_ROWS, "size", "length", "vocabulary"),
    "LEAF folder with train/ and test/",
    **_PEOPLE,
)
_add("npz", "sources.npz:read_npz", _ARRAYS, ".npz file", **_PEOPLE)
_add("images", "sources.images:read_images", _IMAGES, "folder or .zip of images", marks=None, owners=True)
_add("digit-masks", "sources.images:read_digit_masks", task="segmentation", classes=0)
_add("diabetes", "sources.bundled:read_diabetes", task="regression", classes=0)
_add("csv", "sources.csv:read_table", _COLUMNS, "table or a folder", marks=frozenset({"complete"}), splits_owners=True)
_add("memory", "memory:no_file", ("task",), task=None, marks=None, **_PEOPLE)


BY_FILE = "file"
"""What `owner` says where each file of a table in several files is one client."""
Count = Annotated[int, Field(ge=1)]


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Cell = Annotated[str, BeforeValidator(_as_text)]
"""What a cell of a table holds; a number is kept as its text."""


def is_pattern(path: Path) -> bool:
    """Whether a path is a pattern such as sites/*.csv."""
    return any(sign in str(path) for sign in "*?[")


def refuse_misplaced(section: Section, choice: str, only: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse a field that was set although the section's source or scheme has no use for it."""
    chosen = getattr(section, choice)
    for name, allowed in only.items():
        value = getattr(section, name)
        default = type(section).model_fields[name].get_default(call_default_factory=True)
        if chosen not in allowed and value != default:
            shown = str(value) if isinstance(value, Path) else value
            raise ValueError(f"{name}: got {shown!r} with {choice} '{chosen}'; allowed with: {', '.join(allowed)}")


def _list_sources(schema: dict[str, Any]) -> None:
    schema["enum"] = list(sources())


SourceName = Annotated[str, Field(json_schema_extra=_list_sources)]


class AugmentSettings(Section):
    """[data.augment]: how images are changed at random each time a client trains on them; tests see them as they are.

    Draws depend on the seed, the round, the client, the step and the image's place in its batch, and on nothing else.
    """

    pad: Annotated[int, Field(ge=0, le=512)] = 0
    """Pixels added on each side; a window of the image's own size is cut out at random."""
    padding: Literal["zero", "reflect"] = "zero"
    """zero: black; reflect: the image mirrored at its edge."""
    flip: bool = False
    """Whether half of the images, drawn at random, are mirrored left to right."""
    mean: tuple[float, ...] = ()
    """Mean of each channel, of pixels between 0 and 1, which all images are normalised by, those of tests too; in place
    of `normalise`, for constants that others published."""
    deviation: tuple[PositiveFloat, ...] = ()
    """Standard deviation of each channel, together with `mean`."""

    @model_validator(mode="after")
    def _both(self) -> Self:
        if len(self.mean) != len(self.deviation):
            raise ValueError(
                f"deviation: got {len(self.deviation)} numbers and {len(self.mean)} in mean; allowed: as many of each"
            )
        return self


_TASKS: dict[str, tuple[TaskKind, ...]] = {
    "csv": ("classes", "regression", "survival", "multi-label"),
    "npz": ("classes", "regression", "segmentation", "multi-label"),
    "images": ("classes", "segmentation"),
}
"""What may be learnt from a source that has several tasks."""


class DataSettings(Section):
    """Where the samples come from; use one `[data]` section per experiment."""

    source: SourceName = "digits"
    """digits, diabetes, digit-masks (strokes of digits as masks): they come with scikit-learn; mnist: IDX files; leaf:
    a LEAF folder with train/ and test/; npz: NumPy arrays; images: a folder or zip of images, in a folder for each
    class, with an attribute table, or with masks; csv: a table with names of columns (also Parquet, Excel, SPSS,
    Stata), or several; memory: it is given from Python."""
    path: Path | None = None
    """File or folder to read. A relative path is looked for beside the experiment's file, then in the working folder,
    then in the folder that the environment variable STEELYARD_DATA names, then in ../shared/data. mnist: by default
    the folder mnist in STEELYARD_DATA, ../shared/data or data. csv: also a folder of tables or a pattern such as
    sites/*.csv; included/heart_disease.csv comes with the package."""
    files: tuple[Path, ...] = ()
    """csv: several tables, in place of `path`. Like those of a folder or of a pattern, they are joined by the names of
    their columns."""
    normalise: Literal["unit", "standard", "client"] = "unit"
    """unit: pixel values between 0 and 1 (bytes divided by 255, digits by 16), other numbers as they are; standard:
    mean 0 and standard deviation 1 per channel or column, measured on the training part (csv: on the training rows of
    all clients); client, the default for csv: each client by its own training rows, so that nothing is shared."""
    features: str = "x"
    """npz: name of the array with one sample per row."""
    labels: str | None = None
    """npz: name of the array of labels (default y); images: the column that is the label (default Smiling), or
    "folder", the name of the folder that holds the image (default where there is no table); csv: the column that is to
    be predicted. An npz with arrays `attributes` and `attribute_names` also offers each of those
    names."""
    owner: str | None = None
    """npz: name of the array that says whose row it is (default: the first there is of writer, user, owner, identity);
    images: the column that names the person (default identity), or "folder", the folder around that of the class, as in
    OWNER/CLASS/IMAGE; csv: the column that says whose row it is, such as a hospital, or "file": each file is one
    client, named as the file (default for a folder, a pattern and `files`)."""
    held_out: str | None = None
    """npz: name of a true/false array that marks the rows of the source's own test part; csv: of such a column, of
    true/false, 1/0 or test/train; images: "folder" where they lie in train/CLASS and test/CLASS."""
    task: TaskKind = "classes"
    """npz and csv: whether labels are classes (whole numbers or words) or the target of a regression; csv: or, with
    `event`, the time until something happened to a patient (survival). segmentation, of npz: labels are masks (rows,
    height, width), of images: each image has a mask of the same name in a folder beside its own. multi-label, of npz:
    labels are (rows, labels), 0 or 1; of csv: columns, with `further_labels`. diabetes is always a regression,
    digit-masks a segmentation, the other sources are always classes. memory: what the data are; default: as they are
    handed over."""
    event: str | None = None
    """csv, task survival: the column that says whether the event came at that time, as true/false or 1/0; without it
    the patient was last seen then."""
    further_labels: tuple[str, ...] = ()
    """csv, task multi-label: the columns that are labels beside `labels`; each says true/false, 1/0 or yes/no of a
    row."""
    classes: Count | None = None
    """npz, leaf and csv: number of classes, where the highest may be missing; npz and images with masks: of a pixel.
    Default: the highest label plus 1; csv and masks of images: the values that there are, numbered in ascending
    order."""
    positive_above: float | None = None
    """csv: labels above this number are class 1, all others class 0."""
    categories: tuple[str, ...] | None = None
    """csv: columns that become a 0/1 column for each of their values. Default: columns of text and those in levels."""
    levels: dict[str, Annotated[tuple[Cell, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """csv: the values of a category, column = [values], where a file may lack some. Needed where nodes read files of
    their own, so that all have the same columns."""
    ignore: tuple[str, ...] = ()
    """csv: columns that are no input."""
    missing: Literal["mean", "zero", "drop", "refuse"] = "mean"
    """csv: what becomes of an empty cell. mean: the column's mean, over the same rows as in normalise; zero: 0; drop:
    its row is left out; refuse: the file is refused. An empty category is 0 in all its columns."""
    na_values: dict[str, tuple[Cell, ...]] = Field(default_factory=dict)
    """csv: further values that mean that nothing was recorded, column = [values], such as a cholesterol of 0."""
    indicators: tuple[str, ...] = ()
    """csv: columns that get one more 0/1 column, 1 where their cell is empty."""
    marks: dict[str, str] = Field(default_factory=dict)
    """npz, images and csv: further attributes of each row, as name = "column" or name = "not column", each 0/1.
    Default for images: sharp = "not Blurry", which the criterion image sharpness reads. A csv always has the mark
    "complete": the share of a row's inputs that are not empty, which the criterion completeness reads."""
    attributes: Path | None = None
    """images: the attribute table, a .csv or CelebA's list_attr text file, either also .gz. Default: the only such file
    beside the images."""
    identities: Path | None = None
    """images: CelebA's text file of image names and identities; not needed where the table has the person's column."""
    size: Annotated[int, Field(ge=4, le=1024)] = 64
    """images, also those that a LEAF folder names: width and height in pixels; others are cut to the central square and
    scaled."""
    length: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """leaf, text: tokens of a row; a shorter text has padding (token 0) before it. Default: 80 characters, 25 words."""
    vocabulary: Annotated[int, Field(ge=3, le=10_000_000)] = 10_000
    """leaf, words: number of tokens that words are hashed to; the model must know as many, in `model.arguments`."""
    colours: Literal["rgb", "grey"] = "rgb"
    """images: three channels, or one of grey."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """leaf, npz, images and csv: share of the samples to use. Whole people are drawn at random until the share is
    reached; single samples where there are no people."""
    seed: int = 0
    """Seed of that draw, apart from the run's seed so that runs with different seeds see the same data."""
    augment: AugmentSettings | None = None
    """How images are changed at random while they are trained on; default: not at all."""

    @model_validator(mode="before")
    @classmethod
    def _table_default(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("source") != "csv":
            return given
        found = {"normalise": "client", **cast("Mapping[str, Any]", given)}
        path = found.get("path")
        folder = isinstance(path, str | Path) and (is_pattern(Path(path)) or not Path(path).suffix)
        if found.get("files") or folder:
            found.setdefault("owner", BY_FILE)
        return found

    @model_validator(mode="after")
    def _fits_source(self) -> Self:
        chosen = sources()[checked_source(self.source)]
        if self.files and self.path is not None:
            raise ValueError("files: got some together with path; allowed: one of the two")
        if chosen.needs_path and self.path is None and not self.files:
            raise ValueError(f"path: got nothing; allowed with source '{self.source}': a {chosen.needs_path}")
        if self.source == "csv" and self.labels is None:
            raise ValueError("labels: got nothing; allowed with source 'csv': the name of the column to predict")
        allowed = _TASKS.get(self.source, ())
        if allowed and self.task not in allowed:
            raise ValueError(f"task: got '{self.task}' with source '{self.source}'; allowed: {listed(allowed)}")
        if self.positive_above is not None and self.task != "classes":
            raise ValueError(
                f"positive_above: got {self.positive_above} with task '{self.task}'; allowed with: classes"
            )
        if self.source == "csv" and (self.task == "survival") != (self.event is not None):
            raise ValueError(
                f"event: got {self.event!r} with task '{self.task}'; allowed: the column that says whether the event "
                "came, with task 'survival' alone"
            )
        if self.source == "csv" and (self.task == "multi-label") != bool(self.further_labels):
            raise ValueError(
                f"further_labels: got {len(self.further_labels)} with task '{self.task}'; allowed: the labels beside "
                "`labels`, with task 'multi-label' alone"
            )
        if self.augment is not None and self.augment.mean and self.normalise != "unit":
            raise ValueError(f"normalise: got '{self.normalise}' together with augment.mean; allowed: one of the two")
        if self.normalise == "client" and self.source != "csv":
            raise ValueError(f"normalise: got 'client' with source '{self.source}'; allowed with: csv")
        if self.source == "images" and self.held_out not in (None, "folder"):
            raise ValueError(f"held_out: got '{self.held_out}' with source 'images'; allowed with images: folder")
        only = {
            field: tuple(name for name, source in sources().items() if field in source.fields)
            for field in dict.fromkeys(field for source in sources().values() for field in source.fields)
        }
        refuse_misplaced(self, "source", only)
        return self

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of one sample, where the settings decide it; None where only the data can tell."""
        known: dict[str, tuple[int, ...]] = {"digits": (1, 8, 8), "diabetes": (10,), "digit-masks": (1, 16, 16)}
        known["images"] = (1 if self.colours == "grey" else 3, self.size, self.size)
        return known.get(self.source)

    def capabilities(self) -> SourceCapabilities:
        """Return what this data is known to hold before it is read: what its source can give, and what is set here."""
        known = sources()[self.source]
        match self.source:
            case "npz":
                return replace(
                    known,
                    task=self.task,
                    classes=self.classes if self.task == "classes" else 0,
                    marks=frozenset(self.marks),
                    held_out=self.held_out is not None,
                )
            case "csv":
                classes = self.classes if self.positive_above is None else 2
                return replace(
                    known,
                    task=self.task,
                    classes=classes if self.task == "classes" else 0,
                    marks=frozenset({*self.marks, *(known.marks or ())}),
                    owners=self.owner is not None,
                    held_out=self.held_out is not None,
                    splits_owners=self.owner is not None and self.held_out is not None,
                )
            case "leaf":
                return replace(known, classes=self.classes)
            case "memory":
                return replace(known, task=self.task if "task" in self.model_fields_set else None)
            case "images":
                # In folders without a table there are no marks; with one, only the table can tell.
                unmarked = self.labels == "folder" and self.attributes is None
                marks = frozenset(self.marks) if self.marks or unmarked else known.marks
                given = self.held_out is not None
                classes = 0 if self.task == "segmentation" else known.classes
                return replace(known, task=self.task, classes=classes, marks=marks, held_out=given, splits_owners=given)
            case _:
                return known
