"""Files that an experiment names, data and code: where they lie, keeping code with a run, asking before it is run.

Reading an experiment never runs such code. A file or a run folder may come from anybody, so whoever runs what it names
is asked first; code that Python or the command line names itself needs no asking.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from steelyard.base import files
from steelyard.base.errors import UserError, listed, told_as
from steelyard.base.usercode import PYTHON, SHIPPED, app_is_loaded

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


# Code of the user's own.


FOLDER = files.CODE
"""The folder in a run's folder that holds the code it was run with."""

Ask = Callable[[str, Mapping[str, str]], None]
"""Called with a file or folder and the code it names, by field, before any of it runs; raises where it must not run."""


def named_code(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the code that an experiment names, by field; use it on a document or on a description's dump."""
    return {field: value for field, value, _ in _each(document)}


def resolve_code(document: dict[str, Any], base: Path) -> None:
    """Make relative paths of code absolute, in place: they are meant from the folder of the file that names them."""
    for _, value, put in list(_each(document)):
        source, rest = _split(value)
        if source.endswith(".py") and not Path(source).is_absolute():
            put(f"{(base / source).resolve()}{rest}")


def rename_code(document: dict[str, Any], rename: Callable[[str], str]) -> None:
    """Name other code instead of what an experiment names, in place; a node names its own files."""
    for _, value, put in list(_each(document)):
        put(rename(value))


def file_name(code: str) -> str | None:
    """Return "losses.py:mean" for code in a file or in an app folder, wherever that lies; None for other code."""
    source, rest = _split(code)
    if source.startswith(SHIPPED):
        return f"{source.removeprefix(SHIPPED)}.py{rest}"
    return f"{Path(source).name}{rest}" if source.endswith(".py") else None


def digest(path: Path) -> str:
    """Return the SHA-256 of a file of code, shortened, by which a change of it is known."""
    return hashlib.sha256(files.read_bytes(path)).hexdigest()[:16]


def content_name(code: str) -> str:
    """Return "losses.py:mean" and a digest of the file, by which the same code is known wherever it lies."""
    source, _ = _split(code)
    path = Path(_shipped(source) or source)
    name = file_name(code)
    if name is None:
        return code
    return f"{name} {digest(path) if path.is_file() else 'missing'}"


def keep_code(document: dict[str, Any], folder: Path, name_of: Callable[[str], str] | None = None) -> None:
    """Copy the files that an experiment names into a folder and name the copies instead, in place.

    By default a copy is named from above the folder, as "code/losses.py"; `name_of` makes another name of the file's.
    """
    kept: dict[str, str] = {}
    for field, value, put in list(_each(document)):
        source, rest = _split(value)
        source = _shipped(source) or source
        if not source.endswith(".py"):
            continue
        if source not in kept:
            kept[source] = _copy(Path(source), folder, set(kept.values()), field)
        name = kept[source]
        put(f"{folder.name}/{name}{rest}" if name_of is None else f"{name_of(name)}{rest}")


def _shipped(source: str) -> str | None:
    """Return the file of a module that an app folder brought along; a run keeps it as it keeps any other file."""
    if not source.startswith(SHIPPED) or not app_is_loaded():  # Looking for a module imports the package around it.
        return None
    try:
        found = importlib.util.find_spec(source)
    except ModuleNotFoundError:
        return None
    return None if found is None else found.origin


def _copy(source: Path, folder: Path, taken: set[str], field: str) -> str:
    stem, number = source.stem.replace(".", "_"), 1
    name = f"{stem}.py"
    while name in taken:
        number += 1
        name = f"{stem}_{number}.py"
    with told_as(f"{field}: '{source}' cannot be copied to {folder}", "a file that can be read"):
        files.write(folder / name, source.read_bytes())
    return name


def refuse(where: str, code: Mapping[str, str], allowed: str) -> None:
    """Refuse to run the code that a file or folder names, in one line that says which and how to allow it."""
    shown = listed(f"{field} = {value}" for field, value in code.items())
    raise UserError(f"{where}: names code of its own ({shown}), which would run with your rights; allowed: {allowed}")


def _each(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Callable[[str], None]]]:
    """Go over the fields that name code: the field, what it holds, and what changes it."""
    sections = {name: document.get(name) for name in ("weighing", "algorithm")}
    beside = document.get("beside")
    for name, rule in cast("dict[str, Any]", beside).items() if isinstance(beside, dict) else ():
        sections[f"beside.{name}"] = rule
        if isinstance(rule, dict):
            sections[f"beside.{name}.algorithm"] = cast("dict[str, Any]", rule).get("algorithm")
    for name, rule in sections.items():
        plugins = cast("dict[str, Any]", rule).get("plugins") if isinstance(rule, dict) else None
        if isinstance(plugins, list):
            sources = cast("list[Any]", plugins)
            for index, source in enumerate(sources):
                if isinstance(source, str):
                    several = f".{index}" if len(sources) > 1 else ""
                    yield f"{name}.plugins{several}", source, _setter(sources, index)
    for name, key in (("model", "name"), ("training", "loss")):
        section = document.get(name)
        value = cast("dict[str, Any]", section).get(key) if isinstance(section, dict) else None
        if isinstance(value, str) and ":" in value and not value.startswith(PYTHON):
            yield f"{name}.{key}", value, _setter(cast("dict[str, Any]", section), key)


def _setter(holder: Any, key: Any) -> Callable[[str], None]:
    def put(value: str) -> None:
        holder[key] = value

    return put


def _split(value: str) -> tuple[str, str]:
    """Split "losses.py:mean" into the source and the rest with its colon; plugins have no rest."""
    source, colon, name = value.rpartition(":")
    return (source, colon + name) if colon else (value, "")
