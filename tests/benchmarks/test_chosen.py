"""What tables of results choose: settings on validation rows, once."""

from __future__ import annotations

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

    def noted(chosen, train, *rest):
        seen.append((len(train), chosen.model_dump(exclude_unset=True)))
        return baseline(chosen, train, *rest)

    monkeypatch.setattr(recommend_tables, "recommend", noted)
    arguments = [str(recipe), "--out", str(tmp_path / "out"), "--seeds", "2", "--epochs", "1,2"]
    arguments += ["--over", "fpl.learning_rate=0.05,0.2", "--baselines", "popular,user-knn"]
    monkeypatch.setattr(sys, "argv", ["recommend_tables", *arguments])
    recommend_tables.main()
    printed = capsys.readouterr().out
    choosing = min(size for size, _ in seen)
    assert [settings for size, settings in seen if size == choosing and settings] == [
        {"neighbours": 2},
        {"neighbours": 4},
    ]
    tables = json.loads((tmp_path / "out" / "tables.json").read_text())
    assert {row["system"]: len(row["seeds"]) for row in tables} == {"popular": 2, "user-knn": 2, "pFPL+ (formula)": 2}
    assert set(tables[-1]["chosen"]) == {"rounds.epochs", "fpl.learning_rate"}
    fits = len(seen)
    recommend_tables.main()
    assert len(seen) == fits  # each fit of a baseline is kept
    assert capsys.readouterr().out == printed
