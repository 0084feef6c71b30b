"""Relative paths in an experiment file mean files beside it, wherever the command is called from."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

DATA_FIELDS: Mapping[str, tuple[str, ...]] = {
    "data": ("path", "files", "attributes", "identities"),
    "interactions": ("path", "catalogue"),
    "items": ("path",),
    "knowledge.sources": ("path", "links", "predicates", "names"),
}
"""Fields that name data to read, by section. What is written (`store.folder`) goes to the working folder."""


def resolve_paths(document: dict[str, Any], folder: Path, *, data: bool = True) -> None:
    """Replace each relative path of data that exists in `folder` by the whole path; all others stay as they are.

    Tables of facts and of who is there always get their whole path; with `data` = false nothing else does.

    Use it on the document of an experiment file, before changes from the command line, whose paths are relative to the
    working folder. A whole path also lets the run be resumed from anywhere.
    """
    for keys in (["facts"], ["rounds", "select"]):
        for table in _tables(document, keys):
            if isinstance(path := table.get("path"), str):
                table["path"] = str(folder / path)
    for section, fields in DATA_FIELDS.items() if data else ():
        for table in _tables(document, section.split(".")):
            for field in fields:
                given = table.get(field)
                if isinstance(given, list):
                    table[field] = [_whole(folder, one) for one in cast("list[Any]", given)]
                elif given:
                    table[field] = _whole(folder, given)


def _tables(document: Any, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the tables that a section's name means: one, none, or each of several."""
    if isinstance(document, list):
        for each in cast("list[Any]", document):
            yield from _tables(each, keys)
    elif isinstance(document, dict) and keys:
        yield from _tables(cast("dict[str, Any]", document).get(keys[0]), keys[1:])
    elif isinstance(document, dict):
        yield cast("dict[str, Any]", document)


def _whole(folder: Path, given: Any) -> Any:
    """Return a relative path, or a pattern such as sites/*.csv, that exists in a folder as a whole path."""
    try:
        if isinstance(given, str) and not Path(given).is_absolute():
            path = folder / given
            if path.exists() or (any(sign in given for sign in "*?[") and glob.glob(str(path))):
                return str(path.resolve())
    except (OSError, ValueError):
        pass  # A name too long for the file system, or with a NUL: the reader says so with the field's name.
    return given
