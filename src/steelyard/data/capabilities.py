"""What each source of data can give, as far as it is known before anything is read: one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Source = Literal["digits", "mnist", "leaf", "npz", "images", "diabetes", "csv", "memory"]
TaskKind = Literal["classes", "regression"]

NO_MARKS: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SourceCapabilities:
    """What a source can give; None where only the data can tell. `DataSettings.capabilities` adds the settings."""

    task: TaskKind | None = "classes"
    """Whether labels are classes or the target of a regression."""
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


SOURCES: Mapping[Source, SourceCapabilities] = {
    "digits": SourceCapabilities(classes=10),
    "mnist": SourceCapabilities(classes=10, owners=True, held_out=True),
    "leaf": SourceCapabilities(owners=True, held_out=True, splits_owners=True),
    "npz": SourceCapabilities(owners=True, held_out=True, splits_owners=True),
    "images": SourceCapabilities(marks=None, owners=True),
    "diabetes": SourceCapabilities(task="regression", classes=0),
    "csv": SourceCapabilities(marks=frozenset({"complete"}), splits_owners=True),
    "memory": SourceCapabilities(task=None, marks=None, owners=True, held_out=True, splits_owners=True),
}
