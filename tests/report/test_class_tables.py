"""F1 over the rounds and class by class, from hand-made curves."""

from __future__ import annotations

import numpy as np

from steelyard.report.comparison import describe
from steelyard.report.comparison_tables import class_tables
from steelyard.report.recorded_curves import Curve


def curve(rule: str, seed: int, f1: list[list[float]]) -> Curve:
    rounds = np.arange(1, len(f1) + 1)
    scores = np.full((len(f1), 2), 0.5)
    server = {"accuracy": [0.5] * len(f1), "macro_f1": [sum(row) for row in f1]}
    return Curve(rule, seed, rounds, scores, scores.mean(axis=1), 0, {}, server, by_class={"f1": f1} if f1[0] else {})


def test_macro_and_each_class_stand_in_the_tables() -> None:
    curves = [
        curve("DS", 1, [[0.0, 0.2], [0.4, 0.8]]),
        curve("DS", 2, [[0.0, 0.4], [0.6, 0.8]]),
        curve("VP", 1, [[0.5, 0.5], [0.9, 0.7]]),
        curve("VP", 2, [[0.5, 0.5], [0.9, 0.7]]),
    ]
    document = describe(curves, "DS", (0.9,), (0.5,), 2) | {"rounds": 2, "limit": 2}
    macro, last = class_tables(document)
    assert macro.headings == ("rule", "round 1", "round 2")
    # Seeds .1 and .2, then .6 and .7: means .15 and .65, half intervals 12.706 · .0707 / √2 = .635.
    assert macro.rows[0] == ("DS", "0.150±0.635", "0.650±0.635")
    assert macro.rows[1] == ("VP", "0.500±0.000", "0.800±0.000")
    assert last.title == "F1 of each class on the server's reporting rows, round 2"
    assert last.rows[0] == ("DS", "0.500±1.271", "0.800±0.000")
    assert document["class_curves"][0]["f1"][0] == [[0.0, 0.2], [0.4, 0.8]]
    assert last.headings == ("rule", "class 0", "class 1")


def test_nothing_is_shown_where_the_server_reports_no_classes() -> None:
    curves = [curve("DS", 1, [[], []])]
    assert class_tables(describe(curves, "DS", (0.9,), (0.5,), 2)) == []


def test_many_classes_have_no_columns() -> None:
    curves = [curve("DS", 1, [[0.5] * 62])]
    (macro,) = class_tables(describe(curves, "DS", (0.9,), (0.5,), 1))
    assert macro.rows == (("DS", "0.500"),)
