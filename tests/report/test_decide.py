"""Which rule is recommended: by hand for small numbers, and by many comparisons in which the truth is known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.kit import named
from tests.report.made_run import shared_run

from steelyard.base.measures import MEASURES
from steelyard.experiment.loading import read_experiment
from steelyard.report.curves import Curve, read_run
from steelyard.report.decide import Exclusions, Rows, decide, verdict_of
from steelyard.report.statistics import seeds_for
from steelyard.runs.history import History

ROWS = Rows(MEASURES["accuracy"], "on the server's 46 test samples")


def test_a_rule_that_is_better_in_every_seed_is_recommended_with_its_interval() -> None:
    # Differences .10, .12, .14: mean .12, deviation .02, t = .12 / (.02 / √3) = 10.39, p = .0091; interval
    # .12 ± 4.3027 · .02 / √3 = .12 ± .0497.
    found = decide({"fedavg": [0.5, 0.6, 0.7], "VP": [0.6, 0.72, 0.84]}, "fedavg", ROWS)
    assert found["rule"] == "VP"
    assert found["sentence"] == (
        "Use VP: accuracy is 12.0 points higher than with fedavg on the server's 46 test samples (95% confidence "
        "interval 7.0 to 17.0, 3 seeds)."
    )
    row = found["rules"][1]
    assert row["p"] == pytest.approx(0.0091, abs=5e-5)
    assert row["p_holm"] == row["p"]
    assert row["ahead"] == 3


def test_holm_counts_every_rule_of_the_one_family() -> None:
    # Differences 1, 2, 3 hundredths: t = √12 = 3.4641, p = .0742 alone; .10, .12, .14 gives .0091, and with two rules
    # twice that.
    values = {"fedavg": [0.0, 0.0, 0.0], "A": [0.1, 0.12, 0.14], "B": [0.01, 0.02, 0.03]}
    found = decide(values, "fedavg", ROWS)
    assert [row["p_holm"] for row in found["rules"][1:]] == pytest.approx([0.01828, 0.0742], abs=5e-5)
    assert [row["verdict"] for row in found["rules"]] == ["", "better", "not distinguishable"]
    # With four more rules the same figures are no longer enough: .0091 x 6 = .055.
    more = {f"rule {number}": [0.0, 0.01, -0.01] for number in range(4)}
    assert decide(values | more, "fedavg", ROWS)["rule"] == "fedavg"


def test_where_nothing_is_better_the_sentence_says_what_would_not_have_been_seen() -> None:
    # Ten differences of ±1 hundredth: mean 0, deviation √(10/9) hundredths. Ten seeds see .9960 deviations four times
    # of five (the noncentral t with 9 degrees of freedom), here 1.05 points.
    values = {"fedavg": [0.5] * 10, "EQ": [0.51, 0.49] * 5}
    found = decide(values, "fedavg", ROWS)
    assert found["rule"] == "fedavg"
    assert found["detectable"] == pytest.approx(0.01 * math.sqrt(10 / 9) * 0.9960, rel=1e-3)
    assert found["sentence"] == (
        "Keep fedavg: with 10 seeds EQ is not significantly better on the server's 46 test samples. A difference below "
        "1 point may go undetected (80% power). To detect 1 point, run about 11 seeds."
    )


def test_among_equals_another_rule_is_recommended_in_one_comparison_of_forty_at_most() -> None:
    """Both sides of the test together err in 5 %: better by chance in half of that, over four rules, whatever n is."""
    chance = np.random.default_rng(7)
    wrong = 0
    for number in range(400):
        seeds = (3, 5, 10, 20)[number % 4]
        levels = chance.normal(0.8, 0.05, seeds)
        values = {name: (levels + chance.normal(0, 0.02, seeds)).tolist() for name in ("DS", "a", "b", "c", "d")}
        wrong += decide(values, "DS", ROWS)["rule"] != "DS"
    assert wrong <= 20  # 10 expected at most; 20 is three standard deviations above


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_seed_and_two_recommend_nothing_and_say_how_many_would(seeds: int) -> None:
    found = decide({"fedavg": [0.1] * seeds, "VP": [0.9] * seeds, "EQ": [0.2] * seeds}, "fedavg", ROWS)
    assert found["rule"] is None
    # A difference of one deviation at .05 / 2 needs 13 pairs.
    assert found["seeds_needed"] == seeds_for(1.0, 1.0, 2) == 13
    assert "VP is ahead of fedavg by 80.0 points" in found["sentence"]
    assert "13 are enough" in found["sentence"]


def test_errors_are_better_when_lower_and_no_percentages() -> None:
    errors = Rows(MEASURES["rmse"], "on the server's 80 test samples")
    found = decide({"DS": [3.0, 3.1, 3.2], "VE": [2.0, 2.0, 2.3], "EQ": [4.0, 4.2, 4.3]}, "DS", errors)
    assert found["rule"] == "VE"
    assert [row["verdict"] for row in found["rules"]] == ["", "better", "worse"]
    assert found["rules"][1]["difference"]["mean"] == pytest.approx(-1.0)
    assert "RMSE is 1 lower than with DS" in found["sentence"]


LEVEL = {"DS": [0.5, 0.6, 0.7]}
BOTH = {**LEVEL, "A": [0.7, 0.8, 0.91], "B": [0.65, 0.75, 0.86]}
CHOSE = "Of the better rules, it serves the median client best (80 client test samples)."
CHOSEN = {"chosen_on": {"DS": [0.5], "A": [0.6], "B": [0.8]}, "choosing": CHOSE}
NOBODY = "no other rows choose one of them"


@pytest.mark.parametrize(
    ("values", "compared", "rule", "words"),
    named(
        [
            ("alone", LEVEL, {}, None, "DS reached 60.0%"),
            (
                "as good",
                {
                    "DS": [0.5] * 4,
                    "A": [0.7, 0.72, 0.68, 0.71],
                    "B": [0.71, 0.7, 0.69, 0.7],
                    "C": [0.6, 0.61, 0.6, 0.6],
                },
                {},
                "A",
                "B does not differ significantly from it.",
            ),
            (
                "a control",
                {"DS": [0.5] * 3, "server-only": [0.7, 0.71, 0.69]},
                {"controls": ["server-only"]},
                "server-only",
                "Ask no clients (server-only)",
            ),
            ("left out", BOTH, {"left_out": {"A": "so"}}, "B", ""),
            ("other rows choose", BOTH, CHOSEN, "B", "15.3 points higher"),
            (
                "the chosen one is not confirmed",
                BOTH,
                {"chosen_on": {"DS": [0.5], "A": [0.8], "B": [0.6]}, "reported_on": {**BOTH, "A": LEVEL["DS"]}},
                None,
                "A was chosen",
            ),
            ("nobody may choose", BOTH, {"cannot_choose": NOBODY}, None, NOBODY),
        ]
    ),
)
def test_what_a_comparison_comes_to(values: Any, compared: Any, rule: str | None, words: str) -> None:
    rows = replace(ROWS, **{name: given for name, given in compared.items() if name not in ("controls", "left_out")})
    exclusions = Exclusions(compared.get("left_out", {}))
    found = decide(values, "DS", rows, exclusions, controls=compared.get("controls", ()))
    assert found["rule"] == rule
    assert words in found["sentence"]
    assert (CHOSE in found["sentence"]) == (rule == "B" and "choosing" in compared)
    for row in found["rules"]:
        if row["left_out"]:
            assert row["p"] is None


def test_half_of_the_clients_choose_and_the_gain_is_that_of_the_others(tmp_path_factory: Any) -> None:
    """Without rows at the server; A is chosen by clients b and d, and a and c say how much better it is."""
    folder = shared_run(tmp_path_factory)
    run, experiment = read_run(History(folder), "fedavg"), read_experiment(folder).changed({"name": "own"})
    rng = np.random.default_rng(1)
    gains = {"fedavg": [0.0, 0.0, 0.0, 0.0], "A": [0.05, 0.2, 0.05, 0.2], "B": [0.15, 0.1, 0.15, 0.1]}
    curves: list[Curve] = []
    for seed in range(3):
        level = 0.5 + rng.uniform(0, 0.1)
        for rule, gain in gains.items():
            scores = level + np.array([gain]) + rng.uniform(0, 0.002, 4)
            curves.append(Curve(rule, seed, np.array([1]), scores, scores.mean(axis=1), 0, {}, {}, rows=np.full(4, 20)))
    found = verdict_of(replace(run, curves=curves), experiment)
    assert found["rule"] == "A"
    assert "is 5.0 points higher than with fedavg on the 40 test samples of every other client" in found["sentence"]
    few = [replace(curve, rows=np.full(4, 14)) for curve in curves]
    assert verdict_of(replace(run, curves=few), experiment)["rule"] is None
