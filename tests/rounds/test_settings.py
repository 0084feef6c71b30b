"""[rounds]: defaults and limits."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.errors import UserError
from steelyard.rounds.settings import RoundSettings
from steelyard.settings import validated


def test_defaults() -> None:
    assert RoundSettings().model_dump() == {
        "count": 50,
        "fraction": 0.1,
        "sampling": "fixed",
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
    }


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
