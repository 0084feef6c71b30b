"""Which rule is recommended: by hand for small numbers, and by many comparisons in which the truth is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from steelyard.report.recommendation import Compared, Measure, recommend
from steelyard.report.recorded_curves import Curve
from steelyard.report.reporting_rows import _halves
from steelyard.report.statistics import detectable, seeds_for

ROWS = Measure("accuracy", "on the server's 46 rows")


def test_a_rule_that_is_better_in_every_seed_is_recommended_with_its_interval() -> None:
    # Differences .10, .12, .14: mean .12, deviation .02, t = .12 / (.02 / √3) = 10.39, p = .0091; interval
    # .12 ± 4.3027 · .02 / √3 = .12 ± .0497.
    found = recommend({"fedavg": [0.5, 0.6, 0.7], "VP": [0.6, 0.72, 0.84]}, "fedavg", ROWS)
    assert found["rule"] == "VP"
    assert found["sentence"] == (
        "Use VP: accuracy is 12.0 points higher than with fedavg on the server's 46 rows (95 % interval 7.0 to 17.0, "
        "3 seeds)."
    )
    row = found["rules"][1]
    assert row["p"] == pytest.approx(0.0091, abs=5e-5)
    assert row["p_holm"] == row["p"]
    assert row["ahead"] == 3


def test_holm_counts_every_rule_of_the_one_family() -> None:
    # Differences 1, 2, 3 hundredths: t = √12 = 3.4641, p = .0742 alone; .10, .12, .14 gives .0091, and with two rules
    # twice that.
    values = {"fedavg": [0.0, 0.0, 0.0], "A": [0.1, 0.12, 0.14], "B": [0.01, 0.02, 0.03]}
    found = recommend(values, "fedavg", ROWS)
    assert [row["p_holm"] for row in found["rules"][1:]] == pytest.approx([0.01828, 0.0742], abs=5e-5)
    assert [row["verdict"] for row in found["rules"]] == ["", "better", "not distinguishable"]
    # With four more rules the same figures are no longer enough: .0091 x 6 = .055.
    more = {f"rule {number}": [0.0, 0.01, -0.01] for number in range(4)}
    assert recommend(values | more, "fedavg", ROWS)["rule"] == "fedavg"


def test_where_nothing_is_better_the_sentence_says_what_would_not_have_been_seen() -> None:
    # Ten differences of ±1 hundredth: mean 0, deviation √(10/9) hundredths. Ten seeds see .9960 deviations four times
    # of five (the noncentral t with 9 degrees of freedom), here 1.05 points.
    values = {"fedavg": [0.5] * 10, "EQ": [0.51, 0.49] * 5}
    found = recommend(values, "fedavg", ROWS)
    assert found["rule"] == "fedavg"
    assert found["detectable"] == pytest.approx(0.01 * math.sqrt(10 / 9) * 0.9960, rel=1e-3)
    assert found["sentence"] == (
        "Keep fedavg: with 10 seeds EQ is not better on the server's 46 rows; a difference under 1 point would not "
        "have been seen. To see 1 point takes about 11 seeds."
    )
    both = recommend({**values, "DS>LD": [0.505, 0.495] * 5}, "fedavg", ROWS)
    assert both["sentence"].startswith("Keep fedavg: with 10 seeds nothing is better on the server's 46 rows; ")


@pytest.mark.parametrize(("effect", "seeds"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_seeds_needed_are_those_of_the_tables_of_paired_tests(effect: float, seeds: int) -> None:
    """Cohen's small, medium and large effect at 5 % and 80 % power need 199, 34 and 15 pairs."""
    assert seeds_for(effect, 1.0) == seeds
    assert detectable(1.0, seeds) <= effect < detectable(1.0, seeds - 1)


def test_what_is_detectable_is_seen_four_times_of_five() -> None:
    chance = np.random.default_rng(3)
    shift = detectable(2.0, 6, tests=3)
    drawn = chance.normal(shift, 2.0, (20_000, 6))
    t = drawn.mean(axis=1) / (drawn.std(axis=1, ddof=1) / math.sqrt(6))
    # Student's t with 5 degrees of freedom, two-sided at .05 / 3: 3.5341.
    assert np.mean(t > 3.5341) == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("seeds", [1, 2])
def test_too_few_seeds_recommend_nothing_and_say_how_many_are_needed(seeds: int) -> None:
    found = recommend({"fedavg": [0.1] * seeds, "VP": [0.9] * seeds, "EQ": [0.2] * seeds}, "fedavg", ROWS)
    assert found["rule"] is None
    # A difference of one deviation at .05 / 2 needs 13 pairs.
    assert found["seeds_needed"] == seeds_for(1.0, 1.0, 2) == 13
    count = {1: "one seed", 2: "two seeds"}[seeds]
    assert found["sentence"] == (
        f"VP is ahead of fedavg by 80.0 points on the server's 46 rows, but {count} cannot tell it from chance: "
        "steelyard compare --seeds 13 can."
    )
    behind = recommend({"fedavg": [0.5] * seeds, "VP": [0.4] * seeds}, "fedavg", ROWS)
    assert behind["sentence"].startswith("No rule is ahead of fedavg on the server's 46 rows, but")


def test_one_rule_has_nothing_to_be_held_against() -> None:
    found = recommend({"fedavg": [0.5, 0.6, 0.7]}, "fedavg", ROWS)
    assert found["rule"] is None
    assert (
        found["sentence"] == "fedavg ended at 60.0% on the server's 46 rows; there is no other rule to hold it against."
    )


def test_the_errors_of_a_regression_are_better_when_lower() -> None:
    errors = Measure("RMSE", "on the server's 80 rows", less_is_better=True)
    found = recommend({"DS": [3.0, 3.1, 3.2], "VE": [2.0, 2.0, 2.3], "EQ": [4.0, 4.2, 4.3]}, "DS", errors)
    assert found["rule"] == "VE"
    assert [row["verdict"] for row in found["rules"]] == ["", "better", "worse"]
    assert found["rules"][1]["difference"]["mean"] == pytest.approx(-1.0)
    assert found["sentence"].startswith("Use VE: RMSE is 1 lower than with DS on the server's 80 rows (95 % interval ")
    kept = recommend({"DS": [3.0, 3.1, 3.2, 3.1], "VE": [3.1, 3.0, 3.2, 3.3]}, "DS", errors)
    assert "a difference under RMSE 0." in kept["sentence"]


def test_a_recommenders_figures_are_no_percentages() -> None:
    lists = Measure("ndcg@10", "over 943 users")
    found = recommend({"DS": [0.18, 0.19, 0.2], "EQ": [0.21, 0.221, 0.229]}, "DS", lists)
    assert found["sentence"] == (
        "Use EQ: ndcg@10 is 0.03 higher than with DS over 943 users (95 % interval 0.0275 to 0.0325, 3 seeds)."
    )
    assert "%" not in found["sentence"].replace("95 %", "")


def test_of_several_better_rules_those_that_may_be_as_good_are_named() -> None:
    base = [0.5, 0.5, 0.5, 0.5]
    values = {"DS": base, "A": [0.7, 0.72, 0.68, 0.71], "B": [0.71, 0.7, 0.69, 0.7], "C": [0.6, 0.61, 0.6, 0.6]}
    found = recommend(values, "DS", ROWS)
    assert found["rule"] == "A"
    assert found["sentence"].endswith(" B may be as good: 4 seeds cannot tell.")


def test_a_control_that_asks_no_clients_is_named_as_one() -> None:
    values = {"DS": [0.5, 0.5, 0.5], "server-only": [0.7, 0.71, 0.69]}
    found = recommend(values, "DS", ROWS, Compared(controls=frozenset({"server-only"})))
    assert found["sentence"].startswith("Ask no clients (server-only): accuracy is 20.0 points higher")


def test_a_rule_that_is_left_out_is_shown_and_never_recommended() -> None:
    values = {"DS": [0.5, 0.5, 0.5], "online": [0.9, 0.91, 0.92], "EQ": [0.6, 0.61, 0.62]}
    found = recommend(values, "DS", ROWS, Compared({"online": "the rows that report also chose its order"}))
    assert found["rule"] == "EQ"
    assert found["rules"][1]["left_out"]
    assert found["rules"][1]["p"] is None
    alone = recommend({name: values[name] for name in ("DS", "online")}, "DS", ROWS, Compared({"online": "so"}))
    assert alone["rule"] is None
    assert alone["sentence"] == "No recommendation: no rule is left to hold against DS (online: so)."


def test_rules_that_do_exactly_the_same_are_said_to() -> None:
    found = recommend({"DS": [0.5, 0.6, 0.7], "EQ": [0.5, 0.6, 0.7]}, "DS", ROWS)
    assert found["rule"] == "DS"
    assert "differs from it in any seed" in found["sentence"]


def test_among_equals_another_rule_is_recommended_in_one_comparison_of_forty_at_most() -> None:
    """Both sides of the test together err in 5 %: better by chance in half of that, over four rules, whatever n is."""
    chance = np.random.default_rng(7)
    wrong = 0
    for number in range(400):
        seeds = (3, 5, 10, 20)[number % 4]
        levels = chance.normal(0.8, 0.05, seeds)
        values = {name: (levels + chance.normal(0, 0.02, seeds)).tolist() for name in ("DS", "a", "b", "c", "d")}
        wrong += recommend(values, "DS", ROWS)["rule"] != "DS"
    assert wrong <= 20  # 10 expected at most; 20 is three standard deviations above


def test_a_true_difference_as_large_as_promised_is_found_four_times_of_five() -> None:
    chance = np.random.default_rng(11)
    gain = detectable(0.02, 8, tests=2)
    found = 0
    for _ in range(500):
        levels = chance.normal(0.8, 0.05, 8)
        values = {
            "DS": levels.tolist(),
            "better": (levels + gain + chance.normal(0, 0.02, 8)).tolist(),
            "same": (levels + chance.normal(0, 0.02, 8)).tolist(),
        }
        found += recommend(values, "DS", ROWS)["rule"] == "better"
    assert found >= 380  # 80 %, and a little more by Holm's second step


def test_of_several_better_rules_other_rows_choose_and_those_that_report_report() -> None:
    values = {"fedavg": [0.5, 0.6, 0.7], "A": [0.7, 0.8, 0.91], "B": [0.65, 0.75, 0.86]}
    chosen = Compared(
        chosen_on={"fedavg": [0.5], "A": [0.6], "B": [0.8]}, choosing="The clients' 80 test rows chose it."
    )
    found = recommend(values, "fedavg", ROWS, chosen)
    assert found["rule"] == "B"
    assert found["sentence"].startswith("Use B: accuracy is 15.3 points higher than with fedavg on the server's")
    assert found["sentence"].endswith("The clients' 80 test rows chose it.")
    alone = recommend({"fedavg": values["fedavg"], "A": values["A"]}, "fedavg", ROWS, chosen)
    assert (alone["rule"], "chose" in alone["sentence"]) == ("A", False)


def test_half_of_the_clients_choose_and_the_gain_is_that_of_the_others() -> None:
    """Without rows at the server; A is chosen by clients b and d, and a and c say how much better it is."""
    rng = np.random.default_rng(1)
    gains = {"fedavg": [0.0, 0.0, 0.0, 0.0], "A": [0.05, 0.2, 0.05, 0.2], "B": [0.15, 0.1, 0.15, 0.1]}
    curves: list[Curve] = []
    for seed in range(3):
        level = 0.5 + rng.uniform(0, 0.1)
        for rule, gain in gains.items():
            scores = level + np.array([gain]) + rng.uniform(0, 0.002, 4)
            rows = np.full(4, 20)
            overall = scores @ rows / rows.sum()
            curves.append(Curve(rule, seed, np.array([1]), scores, overall, 0, {}, {}, rows=rows))
    values = {rule: [float(c.overall[0]) for c in curves if c.rule == rule] for rule in gains}
    compared = Compared(**_halves(curves, 5))
    found = recommend(values, "fedavg", Measure("accuracy", "on the clients' 80 test rows"), compared)
    assert found["rule"] == "A"
    assert "is 5.0 points higher than with fedavg on the 40 test rows of every other client" in found["sentence"]
    assert "The 40 test rows of the other clients chose it." in found["sentence"]
    few = [replace(curve, rows=np.full(4, 14)) for curve in curves]
    assert _halves(few, 5) == {}
    turned = Compared(**{**_halves(curves, 5), "reported_on": {**compared.reported_on, "A": values["fedavg"]}})
    none = recommend(values, "fedavg", ROWS, turned)
    assert none["rule"] is None
    assert none["sentence"].startswith("No recommendation: of A and B, which are better than fedavg, A was chosen")


def test_rows_that_report_do_not_also_choose() -> None:
    values = {"fedavg": [0.5, 0.6, 0.7], "A": [0.7, 0.8, 0.91], "B": [0.65, 0.75, 0.86]}
    none = Compared(cannot_choose="no other rows choose one of them")
    found = recommend(values, "fedavg", ROWS, none)
    assert found["rule"] is None
    assert found["sentence"] == (
        "No recommendation: A and B are better than fedavg on the server's 46 rows, and no other rows choose one of "
        "them."
    )
    assert recommend({"fedavg": values["fedavg"], "A": values["A"]}, "fedavg", ROWS, none)["rule"] == "A"
