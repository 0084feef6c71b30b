"""What fields mean: the strings under them in the code, for schemas and the reference; documents that are printed."""

from __future__ import annotations

import ast
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

_parsing = threading.Lock()
"""Python 3.11 counts the depth of all trees that threads build at a time in one place, and fails where they mix."""


class Told(BaseModel):
    """What schemas describe field by field; sections and documents derive from it."""


class Document(Told):
    """What commands print as JSON, and tables and reports are made of: frozen, every field named and typed.

    Derive from it for a result. A number that is not known is NaN, in JSON null; `document["field"]` is
    `document.field`, for scripts of before documents were classes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __getitem__(self, name: str) -> Any:
        if name not in {**type(self).model_fields, **type(self).model_computed_fields}:
            raise KeyError(name)
        return getattr(self, name)

    @classmethod
    def schema_of_output(cls) -> dict[str, Any]:
        """Return the JSON schema of what is printed, every field with its meaning; a number may be null."""
        return schema_with_texts(cls, _Printed, "serialization")


class _Printed(GenerateJsonSchema):
    """The schema of what is printed, where NaN, a number that is not known, is null."""

    def float_schema(self, schema: core_schema.FloatSchema) -> dict[str, Any]:
        return {"type": ["number", "null"]}


@cache
def field_texts(section: type[BaseModel]) -> dict[str, str]:
    """Return the string under each field of a section, those of the sections that it derives from included."""
    found = dict[str, str]()
    for base in reversed(section.__mro__):
        if issubclass(base, BaseModel):
            found.update(_own_texts(base))
    return {name: text for name, text in found.items() if name in section.model_fields}


def _own_texts(section: type[BaseModel]) -> Iterator[tuple[str, str]]:
    with _parsing:
        definition = _classes(section.__module__).get(section.__qualname__)
    for field, under in pairwise(definition.body if definition else ()):
        match field, under:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)
            case _:
                pass


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module by their qualified names: parsed once, where `inspect` would for each of them."""
    found: dict[str, ast.ClassDef] = {}

    def look(node: ast.AST, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.ClassDef():
                    found[path + child.name] = child
                    look(child, f"{path}{child.name}.")
                case ast.FunctionDef():
                    look(child, f"{path}{child.name}.<locals>.")
                case _:
                    pass

    # What is made in an interactive session has no file to read.
    with suppress(OSError, TypeError, KeyError):
        look(ast.parse(inspect.getsource(sys.modules[module])), "")
    return found


def first_line(made: object) -> str:
    """Return what a class or function says of itself, without the full stop: for lists of what there is."""
    return (made.__doc__ or "").split("\n")[0].rstrip(".")


def schema_with_texts(
    section: type[BaseModel],
    generator: type[GenerateJsonSchema] = GenerateJsonSchema,
    mode: Literal["validation", "serialization"] = "validation",
) -> dict[str, Any]:
    """Return the JSON schema of a section and of all that it holds, every field with its meaning."""
    schema = section.model_json_schema(schema_generator=generator, mode=mode)
    known = {kind.__name__: kind for kind in _all_below(Told)}
    for name, part in {section.__name__: schema, **schema.get("$defs", {})}.items():
        for field, text in field_texts(known[name]).items() if name in known and "properties" in part else ():
            part["properties"][field].setdefault("description", text)
    return schema


def _all_below(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for below in section.__subclasses__():
        yield below
        yield from _all_below(below)
