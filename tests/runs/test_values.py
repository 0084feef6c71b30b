"""Values of a database that may be anybody's, column by column: what passes, what becomes unknown, what is named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from steelyard.runs.checks import Damaged
from steelyard.runs.schema import SCHEMA
from steelyard.runs.typed import LARGEST_FIGURE, Reader, _check, _check_shape, _known, declared, known


def checked(table: str, name: str, *values: Any) -> list[Any]:
    return list(_check(table, name, declared(SCHEMA)[table][name], values))


def refused(table: str, name: str, *values: Any) -> str:
    with pytest.raises(Damaged) as found:
        checked(table, name, *values)
    return str(found.value)


def test_a_figure_that_is_not_finite_is_unknown_and_the_others_stay() -> None:
    assert checked("rounds", "accuracy", 0.5, None, math.inf, -math.inf, -3.0) == [0.5, None, None, None, -3.0]
    assert checked("rounds", "accuracy", 0.5, None) == [0.5, None]
    assert checked("rounds", "accuracy", LARGEST_FIGURE, -LARGEST_FIGURE) == [LARGEST_FIGURE, -LARGEST_FIGURE]
    for value in (2 * LARGEST_FIGURE, -2 * LARGEST_FIGURE):
        assert refused("rounds", "accuracy", 0.5, value) == "rounds, accuracy: holds a number beyond 1e+200"


def test_counts_are_whole_numbers_from_0_up_to_a_million_millions_and_seeds_any() -> None:
    assert checked("rounds", "round", 0, 1, 10**12) == [0, 1, 10**12]
    assert refused("rounds", "round", 0, 10**12 + 1, 5) == (f"rounds, round: {10**12 + 1} is no whole number from 0 on")
    assert refused("rounds", "round", 3, -1) == "rounds, round: -1 is no whole number from 0 on"
    assert checked("federations", "seed", 0, 2**63) == [0, 2**63]
    assert refused("federations", "seed", 2**63 + 1) == (f"federations, seed: {2**63 + 1} is no whole number from 0 on")


def test_a_value_of_another_type_is_named_with_what_its_column_holds() -> None:
    assert refused("rounds", "round", 1, 1.5) == "rounds, round: 1.5 is no whole number from 0 on"
    assert refused("rounds", "accuracy", "high") == "rounds, accuracy: 'high' is no number"
    assert refused("clients", "name", 7) == "clients, name: 7 is no text"
    assert refused("clients", "name", None) == "clients, name: None is no text"
    assert refused("updates", "clients", "abc") == "updates, clients: 'abc' is no column of numbers"


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({"f1": 0.5}, "f1 is of another kind"),
        ({"mae": [0.5]}, "mae is of another kind"),
        ({"mape": 1e201}, "mape is beyond 1e+200"),
        ({"f1": [0.5, -1e201]}, "f1 is beyond 1e+200"),
    ],
)
def test_figures_of_the_server_are_of_their_kind(metrics: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line.replace('+', '[+]')}$"):
        _known(metrics)
    fine: dict[str, Any] = {"f1": [0.5, 1.0], "mae": 1.0, "mape": 1e200, "own": [1.0], "other": 2.0}
    assert _known(fine) is fine


@pytest.mark.parametrize(
    ("table", "name", "text", "line"),
    [
        ("info", "rounds", "[1]", "info, rounds: Input should be a valid integer"),
        ("info", "rounds", "nothing", "info, rounds holds no JSON (Expecting value: line 1 column 1 (char 0))"),
        ("info", "labels", '{"1": {"a": ["x"]}}', "info, labels: 1.a.0: Input should be a valid integer"),
        (
            "federations",
            "settings",
            '{"criteria": ["DS", "DS"]}',
            "federations, settings: Value error, criteria and priority do not fit",
        ),
        (
            "federations",
            "settings",
            '{"criteria": ["DS"], "priority": "DS>LD"}',
            "federations, settings: Value error, criteria and priority do not fit",
        ),
    ],
)
def test_a_text_of_another_shape_is_named_with_the_place(table: str, name: str, text: str, line: str) -> None:
    with pytest.raises(Damaged) as found:
        _check_shape(table, name, text)
    assert str(found.value) == line


def test_texts_of_the_right_shape_or_of_none_pass() -> None:
    _check_shape("info", "labels", '{"1": {"a": [1, 2]}}')
    _check_shape("info", "anything", "nothing")
    _check_shape("federations", "settings", '{"criteria": ["DS", "LD"], "priority": "LD > DS", "more": 1}')


def test_a_number_without_a_name_is_damage() -> None:
    assert known({3: "a"}, 3, "client") == "a"
    with pytest.raises(Damaged) as found:
        known({3: "a"}, 4, "client")
    assert str(found.value) == "client number 4 is not in its table"


def reader(*statements: str, size: int = 1 << 20) -> Reader:
    import sqlite3

    made = sqlite3.connect(":memory:", factory=Reader)
    made.executescript(SCHEMA)
    for statement in statements:
        made.execute(statement)
    made.schema, made.size = SCHEMA, size
    return made


def test_federations_are_given_by_number_in_order() -> None:
    insert = "INSERT INTO federations (id, name, rule, seed, settings, algorithm) VALUES"
    made = reader(
        f"""{insert} (9, 'x', 'DS', 4, '{{"criteria": ["DS"]}}', 'fedavg')""",
        f"""{insert} (2, 'y', 'LD', 4, '{{"criteria": ["LD"]}}', 'fedavg')""",
    )
    assert list(made.federations().items()) == [(2, ("LD", 4)), (9, ("DS", 4))]
    made.execute("UPDATE federations SET rule = 'DS'")
    with pytest.raises(Damaged, match=r"^federations: a rule and a seed come twice$"):
        made.federations()


def test_a_table_cannot_hold_more_than_its_file() -> None:
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100) "
    made = reader(many + "INSERT INTO clients SELECT i, 'c' || i FROM n", size=400)
    assert len(made.rows("clients", ("id", "name"))) == 100
    made.size = 399
    with pytest.raises(Damaged, match=r"^clients holds more than its file does$"):
        made.rows("clients", ("id",))
    made.size = 400
    made.execute("UPDATE clients SET name = name || ' is long'")
    with pytest.raises(Damaged, match=r"^clients holds more than its file does$"):
        made.rows("clients", ("id", "name"))
    assert made.rows("clients", ("id",), "WHERE id > ? ORDER BY id DESC", 98) == [(100,), (99,)]
