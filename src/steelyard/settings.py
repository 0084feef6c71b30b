"""Sections of an experiment's description: their base, reading TOML, changing fields by name, explaining mistakes."""

from __future__ import annotations

import tomllib
import types
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from steelyard.errors import UserError, listed, nearest

ModelT = TypeVar("ModelT", bound=BaseModel)


class Section(BaseModel):
    """One table of an experiment file: frozen, every field checked, unknown fields refused.

    Derive from it in the package that the section configures; a string under a field is its documentation and
    appears in `steelyard show --schema`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


def parse(text: str, where: str) -> dict[str, Any]:
    """Parse TOML; a slip in the file is named with its line."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where}: not valid TOML: {error}") from error


def change(document: dict[str, Any], assignment: str) -> None:
    """Apply one `section.field=value` to a document; the value is read as TOML, else taken as plain text."""
    name, equals, text = assignment.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not equals or not all(keys):
        raise UserError(f"--set: got '{assignment}'; allowed: section.field=value, such as rounds.count=50")
    put(document, keys, read_value(text.strip()), assignment)


def read_value(text: str) -> Any:
    """Read one value as TOML would (numbers, true, [lists], "text"); anything else is plain text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def put(document: dict[str, Any], keys: Sequence[str], value: Any, shown: str) -> None:
    """Set a nested value, making tables on the way; a number names one of several sections, as in flaws.0.amount."""
    table: Any = document
    for key, following in pairwise(keys):
        if isinstance(table, list):
            table = cast("list[Any]", table)[_position(cast("list[Any]", table), key, shown)]
        else:
            table = table.setdefault(key, {})
        sections = isinstance(table, list) and following.isdigit() and len(keys) > 2
        if not isinstance(table, dict) and not sections:
            raise UserError(f"{shown}: '{key}' is a single value, not a section")
    if isinstance(table, list):
        table[_position(cast("list[Any]", table), keys[-1], shown)] = value
    else:
        table[keys[-1]] = value


def _position(sections: Sequence[Any], key: str, shown: str) -> int:
    if not key.isdigit() or int(key) >= len(sections):
        raise UserError(f"{shown}: no section {key}; allowed: 0 to {len(sections) - 1}, those that the file has")
    return int(key)


def validated(model: type[ModelT], document: Mapping[str, Any], where: str) -> ModelT:
    """Check a document against a section; the first thing wrong is named in one line that begins with `where`."""
    try:
        return model.model_validate(dict(document))
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, model)}" if where else explain(error, model)) from None


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Put the first error of a validation into one line: the field, what it held, what is allowed."""
    problems = error.errors(include_url=False)
    first = problems[0]
    path = [part for part in first["loc"] if part != "function-after"]
    name = ".".join(str(part) for part in path)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    message, got = first["msg"], first.get("input")
    if first["type"] == "extra_forbidden":
        fields = known_fields(model, path[:-1])
        hint = nearest(str(path[-1]), fields)
        return f"{name}: unknown field{hint}; allowed here: {listed(fields)}{more}"
    if first["type"] == "missing":
        return f"{name}: missing; this field must be given{more}"
    if first["type"] == "value_error":
        told = message.removeprefix("Value error, ")
        return f"{name}.{told}{more}" if name else f"{told}{more}"
    hint = ""
    if first["type"] == "literal_error" and isinstance(got, str):
        hint = nearest(got, [part for part in message.split("'") if part.strip() not in ("", ",", "or")][1:])
    # What pydantic calls these types is no word of TOML's.
    kinds = {"model_type": "a section of fields", "dict_type": "a section of fields", "tuple_type": "a list"}
    allowed = kinds.get(first["type"], message.removeprefix("Input should be ").removeprefix("a valid "))
    shown = "a table" if isinstance(got, dict) else repr(got)
    return f"{name}: got {shown}{hint}; allowed: {allowed}{more}"


def known_fields(model: type[BaseModel], path: Sequence[int | str]) -> list[str]:
    """Return the field names of the section at a path, for the nearest match to a misspelt one."""
    current: Any = model
    for part in path:
        current = _step(current, part)
        if current is None:
            return []
    return sorted(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def _step(annotation: Any, part: int | str) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(str(part))
        return None if field is None else _unwrap(field.annotation)
    inner = [argument for argument in get_args(annotation) if argument is not Ellipsis]
    return _unwrap(inner[-1]) if inner else None


def _unwrap(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        models = [argument for argument in get_args(annotation) if argument is not type(None)]
        return _unwrap(models[0])
    return annotation
