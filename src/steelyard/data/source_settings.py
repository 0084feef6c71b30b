"""The `[data]` section of an experiment: what is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from steelyard.data.offers import SOURCES, Source, SourceOffers
from steelyard.settings import Section

Count = Annotated[int, Field(ge=1)]


def refuse_misplaced(section: Section, choice: str, only: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse a field that was set although the section's source or scheme has no use for it."""
    chosen = getattr(section, choice)
    for name, allowed in only.items():
        value = getattr(section, name)
        default = type(section).model_fields[name].get_default(call_default_factory=True)
        if chosen not in allowed and value != default:
            shown = str(value) if isinstance(value, Path) else value
            raise ValueError(f"{name}: got {shown!r} with {choice} '{chosen}'; allowed with: {', '.join(allowed)}")


class DataSettings(Section):
    """Where the samples come from; use one `[data]` section per experiment."""

    source: Source = "digits"
    """digits and diabetes come with scikit-learn; mnist reads IDX files; leaf a LEAF folder with train/ and test/; npz
    NumPy arrays; images a folder or zip of images with an attribute table; memory is given from Python."""
    path: Path | None = None
    """File or folder to read. A relative path is looked for in the working folder, then in the folder that the
    environment variable STEELYARD_DATA names, then in ../shared/data. mnist: by default the folder
    mnist in STEELYARD_DATA, ../shared/data or data."""
    normalise: Literal["unit", "standard"] = "unit"
    """unit: pixel values between 0 and 1 (bytes divided by 255, digits by 16), other numbers as they are; standard:
    mean 0 and standard deviation 1 per channel or column, measured on the training part."""
    features: str = "x"
    """npz: name of the array with one sample per row."""
    labels: str | None = None
    """npz: name of the array of labels (default y); images: the column that is the label (default Smiling). An npz with
    arrays `attributes` and `attribute_names` also offers each of those names."""
    owner: str | None = None
    """npz: name of the array that says whose row it is (default: the first there is of writer, user, owner, identity);
    images: the column that names the person (default identity)."""
    held_out: str | None = None
    """npz: name of a true/false array that marks the rows of the source's own test part."""
    task: Literal["classes", "regression"] = "classes"
    """npz: whether labels are classes (whole numbers or words) or the target of a regression. diabetes is always a
    regression, the other sources are always classes."""
    classes: Count | None = None
    """npz and leaf: number of classes, where the highest may be missing. Default: the highest label plus 1."""
    marks: dict[str, str] = Field(default_factory=dict)
    """npz and images: further attributes of each row, as name = "column" or name = "not column", each 0/1. Default for
    images: sharp = "not Blurry", which the criterion image sharpness reads."""
    attributes: Path | None = None
    """images: the attribute table, a .csv or CelebA's list_attr text file, either also .gz. Default: the only such file
    beside the images."""
    identities: Path | None = None
    """images: CelebA's text file of image names and identities; not needed where the table has the person's column."""
    size: Annotated[int, Field(ge=4, le=1024)] = 64
    """images, also those that a LEAF folder names: width and height in pixels; others are cut to the central square and
    scaled."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """leaf, npz and images: share of the samples to use. Whole people are drawn at random until the share is reached;
    single samples where there are no people."""
    seed: int = 0
    """Seed of that draw, apart from the run's seed so that runs with different seeds see the same data."""

    @model_validator(mode="after")
    def _fits_source(self) -> Self:
        needs_path = {
            "leaf": "LEAF folder with train/ and test/",
            "npz": ".npz file",
            "images": "folder or .zip of images",
        }
        if self.source in needs_path and self.path is None:
            raise ValueError(f"path: got nothing; allowed with source '{self.source}': a {needs_path[self.source]}")
        only: dict[str, tuple[str, ...]] = {
            "features": ("npz",),
            "held_out": ("npz",),
            "task": ("npz",),
            "labels": ("npz", "images"),
            "owner": ("npz", "images"),
            "marks": ("npz", "images"),
            "attributes": ("images",),
            "identities": ("images",),
            "size": ("images", "leaf"),
            "classes": ("npz", "leaf"),
            "share": ("leaf", "npz", "images"),
            "path": ("mnist", "leaf", "npz", "images"),
        }
        refuse_misplaced(self, "source", only)
        return self

    def offers(self) -> SourceOffers:
        """Return what this data is known to hold before it is read: what its source offers, and what is set here."""
        offered = SOURCES[self.source]
        match self.source:
            case "npz":
                regression = self.task == "regression"
                return replace(
                    offered,
                    task=self.task,
                    classes=0 if regression else self.classes,
                    marks=frozenset(self.marks),
                    held_out=self.held_out is not None,
                )
            case "leaf":
                return replace(offered, classes=self.classes)
            case "images" if self.marks:
                return replace(offered, marks=frozenset(self.marks))
            case _:
                return offered
