"""Curves of runs that are small enough to check every number: who tested, when rounds ended, what exploded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kit import refusal
from tests.runs.contents import chain_again, change
from tests.runs.records import add, begun, evaluations, federation, record, state

from steelyard.base.measures import ERROR
from steelyard.report.curves import Curve, Exploded, read_curves
from steelyard.report.statistics import figures_of
from steelyard.rounds.plan import RoundSettings
from steelyard.runs.history import History
from steelyard.runs.store import Store


def curve_of(store: Store, *rounds: dict[str, Any], ended: str = "") -> Curve:
    """Write rounds from 0 on, of which nobody tests a model unless said otherwise; return the one curve."""
    untested = {"evaluations": None, "accuracy": None, "tried": ()}
    for number, changes in enumerate(rounds):
        found = record(round=number, **untested | changes)
        last = number == len(rounds) - 1
        store.commit(number, [found], {"DS>LD": state(number, ended=ended if last else "")}, dict, last=last)
    store.close()
    (curve,) = read_curves(History(store.folder))
    return curve


@pytest.mark.parametrize(("figure", "sign"), [("rmse", -1), ("dice", 1)])
def test_where_no_client_tests_the_curve_is_the_servers(tmp_path: Path, figure: str, sign: int) -> None:
    rounds = [
        {"server_metrics": {figure: 0.5 / each, "each": [0.25 * each, 1.0]}, "simulated": each} for each in (1, 2, 4)
    ]
    found = curve_of(begun(tmp_path), {"order": (), "simulated": 0.0}, *rounds)
    assert found.rounds.tolist() == [1, 2, 3]
    assert found.overall.tolist() == [sign * 0.5, sign * 0.25, sign * 0.125]
    assert (found.scores.shape, found.devices) == ((3, 0), ())
    assert found.server == {figure: [0.5, 0.25, 0.125]}
    assert found.by_class == {"each": [[0.25, 1.0], [0.5, 1.0], [1.0, 1.0]]}
    assert found.orders == {"DS>LD": 3}
    assert found.seconds is not None
    assert found.seconds.tolist() == [1.0, 3.0, 7.0]


def test_a_rule_that_exploded_at_once_has_its_first_model_if_that_was_tested(tmp_path: Path) -> None:
    first = {"evaluations": evaluations(round=0), "accuracy": 0.625}
    found = curve_of(begun(tmp_path / "tested"), first, ended="exploded")
    assert (found.rounds.tolist(), found.overall.tolist(), found.scores.tolist()) == ([0], [0.625], [[0.5, 1.0]])
    later = {"evaluations": evaluations(round=1), "accuracy": 0.75}
    after = curve_of(begun(tmp_path / "later"), first, later, ended="exploded")
    assert (after.rounds.tolist(), after.overall.tolist()) == ([1], [0.75])
    assert (after.ended, found.ended) == (Exploded(round=2, reason="exploded"), Exploded(round=1, reason="exploded"))
    untested = curve_of(begun(tmp_path / "untested"), {}, ended="exploded")
    assert (untested.rounds.tolist(), untested.overall.tolist()) == ([], [])


def test_a_curve_holds_all_that_its_rounds_recorded(tmp_path: Path) -> None:
    """Two rules; the second is tested in rounds 1 and 3 of 4, and each of its fields is counted by hand."""
    store = Store(tmp_path)
    other = federation("DS>LD/7", 7, "DS>LD")
    store.register([federation("EQ", 7, criteria=("EQ",)), other])
    untested = {"evaluations": None, "accuracy": None, "tried": ()}
    tested = {1: [[0.5, 1.0]], 3: [[0.25, 0.75]]}
    for number in range(5):
        mine: dict[str, Any] = {"order": (), **untested}
        if number:
            server = {"f1": [number / 8, 0.5], "product_error": number / 100, "once": 1.0}
            if number > 1:
                server.pop("once")
            mine = untested | {
                "order": (0, 1) if number < 3 else (1, 0),
                "tests": number,
                "server_accuracy": number / 16,
                "server_macro_f1": number / 32,
                "server_metrics": server,
                "simulated": float(number),
                "cpu": 0.5,
                "bytes_each": 10,
            }
        if number in tested:
            metrics = {ERROR: np.array([0.01, 0.02]) * number}
            answer = evaluations(other.name, number, scores=np.array(tested[number]), metrics=metrics)
            both = (((0, 1), 0.5), ((1, 0), 0.6))
            mine |= {"evaluations": answer, "accuracy": number / 4, "tried": both[:number]}
        add(store, record("EQ", number, order=(), **untested), record(other.name, number, **mine), last=number == 4)
    store.close()
    first, found = read_curves(History(tmp_path))
    assert (first.rule, first.rounds.tolist(), first.last_order, first.seconds) == ("EQ", [], None, None)
    assert (first.server, first.last_test, first.step, first.errors, first.rows.tolist()) == ({}, {}, {}, None, [])
    assert (found.rule, found.seed, found.algorithm, found.played) == ("DS>LD", 7, "fedavg", 4)
    assert found.settings.criteria == ("DS", "LD")
    assert (found.rounds.tolist(), found.scores.tolist()) == ([1, 3], [[0.5, 1.0], [0.25, 0.75]])
    assert found.overall.tolist() == [0.25, 0.75]
    assert (found.tests, found.orders, found.last_order) == (10, {"DS>LD": 2, "LD>DS": 2}, "LD>DS")
    assert found.tried == {"DS>LD": 2, "LD>DS": 1}
    quarters = [number / 16 for number in range(1, 5)]
    assert found.server == {"accuracy": quarters, "macro_f1": [number / 2 for number in quarters]}
    assert found.by_class == {"f1": [[number / 8, 0.5] for number in range(1, 5)]}
    assert (found.last_test, found.step) == ({"accuracy": 0.25, "macro_f1": 0.125}, {"product_error": 0.04})
    assert (found.devices, found.rows.tolist(), found.hits, found.ended) == (("a", "d"), [3, 1], None, None)
    assert found.errors is not None
    assert found.errors.tolist() == pytest.approx([0.03, 0.06])
    assert found.seconds is not None
    assert found.seconds.tolist() == [1.0, 6.0]  # 1, then 1 + 2 + 3
    # Three clients are asked in each of four rounds and two answer; each is sent 10 bytes.
    sums = {"cohort": 12, "answered": 8, "tests": 10, "seconds": 0.5, "cpu": 2, "down": 120}
    assert {name: found.sums[name] for name in sums} == sums
    assert math.isnan(found.sums["gpu"])


def test_a_run_with_another_number_of_scores_than_rounds_is_damaged(tmp_path: Path) -> None:
    store = begun(tmp_path / "run")
    add(store, record(round=1), last=True)
    store.close()
    change(tmp_path / "run", "UPDATE rounds SET accuracy = NULL")
    chain_again(tmp_path / "run")
    said = refusal(read_curves, History(tmp_path / "run"))
    assert "DS>LD, seed 0: 0 rounds with an accuracy and 1 with evaluations" in said


def test_every_figure_of_merit_by_hand() -> None:
    scores = np.array([[0.2, 0.4], [0.9, 0.5], [0.4, 0.8]])
    curve = Curve(
        *("EQ", 1, np.array([2, 4, 6]), scores, np.array([0.3, 0.7, 0.6]), 4, {}),
        {"accuracy": [0.1, 0.2, 0.4], "rmse": [3.0, 2.0, 1.0]},
        sums={"cohort": 9, "answered": 7, "seconds": 1.5, "cpu": 2.5, "gpu": 0.5, "up": 80, "down": 90},
        last_test={"rmse": 1.25},
        step={"product_error": 0.01},
        flawed={"weight": 0.1, "samples": 0.2, "updates": 0.3},
    )
    settings = RoundSettings(target=0.5, share=1.0, last=2)
    expected = {
        "flawed_weight": 0.1,
        "flawed_samples": 0.2,
        "flawed_updates": 0.3,
        "final": 0.6,
        "late": 0.65,
        "best": 0.7,
        "worst": 0.4,
        "worst_tenth": 0.4,
        "p10": 0.44,
        "p90": 0.76,
        "spread": 0.2,
        "jain": 1.2**2 / (2 * (0.4**2 + 0.8**2)),
        "testing_rounds": 4,
        "rounds_to_target": 4,
        "server_accuracy": 0.4,
        "server_accuracy_late": 0.3,
        "server_rmse": 1.25,
        "server_rmse_late": 1.5,
        "left_out": 2,
        "seconds": 1.5,
        "cpu_seconds": 2.5,
        "gpu_seconds": 0.5,
        "bytes_up": 80,
        "bytes_down": 90,
        "product_error": 0.01,
    }
    found = {name: value for name, (value,) in figures_of([curve], settings).items() if not math.isnan(value)}
    assert found == pytest.approx(expected)
    above = figures_of([curve], settings.model_copy(update={"reach": "above"}))
    assert math.isnan(above["rounds_to_target"][0])
    empty = Curve("EQ", 1, np.zeros(0, np.int64), np.zeros((0, 2)), np.zeros(0), 0, {}, {})
    known = {name: value for name, (value,) in figures_of([empty], settings).items() if not math.isnan(value)}
    assert known == {"testing_rounds": 0.0, "left_out": 0.0}
