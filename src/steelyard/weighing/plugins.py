"""Criteria written by users: found through entry points, or loaded from a script or module that a run names."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from steelyard.errors import UserError
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
    own = source.endswith(".py") or source.startswith(SHIPPED) or is_allowed_by_name(source)
    if not own and source not in {point.module for point in entry_points(group=GROUP)}:
        # The line may go from a node to its server, so it does not say which modules are declared here.
        raise NotAllowed(
            f"plugin: '{source[:80]}' is not declared for Steelyard; allowed: the path of a .py file of your own, "
            f"or a module that a package declares under the entry point {GROUP}"
        )
    return load_code(source, "plugin")
