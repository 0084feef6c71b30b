"""Rules: what words stand for, what settings are called, criteria that rules share, and wrong parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kit import assert_refused

from steelyard.base.errors import UserError
from steelyard.weighing.criterion import LocalData
from steelyard.weighing.rule import Rule, WeighingSettings, criteria_of
from steelyard.weighing.scores import parse_priority
from steelyard.weighing.words import Frame, label, read_rule, show_priority, split

BASE = WeighingSettings(criteria=["DS", "LD", "MD"], priority="MD>DS>LD")
KNOWN = ("DS", "LD", "MD", "VP", "VE", "EQ")
FRAME = Frame(known=KNOWN, base=BASE)
ANY = Frame(known=None, base=BASE)
"""The recipe's own criteria in their listed order, and its own priority."""
OWN: dict[str, Any] = {"criteria": ["DS", "LD", "MD"], "priority": "MD>DS>LD"}


def settings(**given: Any) -> WeighingSettings:
    return WeighingSettings(**{"criteria": ["DS", "LD"], **given})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"priority": "LD>DS"}, "LD>DS"),
        ({"criteria": ["DS"], "score": "power", "power": 2.5}, "power(DS)^2.5"),
        ({"score": " Weighted_Mean ", "weights": [1, 2]}, "weighted-mean(DS=1,LD=2)"),
        ({"adjust": {"report": "apart", "budget": 3}}, "online-apart(DS>LD)@3"),
        ({"loss": {"adapt": "barron"}}, "DS>LD+barron"),
        ({"loss": {"adapt": "none"}}, "DS>LD"),
        ({"criteria": ["DS", "LD", "MD"], "priority": "LD>DS>MD", "adjust": {}}, "online(LD>DS>MD)"),
        ({"bound": 3.0, "max_shares": 2.0, "criteria": ["DS"]}, "capped(DS;bound=3;max_shares=2)"),
        ({"criteria": ["DS"], "defence": {"rule": "clip", "quantile": 0.25}}, "clip(DS;quantile=0.25)"),
        ({"criteria": ["DS"], "defence": {"rule": "median", "mix": True}}, "median(DS;mix)"),
    ],
)
def test_a_rule_is_named_by_what_it_does(given: dict[str, Any], name: str) -> None:
    assert label(settings(**given)) == name


orders = st.lists(st.sampled_from(["DS", "LD", "MD", "EQ"]), min_size=1, max_size=4, unique=True)
tenths = st.integers(11, 99).map(lambda tenth: tenth / 10)
scored = st.one_of(
    orders.map(">".join),
    st.builds("power({})^{:g}".format, orders.map(",".join), tenths),
    st.builds(
        "{}({})".format, st.sampled_from(["mean", "product"]), orders.filter(lambda order: len(order) > 1).map(",".join)
    ),
    st.builds("weighted-mean(DS={:g},LD={:g})".format, tenths, tenths),
    st.sampled_from(
        ["owa(DS,LD;most)", "owa(DS,LD;0.7,0.3)", "feddisco(a=0.25)", "online(DS>MD)@3/max", "bandit-apart"]
    ),
    st.just("greedy(LD>DS)"),
)
wrapped = st.one_of(
    scored,
    st.builds("{}/{}".format, scored, st.sampled_from(["max", "rank"])),
    st.builds(
        "fitted({};steps={};shrink={:g})".format, scored, st.integers(1, 99), tenths.map(lambda tenth: tenth / 10)
    ),
)
capped = wrapped | st.builds(
    "capped({};bound=3;max_shares={:g};floors.a=0.1)".format, wrapped, tenths.map(lambda t: t + 1)
)
defended = st.one_of(
    st.just("server-only"),
    capped,
    st.builds("clip({};quantile=0.25)".format, capped),
    st.builds("{}({};mix;hostile=0.2)".format, st.sampled_from(["median", "spectral", "none"]), capped),
)


@given(defended)
def test_what_is_printed_of_a_rule_is_read_as_that_rule(word: str) -> None:
    try:
        read = WeighingSettings(**_plain(read_rule(word, FRAME)))
    except UserError:  # parts that do not go together
        return
    again = WeighingSettings(**_plain(read_rule(label(read), FRAME)))
    assert (again, label(again)) == (read, label(read))


def _plain(given: dict[str, Any]) -> dict[str, Any]:
    """Without the name that a word may give itself."""
    return {name: value for name, value in given.items() if name != "name"}


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"score": "product", "weights": [1, 2]}, ("weights", "'product'")),
        ({"criteria": ["DS"], "adjust": {}}, ("adjust", "1 criteria")),
        ({"score": "weighted-mean"}, ("weights", "nothing", "2 numbers")),
        ({"score": "weighted-mean", "weights": [1, -1]}, ("weights", "1.0, -1.0")),
        ({"score": "choquet"}, ("capacity", "missing")),
        ({"score": "owa", "quantifier": "mosst"}, ("quantifier", "'mosst'", "did you mean 'most'")),
        ({"attested": ["MD"]}, ("attested", "MD")),
        ({"trained_by": "server", "defence": {}}, ("trained_by",)),
        ({"min_weight": 0.5, "max_weight": 0.3}, ("min_weight", 0.5, "max_weight = 0.3")),
        ({"floors": {"a": 0.6, "b": 0.6}}, ("floors", 1.2)),
        ({"floors": {"a": 0.6}, "max_weight": 0.3}, ("floors.a", 0.6, "max_weight = 0.3")),
    ],
)
def test_a_wrong_parameter_is_one_line(given: dict[str, Any], parts: tuple[Any, ...]) -> None:
    assert_refused(lambda: settings(**given), "WeighingSettings", *parts)


def test_orders_are_written_and_read_and_looked_at_by_prioritized_rules_alone() -> None:
    assert parse_priority(" LD > DS ", ("DS", "LD")) == (1, 0)
    assert_refused(lambda: parse_priority("LDD>DS", ("DS", "LD")), "priority", "'LDD'", "did you mean 'LD'")
    assert show_priority((1, 0), ("DS", "LD")) == "LD>DS"
    assert {"mean", "owa"} < set(WeighingSettings.model_json_schema()["properties"]["score"]["enum"])
    values = np.array([[0.5, 0.1], [0.2, 0.9]])
    ordered = Rule(settings(priority="LD>DS"))
    assert ordered.score(values) == pytest.approx([0.1 + 0.05, 0.9 + 0.18])
    assert ordered.score(values, (0, 1)) == pytest.approx([0.5 + 0.05, 0.2 + 0.18])


def test_the_criteria_of_several_rules_come_once_each_in_order_of_naming(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "from steelyard import client_criterion\n@client_criterion('OWNED')\ndef owned(local): return 2.0\n"
    )
    assert_refused(lambda: criteria_of([settings(criteria=["OWNED"])]), "'OWNED'")
    rules = [settings(), settings(criteria=["MD", "LD"]), settings(criteria=["OWNED"], plugins=[str(script)])]
    assert [criterion.name for criterion in criteria_of(rule for rule in rules)] == ["DS", "LD", "MD", "OWNED"]
    assert [criterion.name for criterion in Rule(rules[1]).criteria] == ["MD", "LD"]


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
    both = settings(criteria=["SAME"], plugins=sources)
    assert_refused(lambda: criteria_of([both]), "SAME", "twice", "first", "second")


@pytest.mark.parametrize(
    ("word", "settings"),
    [
        ("DS", {"criteria": ["DS"]}),
        # An order of the recipe's own criteria keeps the order in which they are listed, and is their priority.
        ("LD>MD>DS", {"criteria": ["DS", "LD", "MD"], "priority": "LD>MD>DS"}),
        ("server-only", {"trained_by": "server"}),
        # In any case, and as Flower calls it; a robust rule alone has equal weights.
        ("ld>DS", {"criteria": ["LD", "DS"]}),
        ("Krum", {"criteria": ["EQ"], "defence": {"rule": "multi-krum"}, "name": "multi-krum(EQ)"}),
        ("fedavg", {"criteria": ["DS"], "name": "fedavg"}),
        (
            "adafed",
            {"criteria": ["VP"], "when_zero": "keep", "name": "adafed", "loss": {"adapt": "class-f1"}},
        ),
        ("online@20", OWN | {"adjust": {"strategy": "online", "budget": 20}}),
        (
            "bandit-apart(VP>LD)@12",
            {"criteria": ["VP", "LD"], "adjust": {"strategy": "bandit", "budget": 12, "report": "apart"}},
        ),
        ("greedy(VP>LD/max)", {"criteria": ["VP", "LD"], "normalise": "max", "adjust": {"strategy": "greedy"}}),
        ("power(VP)^0.5", {"criteria": ["VP"], "score": "power", "power": 0.5}),
        (
            "weighted-mean(DS=2, LD)",
            {
                "criteria": ["DS", "LD"],
                "score": "weighted-mean",
                "name": "weighted-mean(DS=2, LD)",
                "weights": [2.0, 1.0],
            },
        ),
        ("owa(DS;0.7)", {"criteria": ["DS"], "score": "owa", "name": "owa(DS;0.7)", "weights": [0.7]}),
        # As many weights as criteria, or it is a quantifier, which the rule then refuses by its name.
        (
            "owa(DS,LD;0.7,0.2,0.1)",
            {"criteria": ["DS", "LD"], "score": "owa", "name": "owa(DS,LD;0.7,0.2,0.1)", "quantifier": "0.7,0.2,0.1"},
        ),
        ("mean(DS,LD)/share", {"criteria": ["DS", "LD"], "score": "mean", "normalise": "share"}),
        (
            "fitted( LD>DS/max ; steps = 20 ; rate=1.5)",
            {
                "criteria": ["LD", "DS"],
                "normalise": "max",
                "fit": {"steps": 20, "rate": 1.5},
                "name": "fitted(LD>DS/max;steps = 20;rate=1.5)",
            },
        ),
        (
            "clip(DS;mix)",
            {"criteria": ["DS"], "defence": {"rule": "clip", "mix": True}, "name": "clip(DS;mix)"},
        ),
        (
            "capped(median(VP);bound=3;max_shares=2)",
            {
                "criteria": ["VP"],
                "bound": 3,
                "max_shares": 2,
                "defence": {"rule": "median"},
                "name": "capped(median(VP);bound=3;max_shares=2)",
            },
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
    assert read_rule("adafed", errors)["loss"] == {"adapt": "barron"}


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


def test_where_any_criterion_may_be_named_and_a_base_has_no_priority() -> None:
    assert read_rule("mine", ANY) == {"criteria": ["mine"]}
    assert read_rule("mean(mine,DS)", ANY) == {"criteria": ["mine", "DS"], "score": "mean"}
    assert_refused(lambda: read_rule("mine(DS)", ANY), "'mine(DS)'")
    frame = Frame(known=KNOWN, base=WeighingSettings(criteria=["LD", "DS"]))
    assert read_rule("greedy", frame) == {"criteria": ["LD", "DS"], "adjust": {"strategy": "greedy"}}
    # One criterion has no order.
    assert read_rule("LD", replace(frame, base=WeighingSettings(criteria=["LD"]))) == {"criteria": ["LD"]}


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("DS>DS", ("each criterion once",)),
        ("DS>", ("a name between two signs",)),
        ("clip()", ("clip(EQ)",)),
        ("DS/share/max", ("/share, /max, /rank",)),
        ("server-only/max", ("server-only alone",)),
        ("fitted(EQ;steps)", ("steps=10;rate=3;shrink=0",)),
        ("fitted(EQ;steps=2;steps=3)", ("steps once",)),
        ("clip", ("is no rule",)),
        ("clip(median(EQ))", ("clip(EQ)",)),
        ("fitted(fitted(DS))", ("not fitted",)),
        ("capped(EQ;steps=2)", ("bound, max_weight, max_shares", "floors.CLIENT")),
        ("weighted-mean(DS;LD)", ("weighted-mean(DS=2,LD=1)",)),
        ("choquet(DS,LD)", ("choquet(DS,LD;capacity.toml)",)),
        ("power(VP)^1.2.3", ("a number",)),
        ("mean(DS,LDD)", ("'LDD'", "did you mean 'LD'", ", ".join(KNOWN))),
        ("prioritized", ("steelyard list rules",)),
    ],
)
def test_what_is_wrong_with_a_word_is_said_in_one_line(word: str, parts: tuple[str, ...]) -> None:
    frame = Frame(known=KNOWN, base=BASE, option="rule", further=("more",))
    assert_refused(lambda: read_rule(word, frame), "rule: ", f"'{word}'", *parts)


def test_marks_inside_parentheses_do_not_split() -> None:
    assert split("DS, owa(DS,LD;most) ,, mean") == ["DS", "owa(DS,LD;most)", "mean"]
    assert split("a(b(c;d);e);f", ";") == ["a(b(c;d);e)", "f"]
    assert split("a),b") == ["a)", "b"]
    assert split(" ") == []


@pytest.mark.parametrize("word", ["mean(DS)@3", "product(DS,LD)@7", "online(DS>LD)^2", "power(VP)^3@2"])
@pytest.mark.parametrize("frame", [FRAME, ANY])
def test_what_follows_a_word_is_never_lost(word: str, frame: Frame) -> None:
    assert_refused(lambda: read_rule(word, frame), word)
