"""A run with a measure that leads: what is recorded, what is read back, and what decides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.kit import assert_refused, made_once, small

import steelyard
from steelyard import Result
from steelyard.base.tallies import Tally, figures_of
from steelyard.report.figures import draw, spec
from steelyard.report.view import RunView
from steelyard.runs.history import History

COUNT = 240


def rare(seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Rows of which one in eight is of the second class; those of the last sixth are all of the first."""
    chance = np.random.default_rng(seed)
    labels = (np.arange(COUNT) % 8 == 0).astype(int)
    labels[-COUNT // 6 :] = 0
    return chance.normal(size=(COUNT, 3)) + 1.2 * labels[:, None], labels


def led(measure: str, folder: Path) -> Result:
    features, labels = rare()
    owners = np.repeat([f"site{site}" for site in range(6)], COUNT // 6)
    data = steelyard.in_memory(features, labels, owners=owners)
    described = small(
        data={"source": "memory"},
        partition={"scheme": "natural", "clients": None, "alpha": None, "minimum": 2, "test_fraction": 0.4},
        rounds={"measure": measure, "count": 2},
        beside={"equal": {"criteria": ["EQ"]}},
    )
    return described.run(dataset=data, out=folder)


@pytest.fixture(scope="session")
def by_auc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "led-by-auc", lambda folder: led("roc-auc", folder))


def test_sums_of_the_last_round_are_read_back_and_give_what_was_recorded(by_auc: Path) -> None:
    history = History(by_auc)
    found = history.tallies("DS", 5)
    assert found is not None
    clients, tally = found
    tests = history.tested("DS", 5, 1)
    assert tests.clients == clients
    assert tally.confusion.sum(axis=(-2, -1)).tolist() == tests.samples.tolist()
    assert figures_of(tally)["roc_auc"] == pytest.approx(tests.score)
    assert figures_of(tally)["brier"] == pytest.approx(tests.metrics["brier"])
    assert not [name for name in tests.metrics if "/" in name]
    frame = history.rounds
    last = frame[(frame["rule"] == "DS") & (frame["round"] == 2)]["accuracy"].item()
    assert float(figures_of(Tally(tally.cells.sum(axis=0)))["roc_auc"]) == pytest.approx(last)


def test_a_site_of_one_class_gives_no_score_and_says_why(by_auc: Path) -> None:
    history = History(by_auc)
    assert "site5" not in history.tested("DS", 5).clients
    assert history.untested["failure"].str.contains("ROC AUC").all()


def test_the_measure_names_scores_and_decides(by_auc: Path) -> None:
    result = Result(by_auc)
    assert result.comparison.measure == result.comparison.tested().measure == "ROC AUC"


def test_its_picture_has_every_measure_of_every_site_with_its_interval(by_auc: Path) -> None:
    document = spec(draw(RunView([by_auc]), "measures"))
    values, curves, confusion = document["vconcat"]
    written = {(row["site"], row["measure"]): row["text"] for row in values["data"]["values"]}
    sites = ["all sites", *(f"site{number}" for number in range(5))]
    assert {site for site, _ in written} == {*sites}
    tally = History(by_auc).tallies("DS", 5)
    assert tally is not None
    every = Tally(tally[1].cells.sum(axis=0))
    assert written["all sites", "ROC AUC"].startswith(f"{float(figures_of(every)['roc_auc']):.4g} [")
    right, rows = every.confusion[1, 1], every.confusion[1].sum()
    assert written["all sites", "right of class 1"] == f"{right:.0f} of {rows:.0f}"
    assert [panel.get("title") for panel in curves["hconcat"]] == ["ROC", "Calibration"]
    assert sum(row["rows"] for row in confusion["data"]["values"]) == 2 * every.confusion.sum()
    assert "move ROC AUC by" in document["usermeta"]["note"]


@pytest.mark.parametrize("measure", ["r2", "auc"])
def test_a_measure_of_another_task_is_refused(measure: str) -> None:
    assert_refused(lambda: small(rounds={"measure": measure}), "rounds.measure", measure)
