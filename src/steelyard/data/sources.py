"""The one table of data sources: who reads each, which fields of [data] it has, and what it offers before reading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from steelyard.base.errors import UserError, listed, nearest

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


_add("digits", "bundled:read_digits", classes=10)
_add("mnist", "mnist:read_mnist", ("path",), classes=10, owners=True, held_out=True)
_add("leaf", "leaf:read_leaf", (*_ROWS, "size", "length", "vocabulary"), "LEAF folder with train/ and test/", **_PEOPLE)
_add("npz", "npz:read_npz", _ARRAYS, ".npz file", **_PEOPLE)
_add("images", "images:read_images", _IMAGES, "folder or .zip of images", marks=None, owners=True)
_add("digit-masks", "masks:read_digit_masks", task="segmentation", classes=0)
_add("diabetes", "bundled:read_diabetes", task="regression", classes=0)
_add("csv", "tables:read_table", _COLUMNS, "table or a folder", marks=frozenset({"complete"}), splits_owners=True)
_add("memory", "handed_over:no_file", ("task",), task=None, marks=None, **_PEOPLE)
