"""What the shell offers when a user presses Tab: names of recipes; it imports nothing heavy."""

from __future__ import annotations

from importlib import resources


def recipe_names(incomplete: str) -> list[str]:
    """Return the recipes that begin so; where none does, the shell goes on with names of files."""
    names = (entry.name for entry in resources.files("steelyard.recipes").iterdir())
    found = sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))
    return [name for name in found if name.startswith(incomplete)]
