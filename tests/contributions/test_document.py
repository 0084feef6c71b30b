"""The document of contributions: sums over rounds, intervals over rows, rounds and seeds, what it refuses to say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.runs.records import federation, record, state

from steelyard.contributions.document import AGREEMENT, Contributions, stored_contributions
from steelyard.errors import UserError
from steelyard.rounds.contributions import RoundValues
from steelyard.runs.store import Store
from steelyard.runs.valued import add_values


def in_round(
    *values: tuple[float, ...], names: str = "ab", method: str = "shapley", before: float = 2.0
) -> RoundValues:
    """Values over all rows, then by group; groups have 3 rows and 1."""
    table = np.array(values)
    gain = float(table[:, 0].sum())
    return RoundValues(
        "loss", method, tuple(names), table, np.zeros(len(table)), np.array([3, 1]), before, before - gain
    )


def stored(folder: Path, *rounds: RoundValues, seeds: tuple[int, ...] = (0,)) -> Path:
    store = Store(folder)
    federations = [federation(f"DS>LD#{seed}", seed, rule_name="DS>LD") for seed in seeds]
    store.register(federations)
    for number, values in enumerate(rounds, 1):
        made = [record(each.name, number, contributions=(values,)) for each in federations]
        states = {each.name: state(number) for each in federations}
        store.commit(number, made, states, dict, last=number == len(rounds))
    store.close()
    return folder


def document(folder: Path, **asked: object) -> Contributions:
    found = stored_contributions(folder, **asked)  # type: ignore[arg-type]
    assert not isinstance(found, str), found
    return found


def test_values_are_summed_over_rounds_with_rows_and_rounds_in_the_interval(tmp_path: Path) -> None:
    # Client a: .4 and .2 over all rows; its groups sum to .6 and .6, so rows vary by nothing. b: groups .2 and −.2.
    first = in_round((0.4, 0.3, 0.7), (0.05, 0.1, -0.1))
    second = in_round((0.2, 0.3, -0.1), (0.05, 0.1, -0.1), before=1.55)
    found = document(stored(tmp_path, first, second))
    a, b = found["clients"]
    assert (a["client"], b["client"]) == ("a", "b")
    assert a["value"] == pytest.approx(0.6)
    assert a["by_round"] == pytest.approx([0.4, 0.2])
    # Rounds: 2/1 · (.2²)/2 = .04; the method: a fifth of the mean of .6 and .1, squared.
    assert a["high"] - a["value"] == pytest.approx(1.959964 * (0.04 + 0.07**2) ** 0.5)
    # Rows: 2/1 · ((3/4 · .1)² + (1/4 · −.3)²) = .0225, and the rounds are alike.
    assert b["value"] == pytest.approx(0.1)
    assert b["value"] - b["low"] == pytest.approx(1.959964 * (0.0225 + 0.07**2) ** 0.5)
    assert (a["verdict"], b["verdict"]) == ("helps", "not clear")
    assert found["total"] == pytest.approx(0.7)
    assert (found["before"], found["after"]) == pytest.approx((2.0, 1.3))
    assert found["rounds"] == [1, 2]


def test_shares_stand_only_beside_a_gain_that_is_clear_and_values_that_are_more_than_an_order(tmp_path: Path) -> None:
    good = in_round((0.9, 0.9, 0.9), (-0.3, -0.3, -0.3))
    found = document(stored(tmp_path / "good", good))
    assert [row["share"] for row in found["clients"]] == pytest.approx([1.5, -0.5])
    assert not any("percent" in note or "Order only" in note for note in found["notes"])
    poor = in_round((0.3, 0.9, -1.5), (0.1, 0.1, 0.1))
    found = document(stored(tmp_path / "poor", poor))
    assert [row["share"] for row in found["clients"]] == [None, None]
    assert any("percent" in note for note in found["notes"])
    unharmed = stored(tmp_path / "unharmed", in_round((0.3, 0.3, 0.3), (0.1, 0.1, 0.1)))
    found = document(unharmed)
    assert [row["share"] for row in found["clients"]] == [None, None]
    assert any("Order only" in note for note in found["notes"])
    assert not any("percent" in note for note in found["notes"])
    add_values(unharmed, {("DS>LD#0", 1): [in_round((0.3, 0.3, 0.3), (0.1, 0.1, 0.1))]}, "retrained")
    assert [row["share"] for row in document(unharmed, retrained=True)["clients"]] == pytest.approx([0.75, 0.25])


def test_one_who_is_not_in_every_cohort_adds_nothing_elsewhere(tmp_path: Path) -> None:
    rounds = (in_round((0.3, 0.3, 0.3), (0.1, 0.1, 0.1)), in_round((0.2, 0.2, 0.2), names="b"))
    found = {row["client"]: row for row in document(stored(tmp_path, *rounds))["clients"]}
    assert found["a"]["by_round"] == pytest.approx([0.3, 0.0])
    assert (found["a"]["rounds"], found["b"]["rounds"]) == (1, 2)


def test_several_seeds_give_the_mean_and_how_they_differ(tmp_path: Path) -> None:
    folder = stored(tmp_path, in_round((0.3, 0.3, 0.3), (0.1, 0.1, 0.1)), seeds=(0, 1))
    add_values(folder, {("DS>LD#1", 1): [in_round((0.5, 0.5, 0.5), (0.1, 0.1, 0.1))]}, "run")
    a, b = document(folder)["clients"]
    assert a["value"] == pytest.approx(0.4)
    # Two seeds: t with one degree of freedom, 12.7062, times .1414/√2; the method: a fifth of the mean of .4 and .1.
    method = 1.959964 * 0.05
    assert a["high"] - a["value"] == pytest.approx(((12.7062 * 0.1) ** 2 + method**2) ** 0.5, rel=1e-4)
    assert b["high"] - b["value"] == pytest.approx(method)


def test_retrained_values_and_other_methods_have_no_error_of_the_method(tmp_path: Path) -> None:
    left_out = in_round((0.3, 0.3, 0.3), (0.1, 0.1, 0.1), method="leave-one-out")
    folder = stored(tmp_path, left_out)
    add_values(folder, {("DS>LD#0", 1): [in_round((0.3, 0.3, 0.3), (0.1, 0.1, 0.1))]}, "retrained")
    for found in (document(folder, method="leave-one-out"), document(folder, retrained=True)):
        assert [row["high"] - row["low"] for row in found["clients"]] == pytest.approx([0.0, 0.0])


def test_that_an_update_agrees_class_by_class_is_not_called_help(tmp_path: Path) -> None:
    both = in_round((0.8, 0.8, 0.8), (-0.5, -0.5, -0.5), method="classes")
    found = document(stored(tmp_path, both, both), method="classes")
    assert [(row["value"], row["verdict"]) for row in found["clients"]] == [(0.8, "agrees"), (-0.5, "opposes")]
    assert found["notes"] == [AGREEMENT]


def test_no_weight_is_said_and_what_was_not_measured_too(tmp_path: Path) -> None:
    folder = stored(tmp_path, in_round((0.3, 0.3, 0.3), (0.0, 0.0, 0.0)))
    assert [row["verdict"] for row in document(folder)["clients"]] == ["helps", "no weight"]
    missing = stored_contributions(folder, measure="accuracy")
    assert isinstance(missing, str)
    assert "was not measured" in missing
    assert isinstance(stored_contributions(folder, method="leave-one-out"), str)
    assert isinstance(stored_contributions(folder, retrained=True), str)
    with pytest.raises(UserError, match=r"--rule: got 'DS'.*allowed: DS>LD"):
        stored_contributions(folder, "DS")


def test_rounds_without_values_are_said(tmp_path: Path) -> None:
    folder = stored(tmp_path, in_round((0.3, 0.3, 0.3), (0.0, 0.0, 0.0)), in_round((0.1, 0.1, 0.1), names="a"))
    store = Store(folder)
    with store._db:
        store._db.execute("DELETE FROM contributions WHERE round = 1")
    store.close()
    found = document(folder)
    assert any(note.startswith("Measured in 1 of 2 rounds") for note in found["notes"])


def test_values_far_above_the_whole_gain_are_an_order_only(tmp_path: Path) -> None:
    # One client spoils in each round what the other mends: a gain of .1 in all, values of 2.05 and 1.95.
    rounds = [in_round((1.05, 1.05, 1.05), (-1.0, -1.0, -1.0)), in_round((1.0, 1.0, 1.0), (-0.95, -0.95, -0.95))]
    found = document(stored(tmp_path / "far", *rounds))
    assert found["total"] == pytest.approx(0.1)
    assert [row["share"] for row in found["clients"]] == [None, None]
    assert any(note.startswith("Order only: the values are over 10 times the whole gain.") for note in found["notes"])
    assert any("percent" in note for note in found["notes"]) == (found["total_low"] <= 0)
    near = document(
        stored(tmp_path / "near", in_round((0.9, 0.9, 0.9), (-0.7, -0.7, -0.7)), in_round((0.1, 0.1, 0.1), (0, 0, 0)))
    )
    assert not any("whole gain. What one" in note for note in near["notes"])
