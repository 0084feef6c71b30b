"""Going on with a run: its fields, data, rows, ledger and engine are those with which it began, or changes are named.

What is said of one is shown by the real commands on runs that were killed, which all tests copy.
"""

from __future__ import annotations

import functools
import json
import shutil
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from tests.conftest import CommandLine
from tests.kit import SMALL, changed, made_once, small, wait_until
from tests.runs.commands import steelyard as killable
from tests.runs.contents import change, change_fact, query
from tests.stopping import assert_a_stop_changes_nothing, stop_in_round, stopped
from tests.warm import WarmProcess

import steelyard
from steelyard.base.errors import UserError
from steelyard.base.processor import KERNELS, kernels
from steelyard.clients.local import Simulation
from steelyard.clients.local.engines import choice
from steelyard.experiment.loading import build
from steelyard.experiment.running import resume, run
from steelyard.privacy.ledger import FILE
from steelyard.report.verification import verify
from steelyard.runs.database import exists
from steelyard.runs.history import History

PLAIN = changed(SMALL, rounds={"count": 4}, weighing={"criteria": ["DS", "LD"]}, compute={"threads": 1})
PRIVATE = changed(
    PLAIN,
    rounds={"count": 3, "fraction": 0.5, "sampling": "poisson"},
    weighing={"criteria": ["DS"], "max_shares": 2.0},
    privacy={"central": {"clip": 1.0, "noise": 2.0, "references": {"DS": 140}}},
)
SEEN = "SELECT MAX(round) FROM rounds"


@pytest.fixture
def killed(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a copy of a run of an experiment that was killed after its second round."""

    def make(document: dict[str, Any], folder: Path) -> None:
        folder.mkdir()
        (folder / "mine.toml").write_text(tomli_w.dumps(document))
        code = killable("run", "mine.toml", "--out", "run", folder=folder, killed_after=2)
        assert code == -signal.SIGKILL, (folder / "output").read_text()

    def copied(name: str, document: dict[str, Any]) -> Path:
        made = made_once(tmp_path_factory, f"killed-{name}", functools.partial(make, document))
        return shutil.copytree(made / "run", tmp_path / name)

    return copied


@pytest.fixture
def part(killed: Callable[..., Path]) -> Path:
    return killed("plain", PLAIN)


def goes_on(command: CommandLine, run: Path, *options: str) -> str:
    """Resume a run to its end; returns what was said on the way."""
    done = command("resume", run, *options)
    assert done.returncode == 0, done.stderr
    assert History(run).info["status"] == "finished"
    return done.stderr


def test_an_edited_field_is_named_with_both_values_and_can_be_accepted(
    part: Path, refused: Callable[..., str], command: CommandLine
) -> None:
    file = part / "experiment.toml"
    file.write_text(file.read_text().replace("learning_rate = 0.1", "learning_rate = 0.3"))
    line = refused("resume", part)
    assert "experiment.toml: training.learning_rate: 0.1 when the run began, 0.3 now" in line
    assert f"`steelyard resume {part} --accept-changes`" in line
    assert query(part, SEEN) == [(2,)]
    goes_on(command, part, "--accept-changes")
    ((accepted,),) = query(part, "SELECT value FROM info WHERE key = 'accepted'")
    assert json.loads(accepted) == ["training.learning_rate: 0.1 when the run began, 0.3 now"]
    ((text,),) = query(part, "SELECT value FROM info WHERE key = 'experiment_text'")
    assert text == file.read_text()


def test_another_processor_is_said_and_named_beside_the_first(part: Path, command: CommandLine) -> None:
    change_fact(part, KERNELS, "AVX0 0")
    said = goes_on(command, part)
    assert f"the set of the processor's kernels was AVX0 0 when the run began, and is {kernels()} now" in said
    found = verify(part)
    assert found.code == 0
    assert f"(AVX0 0; {kernels()})" in found.found.checked["made on"]


def test_another_experiment_is_another_run_whatever_is_accepted(part: Path, refused: Callable[..., str]) -> None:
    file = part / "experiment.toml"
    before = file.read_text()
    for kept in (0, 1, 200):  # cut off: what is left is never taken for an experiment
        file.write_text("\n".join(before[:kept].splitlines()[:-1]))
        assert "experiment.toml" in refused("resume", part)
        assert kept or "experiment.toml: is empty or cut off" in refused("table", part)
    for old, new, said in (
        ('"LD",', '"MD",', "began with the rules and seeds DS>LD, now DS>MD"),
        ('name = "logistic"', 'name = "mlp"', "the checkpoint holds a model of 650 numbers"),
    ):
        assert old in before
        file.write_text(before.replace(old, new))
        assert said in refused("resume", part, "--accept-changes")
    file.write_text(before)
    # What was measured stands in the order of the criteria; the names would be put on other numbers.
    change(part, 'UPDATE federations SET settings = replace(settings, \'"DS","LD"\', \'"LD","DS"\')')
    assert "began with the criteria LD, DS, now DS, LD" in refused("resume", part, "--accept-changes")


def test_one_changed_number_of_the_data_is_noticed(tmp_path: Path, command: CommandLine) -> None:
    path, labels = tmp_path / "data.npz", np.arange(120) % 3
    arrays = {"x": np.random.default_rng(0).normal(size=(120, 5)).astype(np.float32), "y": labels}
    np.savez(path, **arrays)

    stopped(small(data={"source": "npz", "path": str(path)}, rounds={"count": 4}), tmp_path / "run", after=2)
    for key, named in {"x": "features", "y": "labels"}.items():
        other = arrays[key].copy()
        other.flat[7] += 1
        np.savez(path, **{**arrays, key: other})
        with pytest.raises(UserError, match=rf"\(data.path = {path}\): {named} \(seed 5\)"):
            resume(tmp_path / "run")
    goes_on(command, tmp_path / "run", "--accept-changes")


def test_a_run_that_fails_before_its_first_round_leaves_its_folder_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UserError("nothing to test")

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "evaluate", fail)
        with pytest.raises(UserError, match="nothing to test"):
            run(small(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    # One that failed later is a run, and goes on.
    with pytest.raises(UserError, match="nothing to test"):
        run(small(), out=tmp_path / "run", progress=fail)
    assert exists(tmp_path / "run")
    assert History(tmp_path / "run").info["status"] == "stopped"
    steelyard.resume(tmp_path / "run")


def test_sigterm_stops_as_an_interrupt_does(tmp_path: Path) -> None:
    document, part = tmp_path / "mine.toml", tmp_path / "part"
    document.write_text(tomli_w.dumps(changed(PLAIN, rounds={"count": 100_000})))
    process = WarmProcess("run", document, "--out", part, folder=tmp_path, printed=tmp_path / "printed")
    try:
        wait_until((part / "run.sqlite-wal").exists, 120)
        wait_until(lambda: query(part, "SELECT 1 FROM rounds WHERE round = 1"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    finally:
        process.kill()
    told = (tmp_path / "printed").read_text(encoding="utf-8")
    assert "Traceback" not in told
    assert f"steelyard resume {part}" in told
    assert History(part).info["status"] == "stopped"
    assert [path.name for path in part.glob("run.sqlite*")] == ["run.sqlite"]


# rows, chain and ledger ----------------------------------------------------------------------------------------------


def shortened(content: bytes) -> bytes:
    return content[: content.index(b"\n") + 1]


LEDGERS: dict[str, Callable[[bytes], bytes]] = {
    "has 0 bytes, and had ": lambda content: b"",
    "when round 2 was written": shortened,
    "no longer holds the lines that it held": lambda content: content.replace(b'"noise": 2.0', b'"noise": 200.0', 1),
}


def test_nothing_excuses_a_changed_private_run(
    killed: Callable[..., Path], refused: Callable[..., str], command: CommandLine
) -> None:
    run = killed("private", PRIVATE)
    ledger, file = (run / FILE).read_bytes(), run / "experiment.toml"
    rows = query(run, "SELECT round, epsilon FROM rounds")
    for problem, made in LEDGERS.items():
        (run / FILE).write_bytes(made(ledger))
        line = refused("resume", run, "--accept-changes")
        assert line.startswith(f"steelyard: {run}: privacy.jsonl: the ledger of this run ")
        assert problem in line
    (run / FILE).write_bytes(ledger)
    written = file.read_text()
    file.write_text(tomli_w.dumps({key: value for key, value in tomllib.loads(written).items() if key != "privacy"}))
    assert f"{file}: privacy: missing" in refused("resume", run, "--accept-changes")
    file.write_text(written)
    assert query(run, "SELECT round, epsilon FROM rounds") == rows  # nothing was touched
    again = shutil.copytree(run, run.parent / "again")
    (again / FILE).unlink()
    change(again, "UPDATE chain SET ledger = NULL, ledger_bytes = NULL")
    assert "round 0 is not as it was written" in refused("resume", again, "--accept-changes")
    goes_on(command, run)


def test_an_honest_kill_is_never_called_tampering(
    killed: Callable[..., Path], refused: Callable[..., str], command: CommandLine
) -> None:
    """The ledger is ahead of the checkpoint by whole rounds, by a charge without a round, and by a torn line."""
    run = killed("seldom", changed(PRIVATE, store={"checkpoint_every": 5}))
    assert query(run, "SELECT MAX(round) FROM checkpoints") == [(0,)]
    content = (run / FILE).read_bytes()
    (run / FILE).write_bytes(shortened(content))  # rounds without a checkpoint hold their charges too
    assert "when round 2 was written" in refused("resume", run)
    line = content.splitlines(keepends=True)[-1]
    (run / FILE).write_bytes(content + line.replace(b'"round": 2', b'"round": 3') + line[:-9])
    assert "MODIFIED" not in command("table", run).stdout
    goes_on(command, run)
    assert (History(run).chain.problem, History(run).chain.round) == ("", 3)


def test_an_edited_accuracy_is_refused_said_and_can_be_accepted(
    part: Path, refused: Callable[..., str], command: CommandLine
) -> None:
    change(part, "UPDATE rounds SET accuracy = 0.999 WHERE round = 1")
    problem = "round 1 is not as it was written"
    assert f"{part}: {problem}; allowed: " in refused("resume", part)
    said = f"MODIFIED since it was written: {problem}"
    assert command("report", part).returncode == 0
    assert said in (part / "report.html").read_text()
    # Accepted, it goes on, and the difference stays for everybody to see, at its end too.
    assert f"{problem}; going on from round 2" in goes_on(command, part, "--accept-changes")
    assert said in command("table", part).stdout
    assert problem in refused("resume", part)


# the engine ----------------------------------------------------------------------------------------------------------

DRAWING = changed(
    PLAIN,
    data={"augment": {"pad": 1, "flip": True}},
    model={"name": "mlp", "hidden": [8]},
    compute={"engine": "auto"},
)
COST = ["seconds", "cpu", "gpu"]


def test_the_recorded_engine_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "kept_choice", lambda key: choice.Choice("stacked:2"))
    whole = History(run(build(DRAWING), out=tmp_path / "whole"))
    with monkeypatch.context() as stopping:
        stop_in_round(3, stopping)
        with pytest.raises(KeyboardInterrupt):
            run(build(DRAWING), out=tmp_path / "stopped")
    assert History(tmp_path / "stopped").info["engine_choice"] == "stacked:2"
    # A trial on another day might say so.
    monkeypatch.setattr(choice, "kept_choice", lambda key: choice.Choice("threads"))
    resumed = History(resume(tmp_path / "stopped"))
    assert (resumed.info["engine_choice"], resumed.info["engine_reason"]) == ("stacked:2", "asked for")
    assert resumed.rounds.drop(columns=COST).equals(whole.rounds.drop(columns=COST))


NOTE = "the model draws at random while it trains; clients are trained one after another"
NETWORKS = """
import torch
from torch import nn

class Noisy(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
    def forward(self, x):
        x = x.flatten(1)
        return super().forward(x + 0.1 * torch.rand(x.shape) if self.training else x)
"""


@pytest.mark.usefixtures("own_cache")
def test_chance_outside_the_names_is_told_and_repeats_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nets.py").write_text(NETWORKS)
    noisy = build({**DRAWING, "model": {"name": f"{tmp_path}/nets.py:Noisy"}})
    assert_a_stop_changes_nothing(noisy, tmp_path, monkeypatch)
    for name in ("whole", "stopped"):
        assert History(tmp_path / name).notes.startswith(NOTE)
