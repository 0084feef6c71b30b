"""The folder for what can be made again: choices of engines, scripts of figures."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return where things are kept between runs: $STEELYARD_CACHE, else steelyard/ in the user's cache folder."""
    given = os.environ.get("STEELYARD_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steelyard"
