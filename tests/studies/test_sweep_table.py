"""The table and the figure of a sweep: by hand where figures are ranked and shown, from a real one where read."""

from __future__ import annotations

import csv
import io
import math
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kit import assert_refused

from steelyard import Experiment, Result, SweepResult
from steelyard.base.measures import estimate
from steelyard.experiment.loading import load
from steelyard.report.figures.look import HEIGHT
from steelyard.studies.charts import sweep_chart
from steelyard.studies.sweep import Sweep
from steelyard.studies.sweep_table import SweepDocument, SweepRow, show_value, sweep_table

EXPERIMENT = {
    "name": "small",
    "partition": {"scheme": "iid", "clients": 5, "server": "fraction", "server_report": "apart"},
    "model": {"name": "logistic"},
    "training": {"epochs": 1, "batch_size": 60},
    "rounds": {"count": 3, "fraction": 1.0, "target": 0.5, "share": 0.4},
    "compute": {"engine": "loop", "device": "cpu", "threads": 1},
    "weighing": {"criteria": ["DS", "LD"]},
}


GRID = {"training.learning_rate": [0.001, 0.3], "training.epochs": [1, 2]}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    folder = tmp_path_factory.mktemp("sweep") / "sweep"
    return Experiment.model_validate(EXPERIMENT).sweep(GRID, ["DS", "LD>DS"], seeds=2, out=folder)


def made(values: dict[int, list[float]], diverged: tuple[int, ...] = (), **fields: Any) -> SweepDocument:
    """A document written by hand: points by number, figures of each seed."""
    rows = tuple(
        SweepRow(
            point=point,
            run=f"run-{point}",
            values={"fpl.learning_rate": 10.0**-point, "fpl.mode": "pFPL"},
            rule="EQ",
            seeds=tuple(range(len(figures))),
            value=estimate(figures),
            unreached=0,
            diverged=point in diverged,
        )
        for point, figures in values.items()
    )
    document = SweepDocument(
        folder="sweeps/one",
        measure="score",
        measured="ndcg@10",
        less_is_better=False,
        validation=0.2,
        seeds=rows[0].seeds,
        fields=("fpl.learning_rate", "fpl.mode"),
        rows=rows,
        best=rows[0],
    )
    return document.model_copy(update=fields)


@pytest.mark.parametrize(
    ("values", "measure", "measured", "shown"),
    [
        ([0.91, 0.93], "score", "accuracy", "92.00 % ±12.71"),  # t(1) = 12.706, s/√2 = 0.01
        ([0.91], "worst10", "worst tenth, accuracy", "91.00 %"),
        ([0.25], "server-mape", "server-mape", "25.00 %"),  # as in every other table
        ([12.0, 13.0, 14.0], "rounds-to-target", "rounds-to-target", "13.0 ±2.5"),  # t(2) = 4.303, s/√3 = 0.577
    ],
)
def test_figures_are_shown_with_half_their_interval(
    values: list[float], measure: str, measured: str, shown: str
) -> None:
    assert show_value(estimate(values), made({1: values}, measure=measure, measured=measured)) == shown


def test_the_table_reads_well_in_60_columns():
    document = made({2: [0.5, 0.6], 1: [0.4, 0.5]})
    assert sweep_table(document, "text", 60).splitlines()[3:7:3] == [
        "point  learning_rate  mode           ndcg@10",
        "1                0.1  pFPL  0.45000 ±0.63531",
    ]


def test_a_real_sweep_is_read_from_its_runs(result: SweepResult):
    document = result.table
    assert (result.folder / "sweep.svg").read_text().startswith("<svg")
    rows = list(csv.DictReader(io.StringIO((result.folder / "results.csv").read_text())))
    assert len(document.rows) == len(rows) == 8
    assert float(rows[0]["accuracy"]) == pytest.approx((float(rows[0]["seed 0"]) + float(rows[0]["seed 1"])) / 2)
    means = [row.value.mean for row in document.rows]
    assert means == sorted(means, reverse=True)
    best = document.best
    assert best.values["training.learning_rate"] == 0.3
    run = Result(result.folder / best.run)
    last = run.table.rule(best.rule).figures["final"].values
    assert best.value.values == last
    assert best.value.mean == pytest.approx(np.mean(last))


@pytest.mark.parametrize("measure", ["worst10", "rounds-to-target"])
def test_every_measure_is_what_the_run_recorded(result: SweepResult, measure: str):
    path = result.folder / "sweep.toml"
    text = path.read_text()
    path.write_text(text.replace('measure = "score"', f'measure = "{measure}"'))
    try:
        document = Sweep.read(result.folder).answer(result.folder)
    finally:
        path.write_text(text)
    means = [row.value.mean for row in document.rows]
    assert means == sorted(means, reverse=measure == "worst10"), "the best first"
    for row in document.rows:
        figures = Result(result.folder / row.run).table.rule(row.rule).figures
        name = "worst_tenth" if measure == "worst10" else "rounds_to_target"
        found = figures[name].values if name in figures else (math.nan,) * 2  # no seed got there
        assert row.value.values == pytest.approx(np.nan_to_num(found, nan=3.0))
        assert row.unreached == sum(map(math.isnan, found))


def test_the_best_is_an_experiment_for_the_test_set(result: SweepResult):
    best = load(result.folder / "best.toml")
    assert best.validation is None
    assert list(best.rules()) == [result.table.best.rule]
    assert best.model_dump()["training"]["learning_rate"] == 0.3
    first_line = (result.folder / "best.toml").read_text().splitlines()[0]
    assert first_line.startswith("# Chosen by `steelyard sweep`: training.learning_rate = 0.3, training.epochs = ")
    assert result.best.model_dump() == best.model_dump()
    assert_refused(lambda: SweepResult(result.folder / "none").best, "no point is the best")


def test_a_run_that_was_changed_is_said(result: SweepResult, tmp_path: Path):
    assert result.table.problems == ()
    folder = tmp_path / "sweep"
    shutil.copytree(result.folder, folder)
    run = result.table.rows[0].run
    with sqlite3.connect(folder / run / "run.sqlite") as database:
        database.execute("UPDATE rounds SET accuracy = 0.99 WHERE round = 1")
    database.close()
    document = Sweep.read(folder).answer(folder)
    (problem,) = document.problems
    assert problem.startswith(f"{run}: CHANGED since it was written: round 1 ")
    assert f"- {run}: CHANGED since" in sweep_table(document)


def test_a_point_that_exploded_is_a_cross_on_the_side_of_the_worst():
    words = made({1: [0.5, 0.7], 2: [0.6, math.nan], 3: [0.4, 0.5]}, diverged=(2,))
    for less, edge in ((True, 0), (False, HEIGHT)):
        document = sweep_chart(words.model_copy(update={"less_is_better": less})).to_dict(validate=True)
        (crosses,) = [layer for layer in document["layer"] if layer["mark"].get("shape") == "cross"]
        assert crosses["encoding"]["y"] == {"value": edge}
        # It keeps its place on the axis, between the two that went well.
        assert document["layer"][0]["encoding"]["x"]["axis"]["values"] == [0.001, 0.01, 0.1]
    assert sweep_chart(made({1: [math.nan]})) is None
