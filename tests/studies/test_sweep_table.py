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
from steelyard.report.rendering import as_text, render
from steelyard.studies.charts import sweep_chart
from steelyard.studies.sweep import Sweep, run_on_test
from steelyard.studies.sweep_table import (
    SweepDocument,
    SweepRow,
    SweepTest,
    next_lines,
    show_value,
    sweep_csv,
    sweep_table,
)

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
        ([0.91], "worst10", "worst 10% of clients, accuracy", "91.00 %"),
        ([0.25], "server-mape", "server-mape", "25.00 %"),  # as in every other table
        ([12.0], "rounds-to-target", "rounds-to-target", "12"),
        ([12.0, 13.0, 14.0], "rounds-to-target", "rounds-to-target", "13.0 ±2.5"),  # t(2) = 4.303, s/√3 = 0.577
    ],
)
def test_figures_are_shown_with_half_their_interval(
    values: list[float], measure: str, measured: str, shown: str
) -> None:
    assert show_value(estimate(values), made({1: values}, measure=measure, measured=measured)) == shown


def test_a_real_sweep_is_read_from_its_runs(result: SweepResult):
    document = result.answer
    assert (result.folder / "sweep.svg").read_text().startswith("<svg")
    rows = list(csv.DictReader(io.StringIO((result.folder / "results.csv").read_text())))
    assert len(document.rows) == len(rows) == 8
    assert float(rows[0]["accuracy"]) == pytest.approx((float(rows[0]["seed 0"]) + float(rows[0]["seed 1"])) / 2)
    means = [row.value.mean for row in document.rows]
    assert means == sorted(means, reverse=True)
    best = document.best
    assert best.values["training.learning_rate"] == 0.3
    run = Result(result.folder / best.run)
    last = run.comparison.rule(best.rule).figures["final"].values
    assert best.value.values == last
    assert best.value.mean == pytest.approx(np.mean(last))


def measured_by(result: SweepResult, measure: str) -> SweepDocument:
    """The same runs, by another measure."""
    return Sweep.read(result.folder).model_copy(update={"measure": measure}).answer(result.folder)


def test_the_loss_is_that_of_every_row_after_the_last_round(result: SweepResult) -> None:
    document = measured_by(result, "loss")
    assert (document.measured, document.less_is_better) == ("loss", True)
    means = [row.value.mean for row in document.rows]
    assert means == sorted(means)
    for row in document.rows:
        frame = Result(result.folder / row.run).history.evaluations.query("rule == @row.rule and round == 3")
        expected = [np.average(each["loss"], weights=each["samples"]) for _, each in frame.groupby("seed")]
        assert row.value.values == pytest.approx(expected)
    assert not np.isfinite([row.value.mean for row in measured_by(result, "none").rows]).any()


def test_the_best_runs_on_the_test_set_and_the_table_says_what_it_came_to(result: SweepResult, tmp_path: Path) -> None:
    folder = shutil.copytree(result.folder, tmp_path / "sweep")
    found = Sweep.read(folder)
    assert f"steelyard run {folder}/best.toml" in found.next_lines(found.answer(folder))[-1]
    best = load(folder / "best.toml")
    run_on_test(folder, best)
    run_on_test(folder, best.changed({"rounds.fraction": None}))  # the share that it comes to is the same
    tested = found.answer(folder).test
    assert tested is not None
    assert (tested.run, tested.rule, tested.unreached) == ("test", result.answer.best.rule, 0)
    assert tested.value.values == Result(folder / "test").comparison.rules[0].figures["final"].values
    assert f"on the test set: accuracy {100 * tested.value.mean:.2f} % ±" in found.next_lines(found.answer(folder))[-1]
    assert found.csv(found.answer(folder)) == (folder / "results.csv").read_text()
    for other in ({"training.epochs": 3}, {"rounds.fraction": 0.4}):
        assert_refused(lambda other=other: run_on_test(folder, best.changed(other)), folder / "test", "another choice")


@pytest.mark.parametrize("measure", ["worst10", "rounds-to-target"])
def test_every_measure_is_what_the_run_recorded(result: SweepResult, measure: str):
    document = measured_by(result, measure)
    means = [row.value.mean for row in document.rows]
    assert means == sorted(means, reverse=measure == "worst10"), "the best first"
    for row in document.rows:
        figures = Result(result.folder / row.run).comparison.rule(row.rule).figures
        name = "worst_tenth" if measure == "worst10" else "rounds_to_target"
        found = figures[name].values if name in figures else (math.nan,) * 2  # no seed got there
        assert row.value.values == pytest.approx(np.nan_to_num(found, nan=3.0))
        assert row.unreached == sum(map(math.isnan, found))


def test_the_best_is_an_experiment_for_the_test_set(result: SweepResult):
    Sweep.read(result.folder).write_files(result.folder)
    best = load(result.folder / "best.toml")
    assert best.validation is None
    assert list(best.rules()) == [result.answer.best.rule]
    assert best.model_dump()["training"]["learning_rate"] == 0.3
    first_line = (result.folder / "best.toml").read_text().splitlines()[0]
    assert first_line.startswith("# Chosen by `steelyard sweep`: training.learning_rate = 0.3, training.epochs = ")
    assert result.best.model_dump() == best.model_dump()
    assert_refused(lambda: SweepResult(result.folder / "none").best, "no point is the best")


def test_a_run_that_was_changed_is_said(result: SweepResult, tmp_path: Path):
    assert result.answer.problems == ()
    folder = tmp_path / "sweep"
    shutil.copytree(result.folder, folder)
    run = result.answer.rows[0].run
    with sqlite3.connect(folder / run / "run.sqlite") as database:
        database.execute("UPDATE rounds SET accuracy = 0.99 WHERE round = 1")
    database.close()
    document = Sweep.read(folder).answer(folder)
    (problem,) = document.problems
    assert problem.startswith(f"{run}: MODIFIED since it was written: round 1 ")
    assert f"- {run}: MODIFIED since" in render(Sweep.read(folder).parts(document))


def test_a_point_that_exploded_is_a_cross_on_the_side_of_the_worst():
    words = made({1: [0.5, 0.7], 2: [0.6, math.nan], 3: [0.4, 0.5]}, diverged=(2,))
    for less, edge in ((True, 0), (False, HEIGHT)):
        document = sweep_chart(words.model_copy(update={"less_is_better": less})).to_dict(validate=True)
        (crosses,) = [layer for layer in document["layer"] if layer["mark"].get("shape") == "cross"]
        assert (crosses["encoding"]["x"]["field"], crosses["encoding"]["y"]) == ("x", {"value": edge})
        # It keeps its place on the axis, between the two that went well.
        assert document["layer"][0]["encoding"]["x"]["axis"]["values"] == [0.001, 0.01, 0.1]
    assert sweep_chart(made({1: [math.nan]})) is None


def test_the_table_says_what_its_marks_mean() -> None:
    document = made({2: [0.5, 0.6], 1: [0.4, 0.5]})
    assert [line.split()[:2] for line in as_text(sweep_table(document)).splitlines() if " * " in line] == [["2", "*"]]
    note = "the best is marked *; mean of 2 seeds ± half the 95% interval"
    assert note in as_text(sweep_table(document))
    assert "ndcg@10 on a validation split (20% of the training data), higher is better" in as_text(
        sweep_table(document)
    )
    rows = (document.rows[0], document.rows[1].model_copy(update={"unreached": 1, "diverged": True, "rule": "DS"}))
    odd = document.model_copy(update={"rows": rows, "best": None, "left": ("a", "b"), "less_is_better": True})
    shown = as_text(sweep_table(odd))
    heading, first, second = [line.split("  ") for line in shown.splitlines() if line.startswith(("point", "2", "1"))]
    assert [word.strip() for word in heading if word] == [
        *("point", "learning_rate", "mode", "rule", "ndcg@10", "unreached")
    ]
    assert [word.strip() for word in first if word] == ["2", "0.01", "pFPL", "EQ", "0.55000 ±0.63531", "0 of 2"]
    assert [word.strip() for word in second if word] == ["1", "0.1", "pFPL", "DS", "diverged", "1 of 2"]
    for words in (
        "lower is better",
        "no point has a figure; mean of 2 seeds",
        "a target that is not reached counts as the last round; diverged: training diverged in one seed or more; "
        "not done: 2 runs",
    ):
        assert words in shown
    many = document.model_copy(update={"rows": document.rows[:1] * 51, "seeds": (1,)})
    assert "50 of 51 points" in as_text(sweep_table(many))
    assert "seeds" not in as_text(sweep_table(many))
    same = document.model_copy(update={"fields": ("a.rate", "b.rate")})
    assert "a.rate" in as_text(sweep_table(same))
    assert "rule" in as_text(sweep_table(document.model_copy(update={"fields": ()})))


def test_the_file_has_a_column_for_each_field_and_seed() -> None:
    rows = list(csv.reader(io.StringIO(sweep_csv(made({2: [0.5, 0.75]})))))
    assert rows[0] == [
        *("point", "fpl.learning_rate", "fpl.mode", "rule", "ndcg@10", "low", "high", "unreached", "seed 0", "seed 1"),
        "run",
    ]
    assert rows[1][:5] == ["2", "0.01", "pFPL", "EQ", "0.625"]
    assert [float(end) for end in rows[1][5:7]] == pytest.approx([0.625 - 1.58826, 0.625 + 1.58826], abs=1e-4)
    assert rows[1][7:] == ["0", "0.5", "0.75", "run-2"]


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, ["sweep stored in a b; its picture: sweep.svg", "on the test set: steelyard run 'a b/best.toml'"]),
        ({"left": ("run",)}, ["sweep stored in a b", "continue with: steelyard resume 'a b'"]),
        ({"best": None}, ["sweep stored in a b"]),
        (
            {"test": SweepTest(run="test", rule="EQ", value=estimate([0.5]), unreached=0)},
            ["sweep stored in a b; its picture: sweep.svg", "the best on the test set: ndcg@10 0.50000"],
        ),
    ],
)
def test_what_to_do_next_is_said(changes: dict[str, Any], lines: list[str]) -> None:
    found = next_lines(made({1: [0.5]}).model_copy(update={"folder": "a b", **changes}))
    assert len(found) == len(lines)
    assert all(line in shown for line, shown in zip(lines, found, strict=True))


def drawn(document: SweepDocument) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A sweep's picture and the rows of its first data set, a point each."""
    chart = sweep_chart(document)
    assert chart is not None
    found = chart.to_dict(validate=True)
    name = (found.get("data") or found["layer"][0]["data"])["name"]
    return found, found["datasets"][name]


def test_a_sweep_is_drawn_over_its_first_numbers_with_a_line_for_all_else() -> None:
    rates, lines = (0.1, 0.01, 0.001), ["mode p, EQ", "mode q, EQ", "mode p, DS", "mode q, DS"]
    every = [(rule, mode, rate) for rule in ("EQ", "DS") for mode in ("p", "q") for rate in rates]
    rows = tuple(
        SweepRow(
            point=number,
            run="r",
            values={"a.mode": mode, "a.rate": rate, "a.same": 3},
            rule=rule,
            seeds=(1, 2),
            value=estimate([rate, rate + 0.2]),
            unreached=number == 1,
            diverged=False,
        )
        for number, (rule, mode, rate) in enumerate(every, 1)
    )
    document = made({1: [0.5, 0.6]}).model_copy(update={"rows": rows, "best": rows[0]})
    found, points = drawn(document)
    assert [point["x"] for point in points] == [*rates] * 4
    assert list(dict.fromkeys(point["line"] for point in points)) == lines
    assert (points[0]["point"], points[0]["setting"]) == (1, "a.rate 0.1, mode p, EQ")
    assert (points[0]["mean"], points[0]["values"]) == (pytest.approx(0.2), pytest.approx([0.1, 0.3]))
    line, single, ring = found["layer"]
    assert line["encoding"]["x"]["title"] == "a.rate"
    assert line["encoding"]["x"]["scale"]["type"] == "log"
    assert [layer["encoding"]["y"]["field"] for layer in found["layer"]] == ["mean", "values", "mean"]
    assert line["encoding"]["y"]["title"] == single["encoding"]["y"]["title"] == "ndcg@10"
    # From .001 to .3 with a twentieth of that on each side, for the seeds as for their means.
    domain = pytest.approx([0.001 - 0.05 * 0.299, 0.3 + 0.05 * 0.299])
    assert line["encoding"]["y"]["scale"]["domain"] == single["encoding"]["y"]["scale"]["domain"] == domain
    assert line["encoding"]["color"]["scale"]["domain"] == lines
    assert [tip.get("title", tip["field"]) for tip in line["encoding"]["tooltip"]] == ["setting", "ndcg@10"]
    assert ring["transform"] == [{"filter": "(datum.point === 1)"}]
    assert found["description"].startswith("ndcg@10 on a validation split, by a.rate.")
    note = found["usermeta"]["note"]
    for part in ("Ring: the best point, more", "Line: mean of 2 seeds", "A target that was not reached"):
        assert part in note
    assert "lines: those" not in note
    assert "Cross" not in note


def test_a_sweep_over_words_or_steps_and_of_many_lines_is_drawn_as_such() -> None:
    def points(values: list[Any], name: str = "a.mode") -> SweepDocument:
        row = made({1: [0.5]}).rows[0]
        rows = tuple(
            row.model_copy(update={"point": number, "values": {name: value}, "rule": f"rule {number % 14}"})
            for number, value in enumerate(values)
        )
        return made({1: [0.5]}).model_copy(update={"rows": rows, "best": None})

    words, found = drawn(points(["one", "two", True]))
    assert [point["x"] for point in found] == ["one", "two", "true"]
    assert words["layer"][0]["encoding"]["x"]["type"] == "nominal"
    assert words["layer"][0]["encoding"]["y"]["scale"]["domain"] == pytest.approx([0.475, 0.525])  # all alike
    assert len(words["layer"]) == 1
    for values, scale in (([1, 2, 3], "linear"), ([1, 10], "log"), ([0, 10, 100], "linear"), ([1, 2, 4], "log")):
        assert drawn(points(values))[0]["layer"][0]["encoding"]["x"]["scale"]["type"] == scale
    many, found = drawn(points([1, 2] * 14))
    assert "12 of 14 lines: those of the best points." in many["usermeta"]["note"]
    assert {point["line"] for point in found} == {f"rule {number}" for number in range(12)}
    alone, found = drawn(made({1: [0.0]}))
    assert alone["layer"][0]["encoding"]["y"]["scale"]["domain"] == [-1.0, 1.0]
    assert found[0]["line"] == "all"
    assert alone["layer"][0]["encoding"]["color"]["legend"] is None
