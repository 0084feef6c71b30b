"""What privacy needs beyond the core."""

from __future__ import annotations

from importlib.util import find_spec

from steelyard.errors import UserError

INSTALL = "pip install 'steelyard[privacy]'"


def check_accounting() -> None:
    """Refuse a budget where the library that adds it up is missing, in one line that says how to get it."""
    if find_spec("dp_accounting") is None:
        raise UserError(f"privacy: a budget needs the package dp-accounting, which is not installed; {INSTALL}")
