"""Whether the optional libraries for federations are there."""

from __future__ import annotations

from importlib.util import find_spec

from steelyard.errors import UserError


def needed() -> None:
    """Say in one line what to install where Flower is missing."""
    for module in ("flwr", "cryptography"):
        if find_spec(module) is None:
            raise UserError(f"federate: the package '{module}' is not installed; install steelyard[flower]")
