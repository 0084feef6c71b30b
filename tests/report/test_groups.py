"""Paper 003's Table 1 from hand-made curves: groups, studies, means, and what was not reached."""

from __future__ import annotations

import numpy as np

from steelyard.report.groups import group_tables, study_of
from steelyard.report.recorded_curves import Curve


def curve(rule: str, seed: int, reached: list[int]) -> Curve:
    """Twenty devices in four blocks of five; a block has accuracy .8 from its round on; 0 stands for never."""
    rounds = np.arange(1, 11)
    first = np.repeat([at or 99 for at in reached], 5)
    scores = np.where(rounds[:, None] >= first[None], 0.8, 0.1)
    return Curve(rule, seed, rounds, scores, scores.mean(axis=1), 0, {}, {})


def test_a_rule_belongs_to_a_study():
    assert [study_of(rule) for rule in ("DS", "DS>LD>MD", "online(MD>DS>LD)", "online-apart(DS>LD)")] == [
        "Ind",
        "MCA",
        "Final",
        "Final",
    ]


def test_groups_means_and_what_was_not_reached():
    curves = [
        curve("online(DS>LD)", 1, [1, 2, 4, 0]),
        curve("DS", 1, [2, 4, 6, 0]),
        curve("DS>LD", 1, [1, 3, 5, 0]),
        curve("LD>DS", 1, [3, 5, 0, 0]),
        curve("DS", 2, [4, 6, 0, 0]),
        curve("online(DS>LD)", 2, [1, 2, 4, 0]),
        curve("DS>LD", 2, [1, 3, 5, 0]),
        curve("LD>DS", 2, [3, 5, 0, 0]),
    ]
    (grid,) = group_tables(curves, (0.75,), 10)
    assert grid.headings[2:5] == ("Low 20%", "Low 30%", "Low mean")
    found = {row[:2]: row[2:] for row in grid.rows}
    # A quarter of the devices (5 of 20) is enough for 20 %, six need two blocks; 70 and 75 % need three (14 and 15).
    assert found["Ind", "DS"] == ("3.0", "5.0", "4.0", "5.0", "5.0", "5.0", "≥8.0", "≥8.0", "≥8.0")
    assert found["MCA", "DS>LD"] == ("1.0", "3.0", "2.0", "3.0", "3.0", "3.0", "5.0", "5.0", "5.0")
    assert found["MCA", "LD>DS"][-3:] == ("—", "—", "—")
    assert found["MCA", "Mean"] == ("2.0", "4.0", "3.0", "4.0", "4.0", "4.0", "—", "—", "—")
    assert found["Final", "online(DS>LD)"] == ("1.0", "2.0", "1.5", "2.0", "2.0", "2.0", "4.0", "4.0", "4.0")
    assert [row[0] for row in grid.rows] == ["Ind", "MCA", "MCA", "MCA", "Final"]
    assert "none did" in grid.note


def test_above_is_stricter():
    (grid,) = group_tables([curve("DS", 1, [1, 1, 1, 1])], (0.8,), 10, above=True)
    assert set(grid.rows[0][2:]) == {"—"}
    assert "are above 80%" in grid.title
