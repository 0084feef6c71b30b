"""The page of Python names: every `::: module.Name` in it becomes signature, docstring and members, from the code.

`steelyard docs` shows the same page without them. A block may name members of base classes to be shown too, in an
option `inherited_members`: a list of names, or true for all that are public.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cached_property, reduce
from importlib import import_module
from operator import or_
from types import UnionType
from typing import Any, Union, get_args, get_origin

_BLOCK = re.compile(r"^::: ([\w.]+)\n((?:    .*\n)*)", re.MULTILINE)
_LONGEST = 100
"""Letters of a signature that stands in one line."""
_LONGEST_DEFAULT = 40


def filled(text: str) -> str:
    """Return the page with its blocks filled in."""
    return _BLOCK.sub(lambda found: "\n".join(_described(found[1], found[2])), text)


def _described(path: str, options: str) -> Iterator[str]:
    module, _, name = path.rpartition(".")
    found = getattr(import_module(module), name, None) or import_module(path)
    yield from _entry("###", name, found)
    if inspect.isclass(found):
        attributes = _attributes(found)
        if attributes:
            yield from ["", *(f"- `{each}`: {' '.join(doc.split())}" for each, doc in attributes.items())]
        for each, member in _members(found, _inherited(found, options)):
            yield from _entry("####", f"{name}.{each}", member)


def _entry(level: str, name: str, found: Any) -> Iterator[str]:
    yield f"\n{level} `{name}`\n"
    if callable(found):
        yield f"```python\n{_signature(name, found)}\n```\n"
    yield _as_markdown(inspect.getdoc(found) or "")


def _signature(name: str, found: Any) -> str:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return name
    parts: list[str] = []
    star = False
    for each in signature.parameters.values():
        if each.name in ("self", "cls"):
            continue
        prefix = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        if each.kind == each.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or prefix == "*" or each.kind == each.KEYWORD_ONLY
        kind = "" if each.annotation is each.empty else f": {_kind(each.annotation)}"
        said = repr(each.default)
        default = "" if each.default is each.empty else f" = {said if len(said) < _LONGEST_DEFAULT else '...'}"
        parts.append(f"{prefix}{each.name}{kind}{default}")
    returned = signature.return_annotation
    back = "" if inspect.isclass(found) or returned is signature.empty else _kind(returned)
    line = f"{name}({', '.join(parts)}){back and f' -> {back}'}"
    if len(line) <= _LONGEST:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){back and f' -> {back}'}"])


def _plain(annotation: Any) -> Any:
    """Return a type without what `Annotated` adds to it or to its parts: checks, which print as addresses."""
    if hasattr(annotation, "__metadata__"):
        return _plain(annotation.__origin__)
    origin, parts = get_origin(annotation), get_args(annotation)
    if not any("Annotated" in repr(part) for part in parts):
        return annotation
    plain = tuple(_plain(part) for part in parts)
    return reduce(or_, plain) if origin in (Union, UnionType) else origin[plain]


def _kind(annotation: Any) -> str:
    annotation = _plain(annotation)
    if isinstance(annotation, str | type):
        return annotation if isinstance(annotation, str) else annotation.__name__
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", str(annotation))


def _as_markdown(doc: str) -> str:
    """Return a docstring as Markdown: examples are code, and what is raised is a list."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", doc):
        bare = textwrap.dedent(paragraph)
        if bare.startswith(">>>"):
            lines += ["```pycon", bare, "```", ""]
        elif bare.startswith("Raises:"):
            body = re.sub(r"\n\s{5,}", " ", bare.partition("\n")[2])
            lines += ["Raises:", "", *(f"- {line.strip()}" for line in body.splitlines()), ""]
        else:
            lines += [bare, ""]
    return "\n".join(lines)


def _inherited(found: type, options: str) -> list[str]:
    _, _, said = options.partition("inherited_members:")
    said = said.strip()
    if said == "true":
        return [name for name in dir(found) if not name.startswith("_")]
    return [name.strip() for name in said.strip("[]").split(",") if name.strip()]


def _members(found: type, inherited: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield public methods and properties in the order of the source, and what is asked for of base classes."""
    seen: set[str] = set()
    for cls in found.__mro__:
        for name, raw in vars(cls).items():
            member = raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw
            wanted = (cls is found or name in inherited) and name not in seen and not name.startswith("_")
            seen.add(name)
            if wanted and (inspect.isfunction(member) or isinstance(member, property | cached_property)):
                yield name, member


def _attributes(found: type) -> dict[str, str]:
    """Return the attributes of a class that have a docstring behind them."""
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(found))).body
    except (OSError, TypeError, SyntaxError):
        return {}
    assert isinstance(body, ast.ClassDef)
    documented: dict[str, str] = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            documented[target.id] = str(after.value.value)
    return {name: doc for name, doc in documented.items() if not name.startswith("_")}
