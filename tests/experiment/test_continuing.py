"""Going on with a run: what it began with is checked, each change is named in one line, and accepting goes on."""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.runs.commands import steelyard
from tests.runs.contents import assert_same_bits, query
from tests.warm import WarmProcess

import steelyard as package
from steelyard.errors import UserError
from steelyard.experiment.running import run
from steelyard.rounds import loop
from steelyard.runs.store import exists

TEXT = """
name = "small"
seed = 3
[data]
source = "npz"
path = "{path}"
[partition]
scheme = "iid"
clients = 4
[model]
name = "logistic"
[training]
learning_rate = 0.2
epochs = 1
batch_size = 10
[rounds]
count = {rounds}
fraction = 1.0
[compute]
engine = "loop"
device = "cpu"
threads = 1
[weighing]
criteria = ["DS", "LD"]
"""


def write_data(folder: Path) -> Path:
    random = np.random.default_rng(0)
    path = folder / "data.npz"
    labels = np.arange(120) % 3
    np.savez(path, x=random.normal(size=(120, 5)).astype(np.float32) + labels[:, None], y=labels)
    return path


def experiment(folder: Path, rounds: int = 4) -> Path:
    path = folder / "small.toml"
    path.write_text(TEXT.format(path=write_data(folder), rounds=rounds))
    return path


@pytest.fixture
def part(tmp_path: Path) -> Path:
    """A run that was killed after round 2."""
    code = steelyard("run", experiment(tmp_path), "--out", tmp_path / "part", folder=tmp_path, killed_after=2)
    assert code == -signal.SIGKILL, (tmp_path / "output").read_text()
    return tmp_path / "part"


def said(folder: Path) -> str:
    """The one line that a command printed."""
    lines = (folder / "output").read_text().strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def goes_on(part: Path, *options: str) -> None:
    code = steelyard("resume", part, *options, folder=part.parent)
    assert code == 0, (part.parent / "output").read_text()
    assert query(part, "SELECT MAX(round) FROM rounds") == [(4,)]


def test_an_edited_field_is_named_with_both_values(part: Path) -> None:
    file = part / "experiment.toml"
    before = file.read_text()
    file.write_text(before.replace("learning_rate = 0.2", "learning_rate = 0.3"))
    assert steelyard("resume", part, folder=part.parent) == 2
    line = said(part.parent)
    assert "experiment.toml: training.learning_rate: 0.2 when the run began, 0.3 now; allowed: as it was, or" in line
    assert f"`steelyard resume {part} --accept-changes`" in line
    assert query(part, "SELECT MAX(round) FROM rounds") == [(2,)]
    # What is only written otherwise is no change.
    file.write_text("# a remark\n" + before)
    goes_on(part)


def test_an_edited_field_can_be_accepted_and_is_recorded(part: Path) -> None:
    file = part / "experiment.toml"
    file.write_text(file.read_text().replace("learning_rate = 0.2", "learning_rate = 0.3"))
    goes_on(part, "--accept-changes")
    ((accepted,),) = query(part, "SELECT value FROM info WHERE key = 'accepted'")
    assert json.loads(accepted) == ["training.learning_rate: 0.2 when the run began, 0.3 now"]
    ((text,),) = query(part, "SELECT value FROM info WHERE key = 'experiment_text'")
    assert text == file.read_text()


@pytest.mark.parametrize("kept", [0, 1, 200])
def test_an_experiment_file_cut_off_is_never_another_experiment(part: Path, kept: int) -> None:
    file = part / "experiment.toml"
    file.write_text("\n".join(file.read_text()[:kept].splitlines()[:-1]))
    assert steelyard("resume", part, folder=part.parent) == 2
    assert "experiment.toml" in said(part.parent)
    if not kept:
        assert steelyard("table", part, folder=part.parent) == 2
        assert "experiment.toml: is empty or cut off; allowed: the file as the run wrote it" in said(part.parent)


@pytest.mark.parametrize("change", ["x", "y"])
def test_one_changed_number_of_the_data_is_noticed(part: Path, change: str) -> None:
    path = part.parent / "data.npz"
    arrays = dict(np.load(path))
    arrays[change].flat[7] += 1
    np.savez(path, **arrays)
    assert steelyard("resume", part, folder=part.parent) == 2
    line = said(part.parent)
    part_of = "labels" if change == "y" else "features"
    assert f"the data are not those that the run began with (data.path = {path}): {part_of} (seed 3)" in line
    goes_on(part, "--accept-changes")


def test_a_flipped_bit_of_the_newest_checkpoint_is_told_and_ends_in_the_same_bits(part: Path) -> None:
    assert steelyard("run", part.parent / "small.toml", "--out", part.parent / "whole", folder=part.parent) == 0
    path = part / "checkpoints" / "round-000002.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(bytes(content))
    goes_on(part)
    told = (part.parent / "output").read_text()
    assert "round-000002.safetensors: not the checkpoint that was written: its checksum differs; going on from" in told
    assert_same_bits(part, part.parent / "whole")


def test_other_rules_or_another_model_are_another_run(part: Path) -> None:
    file = part / "experiment.toml"
    before = file.read_text()
    file.write_text(before.replace('"LD",', '"MD",'))
    assert steelyard("resume", part, "--accept-changes", folder=part.parent) == 2
    assert "began with the rules and seeds DS>LD, now DS>MD; allowed: the same, or a new run" in said(part.parent)
    file.write_text(before.replace('name = "logistic"', 'name = "mlp"'))
    assert steelyard("resume", part, "--accept-changes", folder=part.parent) == 2
    assert "the checkpoint holds a model of 18 numbers, the experiment describes one of" in said(part.parent)


def test_other_criteria_of_a_rule_are_another_run(part: Path) -> None:
    """What was measured stands in the order of the criteria; the names would be put on other numbers."""
    connection = sqlite3.connect(part / "run.sqlite")
    with connection:
        changed = 'UPDATE federations SET settings = replace(settings, \'"DS","LD"\', \'"LD","DS"\')'
        assert connection.execute(changed).rowcount == 1
    connection.close()
    assert steelyard("resume", part, "--accept-changes", folder=part.parent) == 2
    assert said(part.parent).endswith(
        "DS>LD began with the criteria LD, DS, now DS, LD; allowed: the same, or a new run"
    )


def test_versions_that_differ_are_said(part: Path) -> None:
    connection = sqlite3.connect(part / "run.sqlite")
    with connection:
        connection.execute("UPDATE info SET value = '1.0.0' WHERE key IN ('version_torch', 'version_steelyard')")
    connection.close()
    goes_on(part)
    told = (part.parent / "output").read_text()
    assert f"steelyard: torch was 1.0.0 when the run began, and is {torch.__version__} now: the rounds" in told
    assert "steelyard: steelyard was 1.0.0 when the run began, and is " in told


def test_a_run_that_fails_before_its_first_round_leaves_its_folder_free(tmp_path: Path) -> None:
    described = package.Experiment.load(experiment(tmp_path))

    def fail(round: int, accuracies: object) -> None:
        raise UserError("the first report failed")

    def refuse(*_: object) -> None:
        raise UserError("nothing to test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_begin", refuse)
        with pytest.raises(UserError, match="nothing to test"):
            run(described, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    # One that failed later is a run, and goes on.
    with pytest.raises(UserError, match="the first report failed"):
        run(described, out=tmp_path / "run", progress=fail)
    assert exists(tmp_path / "run")
    assert query(tmp_path / "run", "SELECT value FROM info WHERE key = 'status'") == [("stopped",)]
    package.resume(tmp_path / "run")


def test_sigterm_stops_as_an_interrupt_does(tmp_path: Path) -> None:
    document, part = experiment(tmp_path, rounds=100_000), tmp_path / "part"
    process = WarmProcess("run", document, "--out", part, folder=tmp_path, printed=tmp_path / "printed")
    try:
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until and not (part / "run.sqlite-wal").exists():
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    finally:
        process.kill()
    told = (tmp_path / "printed").read_text(encoding="utf-8")
    assert "Traceback" not in told
    assert f"steelyard resume {part}" in told
    assert query(part, "SELECT value FROM info WHERE key = 'status'") == [("stopped",)]
    assert [path.name for path in part.glob("run.sqlite*")] == ["run.sqlite"]
