"""Figures of devices and the papers' tables from hand-made scores and curves, checked number by number."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.kit import assert_refused

from steelyard.base.measures import MEASURES, measure_of, wilson
from steelyard.base.settings import validated
from steelyard.report.curves import Curve
from steelyard.report.figures import write_curves
from steelyard.report.result import Comparison, compared
from steelyard.report.statistics import (
    jain,
    on_rows,
    on_sample,
    rounds_to_shares,
    rounds_to_target,
    worst_devices,
    worst_score,
    worst_tenth,
)
from steelyard.report.tables import class_tables, comparison_csv, group_tables, study_of
from steelyard.rounds.plan import RoundSettings

SCORE_TABLES = st.tuples(st.integers(0, 6), st.integers(0, 7)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
)


@given(SCORE_TABLES, st.sampled_from([0.25, 0.5, 0.6, 1.0]), st.integers(1, 100), st.integers(1, 5))
@settings(max_examples=40)
def test_rounds_to_target_against_a_search_with_exact_fractions(scores, target, hundredths, step) -> None:
    rounds = np.arange(1, len(scores) + 1) * step
    expected = None
    for round, row in zip(rounds.tolist(), scores.tolist(), strict=True):
        enough = sum(score >= target for score in row) >= Fraction(hundredths, 100) * len(row)
        if row and enough:
            expected = round
            break
    assert rounds_to_target(rounds, scores, target, hundredths / 100) == expected
    assert rounds_to_shares(rounds, scores, target, [1.0, hundredths / 100])[1] == expected


@pytest.mark.parametrize(("devices", "count"), [(1, 1), (10, 1), (11, 2), (15, 2), (20, 2), (30, 3)])
def test_a_tenth_that_is_no_whole_number_of_devices_is_rounded_up(devices: int, count: int) -> None:
    # Of 15 devices the worst two: whoever is left behind is not rounded away.
    scores = np.random.default_rng(devices).permutation(np.arange(devices, dtype=np.float64))
    assert worst_tenth(scores) == pytest.approx((count - 1) / 2)
    assert worst_devices(np.zeros(10 * devices)).tolist() == list(range(devices)), "of equals the first"
    assert all(math.isnan(figure(np.zeros(0))) for figure in (worst_tenth, worst_score))


def test_the_interval_of_a_drawn_score_by_hand() -> None:
    # 3 right of 5 rows; parts 1 · (1 − .6) · 3/5 = .24, 2 · (.5 − .6) · 3/5 = −.12 twice; s² = .0864 / (3 · 2), of 10
    # clients 7 were not drawn: 1.96 √(.7 · .0144).
    found = on_sample(np.array([1.0, 0.5, 0.5]), np.array([1, 2, 2]), 10)
    assert (found.clients, found.of) == (3, 10)
    assert (found.low, found.high) == pytest.approx((0.40322, 0.79678), abs=1e-5)
    alone = on_sample(np.array([0.5]), np.array([4]), 10)
    assert alone.low == alone.high == 0.5


def test_the_rows_behind_a_mean_over_devices_by_hand() -> None:
    # Devices with 10 and 40 rows carry 2² / (1/10 + 1/40) = 32 of one; a second seed tests on the same.
    low, high = wilson(0.75, 32)
    scores, rows = np.array([0.5, 1.0]), np.array([10, 40])
    expected = {"rows": 50, "low": low, "high": high, "too_few": False}
    assert dict(on_rows([scores] * 2, [rows] * 2)) == pytest.approx(expected)
    # Standard errors √(.06² + .08²) / 2 = .05 of the mean; Student's t with 19 degrees of freedom is 2.093.
    tens, errors = [np.array([10, 10])] * 2, [np.array([0.06, 0.08]), None]
    found = on_rows([np.array([0.6, 0.8])] * 2, tens, MEASURES["c_index"], errors)
    assert found is not None
    assert (found.rows, found.low, found.high) == pytest.approx((20, 0.59535, 0.80465), abs=1e-5)
    assert on_rows([scores], [rows], MEASURES["minus_rmse"]) is None
    # 2² / (1/1 + 1/1) rows of one carry two devices with a row each; one without rows counts as one with one.
    for few in ([1, 1], [1, 0]):
        found = on_rows([scores], [np.array(few)])
        assert found is not None
        assert (found.low, found.high) == pytest.approx(wilson(0.75, 2))


def test_what_of_the_target_and_share_must_be_reached() -> None:
    scores = np.array([[0.9, 0.2, 0.3], [0.9, 0.8, 0.95]])
    rounds = np.array([3, 5])
    assert rounds_to_target(rounds, scores, 0.9, 0.1) == 3
    assert rounds_to_target(rounds, scores, 0.9, 0.1, above=True) == 5
    assert rounds_to_target(rounds, scores, 0.95, 0.1, above=True) is None
    # 0.07 · 100 is 7.000000000000001 in binary and must ask for 7 devices, not 8.
    seven = np.array([[1.0] * 7 + [0.0] * 93])
    assert rounds_to_target(rounds[:1], seven, 0.5, 0.07) == 3
    assert rounds_to_target(rounds[:1], seven, 0.5, 0.0701) is None


SHARES = (0.25, 0.5, 1.0)


def curve(rule: str, seed: int, reached: list[int], hits: str = "1100", tests: int = 0, count: int = 10) -> Curve:
    """Four devices; device i has accuracy .9 from round reached[i] on and .5 before; 0 stands for never."""
    rounds = np.arange(1, count + 1)
    first = np.array([at or count + 1 for at in reached])
    scores = np.where(rounds[:, None] >= first[None], 0.9, 0.5)
    level = 0.8 if rule == "DS" else 0.9
    server = {"accuracy": [0.1] * (count - 1) + [level], "macro_f1": [level - 0.1] * count}
    kept = np.array([mark == "1" for mark in hits])
    return Curve(rule, seed, rounds, scores, scores.mean(axis=1), tests, {"DS>LD": count}, server, kept)


def document():
    curves = [
        curve("LD", 1, [1, 2, 4, 0], "1010"),
        curve("LD", 2, [2, 2, 6, 0], "1111"),
        curve("DS", 1, [3, 4, 4, 8]),
        curve("DS", 2, [3, 3, 9, 0]),
    ]
    return compare(curves)


def compare(
    curves: list[Curve],
    targets: tuple[float, ...] = (0.9, 0.95),
    shares: Sequence[float] = SHARES,
    limit: int = 10,
    measure: str = "accuracy",
) -> Comparison:
    """What is a pure function of the curves, DS being the baseline; the rest is not looked at."""
    settings = validated(RoundSettings, {"targets": targets, "target": targets[0], "shares": shares}, "rounds")
    curves = sorted(curves, key=lambda curve: (curve.rule != "DS", curve.seed))
    rules, sections = compared(curves, settings, measure_of(measure), limit)
    seeds = tuple(dict.fromkeys(curve.seed for curve in curves))
    return Comparison.model_construct(
        measure=measure, rules=tuple(rules), rounds_to_target=sections, seeds=seeds, rounds=limit, limit=limit
    )


def test_the_baseline_shows_rounds_and_the_others_gains():
    section, nobody = document().rounds_to_target
    base, rule = section.rows
    assert (base.rule, base.kind) == ("DS", "rounds")
    # Seed 1: a quarter (1 device) at round 3, half (2) at 4, all at 8; seed 2: 3, 3, never = 10.
    assert [part.values for part in base.cells] == [(3, 3), (4, 3), (8, 10)]
    assert [part.mean for part in base.cells] == [3.0, 3.5, 9.0]
    assert [part.unreached for part in base.cells] == [0, 0, 1]
    assert base.average.mean == pytest.approx((5 + 16 / 3) / 2)
    # LD: 1 2 – and 2 2 –: gains 3−1, 4−2, 8−10 and 3−2, 3−2, both unreached = 0.
    assert [part.mean for part in nobody.rows[1].cells] == [0.0, 0.0, 0.0]
    assert rule.kind == "gain"
    assert [part.values for part in rule.cells] == [(2, 1), (2, 1), (-2, 0)]
    assert rule.average.values == pytest.approx([2 / 3, 2 / 3])


@pytest.mark.parametrize(
    ("base", "gains", "every", "printed"),
    [
        # Paper 004, Table 6, CelebA: the average column over all nine shares; thesis, Table 5.5: over those printed.
        ([1, 1, 1, 13, 15, 21, 32, 58, 0], [0, 0, 0, 7, 9, 15, 18, 20, 0], "7.67", "8.62"),
        ([1, 1, 15, 21, 26, 44, 0, 0, 0], [0, 0, 9, 15, 17, 28, 0, 0, 0], "7.67", "11.50"),
        # DS>CB>IS at 80 %: the baseline never has 70 % of the devices there, the rule has in round 57.
        ([1, 1, 15, 21, 26, 44, 0, 0, 0], [0, 0, 10, 15, 18, 32, 43, 0, 0], "13.11", "16.86"),
    ],
)
def test_the_averages_of_the_papers(base: list[int], gains: list[int], every: str, printed: str):
    rounds = [(at or 100) - gain if at or gain else 0 for at, gain in zip(base, gains, strict=True)]
    curves = [curve("DS", 1, [*base, 0], count=100), curve("rule", 1, [*rounds, 0], count=100)]
    row = compare(curves, (0.9,), [tenths / 10 for tenths in range(1, 10)], 100).rounds_to_target[0].rows[1]
    assert [part.mean for part in row.cells] == gains
    assert f"{row['average']['mean']:.2f}" == every
    assert f"{row['printed']['mean']:.2f}" == printed


def test_verdicts_say_what_the_seeds_can_tell():
    found = document().rule("LD").tests
    assert found["gain"].values == pytest.approx([1 / 3, 1 / 3])
    assert found["gain"].p == 0.5
    assert found["gain"].verdict == "not distinguishable"
    # Final accuracy: DS .9 and .8, LD .8 and .8.
    assert found["final"].values == pytest.approx([-0.1, 0.0])
    assert found["server_accuracy"].mean == pytest.approx(0.1)
    assert "accuracy on the server's test set" in document().rule("LD").in_words
    assert document().rule("DS").tests == {}


def test_right_and_wrong_per_sample_are_summed_over_seeds():
    # DS is right on 1100 twice; LD on 1010 and 1111.
    assert dict(document().rule("LD").right_wrong) == {
        "both_wrong": 1,
        "only_rule_right": 3,
        "only_baseline_right": 1,
        "both_right": 3,
    }


def test_devices_show_the_worst_and_the_spread():
    rows = {rule.rule: rule.figures for rule in document().rules}
    assert rows["LD"]["worst_tenth"].mean == 0.5
    assert rows["LD"]["spread"].mean == pytest.approx(np.std([0.9, 0.9, 0.9, 0.5]))
    assert rows["LD"]["jain"].mean == pytest.approx(3.2**2 / (4 * (3 * 0.81 + 0.25)))
    assert np.isnan(jain(np.zeros(3)))
    assert rows["DS"]["final"].values == pytest.approx([0.9, 0.8])


def test_files_of_a_comparison_are_tidy(tmp_path: Path) -> None:
    found = document()
    rows = list(csv.DictReader(io.StringIO(comparison_csv(found))))
    (gain,) = [row for row in rows if (row["target"], row["rule"], row["share"]) == ("0.9", "LD", "1.0")]
    assert (gain["kind"], float(gain["mean"])) == ("gain", -1.0)
    assert_refused(lambda: write_curves(tmp_path, found, tmp_path / "curves.gif"), "--curves", "curves.gif")


def blocks(rule: str, seed: int, reached: list[int]) -> Curve:
    """Twenty devices in four blocks of five; a block has accuracy .8 from its round on; 0 stands for never."""
    rounds = np.arange(1, 11)
    first = np.repeat([at or 99 for at in reached], 5)
    scores = np.where(rounds[:, None] >= first[None], 0.8, 0.1)
    return Curve(rule, seed, rounds, scores, scores.mean(axis=1), 0, {}, {})


def test_groups_means_and_what_was_not_reached():
    curves = [
        blocks("DS", 1, [2, 4, 6, 0]),
        blocks("DS>LD", 1, [1, 3, 5, 0]),
        blocks("LD>DS", 1, [3, 5, 0, 0]),
        blocks("DS", 2, [4, 6, 0, 0]),
    ]
    (grid,) = group_tables(curves, (0.75,), 10)
    assert grid.headings[2:5] == ("Low 20%", "Low 30%", "Low mean")
    found = {row[:2]: row[2:] for row in grid.rows}
    # A quarter of the devices (5 of 20) is enough for 20 %, six need two blocks; 70 and 75 % need three (14 and 15).
    assert found["Ind", "DS"] == ("3.0", "5.0", "4.0", "5.0", "5.0", "5.0", "≥8.0", "≥8.0", "≥8.0")
    assert found["MCA", "DS>LD"] == ("1.0", "3.0", "2.0", "3.0", "3.0", "3.0", "5.0", "5.0", "5.0")
    assert found["MCA", "LD>DS"][-3:] == ("—", "—", "—")
    assert found["MCA", "Mean"] == ("2.0", "4.0", "3.0", "4.0", "4.0", "4.0", "—", "—", "—")
    assert [row[0] for row in grid.rows] == ["Ind", "MCA", "MCA", "MCA"]


def test_a_rule_belongs_to_a_study_and_above_is_stricter() -> None:
    assert list(map(study_of, ("DS", "DS>LD>MD", "online(MD>DS>LD)"))) == ["Ind", "MCA", "Final"]
    (grid,) = group_tables([blocks("DS", 1, [1, 1, 1, 1])], (0.8,), 10, above=True)
    assert set(grid.rows[0][2:]) == {"—"}


def classes(rule: str, seed: int, f1: list[list[float]]) -> Curve:
    rounds = np.arange(1, len(f1) + 1)
    scores = np.full((len(f1), 2), 0.5)
    server = {"accuracy": [0.5] * len(f1), "macro_f1": [sum(row) for row in f1]}
    return Curve(rule, seed, rounds, scores, scores.mean(axis=1), 0, {}, server, by_class={"f1": f1} if f1[0] else {})


def test_macro_and_each_class_stand_in_the_tables() -> None:
    curves = [
        classes("DS", 1, [[0.0, 0.2], [0.4, 0.8]]),
        classes("DS", 2, [[0.0, 0.4], [0.6, 0.8]]),
    ]
    macro, last = class_tables(compare(curves, (0.9,), (0.5,), 2))
    assert macro.headings == ("rule", "round 1", "round 2")
    # Seeds .1 and .2, then .6 and .7: means .15 and .65, half intervals 12.706 · .0707 / √2 = .635.
    assert macro.rows[0] == ("DS", "0.150±0.635", "0.650±0.635")
    assert last.rows[0] == ("DS", "0.500±1.271", "0.800±0.000")
    assert last.headings == ("rule", "class 0", "class 1")
