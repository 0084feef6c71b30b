"""Whether the libraries of the extra `steelyard[flower]` are installed."""

from __future__ import annotations

from importlib.util import find_spec

from steelyard.errors import UserError


def require_flower() -> None:
    """Refuse in one line that says what to install where Flower is missing; call it before Flower is imported."""
    for module in ("flwr", "cryptography"):
        if find_spec(module) is None:
            raise UserError(f"federate: the package '{module}' is not installed; install steelyard[flower]")
