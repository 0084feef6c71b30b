"""Facts as criteria: what `fact(...)` reads, in rules in words and TOML, on clients, on nodes and under hidden sums."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import SMALL, assert_refused

import steelyard
from steelyard import Experiment, LocalData
from steelyard.adapters.rounds import Reply, WeighedRounds
from steelyard.base.usercode import NotAllowed
from steelyard.clients.node import NodeConfig
from steelyard.experiment.loading import build, load
from steelyard.experiment.node_rules import agreed
from steelyard.experiment.rules import parse_rules
from steelyard.report.result import computed
from steelyard.runs.history import History
from steelyard.weighing.criterion import find

USER = {"age": {"client-000": 70, "client-001": 30, "client-002": 65}, "country": {"client-000": "IT"}, "member": True}


def described(criteria: list[str], **more: Any) -> dict[str, Any]:
    facts = {"user": USER, "device": {"battery": "uniform(0.2, 1)", "cores": 3}}
    usual = {"partition": {"clients": 4}, "rounds": {"count": 1}, "weighing": {"criteria": criteria}, "facts": facts}
    return {**SMALL, **usual, **more}


def local(user: Mapping[str, float], device: Mapping[str, float] | None = None) -> LocalData:
    marks = {"old": np.array([1.0, 0.0, 0.0, 1.0])}
    return LocalData("ann", torch.tensor([0, 1]), 2, marks=marks, user=user, device=device or {})


@pytest.mark.parametrize(
    ("criterion", "value"),
    [
        ("fact(age)", 70.0),
        ("fact(age=65..)", 1.0),
        ("fact(age=70..)", 1.0),
        ("fact(age=..17)", 0.0),
        ("fact(age=18..69.5)", 0.0),
        ("fact(age=70)", 1.0),
        ("fact(age;50..90)", 0.5),
        ("fact(age;0..35)", 1.0),
        ("fact(age;80..90)", 0.0),
        ("fact(country=IT)", 1.0),
        ("fact(country=FR)", 0.0),
        ("fact(device-age)", 3.0),
        ("fact(user-age)", 70.0),
        ("fact(battery)", 0.25),
        ("fact(old)", 0.5),
        ("fact(old=0.5..)", 1.0),
        ("fact(unheard-of)", 0.0),
        ("fact(user-old)", 0.0),
    ],
)
def test_degree_of_a_fact(criterion: str, value: float) -> None:
    found = find(criterion)
    assert found is not None
    measured = found.taken(local({"age": 70.0, "country=IT": 1.0}, {"battery": 0.25, "age": 3.0}))
    assert measured == (value, None)
    assert found.maximum == (None if "=" not in criterion and ";" not in criterion else 1.0)


@pytest.mark.parametrize(
    "name", ["fact()", "fact(a=)", "fact(a=..)", "fact(a=5..2)", "fact(a;3..)", "fact(a;x)", "fact"]
)
def test_what_is_no_fact_is_one_line(name: str) -> None:
    assert_refused(lambda: build(described([name])), name)


@pytest.mark.parametrize(
    ("rule", "criteria"),
    [
        ("fact(age=65..)>DS", ("fact(age=65..)", "DS")),
        ("fact(ds=md)>ds/max", ("fact(ds=md)", "DS")),
        ("mean(fact(member),DS)", ("fact(member)", "DS")),
        ("weighted-mean(fact(age=65..)=2,DS)", ("fact(age=65..)", "DS")),
        ("owa(DS,fact(age;0..100);most)", ("DS", "fact(age;0..100)")),
        ("capped(fact(member)>DS;max_shares=2)", ("fact(member)", "DS")),
        ("online(fact(member)>DS)", ("fact(member)", "DS")),
        ("power(fact(age;0..100))^2", ("fact(age;0..100)",)),
        ("median(fact(member))", ("fact(member)",)),
    ],
)
def test_rules_in_words_may_hold_facts(rule: str, criteria: tuple[str, ...]) -> None:
    ((label, settings),) = parse_rules([rule], load("quickstart")).items()
    assert settings.criteria == criteria
    ((again, same),) = parse_rules([label], load("quickstart")).items()
    assert (again, same) == (label, settings)


def test_a_run_weighs_by_facts_and_says_of_whom_they_are_not_known(tmp_path: Path) -> None:
    folder = Experiment.model_validate(described(["fact(age=65..)", "fact(country=IT)", "DS"])).run(tmp_path).folder
    history = History(folder)
    rows = history.clients.set_index("client")
    assert rows["raw_fact(age=65..)"].to_dict() == {f"client-00{n}": float(n in (0, 2)) for n in range(4)}
    assert rows["raw_fact(country=IT)"].to_dict() == {f"client-00{n}": float(n == 0) for n in range(4)}
    # c = (1/2, 1, 1/4): the first has 1/2 (1 + 1 (1 + 1/4)), the third 1/2.
    assert rows["weight"].tolist() == pytest.approx([1.125 / 1.625, 0.0, 0.5 / 1.625, 0.0], abs=2e-3)
    notes = str(history.info["notes"])
    assert "fact(age=65..): not known of 1 of 4 clients, which count as 0" in notes
    assert "fact(country=IT): not known of 3 of 4" in notes
    document = computed(history, Experiment.load(str(folder / "experiment.toml")), None)
    (rule,) = document.rules
    assert {each.name: (each.measured_by, each.trust) for each in rule.criteria}["fact(age=65..)"] == (
        "client",
        "bounded",
    )


def test_a_fact_that_is_known_of_nobody_is_refused(tmp_path: Path) -> None:
    wrong = Experiment.model_validate(described(["fact(shoe-size)", "DS"]))
    assert_refused(lambda: wrong.run(tmp_path / "run"), "fact(shoe-size): known of no client; allowed: a fact of")


def test_a_node_says_its_own_facts() -> None:
    experiment = Experiment.model_validate(described(["fact(country=IT)", "fact(battery)"]))
    own = {"partition-id": 1, "num-partitions": 4, "user-country": "IT", "device-battery": "0.5"}
    node = experiment.on_node(NodeConfig.read(own))
    seen = node.clients.context.population(0).local("client-001")  # type: ignore[attr-defined]
    assert dict(seen.user) == {"age": 30.0, "member": 1.0, "country=IT": 1.0}
    assert (find("fact(country=IT)").taken(seen), seen.device["battery"]) == ((1.0, None), 0.5)  # type: ignore[union-attr]
    silent = experiment.on_node(NodeConfig.read({"partition-id": 1, "num-partitions": 4}))
    assert silent.notes == ("fact(country=IT): not known of 1 of 1 clients, which count as 0",)


def test_what_is_about_a_person_needs_a_word_where_sums_are_hidden(tmp_path: Path) -> None:
    hidden = {"privacy": {"aggregation": {}}, "partition": {"clients": 5}, "rounds": {"count": 1, "fraction": 1.0}}
    told = "fact(age=65..), which tells of a person what privacy.aggregation does not hide"
    assert_refused(lambda: build(described(["fact(age=65..)", "DS"], **hidden)), told)
    build(described(["fact(device-battery)", "DS"], **hidden))
    public = {**hidden, "privacy": {"aggregation": {}, "criteria": "public"}}
    document = described(["fact(age=65..)", "DS"], **public)
    build(document)
    for name in ("key", "peers"):
        (tmp_path / name).mkdir()
    node = {"client": "a", "require": "aggregation", "key": str(tmp_path / "key"), "peers": str(tmp_path / "peers")}
    with pytest.raises(NotAllowed, match=r"fact\(age=65\.\.\) tells of a person"):
        agreed(dict(document), NodeConfig.read(node))
    agreed(dict(document), NodeConfig.read({**node, "tell": "age"}))


def test_numbers_of_replies_and_tables_make_facts() -> None:
    rounds = WeighedRounds("fact(age=65..)>DS")
    sent = {"w": np.zeros(1)}
    replies = [
        Reply("ann", {"w": np.ones(1)}, 10, {"age": 70.0}),
        Reply("bob", {"w": np.ones(1)}, 10, {"age": 20.0}),
        Reply("cem", {"w": np.ones(1)}, 10, {"fact(age=65..)": 1.0}),
        Reply("dee", {"w": np.ones(1)}, 10, {}),
    ]
    found = rounds.combine(sent, replies)
    assert found.weights == pytest.approx({"ann": 0.5, "bob": 0.0, "cem": 0.5})
    assert found.reasons == {"dee": "criterion fact(age=65..) is missing"}
    table = {"ann": {"DS": 1, "age": 70}, "bob": {"DS": 3, "age": 20}}
    assert steelyard.weigh(table, "mean(fact(age=65..),DS)").weights == pytest.approx([0.625, 0.375])
    assert_refused(lambda: steelyard.weigh(table, "fact(city)>DS"), "has no column 'fact(city)'")
