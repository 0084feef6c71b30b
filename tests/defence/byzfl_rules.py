"""byzfl's aggregators (dev only), without what the rest of that package imports (torchvision, plotting)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

import pytest


def aggregators(module: str = "aggregators") -> Any:
    """Import a file of `byzfl.aggregators` alone: a bare parent package stands in for one whose import loads it all."""
    if "byzfl" not in sys.modules:
        found = importlib.util.find_spec("byzfl")
        if found is None or found.submodule_search_locations is None:
            pytest.skip("byzfl is not installed")
        parent = types.ModuleType("byzfl")
        parent.__path__ = list(found.submodule_search_locations)
        sys.modules["byzfl"] = parent
    return importlib.import_module(f"byzfl.aggregators.{module}")
