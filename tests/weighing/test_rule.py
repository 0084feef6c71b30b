"""Rules: what they are called, the criteria that several share, and every wrong parameter as one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.errors import UserError
from steelyard.weighing.criteria import LocalData
from steelyard.weighing.rule import Rule, WeighingSettings, criteria_of, label, parse_priority, show_priority


def settings(**given: Any) -> WeighingSettings:
    return WeighingSettings(**{"criteria": ["DS", "LD"], **given})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "DS>LD"),
        ({"priority": "LD>DS"}, "LD>DS"),
        ({"criteria": ["DS"], "score": "mean"}, "DS"),
        ({"criteria": ["DS"], "score": "power"}, "power(DS)"),
        ({"criteria": ["DS"], "score": "power", "power": 1}, "power(DS)"),
        ({"criteria": ["DS"], "score": "power", "power": 2.5}, "power(DS)^2.5"),
        ({"score": "power", "power": 3}, "power(DS,LD)^3"),
        ({"score": "mean"}, "mean(DS,LD)"),
        ({"score": " Weighted_Mean ", "weights": [1, 2]}, "weighted-mean(DS,LD)"),
        ({"criteria": ["DS", "LD", "MD"], "score": "product"}, "product(DS,LD,MD)"),
        ({"adjust": {}}, "online(DS>LD)"),
        ({"adjust": {"report": "apart", "budget": 3}}, "online-apart(DS>LD)@3"),
        ({"adjust": {"strategy": "greedy", "budget": 0}}, "greedy(DS>LD)@0"),
        ({"loss": {"adapt": "none"}}, "DS>LD"),
        ({"loss": {"adapt": "barron"}}, "DS>LD+barron"),
        ({"name": "mine", "score": "mean"}, "mine"),
    ],
)
def test_a_rule_is_named_by_what_it_does(given: dict[str, Any], name: str) -> None:
    assert label(settings(**given)) == name


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"criteria": ["DS", "DS"]}, "criteria: got DS, DS; allowed: each criterion once"),
        ({"score": "mean", "priority": "DS>LD"}, "priority: given with score = 'mean'; allowed only with prioritized"),
        (
            {"score": "product", "weights": [1, 2]},
            "weights: given with score = 'product'; allowed only with weighted-mean, owa",
        ),
        (
            {"score": "mean", "adjust": {}},
            "adjust: given with score = 'mean' and 2 criteria; allowed only with prioritized and two criteria or more, "
            "since it changes their order",
        ),
        (
            {"priority": "DS>LX"},
            "priority: 'DS>LX' names 'LX', which is not among the criteria; allowed: an order of DS, LD",
        ),
        ({"priority": "DS"}, "priority: got 'DS'; allowed: an order that names each of DS, LD once"),
        ({"score": "owa"}, "weights, quantifier: score = 'owa' needs exactly one of the two"),
        (
            {"score": "owa", "weights": [1, 0], "quantifier": "most"},
            "weights, quantifier: score = 'owa' needs exactly one of the two",
        ),
        ({"score": "owa", "weights": [1.0]}, "weights: got 1 numbers; allowed: 2 numbers, a weight per rank"),
        ({"score": "weighted-mean"}, "weights: got nothing; allowed: 2 numbers, a weight per criterion"),
        ({"score": "weighted-mean", "weights": [1, -1]}, "weights: got 1.0, -1.0; allowed: numbers >= 0, not all 0"),
        ({"score": "weighted-mean", "weights": [0, 0]}, "weights: got 0.0, 0.0; allowed: numbers >= 0, not all 0"),
        (
            {"score": "choquet"},
            "capacity: missing; score = 'choquet' needs a worth for every subset of criteria",
        ),
        ({"score": "owa", "quantifier": "0.5,0.5"}, "quantifier: got '0.5,0.5'; allowed: 'a,b' with 0 <= a < b <= 1"),
        ({"score": "owa", "quantifier": "0.5,1.5"}, "quantifier: got '0.5,1.5'; allowed: 'a,b' with 0 <= a < b <= 1"),
        (
            {"score": "owa", "quantifier": "mosst"},
            "quantifier: got 'mosst' (did you mean 'most'?); allowed: all, most, at-least-half, as-many-as-possible, "
            "or 'a,b'",
        ),
    ],
)
def test_a_wrong_parameter_is_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as found:
        settings(**given)
    assert str(found.value) == f"WeighingSettings: {line}"


def test_some_weights_may_be_zero() -> None:
    assert Rule(settings(score="weighted-mean", weights=[0, 2])).score(np.array([0.25, 0.5])) == 0.5


def test_orders_are_written_and_read() -> None:
    assert parse_priority(" LD > DS ", ("DS", "LD")) == (1, 0)
    assert show_priority((1, 0), ("DS", "LD")) == "LD>DS"


def test_the_criteria_of_several_rules_come_once_each_in_order_of_naming(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "from steelyard import client_criterion\n@client_criterion('OWNED')\ndef owned(local): return 2.0\n"
    )
    with pytest.raises(UserError, match="'OWNED' is not known"):
        criteria_of([settings(criteria=["OWNED"])])
    rules = [settings(), settings(criteria=["MD", "LD"]), settings(criteria=["OWNED"], plugins=[str(script)])]
    assert [criterion.name for criterion in criteria_of(rule for rule in rules)] == ["DS", "LD", "MD", "OWNED"]
    assert [criterion.name for criterion in Rule(rules[1]).criteria] == ["MD", "LD"]


def test_only_prioritized_rules_look_at_an_order() -> None:
    values = np.array([[0.5, 0.1], [0.2, 0.9]])
    ordered, plain = Rule(settings(priority="LD>DS")), Rule(settings(score="mean"))
    assert (ordered.ordered, plain.ordered) == (True, False)
    assert ordered.score(values) == pytest.approx([0.1 + 0.05, 0.9 + 0.18])
    assert ordered.score(values, (0, 1)) == pytest.approx([0.5 + 0.05, 0.2 + 0.18])
    assert plain.score(values, (1, 0)).tolist() == plain.score(values).tolist()


def test_a_weighing_keeps_everything_that_was_computed() -> None:
    raw = np.array([[3.0, 0.0], [1.0, 0.0]])
    found = Rule(settings(score="product")).weigh(raw)
    assert found.criteria == ("DS", "LD")
    assert found.raw is raw
    assert found.normalised.tolist() == [[0.75, 0.5], [0.25, 0.5]]
    assert found.scores.tolist() == [0.375, 0.125]
    assert found.weights.tolist() == [0.75, 0.25]
    assert found.all_zero == ("LD",)
    assert found.uniform is False


def test_two_experiments_of_one_process_may_share_a_name(tmp_path: Path) -> None:
    """Each script names another measure SAME; whoever names its script gets its own, however often they take turns."""
    sources: list[str] = []
    for number, function in enumerate(("first", "second")):
        script = tmp_path / f"{function}.py"
        script.write_text(
            "from steelyard import client_criterion\n"
            f"@client_criterion('SAME')\ndef {function}(local):\n    return {number}.0\n"
        )
        sources.append(str(script))
    local = LocalData("a", torch.tensor([0]), 2)
    for turn in (0, 1, 0, 1):
        (found,) = criteria_of([settings(criteria=["SAME"], plugins=[sources[turn]])])
        assert found.on_client(local) == turn
        (found,) = criteria_of([settings(criteria=["SAME"])])  # a rule beside it
        assert found.on_client(local) == turn
    with pytest.raises(UserError, match=r"SAME: registered twice, by (first and second|second and first)"):
        criteria_of([settings(criteria=["SAME"], plugins=sources)])
