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


def test_several_precisions_have_a_ratio_each() -> None:
    options = simulator.parse(["--bench", "A", "--precision", "float32, bfloat16"])
    line = subprocess.Popen(["true"])
    line.wait()
    seconds = {"ours": 2.0, "ours:bfloat16": 1.0, "loop": 8.0}
    peers = [simulator.Peer(name, line, None, {}, [s], [s]) for name, s in seconds.items()]  # type: ignore[arg-type]
    said = simulator.summary(peers, options, {})
    assert said["ratio"] == {"loop": 4.0}
    assert said["ratio_by_precision"] == {"float32": {"loop": 4.0}, "bfloat16": {"loop": 8.0}}


@pytest.mark.parametrize(("bench", "precision"), [("A", "half"), ("A", "float32,"), ("compare", "float32,tf32")])
def test_unknown_precisions_are_refused(bench: str, precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        simulator.parse(["--bench", bench, "--precision", precision])
    assert "--precision: got" in capsys.readouterr().err


def test_commands_are_those_a_user_types(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.simulators import comparison

    typed: list[list[str]] = []
    monkeypatch.setattr(comparison.subprocess, "run", lambda command, **_: typed.append(command))
    options = simulator.parse(["--bench", "compare", "--commands", "7"])
    said = comparison.commands(options, ["DS", "LD>DS"])
    assert said["rounds"] == 7
    assert [word for command in typed for word in command if word in ("DS", "LD>DS")] == ["DS", "DS", "LD>DS"]
    assert all("rounds.count=7" in command for command in typed)
    assert "--rules" not in typed[1]
    assert comparison.ratios({"ours": 2.0, "ten_single_ours": 3.0}) == {"ten_single_ours": 1.5}


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


@pytest.mark.parametrize("wrong", ["0", "ten", "10,,50", "-1"])
def test_numbers_of_clients_that_are_none_are_named(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        simulator.parse(["--bench", "nets", f"--clients={wrong}"])
    assert "--clients: got" in capsys.readouterr().err
