"""The family of contrasts: each is there, tested with all its seeds only, and Holm runs over what is tested."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from benchmarks.contrasts import OTHERS, Contrast, contrasts, differences, kept, read, table
from benchmarks.papers import NAMED, best_rates, parts, power_parts

from steelyard import Experiment
from steelyard.experiment.loading import recipes
from steelyard.runs.reader import History
from steelyard.weighing.adjusting import chooses

FAMILY = [Contrast("a", "X", "DS"), Contrast("a", "Y", "DS"), Contrast("b", "X", "DS")]


def scores(seeds: int) -> dict[tuple[str, str, int], float]:
    found = {("a", "DS", seed): 0.5 + 0.01 * seed for seed in range(seeds)}
    found |= {("a", "X", seed): 0.6 + 0.01 * seed + 0.001 * (seed % 2) for seed in range(seeds)}
    return found | {("a", "Y", seed): 0.5 + 0.01 * seed + 0.001 * (seed % 3 - 1) for seed in range(seeds)}


def test_gains_are_paired_by_seed() -> None:
    found = differences(scores(4) | {("a", "X", 9): 0.9}, FAMILY[0])
    assert [round(value, 6) for value in found] == [0.1, 0.101, 0.1, 0.101]


def test_a_gain_an_equality_and_what_is_missing_are_told_apart() -> None:
    _, _, gain, equal, missing = table(scores(10), FAMILY).splitlines()
    assert gain.startswith("| a: X against DS | 10 of 10 | +10.05 ± 0.04 |")
    assert gain.endswith("| ahead |")
    assert equal.endswith("| equal within a point |")
    assert missing == "| b: X against DS | 0 of 10 |  |  |  | not run |"


def test_fewer_seeds_than_planned_are_shown_and_not_tested() -> None:
    gain = table(scores(3), FAMILY).splitlines()[2]
    assert gain == "| a: X against DS | 3 of 10 | +10.03 ± 0.14 |  |  | not tested: seeds are missing |"


def test_every_contrast_has_its_parts_and_every_seed_once() -> None:
    planned = power_parts()
    assert planned.items() <= parts().items()
    for experiment in {contrast.experiment.removesuffix(OTHERS) for contrast in contrasts()}:
        mine = {name: words for name, words in planned.items() if name.startswith(f"power-{experiment}-")}
        seeds: list[int] = []
        for name, words in mine.items():
            if not name.endswith("float32"):
                first = next(int(word.removeprefix("seed=")) for word in words if word.startswith("seed="))
                seeds += range(first, first + int(words[words.index("--seeds") + 1]))
        assert sorted(seeds) == list(range(1, 11))
        assert f"power-{experiment}-float32" in mine
    assert all(words.startswith("DS,") for words in NAMED.values())


def test_adafeds_rules_are_those_of_its_recipes() -> None:
    for contrast in contrasts():
        if contrast.experiment.startswith("adafed"):
            recipe = tomllib.loads(recipes()[contrast.experiment].read_text(encoding="utf-8"))
            assert {contrast.rule, contrast.against} <= {recipe["weighing"]["name"], *recipe["beside"]}


def test_scores_of_runs_that_are_elsewhere_are_kept_beside(tmp_path: Path) -> None:
    before = scores(2)
    (tmp_path / "scores.json").write_text(json.dumps([[*key, score] for key, score in before.items()]))
    assert kept(tmp_path, ["power-a-1"]) == before  # no run is there
    assert kept(tmp_path, ["power-a-1"]) == before  # as it was written


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


def test_the_second_search_takes_the_best_rates_of_the_first(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="run the part celeba-rate-first before celeba-rate"):
        best_rates(tmp_path)
    (tmp_path / "celeba-rate-first").mkdir()
    table = "point,training.learning_rate,accuracy\n4,0.4,0.7\n2,0.1,0.6\n3,0.2,0.5\n1,0.05,0.4\n"
    (tmp_path / "celeba-rate-first" / "results.csv").write_text(table)
    assert best_rates(tmp_path) == "training.learning_rate=0.1,0.2,0.4"
