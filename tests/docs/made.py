"""The program that makes reference pages from the code, as the site's build imports it."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from types import ModuleType

from tests.warm import ROOT


@cache
def generated() -> ModuleType:
    """Return docs/generated.py, with its folder beside it as docs/build.py has it."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return import_module("generated")
    finally:
        sys.path.remove(str(ROOT / "docs"))


def fields() -> ModuleType:
    """Return docs/fields.py, which makes the page of all fields."""
    generated()
    return import_module("fields")


@cache
def pages() -> dict[str, str]:
    """Return the pages that it makes, by path."""
    return generated().pages()
