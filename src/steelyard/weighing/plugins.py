"""Criteria written by users: found through entry points, or loaded from a script or module that a run names."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from steelyard.errors import UserError, listed
from steelyard.usercode import SHIPPED, NotAllowed, is_allowed_by_name, load_code

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
    """Import a declared module by dotted name, or a .py file of the user's own; its decorators do the registering.

    Importing runs a module, so one that nobody declared for Steelyard is refused before it is imported.
    """
    if not source.endswith(".py") and not source.startswith(SHIPPED) and not is_allowed_by_name(source):
        declared = sorted({point.module for point in entry_points(group=GROUP)})
        if source not in declared:
            raise NotAllowed(
                f"plugin: '{source[:80]}' is not declared for Steelyard; allowed: the path of a .py file of your own, "
                f"or a module that a package declares under the entry point {GROUP} ({listed(declared) or 'here none'})"
            )
    return load_code(source, "plugin")
