"""The sentence about what weighing did, and which rule counts as FedAvg."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.report.baseline import is_fedavg
from steelyard.report.flawed import sentence

ROWS = "the server's 9 rows"
FLAWS = {"a": ["labels flipped (50%)"], "b": ["labels flipped (50%)", "free rider"]}


def rule(name: str, accuracy: float | None, weight: float | None = None, **extra: Any) -> dict[str, Any]:
    return {
        "rule": name,
        "fedavg": name == "fedavg",
        "asks_clients": name != "server-only",
        "server": {} if accuracy is None else {"accuracy": accuracy},
        "flawed": None if weight is None else {"weight": weight},
        **extra,
    }


def test_flawed_clients_their_weight_and_the_best_rule_are_told() -> None:
    rules = [rule("fedavg", 0.5, 0.6), rule("VP", 0.9, 0.1), rule("LD", 0.7, 0.3), rule("server-only", 0.95)]
    assert sentence(rules, FLAWS, 8, ROWS) == (
        "2 of 8 clients are flawed (labels flipped (50%)). By size alone they got 60% of the weight and the model "
        "50.0% on the server's 9 rows; VP gave them 10% and reached 90.0%."
    )


def test_without_flaws_one_seed_promises_nothing() -> None:
    assert "which may be chance" in sentence([rule("fedavg", 0.7), rule("VP", 0.75)], {}, 8, ROWS)
    assert "little to gain" in sentence([rule("fedavg", 0.7), rule("VP", 0.71)], {}, 8, ROWS)


@pytest.mark.parametrize(
    "rules",
    [
        [rule("VP", 0.9), rule("LD", 0.8)],
        [rule("fedavg", 0.9), rule("server-only", 0.99)],
        [rule("fedavg", None), rule("VP", None)],
    ],
)
def test_nothing_is_said_without_fedavg_other_rules_or_rows_of_the_server(rules: list[dict[str, Any]]) -> None:
    assert sentence(rules, FLAWS, 8, ROWS) == ""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"normalise": "max"}, True),
        ({"loss": {"adapt": "none"}}, True),
        ({"score": "power", "power": 1}, True),
        ({"normalise": "rank"}, False),
        ({"score": "power", "power": 3}, False),
        ({"fit": {"steps": 10}}, False),
        ({"trained_by": "server"}, False),
        ({"loss": {"adapt": "class-f1"}}, False),
        ({"criteria": ["DS", "LD"]}, False),
    ],
)
def test_fedavg_is_dataset_size_alone(settings: dict[str, Any], expected: bool) -> None:
    assert is_fedavg({"criteria": ["DS"], **settings}) is expected
