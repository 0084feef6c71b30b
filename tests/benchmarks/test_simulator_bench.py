import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.simulators import work

from benchmarks import simulator

ROOT = Path(simulator.__file__).resolve().parent.parent


def test_work_is_the_same_for_every_peer() -> None:
    bench = work.BENCHES["B"]
    sizes = np.diff(work.make_data(bench).begins)
    assert len(sizes) == 371
    assert sizes.min() >= 40
    assert sizes.max() <= 400
    assert 190 < sizes.mean() < 210
    assert work.pick(bench, 4) == work.pick(bench, 4) != work.pick(bench, 5)
    assert len(set(work.pick(bench, 4))) == 37


def test_a_peer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(simulator.Absent, match="STEELYARD_PEERS"):
        simulator.command_of("flower", None)
    with pytest.raises(simulator.Absent, match="venv-jax is not there"):
        simulator.command_of("fedjax", tmp_path)


def test_ratios_are_the_peers_time_over_ours() -> None:
    options = simulator.parse(["--bench", "C", "--against", "loop"])
    line = subprocess.Popen(["true"])
    line.wait()

    def peer(name: str, *seconds: float) -> simulator.Peer:
        return simulator.Peer(name, line, None, {}, list(seconds), list(seconds))  # type: ignore[arg-type]

    said = simulator.summary([peer("ours", 1.0, 2.0, 9.0), peer("loop", 8.0, 6.0, 7.0)], options, {})
    assert said["sec_per_round"] == {"ours": 2.0, "loop": 7.0}
    assert said["ratio"] == {"loop": 3.5}
    assert said["ratio_of_best"] == {"loop": 6.0}


def test_unknown_peers_are_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.simulator", "--bench", "C", "--against", "loop,flwr"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "got flwr; allowed: loop, flower, pfl, fedjax" in ran.stderr


@pytest.mark.slow
def test_the_last_line_is_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.simulator", "--bench", "C", "--against", "loop,flower"]
    command += ["--format", "json", "--rounds", "1", "--logs", str(tmp_path), "--venvs", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["bench"] == "C"
    assert set(said["sec_per_round"]) == {"ours", "loop"}
    assert said["ratio"]["loop"] > 0
    assert "flower" in said["skipped"]
