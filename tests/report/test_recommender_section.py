"""A recommender's part of the report, from a small file of interactions; the arithmetic by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from steelyard.api import Experiment
from steelyard.recommend import run_data
from steelyard.report.html import html
from steelyard.report.recommender_section import _concentration, recommended
from steelyard.report.view import RunView


def test_concentration_by_hand() -> None:
    # Four items; the second is the most popular, then the first; three of four shown go to the second.
    found = _concentration(np.array([1, 3, 0, 0]), np.array([5, 9, 2, 2]))
    assert found["items"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert found["share"] == [0.0, 0.75, 1.0, 1.0, 1.0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recommended")
    chance = np.random.default_rng(3)
    rows = [
        f"{user}\t{item}\t5\t{time}"
        for user in range(20)
        for time, item in enumerate(chance.choice(30, size=12, replace=False))
    ]
    (folder / "ratings.tsv").write_text("\n".join(rows) + "\n")
    changes = [f'interactions.path="{folder / "ratings.tsv"}"', "interactions.min_user=5", "rounds.epochs=2"]
    return (
        Experiment.load("fpl-amazon", [*changes, "rounds.evaluate_every=1", "ranking.cutoff=5"])
        .run(folder / "run")
        .folder
    )


def test_metrics_and_figures_stand_beside_the_most_popular(run: Path) -> None:
    view = RunView([run])
    made = recommended(view)
    (grid,) = made.tables
    assert grid.title == "Metrics of the lists of 5"
    assert [row[0] for row in grid.rows] == [view.labels[0], "most popular"]
    assert {"nDCG", "coverage", "Gini", "PopREO"} <= set(grid.headings)
    (points,) = made.figures["tradeoff"]["datasets"].values()
    shown = next(row for row in points if row["rule"] == "most popular")
    column = grid.headings.index("coverage")
    assert float(grid.rows[1][column]) == pytest.approx(shown["coverage"], abs=1e-4)
    page = html(view)
    assert '<section id="recommended">' in page
    assert 'data-figure="popularity"' in page


def test_data_that_are_gone_are_told_not_raised(run: Path) -> None:
    (run.parent / "ratings.tsv").rename(run.parent / "moved.tsv")
    run_data._loaded.cache_clear()
    made = recommended(RunView([run]))
    assert made.tables == []
    assert "Lists cannot be made again" in made.notes[0]
