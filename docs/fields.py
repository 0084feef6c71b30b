"""The page of all fields of an experiment file, made from the sections' own classes: allowed, default, an example."""

from __future__ import annotations

import copy
import re
import tomllib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from steelyard.base.documents import field_texts
from steelyard.base.settings import fields_of

LONGEST_EXAMPLE = 60
TOP = "top of the file"
_BARE = re.compile(r"[\w-]+", re.ASCII)


class Place(NamedTuple):
    """A section of an experiment file: its path, its class, and whether there may be several of it."""

    path: str
    section: type[BaseModel]
    several: bool

    @property
    def title(self) -> str:
        """The section as a file has it."""
        return TOP if not self.path else f"`[[{self.path}]]`" if self.several else f"`[{self.path}]`"

    def fields(self) -> dict[str, FieldInfo]:
        """Its fields by name, but for sections of their own; each with its meaning."""
        found = {
            name: copy.copy(field)
            for name, field in self.section.model_fields.items()
            if name == "beside" or section_of(field.annotation)[0] is None
        }
        for name, field in found.items():
            field.description = field_texts(self.section).get(name)
        return found


def fields_page() -> str:
    """Every field of an experiment file, by kind and section."""
    from steelyard.experiment.loading import kind_of

    lines = [
        "# Fields of an experiment file",
        "",
        "Made from the code. `steelyard show --schema` prints the same as JSON. `steelyard show NAME --resolved` "
        "shows a recipe with every default filled in. `--set rounds.count=100` changes any of them for one run.",
        "",
        "A field without a default may be left out, unless it says that it must be given. Examples are lines that may "
        "stand at the top of a file; below `[rounds]` the line is `count = 100`.",
    ]
    seen: set[tuple[str, str]] = set()
    for kind in ("learning", "recommend"):
        lines += ["", f'## kind = "{kind}"', "", paragraphs(kind_of(kind)).partition("\n")[0]]
        for place in sections(kind_of(kind)):
            if (place.path, place.section.__name__) in seen:
                continue
            seen.add((place.path, place.section.__name__))
            lines += ["", f"### {place.title} {{: #{_anchor(kind, place.path or TOP)} }}", ""]
            lines += [paragraphs(place.section), ""] if place.path else []
            for name, field in place.fields().items():
                lines += _entry(kind, place, name, field)
    return "\n".join(lines) + "\n"


def sections(model: type[BaseModel], path: str = "", several: bool = False) -> Iterator[Place]:
    """Yield a kind of experiment and all sections in it, from the top down."""
    yield Place(path, model, several)
    for name, field in fields_of(model).items():
        inner, many = section_of(field.annotation)
        if inner is not None and name != "beside":  # each of these has the fields of [weighing], as its text says
            named = [*filter(None, [path, name]), *(["NAME"] if get_origin(field.annotation) is dict else [])]
            yield from sections(inner, ".".join(named), many and named[-1] != "NAME")


def section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the section that a field is, or None, and whether it is a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    several = get_origin(annotation) in (tuple, list, dict)
    for argument in get_args(annotation):
        inner, deeper = section_of(argument)
        if inner is not None:
            return inner, several or deeper
    return None, False


def _anchor(kind: str, name: str) -> str:
    return f"{kind}-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _entry(kind: str, place: Place, name: str, field: FieldInfo) -> list[str]:
    path = f"{place.path}.{name}" if place.path else name
    default = shown_default(field)
    facts = [allowed(field), f"default {default}" if default else ""]
    facts.append(f"example `{example_line(place, name, field)}`")
    text, *items = _meanings(" ".join((field.description or "").split()), field.annotation)
    body = [*([text, ""] if text else []), *(f"- {item}" for item in items), *([""] if items else [])]
    return [f"#### `{path}` {{: #{_anchor(kind, path)} }}", "", *body, " · ".join(filter(None, facts)), ""]


def _meanings(text: str, annotation: Any) -> list[str]:
    """Return a text and, where it goes through values or kinds of data one by one, each of them with its meaning."""
    named = "|".join(re.escape(str(value)) for value in _values(annotation)) or r"(?!default)[a-z][a-z0-9+-]*"
    parts = [
        part for part in re.split(rf"(?:^|(?<=[;.:] ))(?=(?:{named})(?:(?:, | and )[^;:.]+)?: )", text) if part.strip()
    ]
    if len(parts) < 3 and not (len(parts) == 2 and re.match(rf"(?:{named})\b", parts[0])):
        return [text]
    first, *rest = ["", *parts] if re.match(rf"(?:{named})(?:, | and |: )", parts[0]) else parts
    rest = [re.sub(rf"^({named})\b", r"`\1`", part) for part in rest]
    return [first.strip(), *(f"{marked.strip().rstrip(';.: ')}." for marked in rest)]


def _values(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for argument in get_args(annotation) for value in _values(argument)]


# Examples -------------------------------------------------------------------------------------------------------------


def example_line(place: Place, name: str, field: FieldInfo) -> str:
    """Return the field with an example as a line of TOML."""
    path = f"{place.path}.{name}" if place.path and not place.several else name
    return f"{path} = {toml(example(place, name, field))}"


def example(place: Place, name: str, field: FieldInfo) -> Any:
    """Return a value for a field: written by hand, of a recipe, or what is there by default."""
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    found = [value for document in _documents() if (value := _at(document, place.path, name)) is not None]
    short = [value for value in found if len(toml(value)) <= LONGEST_EXAMPLE and accepts(field, value)]
    others = [value for value in _values(field.annotation) if value != default]
    if isinstance(default, bool):
        short.append(not default)
    for value in (*short[:1], *(value for value in short if value != default), *others, default):
        if value is not None and value not in ((), [], {}) and (value != default or value is default):
            return value
    raise KeyError(f"{place.path}.{name}: no recipe sets it and it has no default; docs/fields.toml needs an example")


def accepts(field: FieldInfo, value: Any) -> bool:
    """Say whether a field by itself takes a value."""
    try:
        TypeAdapter(Annotated[field.annotation, field]).validate_python(value)
    except (ValidationError, PydanticUserError):
        return False
    return True


_read: list[dict[str, Any]] = []


def _documents() -> list[dict[str, Any]]:
    """The examples that are written by hand, then all recipes."""
    from steelyard.experiment.loading import recipes

    if not _read:
        texts = [Path(__file__).with_name("fields.toml"), *recipes().values()]
        _read.extend(tomllib.loads(each.read_text(encoding="utf-8")) for each in texts)
    return _read


def _at(document: Any, path: str, name: str) -> Any:
    for part in [*(path.split(".") if path else []), name]:
        if isinstance(document, list):
            document = next((entry for entry in document if part in entry), {})
        document = document.get(part) if isinstance(document, Mapping) else None
    return document


def toml(value: Any) -> str:
    """Return a value as TOML has it, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, Mapping):
        names = {key: key if _BARE.fullmatch(key) else toml(key) for key in value}
        return f"{{ {', '.join(f'{names[key]} = {toml(value[key])}' for key in value)} }}" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml(entry) for entry in value)}]"
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


# Tables and what is allowed -------------------------------------------------------------------------------------------


def table(section: type[BaseModel]) -> list[str]:
    """Return the fields of one section as a table."""
    rows = ["| field | allowed | default | what |", "|---|---|---|---|"]
    for name, field in Place("", section, False).fields().items():
        what = " ".join((field.description or "").split())
        rows.append(f"| `{name}` | {cell(allowed(field))} | {cell(shown_default(field))} | {cell(what)} |")
    return rows if len(rows) > 2 else []


def cell(text: str) -> str:
    """Return a text as a cell of a table holds it."""
    return text.replace("|", "\\|")


def paragraphs(described: type) -> str:
    """Return what a class says of itself, without its examples."""
    parts = [" ".join(part.split()) for part in (described.__doc__ or "").strip().split("\n\n")]
    return "\n\n".join(part for part in parts if not part.startswith((">>>", "Raises:")))


def shown_default(field: FieldInfo) -> str:
    """Return the default of a field as a file would have it; empty where there is none."""
    if field.is_required():
        return "none: it must be given"
    value = field.get_default(call_default_factory=True)
    return "" if value is PydanticUndefined or value is None else f"`{toml(value)}`"


_WORDS = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    dict: "table",
    tuple: "list",
    list: "list",
}
_LIMITS = (
    (Ge, "ge", "≥"),
    (Gt, "gt", ">"),
    (Le, "le", "≤"),
    (Lt, "lt", "<"),
    (MinLen, "min_length", "length ≥"),
    (MaxLen, "max_length", "length ≤"),
)


def allowed(field: FieldInfo) -> str:
    """Return what a field may hold, in words."""
    return _bounded(_kind(field.annotation), field.metadata)


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _bounded(_kind(arguments[0]), annotation.__metadata__)
    if origin is Literal:
        return ", ".join(f"`{toml(value)}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind(argument) for argument in arguments if argument is not type(None)))
    if origin in (tuple, list):
        return f"list of {_kind(arguments[0])}" if arguments else "list"
    if origin is dict:
        return f"table: {_kind(arguments[1])} by name"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    name = getattr(annotation, "__name__", "")
    return _WORDS.get(annotation, "path" if name == "Path" else name.lower() or "value")


def _bounded(kind: str, constraints: Any) -> str:
    bounds: list[str] = []
    for constraint in constraints:
        for part in getattr(constraint, "metadata", None) or [constraint]:
            bounds += [
                f"{sign} {_number(getattr(part, name))}" for limit, name, sign in _LIMITS if isinstance(part, limit)
            ]
    return ", ".join([kind, *bounds])


def _number(value: Any) -> str:
    whole = isinstance(value, int) or float(value).is_integer()
    return f"{int(value):,}" if whole and value >= 10_000 else f"{value:g}"
