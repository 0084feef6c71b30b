"""The document of contributions: sums over rounds, intervals over rows, rounds and seeds, what it refuses to say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.kit import assert_refused
from tests.runs.contents import change
from tests.runs.records import federation, record, state

from steelyard.contributions.document import Contributions, stored_contributions
from steelyard.rounds.plan import RoundValues
from steelyard.runs.store import Store, add_values


def in_round(
    *values: tuple[float, ...] | float, names: str = "ab", method: str = "shapley", before: float = 2.0
) -> RoundValues:
    """Values over all rows, then by group, or one for all of them; groups have 3 rows and 1."""
    table = np.array([np.broadcast_to(each, 3) for each in values])
    gain = float(table[:, 0].sum())
    none = np.zeros(len(table))
    return RoundValues("loss", method, tuple(names), table, none, np.array([3, 1]), before, before - gain)


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


def column(found: Contributions, name: str) -> list[object]:
    return [row[name] for row in found["clients"]]  # type: ignore[literal-required]


def test_values_are_summed_over_rounds_with_rows_and_rounds_in_the_interval(tmp_path: Path) -> None:
    # Client a: .4 and .2 over all rows; its groups sum to .6 and .6, so rows vary by nothing. b: groups .2 and −.2.
    first = in_round((0.4, 0.3, 0.7), (0.05, 0.1, -0.1))
    second = in_round((0.2, 0.3, -0.1), (0.05, 0.1, -0.1), before=1.55)
    found = document(stored(tmp_path, first, second))
    a, b = found["clients"]
    assert column(found, "client") == ["a", "b"]
    assert column(found, "value") == pytest.approx([0.6, 0.1])
    assert a["by_round"] == pytest.approx([0.4, 0.2])
    # Rounds: 2/1 · (.2²)/2 = .04; the method: a fifth of the mean of .6 and .1, squared.
    assert a["high"] - a["value"] == pytest.approx(1.959964 * (0.04 + 0.07**2) ** 0.5)
    # Rows: 2/1 · ((3/4 · .1)² + (1/4 · −.3)²) = .0225, and the rounds are alike.
    assert b["value"] - b["low"] == pytest.approx(1.959964 * (0.0225 + 0.07**2) ** 0.5)
    assert column(found, "verdict") == ["helps", "not clear"]
    assert (found["total"], found["before"], found["after"]) == pytest.approx((0.7, 2.0, 1.3))
    assert found["rounds"] == [1, 2]


PERCENT, ORDER, FAR = "percent", "Only the ranking", "the values are over 10 times the whole gain"


@pytest.mark.parametrize(
    ("rounds", "shares", "notes"),
    [
        ([(0.9, -0.3)], [1.5, -0.5], []),
        ([((0.3, 0.9, -1.5), 0.1)], [None, None], [PERCENT, ORDER]),
        ([(0.3, 0.1)], [None, None], [ORDER]),
        # One client spoils in each round what the other mends: a gain of .1 in all, values of 2.05 and 1.95.
        ([(1.05, -1.0), (1.0, -0.95)], [None, None], [ORDER, FAR]),
    ],
)
def test_shares_stand_only_beside_a_gain_that_is_clear_and_values_that_are_more_than_an_order(
    tmp_path: Path, rounds: list[tuple[float, float]], shares: list[float | None], notes: list[str]
) -> None:
    found = document(stored(tmp_path, *(in_round(*values) for values in rounds)))
    assert column(found, "share") == pytest.approx(shares)
    assert [each for each in (PERCENT, ORDER, FAR) if any(each in note for note in found["notes"])] == notes


def test_retrained_values_and_other_methods_have_no_error_of_the_method(tmp_path: Path) -> None:
    folder = stored(tmp_path, in_round(0.3, 0.1, method="leave-one-out"))
    add_values(folder, {("DS>LD#0", 1): [in_round(0.3, 0.1)]}, "retrained")
    for found in (document(folder, method="leave-one-out"), document(folder, retrained=True)):
        assert [row["high"] - row["low"] for row in found["clients"]] == pytest.approx([0.0, 0.0])
    assert column(document(folder, retrained=True), "share") == pytest.approx([0.75, 0.25])


def test_one_who_is_not_in_every_cohort_adds_nothing_elsewhere(tmp_path: Path) -> None:
    folder = stored(tmp_path, in_round(0.3, 0.1), in_round(0.2, names="b"))
    found = {row["client"]: row for row in document(folder)["clients"]}
    assert found["a"]["by_round"] == pytest.approx([0.3, 0.0])
    change(folder, "DELETE FROM contributions WHERE round = 1")
    assert any(note.startswith("Measured in 1 of 2 rounds") for note in document(folder)["notes"])


def test_several_seeds_give_the_mean_and_how_they_differ(tmp_path: Path) -> None:
    folder = stored(tmp_path, in_round(0.3, 0.1), seeds=(0, 1))
    add_values(folder, {("DS>LD#1", 1): [in_round(0.5, 0.1)]}, "run")
    a, b = document(folder)["clients"]
    assert a["value"] == pytest.approx(0.4)
    # Two seeds: t with one degree of freedom, 12.7062, times .1414/√2; the method: a fifth of the mean of .4 and .1.
    method = 1.959964 * 0.05
    assert a["high"] - a["value"] == pytest.approx(((12.7062 * 0.1) ** 2 + method**2) ** 0.5, rel=1e-4)
    assert b["high"] - b["value"] == pytest.approx(method)


def test_no_weight_is_said_and_what_was_not_measured_too(tmp_path: Path) -> None:
    folder = stored(tmp_path, in_round(0.3, 0.0))
    assert column(document(folder), "verdict") == ["helps", "no weight"]
    for asked in ({"measure": "accuracy"}, {"method": "leave-one-out"}, {"retrained": True}):
        assert isinstance(stored_contributions(folder, **asked), str)
    assert_refused(lambda: stored_contributions(folder, "DS"), "--rule", "'DS'", "DS>LD")
