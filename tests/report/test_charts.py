"""The figures of real small runs: what each holds, and that it stays small however long the run was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.report.made_run import make_run

from steelyard.errors import UserError
from steelyard.report import figures
from steelyard.report.figures import catalogue, curves
from steelyard.report.html import html
from steelyard.report.view import RunView, sampled
from steelyard.runs.reader import History
from steelyard.runs.store import Store


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("charts") / "run", rounds=6, clients=8, seeds=(1, 2))


def rows(chart: Any) -> list[dict[str, Any]]:
    """The rows of a figure's only data set."""
    (found,) = figures.spec(chart)["datasets"].values()
    return found


def test_a_report_and_its_files_draw_each_figure_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, ...]] = []

    def counted(kind: figures.Kind) -> figures.Kind:
        def make(*of: Any) -> Any:
            made.append((kind.name, *(str(getattr(each, "label", each)) for each in of[1:])))
            return kind.make(*of)

        return replace(kind, make=make)

    monkeypatch.setattr(catalogue, "KINDS", {name: counted(kind) for name, kind in figures.KINDS.items()})
    monkeypatch.setattr(figures, "KINDS", catalogue.KINDS)
    view = RunView([run])
    html(view)
    figures.draw_all(view)
    assert ("accuracy",) in made
    assert ("weights", view.federation().label) in made
    assert len(made) == len(set(made))


def test_every_figure_of_a_run_that_has_something_for_it(run: Path) -> None:
    view = RunView([run])
    drawn = figures.draw_all(view)
    assert set(drawn) == set(figures.KINDS) - {
        "adapters",
        "client",
        "contributions",
        "listening",
        "time",
    }  # what clients added was not measured, no client weighs others, none has a clock or adapters
    for name, chart in drawn.items():
        document = figures.spec(chart)
        assert document == {key: part for key, part in chart.to_dict().items() if key != "config"}, name
        assert document["description"], name
        assert "config" not in document, name
        json.dumps(document, allow_nan=False)


@pytest.mark.parametrize(
    ("figure", "title", "form", "sign"),
    [
        ("dice", "mean Dice on the server's rows", ".3~g", 1),
        ("macro_f1", "macro F1 on the server's rows", ".3~g", 1),
        ("rmse", "minus RMSE on the server's rows", ".3~g", -1),
    ],
)
def test_the_servers_curve_is_of_the_score_that_its_task_has(
    figure: str, title: str, form: str, sign: int, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run", rounds=2, clients=4, seeds=(1,), rules=("fedavg",))
    view = RunView([folder])
    plain = figures.spec(figures.draw(view, "server"))["layer"][0]["encoding"]["y"]
    assert (plain["title"], plain["axis"]["format"]) == ("accuracy on the server's rows", "%")
    store = Store(folder)
    with store._db:
        told = json.dumps({figure: 0.25, "further": 9.0})
        store._db.execute("UPDATE rounds SET server_accuracy = NULL, server_metrics = ? WHERE round = 2", (told,))
        store._db.execute("UPDATE rounds SET server_accuracy = NULL, server_metrics = NULL WHERE round < 2")
    store.close()
    chart = figures.draw(RunView([folder]), "server")
    drawn = figures.spec(chart)["layer"][0]["encoding"]["y"]
    assert (drawn["title"], drawn["axis"]["format"]) == (title, form)
    (row,) = rows(chart)
    assert (row["round"], row["score"]) == ([2], [sign * 0.25])


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
    note = figures.spec(chart)["usermeta"]["note"]
    assert "60 of 70 clients" in note
    assert "mean of 3 rounds" in note
    curve = figures.draw(view, "accuracy")
    assert len(rows(curve)[0]["round"]) == 240
    assert rows(curve)[0]["round"][-1] == 250
    assert "240 rounds, evenly spaced, of 250" in figures.spec(curve)["usermeta"]["note"]


def test_a_rule_has_the_same_colour_where_others_are_missing(run: Path) -> None:
    """fedavg never gets to 60 % in the made run, so the figure of targets shows fewer rules than the curves do."""
    view = RunView([run])
    domains = set[tuple[str, ...]]()
    for kind in ("accuracy", "targets", "flawed"):
        text = json.dumps(figures.spec(figures.draw(view, kind)))
        domains |= {tuple(found) for found in _domains(json.loads(text))}
    assert domains == {tuple(view.labels)}


def _domains(node: Any) -> list[list[str]]:
    """The domains of the colours by rule, wherever they stand in a figure."""
    if isinstance(node, list):
        return [found for one in node for found in _domains(one)]
    if not isinstance(node, dict):
        return []
    mine = [node["color"]["scale"]["domain"]] if node.get("color", {}).get("field") == "rule" else []
    return mine + [found for one in node.values() for found in _domains(one)]


def test_of_many_rules_only_the_baseline_and_the_best_have_bands(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "BANDS", 2)
    document = figures.spec(figures.draw(RunView([run]), "accuracy"))
    (kept,) = [
        step["filter"]["oneOf"] for layer in document["layer"] for step in layer["transform"] if "filter" in step
    ]
    assert kept == ["VP>DS", "fedavg"]
    assert "Bands of VP>DS, fedavg alone" in document["usermeta"]["note"]
    assert len(rows(figures.draw(RunView([run]), "accuracy"))) == 3


def test_a_rule_that_weighs_everybody_alike_has_no_heat_map(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = np.full((2, 3), 1 / 3)
    monkeypatch.setattr(History, "weights", lambda *_: (("a", "b", "c"), np.array([1, 2]), found))
    assert figures.draw(RunView([run]), "weights", rule="fedavg") is None
    found[0] = [0.5, np.nan, 0.5]
    assert figures.draw(RunView([run]), "weights", rule="fedavg") is not None


def test_the_split_shows_the_classes_of_each_client(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=2, clients=4, seeds=(1,))
    assert len(figures.spec(figures.draw(RunView([folder]), "split"))["vconcat"]) == 1
    store = Store(folder)
    store.note(labels={"1": {"client-0": [3, 0, 4], "client-1": [0, 9, 0], "never-asked": [1, 0, 0]}})
    store.close()
    document = figures.spec(figures.draw(RunView([folder]), "split"))
    sizes, classes = (document["datasets"][panel["data"]["name"]] for panel in document["vconcat"])
    assert [(row["client"], row["samples"]) for row in sizes] == [
        ("⚑ client-1", 9),
        ("⚑ client-0", 7),
        ("never-asked", 1),
    ]
    assert classes[1] == {"client": "⚑ client-0", "label": ["0", "1", "2"], "samples": [3, 0, 4]}


def test_several_runs_stand_side_by_side_under_their_names(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", rounds=3, clients=4, seeds=(1,))
    view = RunView([run, other])
    assert view.labels[0] == "run · VP>DS"
    assert "other · fedavg" in view.labels
    names = [row["rule"] for row in rows(figures.draw(view, "accuracy"))]
    assert names == view.labels


def test_files_for_a_paper(run: Path, tmp_path: Path) -> None:
    chart = figures.draw(RunView([run]), "accuracy")
    made = figures.write_figures({"accuracy": chart}, tmp_path)
    assert [path.name for path in made] == ["accuracy.svg", "accuracy.png", "accuracy.pdf"]
    assert ElementTree.fromstring(made[0].read_text()).tag.endswith("svg")
    assert made[1].read_bytes().startswith(b"\x89PNG")
    assert made[2].read_bytes().startswith(b"%PDF")
    with pytest.raises(UserError, match=r"allowed: a file name that ends in .svg, .png or .pdf"):
        figures.write_figure(chart, tmp_path / "accuracy.gif")


def test_what_does_not_exist_is_named_with_what_does(run: Path) -> None:
    view = RunView([run])
    with pytest.raises(UserError, match=r"kind: got 'weight'.*weights"):
        figures.draw(view, "weight")
    with pytest.raises(UserError, match=r"--rule: got 'fedavgg'.*fedavg"):
        figures.draw(view, "weights", rule="fedavgg")
    with pytest.raises(UserError, match="--seed: got 9; allowed: 1, 2"):
        figures.draw(view, "weights", seed=9)


@pytest.mark.parametrize(("count", "limit"), [(0, 5), (1, 5), (5, 5), (6, 5), (1000, 240)])
def test_samples_are_evenly_spaced_and_hold_both_ends(count: int, limit: int) -> None:
    found = sampled(count, limit)
    assert len(found) <= limit
    if count:
        assert found[0] == 0
        assert found[-1] == count - 1
    if len(found) > 2:
        assert np.ptp(np.diff(found)) <= 1


def test_the_bundle_is_kept_and_cannot_end_a_script_element(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path))
    (file,) = (figures.bundle() and tmp_path.iterdir(),)[0]
    text = file.read_text()
    assert "vegaEmbed" in text
    assert "</script" not in text
    file.write_text("kept")
    assert figures.bundle() == "kept"
