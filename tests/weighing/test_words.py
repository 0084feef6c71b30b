"""Rules as words: what each stands for as settings, and what is said of a word that is not understood."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import UserError
from steelyard.weighing.rule import WeighingSettings
from steelyard.weighing.words import WORDS, Frame, read_rule, split

BASE = WeighingSettings(criteria=["DS", "LD", "MD"], priority="MD>DS>LD")
KNOWN = ("DS", "LD", "MD", "VP", "VE", "EQ")
FRAME = Frame(known=KNOWN, base=BASE)
ANY = Frame(known=None, base=BASE)
"""The recipe's own criteria in their listed order, and its own priority."""
OWN: dict[str, Any] = {"criteria": ["DS", "LD", "MD"], "priority": "MD>DS>LD"}


@pytest.mark.parametrize(
    ("word", "settings"),
    [
        ("DS", {"criteria": ["DS"]}),
        ("LD > DS", {"criteria": ["LD", "DS"]}),
        # An order of the recipe's own criteria keeps the order in which they are listed, and is their priority.
        ("LD>MD>DS", {"criteria": ["DS", "LD", "MD"], "priority": "LD>MD>DS"}),
        ("fedavg", {"criteria": ["DS"], "name": "fedavg"}),
        ("server-only", {"trained_by": "server"}),
        (
            "adafed",
            {"criteria": ["VP"], "when_zero": "keep", "name": "adafed", "loss": {"adapt": "class-f1"}},
        ),
        ("adafed-weights", {"criteria": ["VP"], "when_zero": "keep", "name": "adafed-weights"}),
        ("budget(20)", OWN | {"adjust": {"strategy": "online", "budget": 20}, "name": "budget(20)"}),
        ("online", OWN | {"adjust": {"strategy": "online"}}),
        ("greedy@7", OWN | {"adjust": {"strategy": "greedy", "budget": 7}}),
        ("bandit(VP>LD)@12", {"criteria": ["VP", "LD"], "adjust": {"strategy": "bandit", "budget": 12}}),
        ("online-apart", OWN | {"adjust": {"strategy": "online", "report": "apart"}}),
        (
            "bandit-apart(VP>LD)@12",
            {"criteria": ["VP", "LD"], "adjust": {"strategy": "bandit", "budget": 12, "report": "apart"}},
        ),
        ("online()", OWN | {"adjust": {"strategy": "online"}}),
        ("mean", {"criteria": ["DS", "LD", "MD"], "score": "mean"}),
        ("product(DS, VP)", {"criteria": ["DS", "VP"], "score": "product"}),
        ("power(VP)^3", {"criteria": ["VP"], "score": "power", "power": 3.0}),
        ("power(VP)^0.5", {"criteria": ["VP"], "score": "power", "power": 0.5}),
        ("power(VP)", {"criteria": ["VP"], "score": "power"}),
        (
            "weighted-mean(DS=2, LD)",
            {
                "criteria": ["DS", "LD"],
                "score": "weighted-mean",
                "name": "weighted-mean(DS=2, LD)",
                "weights": [2.0, 1.0],
            },
        ),
        (
            "owa(DS,LD;most)",
            {"criteria": ["DS", "LD"], "score": "owa", "name": "owa(DS,LD;most)", "quantifier": "most"},
        ),
        (
            "owa(DS,LD;0.7, 0.3)",
            {"criteria": ["DS", "LD"], "score": "owa", "name": "owa(DS,LD;0.7, 0.3)", "weights": [0.7, 0.3]},
        ),
        # As many weights as criteria, or it is a quantifier, which the rule then refuses by its name.
        (
            "owa(DS,LD;0.7,0.2,0.1)",
            {"criteria": ["DS", "LD"], "score": "owa", "name": "owa(DS,LD;0.7,0.2,0.1)", "quantifier": "0.7,0.2,0.1"},
        ),
        ("LD>DS/max", {"criteria": ["LD", "DS"], "normalise": "max"}),
        ("fedavg/rank", {"criteria": ["DS"], "normalise": "rank"}),
        ("mean(DS,LD)/share", {"criteria": ["DS", "LD"], "score": "mean", "normalise": "share"}),
        ("fitted(EQ)", {"criteria": ["EQ"], "fit": {}, "name": "fitted(EQ)"}),
        (
            "fitted( LD>DS/max ; steps = 20 ; rate=1.5)",
            {
                "criteria": ["LD", "DS"],
                "normalise": "max",
                "fit": {"steps": 20, "rate": 1.5},
                "name": "fitted(LD>DS/max;steps = 20;rate=1.5)",
            },
        ),
        ("median(fedavg)", {"criteria": ["DS"], "defence": {"rule": "median"}, "name": "median(fedavg)"}),
        (
            "clip( DS ; quantile = 0.3 ; mix)",
            {
                "criteria": ["DS"],
                "defence": {"rule": "clip", "quantile": 0.3, "mix": True},
                "name": "clip(DS ; quantile = 0.3 ; mix)",
            },
        ),
        (
            "capped(VP;bound=3;max_shares=2)",
            {"criteria": ["VP"], "bound": 3, "max_shares": 2, "name": "capped(VP;bound=3;max_shares=2)"},
        ),
        (
            "capped(median(DS);max_weight=0.5)",
            {
                "criteria": ["DS"],
                "defence": {"rule": "median"},
                "max_weight": 0.5,
                "name": "capped(median(DS);max_weight=0.5)",
            },
        ),
        (
            "guarded",
            {"criteria": ["TR"], "max_shares": 1.5, "defence": {"rule": "spectral"}, "name": "guarded"},
        ),
    ],
)
def test_a_word_stands_for_these_settings(word: str, settings: dict[str, Any]) -> None:
    assert read_rule(word, FRAME) == settings


def test_the_settings_of_a_regression_and_of_a_server_with_rows() -> None:
    held = {"max_shares": 1.5, "defence": {"rule": "spectral"}, "name": "guarded"}
    worth = {"score": "power", "power": 3.0} | held
    rows = Frame(known=KNOWN, base=BASE, server_rows=True)
    assert read_rule("guarded", rows) == {"criteria": ["VP"]} | worth
    errors = Frame(known=KNOWN, base=BASE, server_rows=True, worth="VE")
    assert read_rule("guarded", errors) == {"criteria": ["VE"]} | worth
    # A server that can train on its rows goes by the direction of what it learns.
    trains = replace(rows, trains=True)
    assert read_rule("guarded", trains) == {"criteria": ["RD"]} | held
    found = read_rule("adafed", errors)
    assert (found["criteria"], found["loss"]) == (["VE"], {"adapt": "barron"})


def test_the_capacity_of_a_choquet_integral_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "capacity.toml"
    path.write_text('DS = 0.4\nLD = 0.5\n"DS,LD" = 1\n')
    word = f"choquet(DS,LD;{path})"
    found = read_rule(word, FRAME)
    assert found == {
        "criteria": ["DS", "LD"],
        "score": "choquet",
        "name": word,
        "capacity": {"DS": 0.4, "LD": 0.5, "DS,LD": 1},
    }


def test_a_rule_with_a_name_is_a_part_of_others_without_it() -> None:
    mine = {"criteria": ["LD"], "name": "mine", "plugins": ["a.py"], "algorithm": {"name": "fedprox"}, "bound": 2.0}
    frame = Frame(known=KNOWN, base=BASE, named={"mine": mine})
    assert read_rule("median(mine)", frame) == {
        "criteria": ["LD"],
        "bound": 2.0,
        "defence": {"rule": "median"},
        "name": "median(mine)",
    }
    assert read_rule("mine/max", frame) == {"criteria": ["LD"], "bound": 2.0, "normalise": "max"}
    assert mine["name"] == "mine"


def test_a_base_without_a_priority_gives_none() -> None:
    frame = Frame(known=KNOWN, base=WeighingSettings(criteria=["LD", "DS"]))
    assert read_rule("greedy", frame) == {"criteria": ["LD", "DS"], "adjust": {"strategy": "greedy"}}
    # One criterion has no order.
    single = Frame(known=KNOWN, base=WeighingSettings(criteria=["LD"]))
    assert read_rule("LD", single) == {"criteria": ["LD"]}


def test_where_any_criterion_may_be_named() -> None:
    assert read_rule("MINE", ANY) == {"criteria": ["MINE"]}
    assert read_rule("mine", ANY) == {"criteria": ["mine"]}
    assert read_rule("mine>DS", ANY) == {"criteria": ["mine", "DS"]}
    assert read_rule("mean(mine,DS)", ANY) == {"criteria": ["mine", "DS"], "score": "mean"}
    for word in ("mine(DS)", "mine^2", "mine@3"):
        with pytest.raises(UserError, match="got '"):
            read_rule(word, ANY)


NO_DEFENCE = "a rule inside without a defence of its own, as in"


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("DS>DS", "got 'DS>DS'; allowed: each criterion once"),
        ("DS/max/rank", "got 'DS/max/rank'; allowed: one of /share, /max, /rank"),
        ("DS/share/max", "got 'DS/share/max'; allowed: one of /share, /max, /rank"),
        ("server-only/max", "got 'server-only/max'; allowed: server-only alone, since it weighs no clients"),
        ("fitted()", "got 'fitted()'; allowed: a rule inside that is not fitted, as in fitted(EQ)"),
        ("fitted(fitted(EQ))", "got 'fitted(fitted(EQ))'; allowed: a rule inside that is not fitted, as in fitted(EQ)"),
        ("fitted(EQ;steps)", "got 'fitted(EQ;steps)'; allowed: fitted(RULE;steps=10;rate=3;shrink=0)"),
        ("clip()", f"got 'clip()'; allowed: {NO_DEFENCE} clip(EQ)"),
        ("clip(median(EQ))", f"got 'clip(median(EQ))'; allowed: {NO_DEFENCE} clip(EQ)"),
        ("capped()", f"got 'capped()'; allowed: {NO_DEFENCE} capped(EQ)"),
        (
            "weighted-mean(DS;LD)",
            "got 'weighted-mean(DS;LD)'; allowed: a weight for each criterion, as in weighted-mean(DS=2,LD=1)",
        ),
        (
            "owa(DS,LD)",
            "got 'owa(DS,LD)'; allowed: a quantifier or a weight for each rank, as in owa(DS,LD;most) or "
            "owa(DS,LD;0.7,0.3)",
        ),
        (
            "choquet(DS,LD)",
            "got 'choquet(DS,LD)'; allowed: a TOML file with the capacity, as in choquet(DS,LD;capacity.toml)",
        ),
        (
            "weighted-mean(DS=two)",
            "got 'weighted-mean(DS=two)'; allowed: a number, as in power(VP)^3 or weighted-mean(DS=2,LD=1)",
        ),
        ("power(VP)^1.2.3", "got 'power(VP)^1.2.3'; allowed: a number, as in power(VP)^3 or weighted-mean(DS=2,LD=1)"),
    ],
)
def test_what_is_wrong_with_a_word_is_said_in_one_line(word: str, line: str) -> None:
    for option in ("--rules", "rule"):
        with pytest.raises(UserError) as caught:
            read_rule(word, Frame(known=KNOWN, base=BASE, option=option))
        assert str(caught.value) == f"{option}: {line}"


def test_a_limit_that_is_none_is_named_with_those_there_are() -> None:
    with pytest.raises(UserError) as caught:
        read_rule("capped(EQ;steps=2)", FRAME)
    assert str(caught.value).startswith("--rules: got 'capped(EQ;steps=2)'; allowed: bound, max_weight, max_shares, ")
    assert str(caught.value).endswith(", each with a number")


ALL_WORDS = ", ".join((*WORDS, "more"))
CRITERIA = ", ".join(KNOWN)


@pytest.mark.parametrize(
    ("word", "name"),
    [("mean(DS,LDD)", "LDD"), ("DS>LDD", "LDD"), ("weighted-mean(LDD=1)", "LDD"), ("online(LDD)", "LDD")],
)
def test_a_criterion_that_is_not_there_is_named_with_the_nearest(word: str, name: str) -> None:
    frame = Frame(known=KNOWN, base=BASE, further=("more",))
    with pytest.raises(UserError) as caught:
        read_rule(word, frame)
    whole = word if "(" in word and not word.startswith("online") else word.removeprefix("online(").rstrip(")")
    assert str(caught.value) == (
        f"--rules: '{whole}' names no rule or criterion '{name}' (did you mean 'LD'?); "
        f"allowed: criteria ({CRITERIA}), orders of them such as DS>LD>MD, {ALL_WORDS}"
    )


@pytest.mark.parametrize(
    ("word", "hint"), [("onlin", " (did you mean 'online'?)"), ("prioritized", ""), ("budget", "")]
)
def test_a_word_that_is_none_is_named_with_the_nearest(word: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        read_rule(word, Frame(known=KNOWN, base=BASE, further=("more",)))
    assert str(caught.value).startswith(f"--rules: got '{word}'{hint}")
    assert str(caught.value).endswith(f"; allowed: criteria, orders of them, {ALL_WORDS}")


def test_marks_inside_parentheses_do_not_split() -> None:
    assert split("DS, owa(DS,LD;most) ,, mean") == ["DS", "owa(DS,LD;most)", "mean"]
    assert split("a(b(c;d);e);f", ";") == ["a(b(c;d);e)", "f"]
    assert split("a),b") == ["a)", "b"]
    assert split(" ") == []
