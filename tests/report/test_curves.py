"""Curves of runs that are small enough to check every number: who tested, when rounds ended, what exploded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.runs.records import begun, evaluations, record, state

from steelyard.report.curves import Curve, read_curves
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
    untested = curve_of(begun(tmp_path / "untested"), {}, ended="exploded")
    assert (untested.rounds.tolist(), untested.overall.tolist()) == ([], [])
