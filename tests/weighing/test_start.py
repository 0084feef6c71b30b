"""Criteria are listed and clients weighed on paper without waiting for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.conftest import cli_environment

HEAVY = ("torch", "scipy", "pandas", "sklearn", "flwr")


@pytest.mark.parametrize("module", ["weighing.rule", "weighing.table", "cli.tables", "data", "messages"])
def test_nothing_heavy_is_imported(module: str) -> None:
    text = f"import sys, steelyard.{module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, env=cli_environment(), check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
