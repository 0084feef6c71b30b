"""A federation of real processes on the oldest and on the newest version of Flower that we support."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.clients.flower.test_adapter import SOURCES, VERSIONS
from tests.federate.test_federate_processes import left_running, written

from steelyard.runs.reader import History


def python_with(flower: str, folder: Path) -> Path:
    """Return a Python that has one version of Flower, and for the rest what is installed here."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=200)
    python = folder / "bin" / "python"
    wanted = ["--no-deps", "-q", f"flwr=={flower}"]
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", *wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    if done.returncode:
        pytest.skip(f"flwr {flower} cannot be installed here: {' '.join(done.stderr.split())[-200:]}")
    (own,) = folder.glob("lib/python*/site-packages")
    # After its own packages come those of this Python.
    (own / "here.pth").write_text(sysconfig.get_paths()["purelib"])
    return python


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flower", [VERSIONS[0], VERSIONS[-1]])
def test_a_federation_on_the_oldest_and_the_newest_flower(flower: str, tmp_path: Path):
    python = python_with(flower, tmp_path / "venv")
    env = {**os.environ, "PYTHONPATH": str(SOURCES.parent), "FLWR_TELEMETRY_ENABLED": "0"}
    names = "import flwr; from importlib.metadata import version; print(version('flwr'), flwr.__file__)"
    found = subprocess.run([python, "-c", names], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert found.stdout.split()[0] == flower, found.stderr
    assert str(tmp_path) in found.stdout
    file, folder = written(tmp_path, rounds={"count": 2, "fraction": 1.0}), tmp_path / "run"
    command = [str(python), "-m", "steelyard", "federate", "local", file, "--nodes", "2", "--tls", "--out", str(folder)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    history = History(folder)
    assert history.info["status"] == "finished"
    assert history.clients["failure"].isna().all()
    assert history.clients["round"].max() == 2
    assert history.untested.empty
    assert left_running(folder) == []
