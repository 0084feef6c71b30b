"""Criteria are listed and clients weighed on paper without waiting for torch."""

from __future__ import annotations

import subprocess
import sys

from tests.warm import command_environment

HEAVY = ("torch", "scipy", "pandas", "sklearn", "flwr")


MODULES = ("messages", "data", "weighing.rule", "weighing.table", "cli.summaries")


def test_nothing_heavy_is_imported() -> None:
    lines = [
        f"import steelyard.{name}; print({name!r}, [one for one in {HEAVY} if one in modules])" for name in MODULES
    ]
    text = "\n".join(["from sys import modules", *lines])
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, env=command_environment(), check=True, timeout=120
    )
    assert done.stdout.splitlines() == [f"{name} []" for name in MODULES]
