"""The recommender tables: settings come from validation rows alone, and a stopped run goes on where it was."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from benchmarks.foursquare_groups import GROUPS, group_of
from benchmarks.recommend_data import Source
from tests.recommend.conftest import two_tastes
from tests.recommend.test_golden_lists import shared

from benchmarks import recommend_data, recommend_figures, recommend_pages, recommend_plan, recommend_tables
from steelyard.experiment.loading import load


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of two tastes under the name "toy", and small grids."""
    rows = two_tastes(users=12, items=60, taken=25)
    path = tmp_path / "toy.tsv"
    path.write_text("user\titem\trating\ttime\n" + "".join(f"{u}\t{i}\t{r}\t{t}\n" for u, i, r, t in rows))
    monkeypatch.setenv("STEELYARD_DATA", str(tmp_path))
    monkeypatch.setenv("STEELYARD_SCRATCH", str(tmp_path / "scratch"))
    for module in (recommend_data, recommend_tables):
        monkeypatch.setattr(module, "SOURCES", {"toy": Source(("toy.tsv",))})
    for name, values in {"RATES": (0.05, 0.2), "FACTORS": (10,), "EPOCHS": (1, 2), "NEIGHBOURS": (2, 4)}.items():
        monkeypatch.setattr(recommend_plan, name, values)
    monkeypatch.setattr(recommend_tables, "FACTORS", (10,))
    recommend_data.kept.cache_clear()
    recommend_data.load.cache_clear()
    return tmp_path


def tables(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> list[dict]:
    monkeypatch.setattr(sys, "argv", ["recommend_tables", str(out), "--jobs", "1", *arguments])
    recommend_tables.main()
    return recommend_tables.read_lines(out / "lines.jsonl")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_settings_are_chosen_on_validation_rows_and_a_second_call_finds_nothing_to_do(toy, monkeypatch):
    lines = tables(monkeypatch, toy / "out")
    chosen = [line for line in lines if line["use"] == "validation"]
    tested = [line for line in lines if line["use"] == "test"]
    for kind in ("user-knn", "item-knn"):
        top = max(line["precision"] for line in chosen if line["system"] == kind)
        best = [line["settings"] for line in chosen if line["system"] == kind and line["precision"] == top]
        (line,) = [line for line in tested if line["system"] == kind]
        assert line["settings"] in best
    for mode, counted in recommend_plan.VARIANTS:
        mine = [line for line in chosen if line["system"] == mode and line["settings"]["epoch"] == counted]
        at_one = [line for line in mine if line["settings"]["pi"] == 1]
        top = max(line["precision"] for line in at_one)
        rates = {line["settings"]["rate"] for line in at_one if line["precision"] == top}
        rows = [line for line in tested if line["system"] == mode and line["settings"]["epoch"] == counted]
        assert {line["settings"]["pi"] for line in rows} == set(recommend_plan.shares_of(counted))
        assert {line["settings"]["rate"] for line in rows} <= rates
        assert {line["seed"] for line in rows if line["settings"]["pi"] == 1} == {1, 2, 3}
    before = (toy / "out" / "lines.jsonl").read_bytes()
    tables(monkeypatch, toy / "out")
    assert (toy / "out" / "lines.jsonl").read_bytes() == before
    # Cut off in the middle of a line, as by a power cut: what is missing is done again, to the same figures.
    (toy / "out" / "lines.jsonl").write_bytes(before[: len(before) // 2])
    again = tables(monkeypatch, toy / "out")
    kept = {line["task"]: line["precision"] for line in lines if line["use"] == "test"}
    assert {line["task"]: line["precision"] for line in again if line["use"] == "test"} == kept


def test_the_grid_shows_the_best_epoch_of_each_cell():
    lines = [
        {"use": "validation", "system": "bpr-mf", "settings": {"rate": rate, "factors": 10}, "seed": 1, "epoch": epoch}
        | {"precision": value, "task": f"{rate}"}
        for rate, epoch, value in ((0.05, 10, 0.25), (0.05, 20, 0.5), (0.5, 10, 0.125), (0.5, 20, 0.125))
    ]
    assert recommend_pages.grid(lines).splitlines()[2:] == ["| α = 0.05 | 0.50000 (20) |", "| α = 0.5 | 0.12500 (10) |"]


def test_pictures_take_the_test_rows_or_else_the_best_of_the_validation_rows():
    def line(use: str, precision: float, coverage: float = 5.0, pi: float = 1.0) -> dict:
        settings = {"pi": pi, "epoch": "formula"}
        found = {"data": "amazon", "use": use, "seed": 1, "system": "sFPL", "settings": settings}
        return found | {"precision": precision, "f1": precision, "item_coverage": coverage, "updates": {}}

    chosen = [line("validation", 0.1), line("validation", 0.3), line("validation", 0.2), line("validation", 0, 0, 0.5)]
    assert recommend_figures.frame(chosen)[["data", "P@10"]].values.tolist() == [
        ["Amazon Digital Music, validation rows", 0.3]
    ]
    found = recommend_figures.frame([*chosen, line("test", 0.25)])
    assert found[["data", "P@10"]].values.tolist() == [["Amazon Digital Music", 0.25]]


def test_data_sets_are_done_in_the_order_in_which_they_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recommend_tables", str(tmp_path), "--data", "italy,nowhere"])
    monkeypatch.setattr(recommend_tables, "compile_all", lambda: None)
    with pytest.raises(SystemExit):
        recommend_tables.main()
    assert "--data: nowhere is none of amazon, italy, ml1m" in capsys.readouterr().err
    progress = recommend_tables.Progress(["venice", "amazon"], [])
    assert [entry[3]["data"] for entry in progress.waiting][:1] == ["venice"]


def test_no_time_means_no_task(toy, monkeypatch):
    assert tables(monkeypatch, toy / "out", "--minutes", "0") == []
    assert json.loads((toy / "out" / "machine.jsonl").read_text())["left"] > 0


def test_the_data_are_those_of_the_recipe():
    shared("foursquare_italy/Milan.tsv.gz")
    ours, recipe = recommend_data.load("milan", "test").split, load("fpl-foursquare").prepare().split
    for side in ("train", "test"):
        first, second = getattr(ours, side), getattr(recipe, side)
        assert first.item.tolist() == second.item.tolist()
        assert first.user.tolist() == second.user.tolist()


def test_venue_types_have_one_of_nine_groups():
    assert [group_of(kind) for kind in ("Plaza", "Thai Restaurant", "College Lab", "Home (private)", "Mall")] == [
        *("O&R", "Food", "C&U", "Res.", "S&S"),
    ]
    assert group_of("Ramen /  Noodle House") == "Food"
    assert {group_of(kind) for kind in ("Nightclub", "Museum", "Office", "Airport")} < set(GROUPS)
