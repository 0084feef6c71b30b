"""Criteria written by users: found through entry points, or loaded from a script or module that a run names."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from steelyard.errors import UserError
from steelyard.usercode import CRITERIA, load_code


@cache
def load_entry_points() -> None:
    """Import what installed packages offer under the entry-point group `steelyard.criteria`; runs once."""
    for point in entry_points(group=CRITERIA):
        try:
            point.load()
        except Exception as error:
            raise UserError(f"entry point {CRITERIA}: '{point.name}' ({point.value}) does not load: {error}") from error


@cache
def load_module(source: str) -> object:
    """Import a declared module by dotted name, or a .py file of the user's own; its decorators do the registering.

    Importing runs a module, so one that nobody declared for Steelyard is refused before it is imported.
    """
    return load_code(source, "plugin", CRITERIA)
