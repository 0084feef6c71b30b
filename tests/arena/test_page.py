"""The picture of ranks: every rule, the best on top, and the span that cannot be told apart."""

from __future__ import annotations

from typing import Any

from tests.arena.made import figures, on_paper

from steelyard.arena.page import gain_chart, rank_chart
from steelyard.arena.verdict import judge


def test_rules_are_drawn_by_rank_with_the_critical_difference() -> None:
    names = ["clean", "sizes", "free-riders"]
    made = {name: figures([0.9, 0.8, 0.7], [0.95, 0.85, 0.75], [0.5, 0.4, 0.3]) for name in names}
    document = judge(on_paper(names, 3), made)
    chart = rank_chart(document)
    assert chart is not None
    drawn: dict[str, Any] = chart.to_dict()
    (rows,) = drawn["datasets"].values()
    assert [(row["rule"], row["rank"], row["role"]) for row in rows] == [
        ("X", 1.0, "candidate"),
        ("fedavg", 2.0, "rival"),
        ("EQ", 3.0, "rival"),
    ]
    critical = document["critical_difference"]
    assert critical is not None
    assert rows[1]["low"] == 2 - min(critical, 1)
    assert len(drawn["layer"]) == 2


def test_nothing_is_drawn_without_figures_and_no_span_with_few_scenes() -> None:
    assert rank_chart(judge(on_paper(["clean"]), {})) is None
    chart = rank_chart(judge(on_paper(["clean"], 2), {"clean": figures([0.9, 0.8], [0.95, 0.85], [0.5, 0.4])}))
    assert chart is not None
    assert len(chart.to_dict()["layer"]) == 1


def test_two_rules_have_no_ranks_and_gains_are_drawn_with_their_intervals() -> None:
    document = judge(on_paper(["clean", "sizes"], 3), {"clean": figures([0.9, 0.8, 0.7], [0.95, 0.84, 0.75])})
    assert rank_chart(document) is None
    chart = gain_chart(document)
    assert chart is not None
    rows = next(rows for rows in chart.to_dict()["datasets"].values() if "scene" in rows[0])
    assert [row["scene"] for row in rows] == ["clean"]
    assert rows[0]["low"] < rows[0]["mean"] < rows[0]["high"]
    assert gain_chart(judge(on_paper(["clean"]), {})) is None
