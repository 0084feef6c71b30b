"""The script behind the KGFlex page: what is done when, what a cut run keeps, and the tables that come of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.kgflex_figures import ablated, draw, spread
from benchmarks.kgflex_pages import main_table, number, pages
from benchmarks.kgflex_plan import CHOSEN, LISTED, PARTS, Cell, best, key, settled
from benchmarks.kgflex_tables import append, open_cells, read
from benchmarks.kgflex_thesis import METRICS, NAMES, TABLE

from steelyard.experiment.loading import load
from steelyard.experiment.recommend import RecommendDescription


def figures(ndcg: float) -> dict[str, Any]:
    return {cutoff: {**dict.fromkeys(METRICS, 0.5), "ndcg": ndcg, "item_coverage": 40} for cutoff in ("10", "1")}


def looked(cell: Cell, found: dict[str, Any], end: bool = True) -> Cell:
    return {**cell, "found": found, "seconds": 1.0, "end": end}


def test_the_thesis_table_is_whole() -> None:
    assert {len(row) for rows in TABLE.values() for row in rows.values()} == {2 * len(METRICS)}
    assert all(tuple(rows) == NAMES for rows in TABLE.values())
    assert [TABLE[data]["KGFlex"][0] for data in ("yahoo", "books", "ml1m")] == [".2464", ".0853", ".1982"]


def test_lines_of_one_cell_are_put_together_and_a_cut_one_is_done_again(tmp_path: Path) -> None:
    first, second = list(PARTS["search"]("ml1m", []))[:2]
    append(tmp_path, looked(first, {"1": figures(0.1)}, end=False))
    append(tmp_path, looked(second, {"1": figures(0.3)}, end=False))
    append(tmp_path, looked(first, {"2": figures(0.2)}, end=False))
    append(tmp_path, looked(first, {}))
    done = read(tmp_path)
    assert [sorted(cell["found"]) for cell in done] == [["1", "2"], ["1"]]
    assert [cell["end"] for cell in done] == [True, False]
    left = [key(cell) for cell in open_cells([("search", "ml1m")], done, set(), set(), False)]
    assert key(first) not in left
    assert key(second) in left
    # What was seen counts, whether the cell came to its end or not.
    assert best(done, "ml1m", {}) == (second["set"], 1)


def test_tests_wait_for_the_search_or_for_its_time_to_be_over() -> None:
    parts = [("search", "ml1m"), ("test", "ml1m"), ("last", "books")]
    cells = list(PARTS["search"]("ml1m", []))
    done = [looked(cells[0], {"4": figures(0.2)}), looked(cells[1], {"2": figures(0.1)}, end=False)]
    stages = [cell["stage"] for cell in open_cells(parts, done, set(), set(), False)]
    assert stages == ["search"] * (len(LISTED["ml1m"]) - 1) + ["ablation"]
    over = list(open_cells(parts, done, set(), set(), True))
    assert [cell["stage"] for cell in over] == ["test"] * 6 + ["ablation"]
    assert {json.dumps(cell["set"]) for cell in over if cell["stage"] == "test"} == {json.dumps(cells[0]["set"])}
    assert over[0]["epochs"] == [4]
    # One that still runs is waited for.
    assert [cell["stage"] for cell in open_cells(parts, done, {key(cells[1])}, set(), True)] == ["ablation"]


def test_baselines_are_tested_with_what_was_best_on_validation_rows() -> None:
    done: list[Cell] = []
    for cell in PARTS["baselines"]("books", []):
        score = 0.3 if cell["settings"].get("neighbours") == 100 else 0.2
        done.append(looked(cell, {"0": figures(score)}))
    tested = [cell for cell in PARTS["baselines"]("books", done) if not cell["validation"]]
    chosen = {cell["system"]: cell["settings"] for cell in tested}
    assert (chosen["item-knn"], chosen["user-knn"]) == ({"neighbours": 100}, {"neighbours": 100})
    assert sum(cell["system"] == "bpr-mf" for cell in tested) == 3


def test_the_tables_stand_beside_the_thesis() -> None:
    cell = {"stage": "test", "data": "books", "set": {}, "epochs": [20], "name": "thesis"}
    cells = [looked({**cell, "seed": seed}, {"20": figures(0.08 + seed / 100)}) for seed in (1, 2, 3)]
    cells.append(looked({**cell, "seed": 4}, {"5": figures(0.9)}, end=False))
    lines = list(main_table(cells, "books"))
    assert {line.count("|") for line in lines} == {14}
    assert "| **KGFlex**, thesis' limits (3 seeds) | .1000 | .1000 | 40 | 40 | .5000 |" in "\n".join(lines)
    assert lines[-1].startswith("| *KGFlex in the thesis* | *.0853* | *.0653* | *606* |")
    assert any(line.startswith("| *kaHFM in the thesis* | *.1267* |") for line in lines)
    assert "## Facebook Books" in list(pages(cells))
    assert [number("aclt", 1.25), number("ndcg", 0.12345), number("item_coverage", 1403.0)] == [
        "1.250",
        ".1235",
        "1403",
    ]


def test_without_a_search_movielens_is_tested_as_the_recipe_stands() -> None:
    assert settled([], "ml1m", "chosen") == ({}, 2)
    recipe = load("kgflex-ml1m")
    assert isinstance(recipe, RecommendDescription)
    assert recipe.kgflex is not None
    assert (recipe.kgflex.limits, recipe.fpl.learning_rate) == ((400, 0), 0.2)
    assert (recipe.rounds.epochs, recipe.rounds.fraction) == (2, 0.005)
    changed = recipe.changed(CHOSEN["ml1m", "thesis"][0])
    assert isinstance(changed, RecommendDescription)
    assert changed.kgflex is not None
    assert changed.kgflex.limits == (100, 100)


def test_pictures_show_means_over_seeds_and_each_cell_of_the_ablation(tmp_path: Path) -> None:
    test = {"stage": "test", "data": "ml1m", "set": {}, "epochs": [2], "name": "chosen"}
    shares = {1: 0.4, 2: 0.8}
    seeds = [
        looked({**test, "seed": seed}, {"2": {"10": {"hit_rate": share, "shannon_entropy": 5.0 + seed}, "1": {}}})
        for seed, share in shares.items()
    ]
    cell = {"stage": "ablation", "data": "ml1m", "set": {}, "epochs": [2], "factors": 10}
    cells = [looked({**cell, "hops": hops}, {"2": figures(0.1)}) for hops in ("1", "1+2")]
    cells.append(looked({**cell, "hops": "2"}, {}, end=False))
    (row,) = spread([*seeds, *cells]).to_dict(orient="records")
    assert row == {
        "data": "MovieLens 1M",
        "system": "KGFlex, chosen",
        "HR@10": pytest.approx(0.6),
        "Shannon entropy@10": 6.5,
    }
    assert ablated(cells, "ml1m")["hops"].tolist() == ["one hop", "both"]
    draw([*seeds, *cells], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kgflex-hops.svg", "kgflex-spread.svg"]
