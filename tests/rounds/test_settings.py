"""[rounds]: defaults and limits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import UserError
from steelyard.rounds.settings import RoundSettings
from steelyard.settings import validated


def test_defaults() -> None:
    assert RoundSettings().model_dump() == {
        "count": 50,
        "fraction": None,
        "sampling": "fixed",
        "withdrawn": (),
        "min_clients": 1,
        "evaluate_every": 1,
        "target": 0.9,
        "share": 0.5,
        "targets": (),
        "shares": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
        "stop_at_target": False,
        "reach": "at-least",
        "last": 5,
        "samples": False,
        "select": {"by": "uniform", "candidates": None, "explore": 0.1, "path": None, "available": {}},
    }


@given(st.integers(1, 50))
def test_all_of_up_to_fifty_clients_take_part_unless_a_share_is_given(clients: int) -> None:
    assert (RoundSettings().share_of(clients), RoundSettings().cohort(clients)) == (1.0, clients)
    assert RoundSettings(fraction=0.1).cohort(clients) == max(1, (clients + 5) // 10)


@given(st.integers(51, 100_000))
def test_of_more_a_tenth_takes_part_but_at_least_ten(clients: int) -> None:
    assert RoundSettings().cohort(clients) == max(10, (clients + 5) // 10)
    # Poisson sampling draws each client with the share itself: it is at least a tenth, and ten clients in the mean.
    assert RoundSettings().share_of(clients) == max(0.1, 10 / clients)
    assert RoundSettings(min_clients=30).cohort(clients) == max(30, (clients + 5) // 10)


def test_the_tables_targets_are_the_one_target_unless_given() -> None:
    assert RoundSettings(target=0.7).all_targets == (0.7,)
    assert RoundSettings(target=0.7, targets=(0.8, 0.95)).all_targets == (0.8, 0.95)


@pytest.mark.parametrize(
    ("field", "wrong", "right"),
    [
        ("count", 0, 1),
        ("fraction", 0.0, 1.0),
        ("fraction", 1.01, 0.01),
        ("min_clients", -1, 0),
        ("evaluate_every", 0, 1),
        ("target", 0.0, 1.0),
        ("target", 1.5, 0.5),
        ("share", 0, 1),
        ("shares", (0.5, 0.0), (0.5, 1.0)),
        ("targets", (1.1,), (1.0,)),
    ],
)
def test_limits(field: str, wrong: Any, right: Any) -> None:
    assert getattr(validated(RoundSettings, {field: right}, "rounds"), field) == right
    with pytest.raises(UserError, match=f"rounds: {field}"):
        validated(RoundSettings, {field: wrong}, "rounds")
