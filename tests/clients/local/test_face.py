"""The one door to the simulator."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import steelyard.clients.local as simulator

ROOT = Path(__file__).resolve().parents[3]


def test_the_door_needs_no_torch() -> None:
    code = (
        "import sys; from steelyard.clients.local import ComputeSettings; ComputeSettings(engine='loop');"
        "assert 'torch' not in sys.modules; from steelyard.clients.local import Simulation;"
        "assert 'torch' in sys.modules"
    )
    environment = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_what_the_door_shows() -> None:
    assert [getattr(simulator, name).__name__ for name in simulator.__all__] == simulator.__all__
    with pytest.raises(AttributeError, match="has no attribute 'Workshop'"):
        _ = simulator.Workshop


def test_everyone_outside_goes_through_the_door() -> None:
    clients = ROOT / "src" / "steelyard" / "clients"
    inside = {clients / "local", clients / "ranks"}  # the simulator, and the same in several processes
    for folder in ("src", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            if inside & {*path.parents}:
                continue
            text = path.read_text(encoding="utf-8")
            if "clients.local." not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom):
                    assert not (node.module or "").startswith("steelyard.clients.local."), path
