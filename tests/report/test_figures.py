"""The figures of runs and splits: what each holds, and that it stays small however long the run was."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import altair as alt
import numpy as np
import pytest
from tests.kit import assert_refused
from tests.report.made_run import make_run
from tests.runs.contents import change

from steelyard.report import figures
from steelyard.report.rendering import Split, draw_letters
from steelyard.report.view import RunView
from steelyard.runs.facts import RunFacts
from steelyard.runs.store import Store


def rows(chart: Any) -> list[dict[str, Any]]:
    """The rows of a figure's only data set."""
    (found,) = figures.spec(chart)["datasets"].values()
    return found


def test_a_curve_is_the_mean_over_seeds_with_its_interval(run: Path) -> None:
    view = RunView([run])
    (row,) = [row for row in rows(figures.draw(view, "accuracy")) if row["rule"] == "fedavg"]
    frame = view.rounds
    mine = frame[(frame["rule"] == "fedavg") & (frame["round"] == 6)]["accuracy"].to_numpy()
    assert row["round"] == [1, 2, 3, 4, 5, 6]
    assert row["score"][-1] == pytest.approx(mine.mean())
    # Two seeds: Student's t with one degree of freedom, 12.706, times the standard error.
    half = 12.706 * mine.std(ddof=1) / np.sqrt(2)
    assert row["high"][-1] - row["score"][-1] == pytest.approx(half, rel=1e-3)


def test_the_heat_map_marks_flawed_clients_and_leaves_unasked_cells_empty(run: Path) -> None:
    view = RunView([run])
    found = rows(figures.draw(view, "weights", rule="fedavg", seed=1))
    assert sorted(row["client"] for row in found[:2]) == ["⚑ client-0", "⚑ client-1"]
    assert {row["flaw"] for row in found} == {"labels flipped <b>badly</b>", "few steps", ""}
    by_round = np.array([row["weight"] for row in found], dtype=float)
    assert np.nansum(by_round, axis=0) == pytest.approx(np.ones(6))
    assert np.isnan(by_round).any()


def test_many_clients_and_rounds_are_aggregated_and_the_figure_says_so(tmp_path: Path) -> None:
    view = RunView([make_run(tmp_path / "long", rounds=250, clients=70, seeds=(1,), rules=("fedavg",))])
    chart = figures.draw(view, "weights", rule="fedavg")
    found = rows(chart)
    assert len(found) == 60
    assert len(found[0]["round"]) == 84
    assert "60 of 70 clients" in figures.spec(chart)["usermeta"]["note"]
    curve = rows(figures.draw(view, "accuracy"))[0]["round"]
    assert (len(curve), curve[-1]) == (240, 250)


def test_the_split_shows_the_classes_of_each_client(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=2, clients=4, seeds=(1,))
    store = Store(folder)
    store.note(RunFacts(labels={"1": {"client-0": [3, 0, 4], "client-1": [0, 9, 0], "never-asked": [1, 0, 0]}}))
    store.close()
    document = figures.spec(figures.draw(RunView([folder]), "split"))
    sizes, classes = (document["datasets"][panel["data"]["name"]] for panel in document["vconcat"])
    assert [(row["client"], row["samples"]) for row in sizes] == [
        ("⚑ client-1", 9),
        ("⚑ client-0", 7),
        ("never-asked", 1),
    ]
    assert classes[1] == {"client": "⚑ client-0", "label": ["0", "1", "2"], "samples": [3, 0, 4]}


def test_every_figure_of_a_run_that_has_something_for_it_is_drawn(run: Path) -> None:
    """What clients added was not measured here, no client weighs others, none has a clock, adapters or sums."""
    drawn = figures.draw_all(RunView([run]))
    absent = {"adapters", "client", "contributions", "drift", "listening", "measures", "time"}
    assert set(figures.KINDS) - set(drawn) == absent
    for name, chart in drawn.items():
        document = figures.spec(chart)
        assert document["description"], name
        assert "config" not in document, name
        json.dumps(document, allow_nan=False)


def test_the_servers_curve_is_of_the_score_that_its_task_has(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=2, clients=4, seeds=(1,), rules=("fedavg",))
    told = json.dumps({"rmse": 0.25, "further": 9.0})
    change(folder, "UPDATE rounds SET server_accuracy = NULL, server_metrics = NULL")
    change(folder, "UPDATE rounds SET server_metrics = ? WHERE round = 2", told)
    chart = figures.draw(RunView([folder]), "server")
    assert figures.spec(chart)["layer"][0]["encoding"]["y"]["title"].startswith("minus RMSE")
    (row,) = rows(chart)
    assert (row["round"], row["score"]) == ([2], [-0.25])


@pytest.mark.slow
def test_files_for_a_paper(run: Path, tmp_path: Path) -> None:
    made = figures.write_figures({"accuracy": figures.draw(RunView([run]), "accuracy")}, tmp_path)
    assert [path.name for path in made] == ["accuracy.svg", "accuracy.png", "accuracy.pdf"]
    assert ElementTree.fromstring(made[0].read_text()).tag.endswith("svg")
    assert made[1].read_bytes().startswith(b"\x89PNG")
    assert made[2].read_bytes().startswith(b"%PDF")


def test_what_does_not_exist_is_named_with_what_does(run: Path) -> None:
    view = RunView([run])
    assert_refused(lambda: figures.draw(view, "weight"), "kind", "'weight'", "weights")
    chart = figures.draw(view, "accuracy")
    assert_refused(lambda: figures.write_figure(chart, Path("accuracy.gif")), "accuracy.gif", ".svg")


def test_a_letter_says_how_many_rows_of_a_class_there_are():
    drawn = draw_letters(Split({"a": 104, "b": 60}, {}, {"a": [100, 0, 4], "b": [0, 60, 0]}), 60)
    assert [line.split()[-1] for line in drawn[1:]] == ["█·░", "·▓·"]


def encoded(
    part: Any, rows: list[dict[str, Any]] | None, every: Any
) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Every channel of a figure's marks, with the rows that it reads."""
    if "data" in part:
        rows = every[part["data"]["name"]]
    for channel, found in part.get("encoding", {}).items():
        assert rows is not None
        for each in found if isinstance(found, list) else [found]:
            yield channel, each, rows
    for name in ("layer", "vconcat", "hconcat"):
        for inner in part.get(name, ()):
            yield from encoded(inner, rows, every)
    if "spec" in part:
        yield from encoded(part["spec"], rows, every)


def test_every_figure_keeps_to_its_schema_and_reads_what_its_data_hold(run: Path) -> None:
    view = RunView([run])
    for dark in (False, True):
        alt.Config.from_dict(figures.theme(dark), validate=True)
    styles = set(figures.theme()["style"])
    charts = figures.draw_all(view) | {"client": figures.draw(view, "client", client="client-1")}
    for name, chart in charts.items():
        if chart is None:
            continue
        document = chart.to_dict(validate=True)
        assert document["description"].endswith("."), name
        computed = re.findall(r'"as": "(\w+)"', json.dumps(document))
        for note in filter(None, document.get("usermeta", {}).values()):
            assert note.endswith("."), name
        for channel, found, rows in encoded(document, None, document["datasets"]):
            if channel in ("x", "y"):
                assert "title" in found, (name, found)  # else it has the name of a column
            if (field := found.get("field")) is None or field in computed:
                continue
            values = [cell for row in rows for cell in (row[field] if isinstance(row[field], list) else [row[field]])]
            if found.get("type") == "quantitative":
                assert all(value is None or isinstance(value, int | float) for value in values), (name, field)
            if isinstance(domain := found.get("scale", {}).get("domain"), list):
                if found["type"] == "quantitative":
                    assert domain[0] < domain[1], (name, field)
                else:
                    assert set(map(str, values)) <= set(map(str, domain)), (name, field)
            if isinstance(sort := found.get("sort"), list):
                assert set(map(str, values)) <= set(map(str, sort)), (name, field)
    assert styles == {"ground", "ink", "soft"}
