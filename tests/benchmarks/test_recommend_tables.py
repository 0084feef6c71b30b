"""The recommender tables: settings are chosen on validation rows alone, and a second call does nothing again."""

import json
import sys
from pathlib import Path

import pytest
from tests.recommend.conftest import two_tastes

from benchmarks import recommend_tables

RECIPE = """
kind = "recommend"
name = "toy"
[interactions]
path = "PATH"
[fpl]
mode = "pFPL+"
factors = 4
"""


@pytest.mark.slow
def test_two_fits_at_a_time_are_the_fits_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = toy(tmp_path)
    printed = []
    for jobs in ("1", "2"):
        words = [str(recipe), "--out", str(tmp_path / jobs), "--seeds", "1", "--no-sweep", "--jobs", jobs]
        words += ["--baselines", "user-knn,mf", "--grid", "user-knn.neighbours=2,4", "--grid", "mf.factors=2,3"]
        words += ["--grid", "mf.rate=0.01", "--grid", "mf.decay=0", "--grid", "mf.epochs=1,2"]
        monkeypatch.setattr(sys, "argv", ["recommend_tables", *words])
        recommend_tables.main()
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    first, second = (json.loads((tmp_path / jobs / "fits.json").read_text())["fits"] for jobs in ("1", "2"))
    assert first == second
    assert len(first) == 2 + 4 + 2


def test_a_grid_has_the_settings_of_its_baseline() -> None:
    assert recommend_tables.grids_with(["mf.batch=8192"])["mf"]["batch"] == [8192]
    with pytest.raises(SystemExit, match=r"--grid: got mf\.neighbours; allowed: a setting of the search"):
        recommend_tables.grids_with(["mf.neighbours=3"])


def toy(folder: Path) -> Path:
    rows = two_tastes(users=12, items=60, taken=25)
    data, recipe = folder / "toy.tsv", folder / "toy.toml"
    data.write_text("user\titem\trating\ttime\n" + "".join(f"{u}\t{i}\t{r}\t{t}\n" for u, i, r, t in rows))
    recipe.write_text(RECIPE.replace("PATH", str(data)))
    return recipe


def test_settings_are_chosen_on_validation_rows_and_a_second_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = toy(tmp_path)
    grids = {"popular": {}, "user-knn": {"neighbours": (2, 4)}}
    monkeypatch.setattr(recommend_tables, "GRIDS", grids)
    seen = []
    baseline = recommend_tables.recommend

    def noted(kind, train, *rest):
        seen.append((kind, len(train), *rest))
        return baseline(kind, train, *rest)

    monkeypatch.setattr(recommend_tables, "recommend", noted)
    arguments = [str(recipe), "--out", str(tmp_path / "out"), "--seeds", "2", "--epochs", "1,2"]
    arguments += ["--over", "fpl.learning_rate=0.05,0.2", "--baselines", "popular,user-knn"]
    monkeypatch.setattr(sys, "argv", ["recommend_tables", *arguments])
    recommend_tables.main()
    printed = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in printed.splitlines()[2:]] == [
        "popular",
        "user-knn",
        "pFPL+ (formula)",
    ]
    choosing, testing = sorted({size for _, size, *_ in seen})
    assert choosing < testing
    assert [(size, settings) for kind, size, _, _, settings, _ in seen if kind == "user-knn" and size == choosing] == [
        (choosing, {"neighbours": 2}),
        (choosing, {"neighbours": 4}),
    ]
    tables = json.loads((tmp_path / "out" / "tables.json").read_text())
    assert {row["system"]: len(row["seeds"]) for row in tables} == {"popular": 2, "user-knn": 2, "pFPL+ (formula)": 2}
    assert set(tables[-1]["chosen"]) == {"rounds.epochs", "fpl.learning_rate"}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}
    assert len(before) >= 4 + 2  # points of the sweep, seeds of the test
    fits = len(seen)
    recommend_tables.main()
    assert len(seen) == fits  # each fit of a baseline is kept
    assert capsys.readouterr().out == printed
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}
    monkeypatch.setattr(sys, "argv", ["recommend_tables", *arguments, "--set", "seed=7"])
    with pytest.raises(SystemExit, match=r"fits\.json: of another experiment"):
        recommend_tables.main()
