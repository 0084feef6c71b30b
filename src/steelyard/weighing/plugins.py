"""Criteria written by users: found through entry points, or loaded from a script or module that a run names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from steelyard.errors import UserError

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
def load_module(place: str) -> object:
    """Import a user's module by dotted name or by the path of a .py file; its decorators do the registering."""
    path = Path(place)
    try:
        if place.endswith(".py"):
            if not path.is_file():
                raise UserError(f"plugin '{place}': no such file; allowed: the path of a Python file or a module name")
            spec = importlib.util.spec_from_file_location(f"steelyard_plugin_{path.stem}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            return module
        return importlib.import_module(place)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"plugin '{place}' does not load: {type(error).__name__}: {error}") from error
