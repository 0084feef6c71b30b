"""A federation across machines: Flower carries the messages, Steelyard weighs.

Needs the extra `steelyard[federate]`. Nothing here is imported by a simulation.
"""

from __future__ import annotations

from importlib.metadata import version

from steelyard.base.errors import UserError

OLDEST, NEWEST = (1, 41), (1, 42)
"""The versions of Flower on which a federation runs: `internals` was held to each of them."""


def check_version() -> None:
    """Refuse a Flower that a federation was not tried on, in one line that says what to do; call it at a start."""
    found = version("flwr")
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if not OLDEST <= numbers <= NEWEST:
        least, most = (".".join(map(str, one)) for one in (OLDEST, NEWEST))
        raise UserError(
            f"federate: Flower (flwr) {found} is installed; allowed: {least} to {most}, as by "
            "pip install 'steelyard[federate]' (steelyard.flower, for apps of your own, takes any from 1.29 on)"
        )
