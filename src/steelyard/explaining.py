"""What a validation refused, in one line: the field, what it held, what is allowed."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from steelyard.errors import brief, listed, nearest

_ALLOWED = {
    # What pydantic calls these is no word of TOML's.
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type", "mapping_type"), "a section of fields"),
    **dict.fromkeys(("tuple_type", "list_type", "set_type"), "a list"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("path_type", "string_type"), "text"),
    "string_unicode": "text in UTF-8",
}


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Put the first error of a validation into one line: the field, what it held, what is allowed."""
    problems = error.errors(include_url=False)
    # A field that does not exist may be why others do not fit.
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    path = _path(model, first["loc"])
    name = ".".join(str(part) for part in path)
    # A field that may be of several kinds is named once for each of them.
    others = {tuple(_path(model, problem["loc"])) for problem in problems} - {tuple(path)}
    more = f" (and {len(others)} more)" if others else ""
    got = first.get("input")
    if first["type"] == "extra_forbidden":
        fields = known_fields(model, path[:-1])
        hint = _elsewhere(model, str(path[-1])) or nearest(str(path[-1]), fields)
        return f"{brief(name, '')}: unknown field{hint}; allowed here: {listed(fields)}{more}"
    if first["type"] == "missing":
        return f"{name}: missing; this field must be given{more}"
    if first["type"] == "value_error":
        text = first["msg"].removeprefix("Value error, ")
        return f"{name}.{text}{more}" if name else f"{text}{more}"
    hint = ""
    if first["type"] == "literal_error" and isinstance(got, str):
        hint = nearest(got, [part for part in first["msg"].split("'") if part.strip() not in ("", ",", "or")][1:])
    alike = [problem for problem in problems if _path(model, problem["loc"]) == path]
    allowed = listed(dict.fromkeys(_allowed(problem) for problem in alike))
    shown = "a table" if isinstance(got, dict) else brief(got)
    return f"{name}: got {shown}{hint}; allowed: {allowed}{more}"


def _elsewhere(model: type[BaseModel], field: str) -> str:
    """Return `" (did you mean 'weighing.plugins'?)"` for a field that other sections have, or an empty string."""
    found = [f"'{name}.{field}'" for name in known_fields(model, []) if field in known_fields(model, [name])]
    return f" (did you mean {' or '.join(found)}?)" if 0 < len(found) < 4 else ""


def _path(model: type[BaseModel], location: Sequence[int | str]) -> list[int | str]:
    """Return where a problem is, without the words that pydantic adds for its own branches."""
    path: list[int | str] = []
    current: Any = model
    for part in location:
        if part == "[key]":
            break
        section = isinstance(current, type) and issubclass(current, BaseModel)
        if not section and not isinstance(part, int) and get_origin(current) not in (dict, Mapping):
            break
        path.append(part)
        current = _step(current, part)
    return path


def _allowed(problem: Any) -> str:
    """Say what a field takes, in words of people who write experiment files."""
    kind, message = problem["type"], problem["msg"]
    context = problem.get("ctx", {})
    if kind in ("too_short", "too_long"):
        bound, word = (context["min_length"], "at least") if kind == "too_short" else (context["max_length"], "at most")
        return f"{word} {bound} value{'' if bound == 1 else 's'}"
    if kind in ("string_too_long", "string_too_short"):
        return message.removeprefix("String should have ")
    return _ALLOWED.get(kind) or str(message).removeprefix("Input should be ").removeprefix("a valid ")


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
