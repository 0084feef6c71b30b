"""Code that an experiment names: found beside its file, kept with the run, never run by reading, asked for before."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pty
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.kit import assert_refused, refusal, small
from tests.runs.contents import models
from tests.stopping import stopped

import steelyard
from steelyard import Experiment, Result
from steelyard.base.errors import UserError
from steelyard.experiment import running
from steelyard.experiment.loading import load, named_code, read_experiment, to_toml
from steelyard.federate.app_folder import write_app
from steelyard.runs.export import export_run
from steelyard.runs.history import History

MARK = "import os\nwith open(os.environ['MARK'], 'a') as f:\n    f.write(__file__ + '\\n')\n"


FILES = {
    "criteria.py": "from steelyard import client_criterion\n"
    "@client_criterion('LOW', about='user')\ndef low(local):\n    return float((local.labels < 5).sum())\n",
    "nets.py": "import torch\n"
    "def build(classes):\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))\n",
    "losses.py": "import torch\n"
    "def each(outputs, labels):\n    return torch.nn.functional.cross_entropy(outputs, labels, reduction='none')\n",
}


EXPERIMENT = """
name = "mine"
[partition]
clients = 4
[model]
name = "own/nets.py:build"
[training]
loss = "own/losses.py:each"
batch_size = 60
[rounds]
count = 3
[weighing]
criteria = ["LOW", "DS"]
plugins = ["own/criteria.py"]
[compute]
engine = "loop"
device = "cpu"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    (tmp_path / "elsewhere").mkdir()
    own = tmp_path / "project" / "own"
    own.mkdir(parents=True)
    for name, text in FILES.items():
        (own / name).write_text(MARK + text)
    (tmp_path / "project" / "mine.toml").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "project" / "mine.toml"


def marks(tmp_path: Path) -> list[str]:
    mark = tmp_path / "mark"
    return mark.read_text().split() if mark.exists() else []


def test_loading_looks_beside_the_file_and_runs_nothing(file: Path, tmp_path: Path) -> None:
    described = load(file)
    assert "own/criteria.py" in to_toml(described)  # what `show --resolved` prints
    own = file.parent / "own"
    assert described.named_code() == {
        "weighing.plugins": str(own / "criteria.py"),
        "model.name": f"{own}/nets.py:build",
        "training.loss": f"{own}/losses.py:each",
    }
    assert marks(tmp_path) == []
    # What the command line names is meant from where the user stands.
    changed = load(file, ["training.loss=other.py:f"])
    assert changed.named_code()["training.loss"] == f"{tmp_path / 'elsewhere' / 'other.py'}:f"


def test_a_run_keeps_its_code_and_reading_never_runs_it(file: Path, tmp_path: Path) -> None:
    run = Experiment.load(file, trust=True).run(tmp_path / "run").folder
    assert sorted(path.name for path in (run / "code").iterdir()) == ["criteria.py", "losses.py", "nets.py"]
    written = tomllib.loads((run / "experiment.toml").read_text())
    assert named_code(written) == {
        "weighing.plugins": "code/criteria.py",
        "model.name": "code/nets.py:build",
        "training.loss": "code/losses.py:each",
    }
    before = marks(tmp_path)
    assert len(before) == 3
    moved = tmp_path / "moved"
    shutil.move(run, moved)
    shutil.rmtree(file.parent)
    result = Result(moved)
    assert result.experiment.named_code()["model.name"] == f"{moved}/code/nets.py:build"
    assert result.comparison.rules
    assert len(export_run(History(moved), "csv", None)) == 6
    assert marks(tmp_path) == before


def test_the_same_run_in_another_folder_has_the_same_chain_and_names_no_folder(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "a" / "copy" / "own" / "renamed.criteria.py"
    shutil.copytree(file.parent, other.parents[1])
    (other.parent / "criteria.py").rename(other)
    again = other.parents[1] / "mine.toml"
    again.write_text(EXPERIMENT.replace("own/criteria.py", "own/renamed.criteria.py"))
    runs = [Experiment.load(path, trust=True).run(path.parent / "run").folder for path in (file, again)]
    one, two = (History(run) for run in runs)
    assert one.chain.head == two.chain.head
    (settings,) = one.federations["settings"]
    assert json.loads(settings)["plugins"] == [f"sha256:{hashlib.sha256(other.read_bytes()).hexdigest()}"]


@pytest.mark.parametrize("words", ["run", "compare", "federate local", "federate init app"])
def test_commands_that_would_run_code_need_trust(
    words: str, file: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    line = refused(*words.split(), file)
    assert f"{file}: names code (weighing.plugins = {file.parent}/own/criteria.py" in line
    assert line.endswith("Read it, then add --trust")
    assert marks(tmp_path) == []
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_stopped_run_goes_on_from_anywhere_with_the_code_it_kept(
    file: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    whole = running.run(load(file), out=tmp_path / "whole")
    part = stopped(load(file), tmp_path / "part", after=2)
    shutil.rmtree(file.parent)
    before = marks(tmp_path)
    assert f"{part}: names code (weighing.plugins = {part}/code/criteria.py" in refused("resume", part)
    assert_refused(lambda: steelyard.resume(part), "call steelyard.resume(folder, trust=True)")
    assert marks(tmp_path) == before
    assert steelyard.resume(part, trust=True).comparison.status == "finished"
    assert torch.equal(models(whole)["LOW>DS"], models(part)["LOW>DS"])


@pytest.mark.parametrize("answer", ["n", pytest.param("y", marks=pytest.mark.slow)])
def test_at_a_terminal_the_code_is_shown_and_asked_for(answer: str, file: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    out = tmp_path / "run"
    line = [sys.executable, "-m", "steelyard", "run", file, "--set", "rounds.count=1", "--out", out]
    process = subprocess.Popen(line, stdin=theirs, stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    told = b""
    with contextlib.suppress(OSError):  # the other side has closed
        while part := os.read(ours, 4096):
            told += part
    assert b"Run it?" in told
    assert process.wait(timeout=120) == (2 if answer == "n" else 0)
    assert f"model.name = {file.parent}/own/nets.py:build".encode() in told.replace(b"\r\n", b"\n")
    assert bool(marks(tmp_path)) == out.exists() == (answer == "y")


def test_python_asks_for_files_and_not_for_what_it_names_itself(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"names code .* call Experiment\.load\(\.\.\., trust=True\)"):
        Experiment.load(file)
    loss = f"training.loss={file.parent}/own/losses.py:each"
    assert Experiment.load("quickstart", [loss]).named_code()["training.loss"].endswith("losses.py:each")
    assert marks(tmp_path) == []


def test_what_python_handed_over_is_handed_over_again_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from steelyard.base import usercode

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, labels, reduction="none")

    described = small(training={"loss": loss}, rounds={"count": 3})
    part = stopped(described, tmp_path / "part", after=2)
    monkeypatch.setattr(usercode, "_given", {})
    with pytest.raises(UserError, match=r"was handed over from Python and is not known to this process"):
        steelyard.resume(part)
    assert steelyard.resume(part, given=[loss]).comparison.status == "finished"


def test_an_app_folder_brings_its_code_along(file: Path, tmp_path: Path) -> None:
    write_app(tmp_path / "app", load(file))
    assert named_code(tomllib.loads((tmp_path / "app" / "experiment.toml").read_text())) == {
        "weighing.plugins": "steelyard_app.code.criteria",
        "model.name": "steelyard_app.code.nets:build",
        "training.loss": "steelyard_app.code.losses:each",
    }
    kept = sorted(path.name for path in (tmp_path / "app" / "steelyard_app" / "code").iterdir())
    assert kept == ["__init__.py", "criteria.py", "losses.py", "nets.py"]


def test_a_damaged_code_folder_is_one_line(file: Path, tmp_path: Path) -> None:
    part = stopped(load(file), tmp_path / "part", after=2)
    (part / "code" / "losses.py").unlink()
    assert read_experiment(part).name == "mine"
    assert_refused(lambda: steelyard.resume(part, trust=True), "experiment.toml: code/losses.py: not as it was")
    accepted = partial(steelyard.resume, part, trust=True, accept_changes=True)
    assert_refused(accepted, "training.loss: there is no file ", "code/losses.py")


ON_CLIENTS = """
from steelyard import client_criterion
@client_criterion("ODD")
def odd(local):
    if local.client == "client-000":
        return float("nan")
    if local.client == "client-001":
        return -1.0
    return local.missing if local.client == "client-002" else 1.0
"""


ON_SERVER = """
import numpy as np
from steelyard import Needs, server_criterion
rounds = []
@server_criterion("ODD", needs=Needs())
def odd(view):
    rounds.append(1)
    return np.where(np.array(view.clients) == "client-001", float("nan") if len(rounds) > 1 else 1.0, 1.0)
"""


def own(tmp_path: Path, code: str) -> Experiment:
    """Return an experiment that weighs by a criterion of its own."""
    (tmp_path / "odd.py").write_text(code)
    return small(partition={"clients": 5}, weighing={"criteria": ["ODD", "DS"], "plugins": [str(tmp_path / "odd.py")]})


def test_clients_that_cannot_measure_are_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    history = History(running.run(own(tmp_path, ON_CLIENTS), out=tmp_path / "run"))
    last = history.clients[history.clients["round"] == 2].set_index("client")
    assert last["failure"].dropna().to_dict() == {
        "client-000": "criterion ODD = nan; allowed: 0 to any finite number",
        "client-001": "criterion ODD = -1.0; allowed: 0 to any finite number",
        "client-002": "criterion ODD failed: AttributeError: 'LocalData' object has no attribute 'missing'",
    }
    assert last["weight"].dropna().sum() == pytest.approx(1)
    assert history.rounds["answered"].tolist() == [0, 2, 2]


def test_a_server_s_criterion_that_is_nan_stops_the_run_with_one_line(tmp_path: Path) -> None:
    line = refusal(running.run, own(tmp_path, ON_SERVER), out=tmp_path / "run")
    assert line.startswith("round 2 of ODD>DS: criterion ODD: measured nan on the server for client-001; ")
    history = History(tmp_path / "run")
    assert history.info["status"] == "stopped"
    assert history.rounds["round"].tolist() == [0, 1]
