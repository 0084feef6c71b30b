"""A run killed, its power cut and its disk filled, by the script that does it at every step: here at some of them."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from tests.warm import ROOT, command_environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cc") is None or not sys.platform.startswith("linux"), reason="needs cc and Linux"),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "words",
    [*((kind, "--stride", "40") for kind in ("steps", "power", "full")), ("random", "--count", "10")],
    ids=lambda words: words[0],
)
def test_every_fault_leaves_a_run_that_goes_on_or_none(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", *words],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all sound" in done.stdout
