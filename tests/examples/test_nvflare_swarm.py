"""Swarm learning among the examples: a weighted and robust rule holds, and verify reads the joined run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.warm import ROOT

from steelyard.report.verification import verify
from steelyard.runs.history import History

pytest.importorskip("nvflare")

JOB = ROOT / "examples" / "nvflare_swarm" / "job.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_sites_in_nvflares_simulator_make_one_run(tmp_path: Path) -> None:
    words = [sys.executable, str(JOB), "--sites", "8", "--out", str(tmp_path / "swarm")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=880, env=environment, cwd=JOB.parent)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("AG>DS/max: accuracy"))
    assert float(line.split()[2].rstrip("%")) > 85
    history = History(tmp_path / "swarm")
    assert history.last_round == 6
    weights = history.cohorts("AG>DS/max", 0, after=5)
    assert weights.weight[:2].max() < 0.06 < weights.weight[2:].min()
    names = set(history.clients["client"])
    assert names == {f"site-{number}" for number in range(1, 9)}
    found = verify(tmp_path / "swarm")
    assert (found.code, found.found.checked["weights"][:8]) == (0, "6 rounds")
