"""Criteria written by users: found through entry points, or loaded from a script or module that a run names."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from steelyard.errors import UserError
from steelyard.usercode import load_code

GROUP = "steelyard.criteria"


@cache
def load_entry_points() -> None:
    """Import what installed packages offer under the entry-point group `steelyard.criteria`; runs once."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:
            raise UserError(f"entry point {GROUP}: '{point.name}' ({point.value}) does not load: {error}") from error


@cache
def load_module(source: str) -> object:
    """Import a user's module by dotted name or by the path of a .py file; its decorators do the registering."""
    return load_code(source, "plugin")
