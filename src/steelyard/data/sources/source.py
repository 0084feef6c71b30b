"""The `[data]` section of an experiment: what sources have in common; each is a class in a file of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, model_validator

from steelyard.base.errors import UserError
from steelyard.base.settings import Kinds, Section

if TYPE_CHECKING:
    # For speed of start: settings are read without torch.
    from steelyard.data.dataset import Dataset

FurtherTask = Literal["survival", "segmentation", "multi-label"]
TaskKind = Literal["classes", "regression"] | FurtherTask
BY_FILE = "file"
"""What `owner` says where each file of a table in several files is one client."""
Count = Annotated[int, Field(ge=1)]


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Cell = Annotated[str, BeforeValidator(_as_text)]
"""What a cell of a table holds; a number is kept as its text."""
Side = Annotated[int, Field(ge=4, le=1024)]
"""Width and height of images in pixels."""
COMPLETE = "complete"
"""The mark of every table: the share of a row's inputs that are not empty."""


def is_pattern(path: Path) -> bool:
    """Whether a path is a pattern such as sites/*.csv."""
    return any(sign in str(path) for sign in "*?[")


@dataclass(frozen=True)
class SourceCapabilities:
    """What a source can give, as far as its settings tell; None where only the data can."""

    task: TaskKind | None = "classes"
    """Whether labels are classes, the target of a regression, times to an event, masks, or several for a row."""
    classes: int | None = None
    """Number of classes; 0 for a regression."""
    marks: frozenset[str] | None = frozenset()
    """Names of the further attributes of its rows, such as "sharp"."""
    owners: bool = False
    """Whether it may know whose row each is."""
    held_out: bool = False
    """Whether it may have a test part of its own."""
    splits_owners: bool = False
    """Whether that test part may hold rows of each owner."""


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


class DataSettings(Kinds):
    """Where the samples come from; use one `[data]` section per experiment.

    A source is a class below this one, in a file of its own, with its fields, what it offers before it is read, and
    `read`.
    """

    told_by: ClassVar[str] = "source"
    usual: ClassVar[str | None] = "digits"
    source: str = ""
    """digits, diabetes, digit-masks (strokes of digits as masks): they come with scikit-learn; mnist: IDX files; leaf:
    a LEAF folder with train/ and test/; npz: NumPy arrays; images: a folder or zip of images, in a folder for each
    class, with an attribute table, or with masks; csv: a table with names of columns (also Parquet, Excel, SPSS,
    Stata), or several; memory: it is given from Python."""
    normalise: Literal["unit", "standard", "client"] = "unit"
    """unit: pixel values between 0 and 1 (bytes divided by 255, digits by 16), other numbers as they are; standard:
    mean 0 and standard deviation 1 per channel or column, measured on the training part (csv: on the training rows of
    all clients); client, the default for csv: each client by its own training rows, so that nothing is shared."""
    seed: int = 0
    """Seed of the draw of `share`, apart from the run's seed so that runs with different seeds see the same data."""
    augment: AugmentSettings | None = None
    """How images are changed at random while they are trained on; default: not at all."""

    @model_validator(mode="after")
    def _scaled_once(self) -> Self:
        if self.augment is not None and self.augment.mean and self.normalise != "unit":
            raise ValueError(f"normalise: got '{self.normalise}' together with augment.mean; allowed: one of the two")
        if self.normalise == "client" and self.source != "csv":
            raise ValueError(f"normalise: got 'client' with source '{self.source}'; allowed with: csv")
        return self

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of one sample, where the settings decide it; None where only the data can tell."""
        return None

    def capabilities(self) -> SourceCapabilities:
        """Return what this data is known to hold before it is read."""
        return SourceCapabilities()

    def read(self) -> Dataset:
        """Read the data as they are; `load` draws the share and scales."""
        raise NotImplementedError


class FileSource(DataSettings):
    """What sources with rows of the user's own have in common."""

    classes: Count | None = None
    """Number of classes, where the highest may be missing; of masks: of a pixel. Default: the highest label plus 1;
    csv and masks of images: the values that there are, numbered in ascending order."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the samples to use. Whole people are drawn at random until the share is reached; single samples where
    there are no people."""


class Memory(DataSettings, named="memory"):
    """A data set that is handed over in Python."""

    task: TaskKind | None = None
    """What the data are; default: as they are handed over."""

    def capabilities(self) -> SourceCapabilities:
        return SourceCapabilities(self.task, marks=None, owners=True, held_out=True, splits_owners=True)

    def read(self) -> Dataset:
        raise UserError(
            "data.source: got 'memory', which has no file; allowed: a data set handed over in Python, "
            "experiment.run(dataset=steelyard.in_memory(...))"
        )
