"""`steelyard sweep` as people call it: on digits, in a subprocess."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import CommandLine

from steelyard import Experiment
from steelyard.sweeps.plan import measures_of, plan
from steelyard.sweeps.plan_file import write_sweep

QUICK = ("--set", "rounds.count=2", "--set", "compute.engine=stacked", "--quiet")


def test_a_sweep_on_digits(steelyard: CommandLine, tmp_path: Path) -> None:
    command = ("sweep", "quickstart", *QUICK, "--over", "training.learning_rate=0.01,0.3", "--rules", "DS")
    done = steelyard(*command, "--out", "one", "--test")
    assert done.returncode == 0, done.stderr
    assert "accuracy on a validation split (10% of the training data), better: more" in done.stdout
    assert "2 *" in done.stdout
    assert "the best on the test set: accuracy" in done.stdout
    assert {path.name for path in (tmp_path / "one").iterdir()} == {
        *("1-learning_rate=0.01", "2-learning_rate=0.3", "test"),
        *("sweep.toml", "results.csv", "best.toml", "sweep.svg", "lock"),
    }
    again = steelyard("resume", "one", "--format", "json")
    assert again.returncode == 0, again.stderr
    document = json.loads(again.stdout)
    assert document["best"]["values"] == {"training.learning_rate": 0.3}
    assert document["test"]["value"]["mean"] > 0
    assert document["left"] == []
    shown = steelyard("table", "one", "--format", "csv")
    assert shown.stdout == (tmp_path / "one" / "results.csv").read_text()
    listed = json.loads(steelyard("ls", "one", "--format", "json").stdout)
    names = {run["name"] for run in (listed["runs"] if isinstance(listed, dict) else listed)}
    assert names == {"1-learning_rate=0.01", "2-learning_rate=0.3", "test"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--over", "training.learning_rat=1"), "unknown field (did you mean 'learning_rate'?)"),
        (("--over", "training.epochs=1", "--measure", "speed"), "--measure: got 'speed'; allowed: score"),
        # The first point would run; the second is named before it does.
        (("--over", "model.name=mlp,logstic"), "--over: model.name: got 'logstic' (did you mean 'logistic'?)"),
        (("--over", "training.loss=auto,crossentropy"), "--over: training.loss: got 'crossentropy' (did you mean"),
        ((), "--over: got nothing; allowed: a field and its values"),
        (("--over", "training.epochs=1", "--out", "."), "--out: got nothing or the working folder"),
    ],
)
def test_slips_are_one_line(refused: Callable[..., str], arguments: tuple[str, ...], line: str) -> None:
    assert line in refused("sweep", "quickstart", *arguments)


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("values = [\n    1,\n]\nrules", "values = []\nrules", "sweep.toml: is cut off or changed (ValueError"),
        ("values = [\n    1,\n]\nrules", "values = [[1]]\nrules", "sweep.toml: is cut off or changed (ValueError"),
        ('measure = "score"', 'measure = "speed"', "sweep.toml: measure: got 'speed'; allowed: score, worst10"),
        ('measure = "score"', "measure = 3", "sweep.toml: measure: got '3'; allowed: score"),
        ("field =", "feld =", "sweep.toml: is cut off or changed (KeyError('field'))"),
    ],
)
def test_a_file_that_was_edited_by_hand_is_one_line(
    refused: Callable[..., str], tmp_path: Path, before: str, after: str, line: str
) -> None:
    folder = tmp_path / "swept"
    write_sweep(plan(Experiment.load("quickstart"), ["training.epochs=1,2"]), folder)
    text = (folder / "sweep.toml").read_text()
    assert before in text
    (folder / "sweep.toml").write_text(text.replace(before, after))
    assert line in refused("table", "swept")


def test_the_help_names_every_measure(steelyard: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    told = steelyard("sweep", "--help").stdout
    kinds = ("quickstart", "fpl-ml1m", "kgflex-books")
    known = {measure for name in kinds for measure in measures_of(Experiment.load(name))}
    known |= {"accuracy", "server-mape", "server-macro-f1", "rmse", "mae", "mape"}
    assert [measure for measure in sorted(known) if measure not in told] == []
