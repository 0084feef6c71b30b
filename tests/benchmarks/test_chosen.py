"""What tables of results choose and compare: settings on validation rows, contrasts by seed, new items, images."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks.contrasts import Contrast, differences, table
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


FAMILY = [Contrast("a", "X", "DS"), Contrast("a", "Y", "DS"), Contrast("b", "X", "DS")]


def scores(seeds: int) -> dict[tuple[str, str, int], float]:
    found = {("a", "DS", seed): 0.5 + 0.01 * seed for seed in range(seeds)}
    found |= {("a", "X", seed): 0.6 + 0.01 * seed + 0.001 * (seed % 2) for seed in range(seeds)}
    return found | {("a", "Y", seed): 0.5 + 0.01 * seed + 0.001 * (seed % 3 - 1) for seed in range(seeds)}


def test_a_gain_an_equality_and_what_is_missing_are_told_apart() -> None:
    assert differences(scores(4) | {("a", "X", 9): 0.9}, FAMILY[0]) == pytest.approx([0.1, 0.101, 0.1, 0.101])
    _, _, gain, equal, missing = table(scores(10), FAMILY).splitlines()
    assert gain.startswith("| a: X against DS | 10 of 10 | +10.05 ± 0.04 |")
    assert gain.endswith("| ahead |")
    assert equal.endswith("| equal within a point |")
    assert missing == "| b: X against DS | 0 of 10 |  |  |  | not run |"
