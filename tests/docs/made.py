"""The programs of docs/, as the site's build imports them."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from types import ModuleType

from tests.warm import ROOT


def beside(name: str) -> ModuleType:
    """Return a program of docs/, which finds the others there as docs/build.py does."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(ROOT / "docs"))


def generated() -> ModuleType:
    """Return docs/generated.py, which makes reference pages."""
    return beside("generated")


def fields() -> ModuleType:
    """Return docs/fields.py, which makes the page of all fields."""
    return beside("fields")


@cache
def pages() -> dict[str, str]:
    """Return the pages that it makes, by path."""
    return generated().pages()
