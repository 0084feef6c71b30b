"""Rules in words: every criterion, score, policy and robust rule reads as its authors describe it, in one place."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.defence.robust import DefenceSettings
from steelyard.weighing import criterion, scores
from steelyard.weighing.policy import known as policies
from steelyard.weighing.reading import example, formula, phrase, reading
from steelyard.weighing.rule import WeighingSettings


@pytest.mark.parametrize(
    ("settings", "words", "score"),
    [
        (
            {"criteria": ["DS", "LD", "VP"], "priority": "VP>LD>DS", "normalise": "max"},
            "accuracy on the server's validation set first, then number of distinct labels, then number of training "
            "samples, each divided by the largest value in the round",
            "VP + VP·LD + VP·LD·DS",
        ),
        ({"criteria": ["DS"]}, "number of training samples (FedAvg)", "DS"),
        ({"criteria": ["DS", "LD"], "score": "mean"}, "the mean of number of training samples, number of dis", "Σ c_i"),
        ({"criteria": ["DS"], "score": "power", "power": 3}, "number of training samples to the power of 3", "^k"),
        ({"trained_by": "server"}, "no client trains", "none"),
        (
            {"criteria": ["DS", "own"], "adjust": {}},
            "number of training samples first, then own; tests during training choose the order (online)",
            "DS + DS·own",
        ),
        (
            {"policy": {"name": "feddisco"}},
            "sizes less label discrepancy (the published method feddisco), from number of training samples, KL",
            "as p",
        ),
        ({"criteria": ["own"], "bound": 2.0, "max_weight": 0.5}, "own; what clients report is cut at 2 times", "own"),
        ({"criteria": ["DS"], "defence": {"rule": "median"}}, "updates: the weighted median of every parameter", "DS"),
    ],
)
def test_a_rule_reads_as_people_say_it(settings: dict[str, Any], words: str, score: str) -> None:
    found = WeighingSettings.model_validate(settings)
    assert words in reading(found)
    assert score in formula(found)


def test_whatever_is_registered_brings_its_words() -> None:
    assert [name for name, found in criterion.known().items() if found.built_in and phrase(name) == name] == []
    assert [
        name for name, found in scores.known().items() if name != "prioritized" and found.reads.startswith(name)
    ] == []
    for name, policy in policies().items():
        assert f"published method {name}" in reading(WeighingSettings.model_validate({"policy": {"name": name}})), (
            policy
        )
    for name in DefenceSettings.kinds:
        assert "; updates: " in reading(WeighingSettings.model_validate({"defence": {"rule": name}}))


def test_the_example_is_what_the_rule_computes() -> None:
    clients = example(WeighingSettings(criteria=("DS", "EQ"), score="mean"))
    assert list(clients) == ["client A", "client B", "client C"]
    assert [raw for raw, _ in clients.values()] == [[100.0, 1.0], [60.0, 1.0], [30.0, 1.0]]
    assert [weight for _, weight in clients.values()] == pytest.approx(
        [(share + 1 / 3) / 2 for share in (10 / 19, 6 / 19, 3 / 19)]
    )
    assert [raw for raw, _ in example(WeighingSettings(criteria=("LD",))).values()] == [[10.0], [6.0], [3.0]]
    assert not example(WeighingSettings(trained_by="server"))
