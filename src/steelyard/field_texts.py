"""What fields of an experiment mean: the strings under them in the code, for the schema and the reference.

They are read from the source when somebody asks. Reading them for every section takes a quarter of a second, which a
command that only runs an experiment does not wait for.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from steelyard.settings import Section


@functools.cache
def field_texts(section: type[BaseModel]) -> dict[str, str]:
    """Return the string under each field of a section, those of the sections that it derives from included."""
    found = dict[str, str]()
    for base in reversed(section.__mro__):
        if issubclass(base, Section):
            found.update(_own_texts(base))
    return {name: text for name, text in found.items() if name in section.model_fields}


def _own_texts(section: type[BaseModel]) -> Iterator[tuple[str, str]]:
    try:
        source = inspect.getsource(section)
    except (OSError, TypeError):
        return  # Made in an interactive session: there is no file to read.
    definition = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(definition, ast.ClassDef)
    for field, under in pairwise(definition.body):
        match field, under:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)
            case _:
                pass


def schema_with_texts(section: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a section and of all that it holds, every field with its meaning."""
    schema = section.model_json_schema()
    known = {kind.__name__: kind for kind in _all_below(Section)}
    for name, part in {section.__name__: schema, **schema.get("$defs", {})}.items():
        for field, text in field_texts(known[name]).items() if name in known else ():
            part["properties"][field].setdefault("description", text)
    return schema


def _all_below(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for below in section.__subclasses__():
        yield below
        yield from _all_below(below)
