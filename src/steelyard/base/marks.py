"""Marks on fields: those that name files to read, and those that name code of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import setitem
from pathlib import PurePath
from typing import Any, TypeVar, cast, get_args

from pydantic import BaseModel

from steelyard.base.settings import fields_of, plain_type, type_below
from steelyard.base.usercode import PYTHON

MarkT = TypeVar("MarkT")


@dataclass(frozen=True)
class DataFile:
    """Marks a field that names a file to read: a relative path means one beside the experiment's file.

    Use it as Annotated[Path, DataFile()]. What is written, such as `store.folder`, goes to the working folder.
    """

    on_node: str = ""
    """The key of a node's own configuration that stands in for the field; empty: no server may name such a file."""
    with_settings: bool = False
    """Whether the file is read with the settings themselves, wherever these go afterwards."""


@dataclass(frozen=True)
class Code:
    """Marks a field that names code of the user's own, a file or a module: Annotated[str, Code()]."""

    among_names: bool = False
    """Whether the field also takes names of ours: code is then what has a colon, as in "losses.py:mean"."""

    def named_by(self, text: str) -> bool:
        """Whether a text in the field names code in a file or a module."""
        return not self.among_names or (":" in text and not text.startswith(PYTHON))


def marked(
    section: type[BaseModel], given: Any, kind: type[MarkT], before: str = ""
) -> Iterator[tuple[str, MarkT, str, Callable[[str], None]]]:
    """Go over the texts in marked fields: the field, its mark, the text, and what puts another text into a document."""
    table: dict[str, Any] = dict(given) if isinstance(given, BaseModel) else given
    for name, field in fields_of(section).items():
        if name in table:
            mark = _mark_in((*field.metadata, field.annotation), kind)
            yield from _marked_below(plain_type(field.annotation), table, name, kind, mark, f"{before}{name}")


def _marked_below(
    annotation: Any, holder: Any, key: Any, kind: type[MarkT], mark: MarkT | None, path: str
) -> Iterator[tuple[str, MarkT, str, Callable[[str], None]]]:
    value = holder[key]
    if isinstance(value, list | tuple):
        inner = type_below(annotation, 0)
        for index in range(len(cast("Sequence[Any]", value))):
            place = f"{path}.{index}" if len(cast("Sequence[Any]", value)) > 1 or mark is None else path
            yield from _marked_below(inner, value, index, kind, mark, place)
    elif mark is not None and isinstance(value, str | PurePath):
        yield path, mark, str(value), partial(setitem, holder, key)
    elif isinstance(value, BaseModel):
        yield from marked(type(value), value, kind, f"{path}.")
    elif isinstance(value, dict) and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from marked(annotation, value, kind, f"{path}.")
    elif isinstance(value, dict):
        for name in cast("dict[str, Any]", value):
            yield from _marked_below(type_below(annotation, name), value, name, kind, None, f"{path}.{name}")


def _mark_in(annotations: Sequence[Any], kind: type[MarkT]) -> MarkT | None:
    for annotation in annotations:
        found = annotation if isinstance(annotation, kind) else _mark_in(get_args(annotation), kind)
        if found is not None:
            return found
    return None
