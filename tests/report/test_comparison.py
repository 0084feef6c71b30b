"""The papers' tables from hand-made curves, checked number by number."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import numpy as np
import pytest

from steelyard.errors import UserError
from steelyard.measures import MEASURES
from steelyard.report.baseline import verdicts
from steelyard.report.comparison import describe
from steelyard.report.comparison_tables import comparison_csv, comparison_tables, curves_csv
from steelyard.report.figures.writing import write_curves
from steelyard.report.recorded_curves import Curve
from steelyard.report.rendering import Style, render, spark

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
    return describe(curves, "DS", (0.9, 0.95), SHARES, limit=10) | {"rounds": 10, "limit": 10}


def test_the_baseline_shows_rounds_and_the_others_gains():
    section = document()["rounds_to_target"][0]
    base, rule = section["rows"]
    assert (base["rule"], base["kind"]) == ("DS", "rounds")
    # Seed 1: a quarter (1 device) at round 3, half (2) at 4, all at 8; seed 2: 3, 3, never = 10.
    assert [part["values"] for part in base["cells"]] == [[3, 3], [4, 3], [8, 10]]
    assert [part["mean"] for part in base["cells"]] == [3.0, 3.5, 9.0]
    assert [part["unreached"] for part in base["cells"]] == [0, 0, 1]
    assert base["average"]["mean"] == pytest.approx((5 + 16 / 3) / 2)
    # LD: 1 2 – and 2 2 –: gains 3−1, 4−2, 8−10 and 3−2, 3−2, both unreached = 0.
    assert rule["kind"] == "gain"
    assert [part["values"] for part in rule["cells"]] == [[2, 1], [2, 1], [-2, 0]]
    assert rule["average"]["values"] == pytest.approx([2 / 3, 2 / 3])


@pytest.mark.parametrize(
    ("base", "gains", "every", "printed"),
    [
        # Paper 004, Table 6, CelebA: the average column over all nine shares; thesis, Table 5.5: over those printed.
        ([1, 1, 1, 13, 15, 21, 32, 58, 0], [0, 0, 0, 7, 9, 15, 18, 20, 0], "7.67", "8.62"),
        ([1, 1, 15, 21, 26, 44, 0, 0, 0], [0, 0, 9, 15, 17, 28, 0, 0, 0], "7.67", "11.50"),
        ([1, 15, 21, 29, 50, 0, 0, 0, 0], [0, 9, 15, 15, 26, 0, 0, 0, 0], "7.22", "13.00"),
        # DS>CB>IS at 80 %: the baseline never has 70 % of the devices there, the rule has in round 57.
        ([1, 1, 15, 21, 26, 44, 0, 0, 0], [0, 0, 10, 15, 18, 32, 43, 0, 0], "13.11", "16.86"),
    ],
)
def test_the_averages_of_the_papers(base: list[int], gains: list[int], every: str, printed: str):
    rounds = [(at or 100) - gain if at or gain else 0 for at, gain in zip(base, gains, strict=True)]
    curves = [curve("DS", 1, [*base, 0], count=100), curve("rule", 1, [*rounds, 0], count=100)]
    found = describe(curves, "DS", (0.9,), [tenths / 10 for tenths in range(1, 10)], 100)
    row = found["rounds_to_target"][0]["rows"][1]
    assert [part["mean"] for part in row["cells"]] == gains
    assert f"{row['average']['mean']:.2f}" == every
    assert f"{row['printed']['mean']:.2f}" == printed


def written(found: Any, style: Style) -> str:
    return render(comparison_tables({"measure": "accuracy", "clients": [], **found}), [], style)


def test_above_asks_for_more_than_the_target():
    curves = [curve("DS", 1, [3, 4, 4, 8]), curve("LD", 1, [1, 2, 4, 0])]
    found = describe(curves, "DS", (0.9, 0.5), SHARES, limit=10, above=True)
    strict, low = found["rounds_to_target"]
    assert [part["unreached"] for part in strict["rows"][0]["cells"]] == [1, 1, 1]
    assert [part["mean"] for part in low["rows"][0]["cells"]] == [3, 4, 8]
    table = written(found | {"rounds": 10, "limit": 10, "reach": "above"}, "text")
    assert "are above 90%" in table
    # No share of either was reached, so there is nothing to print an average of.
    assert strict["rows"][1]["printed"]["values"] == []
    assert "–" in table.splitlines()[5]


def test_what_rounding_leaves_of_nothing_is_written_as_nothing():
    # Thirds that cancel: 0.1 + 0.2 - 0.3 is 5.6e-17 in binary.
    (found,) = verdicts({"gain": {"LD": [0.1 + 0.2 - 0.3, 1 / 3, -1 / 3]}}, "DS", ["DS", "LD"])
    assert 0 < abs(found["gain"]["mean"]) < 1e-16
    assert "(+0 rounds gained on average" in found["sentence"]


def test_a_target_nobody_reaches_gains_nothing():
    section = document()["rounds_to_target"][1]
    assert [part["mean"] for part in section["rows"][1]["cells"]] == [0.0, 0.0, 0.0]
    assert section["rows"][0]["cells"][0]["unreached"] == 2


def test_verdicts_say_what_the_seeds_can_tell():
    (found,) = document()["verdicts"]
    assert found["gain"]["values"] == pytest.approx([1 / 3, 1 / 3])
    assert found["gain"]["p"] == 0.5
    assert found["gain"]["verdict"] == "not distinguishable"
    # Final accuracy: DS .9 and .8, LD .8 and .8.
    assert found["final"]["values"] == pytest.approx([-0.1, 0.0])
    assert found["server_accuracy"]["mean"] == pytest.approx(0.1)
    assert "not distinguishable in rounds to the targets" in found["sentence"]
    single = describe([curve("DS", 1, [1, 1, 1, 1]), curve("LD", 1, [1, 1, 1, 1])], "DS", (0.9,), SHARES, 10)
    assert single["verdicts"][0]["gain"]["verdict"] == "untested"
    assert "One seed" in single["verdicts"][0]["sentence"]


def test_a_clear_effect_over_many_seeds_is_called_better_or_worse():
    curves = [curve("DS", seed, [6 + seed % 2] * 4) for seed in range(6)]
    curves += [curve("good", seed, [2 + seed % 3] * 4) for seed in range(6)]
    curves += [curve("bad", seed, [9 + seed % 2] * 4) for seed in range(6)]
    found = {test["rule"]: test for test in describe(curves, "DS", (0.9,), SHARES, 10)["verdicts"]}
    assert found["good"]["gain"]["verdict"] == "better"
    assert found["bad"]["gain"]["verdict"] == "worse"
    assert found["good"]["gain"]["p_holm"] > found["good"]["gain"]["p"]


def test_right_and_wrong_per_sample_are_summed_over_seeds():
    (matrix,) = document()["right_wrong"]
    # DS is right on 1100 twice; LD on 1010 and 1111.
    assert matrix == {"rule": "LD", "both_wrong": 1, "only_rule_right": 3, "only_baseline_right": 1, "both_right": 3}


def test_devices_show_the_worst_and_the_spread():
    rows = {row["rule"]: row for row in document()["devices"]}
    assert rows["LD"]["worst_tenth"]["mean"] == 0.5
    assert rows["LD"]["spread"]["mean"] == pytest.approx(np.std([0.9, 0.9, 0.9, 0.5]))
    assert rows["LD"]["jain"]["mean"] == pytest.approx(3.2**2 / (4 * (3 * 0.81 + 0.25)))
    assert rows["DS"]["final"]["values"] == pytest.approx([0.9, 0.8])


def test_an_error_is_no_accuracy_and_has_no_targets():
    def error(rule: str, level: float) -> Curve:
        scores = np.full((3, 2), -level)
        server = {"mape": [level / 100] * 3, "mae": [1.0] * 3, "rmse": [2.0] * 3}
        return Curve(rule, 1, np.arange(1, 4), scores, scores[:, 0], 0, {}, server)

    found = describe([error("DS", 50), error("VE", 40)], "DS", (0.9,), SHARES, 3, measure=MEASURES["minus_rmse"])
    found |= {"rounds": 3, "limit": 3}
    assert found["rounds_to_target"] == []
    (told,) = found["verdicts"]
    assert told["server_mape"]["mean"] == pytest.approx(0.1)
    assert told["sentence"].startswith(
        "VE against DS: minus RMSE after the last round +10; mean minus RMSE of the last 3"
    )
    assert "−40.00" in written(found | {"measure": "minus RMSE"}, "text")


@pytest.mark.parametrize("style", ["text", "markdown", "latex"])
def test_tables_for_people_hold_every_figure(style):
    text = written(document(), style)
    for part in ("90%", "worst tenth", "3.5", "DS"):
        assert part.replace("%", r"\%") in text if style == "latex" else part in text
    if style == "latex":
        assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == text.count(r"\toprule")
        assert ">" not in text
    if style == "markdown":
        widths = {line.count(" | ") for line in text.splitlines() if line.startswith(("| DS", "| LD"))}
        assert len(widths) > 1


def test_csv_is_tidy():
    rows = list(csv.DictReader(io.StringIO(comparison_csv(document()))))
    assert len(rows) == 2 * 2 * 5
    picked = [row for row in rows if (row["target"], row["rule"], row["share"]) == ("0.9", "LD", "1.0")]
    assert picked[0]["kind"] == "gain"
    assert float(picked[0]["mean"]) == -1.0
    points = list(csv.DictReader(io.StringIO(curves_csv(document()))))
    assert len(points) == 2 * 10
    assert float(points[0]["mean"]) == pytest.approx(0.5)


def test_the_document_is_json_and_the_curves_are_a_file(tmp_path):
    json.loads(json.dumps(document()))
    write_curves(tmp_path, document(), tmp_path / "curves.csv")
    assert (tmp_path / "curves.csv").read_text().startswith("rule,round,mean")
    with pytest.raises(UserError, match=r"--curves: got .*allowed: a file name that ends in .svg, .png, .pdf or .csv"):
        write_curves(tmp_path, document(), tmp_path / "curves.gif")


def test_sparks_cover_the_whole_curve():
    assert spark([0.0, 1.0], 0.0, 1.0) == "▁█"
    assert spark(list(range(100)), 0, 99, width=8) == "▁▂▃▄▅▆▇█"
    assert spark([0.5, 0.5], 0.5, 0.5) == "▁▁"
