"""A run killed, its disk filled and its log cut, by the script that does it at every step: here at some of them."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from tests.conftest import ROOT, cli_environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cc") is None or not sys.platform.startswith("linux"), reason="needs cc and Linux"),
]


@pytest.mark.parametrize(
    "words", [("steps", "--stride", "30"), ("full", "--stride", "30"), ("random", "--count", "10")], ids=lambda w: w[0]
)
def test_every_fault_leaves_a_run_that_goes_on_or_none(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", *words],
        cwd=ROOT,
        env=cli_environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all sound" in done.stdout
