"""Capacities: both forms of writing one, and every fault as a line of its own."""

from __future__ import annotations

import pytest

from steelyard.errors import UserError
from steelyard.weighing import capacity
from steelyard.weighing.capacity import TOLERANCE, checked, from_table, read, subsets, two_additive

AB = ("A", "B")
ABC = ("A", "B", "C")
NOTHING, A, B, BOTH = (frozenset[int](), frozenset({0}), frozenset({1}), frozenset({0, 1}))


def test_subsets_come_smaller_first_and_each_once() -> None:
    assert subsets(0) == [frozenset()]
    assert subsets(2) == [NOTHING, A, B, BOTH]
    assert [len(subset) for subset in subsets(3)] == [0, 1, 1, 1, 2, 2, 2, 3]


def test_the_empty_set_and_everything_need_no_value() -> None:
    assert from_table({"A": 0.25, "B": 0.5}, AB) == {NOTHING: 0.0, A: 0.25, B: 0.5, BOTH: 1.0}


@pytest.mark.parametrize("key", ["A,B", "A+B", "A&B", "A|B", "A B", "{A, B}", "( A ,B )", "B,A"])
def test_a_subset_can_be_written_in_several_ways(key: str) -> None:
    assert from_table({"A": 0.5, "B": 0.5, key: 1.0}, AB)[BOTH] == 1.0


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (
            {"A": 0.5, "Bb": 0.5},
            "capacity: 'Bb' names 'Bb', which is no criterion (did you mean 'B'?); allowed: subsets of A, B",
        ),
        ({"": 0.1, "A": 0.5, "B": 0.5}, "capacity: the empty set has 0.1; allowed: 0"),
        ({"A": 0.5, "B": 0.5, "A,B": 0.9}, "capacity: {A,B} has 0.9; allowed: 1"),
        ({"A": 0.5, "B": 0.5, "A,B": 1.1}, "capacity: {A,B} has 1.1; allowed: 1"),
        ({"B": 0.5}, "capacity: no value for {A}; allowed: one for every subset"),
        ({"A": 1.5, "B": 0.5}, "capacity: not monotone: {A,B} has 1.0, less than 1.5 of its part {A}"),
        ({"A": -0.5, "B": 0.5}, "capacity: not monotone: {A} has -0.5, less than 0.0 of its part {}"),
    ],
)
def test_a_fault_is_one_line(table: dict[str, float], line: str) -> None:
    with pytest.raises(UserError) as found:
        from_table(table, AB)
    assert str(found.value) == line


def test_rounding_is_no_fault_and_more_is() -> None:
    # Capacities written with few digits or summed from masses miss 0, 1 and monotony by rounding errors.
    checked({NOTHING: TOLERANCE, A: 0.5, B: 0.5, BOTH: 1.0}, AB)
    checked({A: 0.5, B: 0.5, BOTH: 1 - TOLERANCE / 2}, AB)
    checked({A: 1.0 + TOLERANCE / 2, B: 0.5, BOTH: 1.0}, AB)
    checked({A: 1.0, B: 0.5}, AB)  # equal worth of a part and the whole is monotone
    for wrong in ({NOTHING: 2 * TOLERANCE}, {BOTH: 1 - 2 * TOLERANCE}, {A: 1.0 + 2 * TOLERANCE}):
        with pytest.raises(UserError):
            checked({A: 0.5, B: 0.5, BOTH: 1.0, **wrong}, AB)


def test_masses_of_singles_and_pairs() -> None:
    found = two_additive({"A": 0.5, "B": 0.25}, {"A,B": 0.25}, AB)
    assert found == {NOTHING: 0.0, A: 0.5, B: 0.25, BOTH: 1.0}
    without_b = two_additive({"A": 0.5}, {"A,B": 0.5}, AB)
    assert without_b == {NOTHING: 0.0, A: 0.5, B: 0.0, BOTH: 1.0}


def test_masses_of_three_criteria_are_refused() -> None:
    with pytest.raises(UserError) as found:
        two_additive({"A": 0.5, "B": 0.5}, {"A,B,C": 0.5}, ABC)
    assert str(found.value) == "capacity: two-additive masses are for one or two criteria, got {A,B,C}"


def test_a_document_may_hold_the_table_itself_or_under_a_heading() -> None:
    table = {"A": 0.25, "B": 0.5}
    expected = from_table(table, AB)
    assert read(table, AB) == expected
    assert read({"capacity": table}, AB) == expected
    masses = {"A": 0.25, "B": 0.75}
    expected = {NOTHING: 0.0, A: 0.25, B: 0.75, BOTH: 1.0}
    assert read({"two_additive": masses}, AB) == expected
    assert read({"two_additive": {"singles": masses}}, AB) == expected
    assert read({"two_additive": {"pairs": {"A,B": 1.0}}}, AB) == {NOTHING: 0.0, A: 0.0, B: 0.0, BOTH: 1.0}


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ({"two_additive": 3}, "capacity: 'two_additive' is not a table; allowed: a table of subset = value"),
        ({"capacity": 3}, "capacity: 'capacity' is not a table; allowed: a table of subset = value"),
        (
            {"two_additive": {"singles": 3, "pairs": {}}},
            "capacity: 'singles' is not a table; allowed: a table of subset = value",
        ),
        (
            {"two_additive": {"singles": {}, "pairs": 3}},
            "capacity: 'pairs' is not a table; allowed: a table of subset = value",
        ),
        (
            {"two_additive": {"singles": {"A": 1}, "B": 0.5}},
            "capacity: two_additive has 'B' beside its parts; allowed: singles, pairs",
        ),
        ({"A": True}, "capacity: 'A' has true; allowed: a number from 0 to 1"),
        ({"A": "much"}, "capacity: 'A' has 'much'; allowed: a number from 0 to 1"),
    ],
)
def test_a_document_of_another_make_is_one_line(document: dict[str, object], line: str) -> None:
    with pytest.raises(UserError) as found:
        capacity.read(document, AB)
    assert str(found.value) == line
