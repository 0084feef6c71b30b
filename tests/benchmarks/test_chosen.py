"""What tables of results choose and compare: settings on validation rows, contrasts by seed, new items, images."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.cell_images import MOST, cells
from benchmarks.cold_start import Kgflex, judged
from benchmarks.cold_start_data import Case, Draw, draw
from benchmarks.contrasts import OTHERS, Contrast, differences, read, table
from tests.recommend.conftest import two_tastes
from torch import nn

from benchmarks import recommend_tables, transfer
from steelyard import Experiment
from steelyard.recommend.baselines.plain import random
from steelyard.recommend.baselines.vsm import vsm
from steelyard.recommend.interactions import build
from steelyard.recommend.knowledge import features
from steelyard.runs.reader import History
from steelyard.weighing.adjusting import chooses

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

    def noted(kind, train, *rest):
        seen.append((kind, len(train), *rest))
        return baseline(kind, train, *rest)

    monkeypatch.setattr(recommend_tables, "recommend", noted)
    arguments = [str(recipe), "--out", str(tmp_path / "out"), "--seeds", "2", "--epochs", "1,2"]
    arguments += ["--over", "fpl.learning_rate=0.05,0.2", "--baselines", "popular,user-knn"]
    monkeypatch.setattr(sys, "argv", ["recommend_tables", *arguments])
    recommend_tables.main()
    printed = capsys.readouterr().out
    choosing, testing = sorted({size for _, size, *_ in seen})
    assert choosing < testing
    assert [(size, settings) for kind, size, _, _, settings, _ in seen if kind == "user-knn" and size == choosing] == [
        (choosing, {"neighbours": 2}),
        (choosing, {"neighbours": 4}),
    ]
    tables = json.loads((tmp_path / "out" / "tables.json").read_text())
    assert {row["system"]: len(row["seeds"]) for row in tables} == {"popular": 2, "user-knn": 2, "pFPL+ (formula)": 2}
    assert set(tables[-1]["chosen"]) == {"rounds.epochs", "fpl.learning_rate"}
    fits = len(seen)
    recommend_tables.main()
    assert len(seen) == fits  # each fit of a baseline is kept
    assert capsys.readouterr().out == printed
    monkeypatch.setattr(sys, "argv", ["recommend_tables", *arguments, "--set", "seed=7"])
    with pytest.raises(SystemExit, match=r"fits\.json: of another experiment"):
        recommend_tables.main()


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


def test_adjusted_orders_are_read_on_clients_that_did_not_choose(tmp_path: Path) -> None:
    rules = ["DS", "online-apart(DS>LD)"]
    Experiment.load("quickstart", ["rounds.count=1", "partition.clients=8"]).compare(rules, out=tmp_path / "power-q-1")
    found = read(tmp_path, ["power-q-1"])
    rows = History(tmp_path / "power-q-1").evaluations
    for rule in rules:
        asked = list(rows[(rows["rule"] == rule) & (rows["round"] == 1)].itertuples())
        others = [row for row in asked if not chooses(row.client)]
        assert 0 < len(others) < len(asked) == 8
        right = sum(row.score * row.samples for row in others) / sum(row.samples for row in others)
        assert found["q" + OTHERS, rule, 1] == pytest.approx(right)
    assert {experiment for experiment, _, _ in found} == {"q", "q" + OTHERS}


@pytest.fixture(scope="module")
def case() -> Case:
    return Case((), 0, {}, triples=4)


@pytest.fixture(scope="module")
def drawn(case: Case) -> Draw:
    columns = list(zip(*two_tastes(users=60, items=100, taken=20), strict=True))
    data = build(columns[0], columns[1], columns[2])
    # Each item is of a half, and one of four colours that say nothing.
    half = [(row, int(item >= "i50")) for row, item in enumerate(data.items.tolist())]
    pairs = np.array([*half, *((row, 2 + row % 4) for row, _ in half)])
    return draw(data, features.build(pairs[:, 0], pairs[:, 1], len(data.items), list("abcdef")), case, 1)


def test_new_items_have_no_training_row_and_are_all_of_the_test(drawn: Draw) -> None:
    assert not np.isin(drawn.train.item, drawn.new).any()
    assert sorted([*drawn.new.tolist(), *drawn.old.tolist()]) == list(range(100))
    assert drawn.truth.items == 20


def test_what_reads_features_finds_whose_they_are(case: Case, drawn: Draw) -> None:
    chance = judged(drawn, random(drawn.train))["ndcg"]
    known = judged(drawn, vsm(drawn.train, drawn.features))["ndcg"]
    model = Kgflex(drawn, case, 100, 1)
    model.train_to(10)
    learned = judged(drawn, model.scores)["ndcg"]
    assert known > chance + 0.1
    assert learned > chance + 0.1


def test_more_cells_are_more_light_and_a_seed_draws_the_same() -> None:
    drawn = cells(1, 200)
    counts, light = drawn.labels.numpy(), drawn.features.numpy().sum(axis=(1, 2, 3))
    assert drawn.features.shape == (200, 1, 28, 28)
    assert {counts.min(), counts.max()} == {1, MOST}
    assert np.corrcoef(counts, light)[0, 1] > 0.9
    assert np.array_equal(counts, cells(1, 200).labels.numpy())


def test_only_the_last_layer_is_trained_and_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 10))
    monkeypatch.setattr(transfer, "pretrained", lambda: layers)
    model = transfer.network()
    assert [name for name, value in model.named_parameters() if value.requires_grad] == ["2.weight", "2.bias"]
    assert not torch.equal(model.get_parameter("2.weight"), layers[2].weight)
