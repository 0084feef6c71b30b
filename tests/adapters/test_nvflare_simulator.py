"""NVFlare's own simulator, in processes of its own: digits, where plain averaging follows the biggest and we do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits
from tests.warm import ROOT

from steelyard.runs.glance import glance
from steelyard.runs.reader import History

pytest.importorskip("nvflare")

SIZES = (450, 450, 100, 100, 100, 100)
"""The first two clients label each digit as the next; where we weigh, the last one sends NaN on top."""


def write_parts(path: Path) -> None:
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = digits.data[order] / 16, digits.target[order]
    parts = {"server_x": x[1300:1360], "server_y": y[1300:1360], "test_x": x[1360:], "test_y": y[1360:]}
    ends = np.cumsum(SIZES)
    for client, (begin, end) in enumerate(zip(ends - SIZES, ends, strict=True), 1):
        parts |= {f"x{client}": x[begin:end], f"y{client}": (y[begin:end] + (client <= 2)) % 10}
    np.savez(path, **parts)


def run(folder: Path, rule: str, transfer: str = "FULL") -> tuple[float, str]:
    """Run the job; return the accuracy of its last model on clean rows, and what the server logged."""
    folder.mkdir()
    write_parts(folder / "parts.npz")
    job = Path(__file__).parent / "nvflare_job" / "job.py"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(job), str(folder), rule, transfer]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=job.parent)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said[-3000:]
    (saved,) = folder.rglob("server.npy")
    model = np.load(saved)
    with np.load(folder / "parts.npz") as parts:
        scores = parts["test_x"] @ model[:, :64].T + model[:, 64]
        return float((scores.argmax(1) == parts["test_y"]).mean()), said


@pytest.mark.slow
def test_plain_averaging_follows_the_biggest(tmp_path: Path) -> None:
    accuracy, _ = run(tmp_path / "plain", "")
    assert accuracy < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["FULL", "DIFF"])
def test_weighed_by_the_servers_rows_it_learns(tmp_path: Path, transfer: str) -> None:
    accuracy, said = run(tmp_path / transfer, "power(VP)^3", transfer)
    assert accuracy > 0.85
    assert said.count("left out site-6: model holds NaN or infinity") == 3
    assert "weights by power(VP)^3" in said
    history = History(tmp_path / transfer / "run")
    assert (history.last_round, history.chain.problem) == (3, "")
    weights = history.clients[history.clients["round"] == 3].set_index("client")["weight"]
    assert weights[["site-1", "site-2"]].max() < 0.01 < weights[["site-3", "site-4", "site-5"]].min()
    assert set(history.failures_after(0)["client"]) == {"site-6"}
    assert glance(tmp_path / transfer, "run").state == "finished"
