"""At a prompt and in a notebook: names, a result that prints itself, progress where somebody watches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.conftest import CommandLine
from tests.warm import command_environment

import steelyard
from steelyard import Experiment, Result, UserError, in_memory
from steelyard.report.summary import short_account


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return Experiment.load("quickstart", ["rounds.count=2"]).run(tmp_path_factory.mktemp("run") / "run")


def test_all_names_are_shown_before_they_are_loaded() -> None:
    assert set(steelyard.__all__) <= set(dir(steelyard))
    code = "import sys, steelyard; assert 'in_memory' in dir(steelyard); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=command_environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert not {"Any", "TYPE_CHECKING", "import_module", "annotations"} & set(dir(steelyard))
    for name in steelyard.__all__:
        assert getattr(steelyard, name) is not None


def test_a_result_prints_as_a_table(result: Result) -> None:
    lines = repr(result).splitlines()
    _, head, _, *rows = lines
    assert head.split("  ")[0].strip() == "rule"
    assert "accuracy on the clients" in head
    assert [line.split()[0] for line in rows[:4]] == ["VP>LD>DS/max", "fedavg", "equal", "DS>LD>MD"]
    first = result.summary["rules"][0]
    assert f"{first['accuracy']:.2%}" in rows[0]
    assert lines[-1] == f"run stored in {result.folder}"
    assert len({len(line) for line in lines[:8]}) == 1  # three lines of dashes, the head, four rules


def test_a_result_whose_folder_is_gone_still_prints(tmp_path: Path) -> None:
    shown = repr(Result(tmp_path / "nowhere"))
    assert shown.startswith(f"Result('{tmp_path / 'nowhere'}')")
    assert "\n" not in shown


def test_columns_that_no_rule_has_are_left_out() -> None:
    rule = {
        "algorithm": "fedavg",
        "rule": "r" * 60,
        "accuracy": -3.5,
        "accuracy_on": None,
        "worst_tenth": None,
        "server": {},
        "rounds_to_target": None,
    }
    summary = {
        "measure": "minus RMSE",
        "run": "runs/x",
        "weighed_one": [],
        "server_rows": "the server's 46 rows",
        "rules": [{**rule, "seed": seed} for seed in range(20)],
    }
    lines = short_account(summary).splitlines()
    _, head, _, first, *_ = lines
    assert head.split("  ")[0].strip() == "rule"
    assert head.endswith("minus RMSE on the clients")
    assert first.startswith(f"{'r' * 37}..., seed 0  ")
    assert first.endswith("-3.5")
    assert lines[-2:] == ["and 8 more rules", "run stored in runs/x"]


def test_progress_is_off_where_nobody_watches_and_can_be_turned_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    experiment = Experiment.load("quickstart", ["rounds.count=1"])
    experiment.run(tmp_path / "silent")
    assert capfd.readouterr().err == ""
    experiment.run(tmp_path / "told", progress=True)
    assert "round 1/1: " in capfd.readouterr().err


def test_quiet_is_quiet(steelyard: CommandLine) -> None:
    done = steelyard("run", "quickstart", "--set", "rounds.count=1", "--quiet")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "run stored in" in done.stdout


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"rounds": 3}, "rounds: got 3; allowed: a section of fields"),
        ({"rounds": {"count": -1}}, "rounds.count: got -1; allowed: greater than or equal to 1"),
        ({"weighing": {"criteria": ["XX"]}}, "weighing.criteria: criterion 'XX' is not known"),
        ({"partition": {"scheme": "natural"}}, "partition.scheme: got 'natural' with data.source 'digits'"),
        ({"name": 1e300}, "name: got 1e+300; allowed: text"),
        ({"description": 10**40}, "description: got 1000"),
        ({"rounds": {"count": 1e300}}, "rounds.count: got 1e+300; allowed: a whole number"),
        ({"runds": {}}, "runds: unknown field (did you mean 'rounds'?)"),
        ({"data": in_memory([[0.0], [1.0]], [0, 1])}, "data: got Dataset; allowed: the fields of a [data] section"),
    ],
)
def test_a_mistake_in_python_is_one_line(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        Experiment(**fields)
    assert str(caught.value).startswith(line)
    assert not {"pydantic", "validation", "Settings", "\n"} & set(str(caught.value).replace("\n", " \n ").split())


@pytest.mark.parametrize("changes", ["rounds.count=2", {"rounds.count": 2}])
def test_changes_that_are_no_list_are_named(changes: Any) -> None:
    with pytest.raises(UserError, match=r"changes: got .*rounds.count.*; allowed: a list of text"):
        Experiment.load("quickstart", changes)


def test_data_that_were_not_built_with_in_memory_are_named(tmp_path: Path) -> None:
    frame: Any = pd.DataFrame({"a": [1, 2]})
    with pytest.raises(UserError, match="dataset: got DataFrame; allowed: a data set built"):
        Experiment(data={"source": "memory"}).run(tmp_path / "out", dataset=frame)
    assert not (tmp_path / "out").exists()


def test_data_handed_over_are_not_said_to_be_others(tmp_path: Path) -> None:
    data = steelyard.in_memory([[0.0], [1.0]] * 20, [0, 1] * 20)
    with pytest.raises(UserError, match=r"data\.source: got 'digits' together with dataset=\.\.\.; allowed: 'memory'"):
        Experiment().run(tmp_path / "out", dataset=data)
    assert not (tmp_path / "out").exists()


def test_a_section_built_in_python_names_its_mistake_in_one_line() -> None:
    with pytest.raises(UserError) as found:
        steelyard.WeighingSettings(scores="mean")  # type: ignore[call-arg]
    assert str(found.value).startswith(
        "WeighingSettings: scores: unknown field (did you mean 'score'?); allowed here: "
    )
    assert "\n" not in str(found.value)


def test_a_data_set_prints_as_one_line() -> None:
    images = in_memory(np.zeros((1200, 1, 8, 8)), np.arange(1200) % 3, ["ann", "bob"] * 600, name="mine")
    assert repr(images) == "Dataset('mine': 1,200 samples of 1×8×8, 3 classes, 2 owners)"
    assert repr(in_memory([[0.0], [1.0]], [0.5, 1.5])) == "Dataset('memory': 2 samples of 1, numbers to predict)"
