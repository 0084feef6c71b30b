"""Tables in every form that people have them: the same weights from each, and one line for what cannot be weighed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import steelyard
from steelyard.errors import UserError
from steelyard.weighing.rule import Rule, WeighingSettings

CLIENTS = {"ann": {"quality": 0.5, "DS": 300}, "bob": {"quality": 0.9, "DS": 100}}
FORMS: dict[str, Any] = {
    "by client": CLIENTS,
    "columns": {"client": ["ann", "bob"], "quality": [0.5, 0.9], "DS": [300, 100]},
    "rows": [{"client": name, **row} for name, row in CLIENTS.items()],
    "a frame": pd.DataFrame({"Client": ["ann", "bob"], "quality": [0.5, 0.9], "DS": [300, 100]}),
    "a frame by index": pd.DataFrame(CLIENTS).T,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same(form: str) -> None:
    found = steelyard.weigh(FORMS[form], "quality>DS")
    assert (found.clients, found.criteria) == (("ann", "bob"), ("quality", "DS"))
    # quality 5/14 and 9/14, DS 3/4 and 1/4: f = c₁(1 + c₂)
    assert found.scores == pytest.approx([5 / 14 * 1.75, 9 / 14 * 1.25])
    assert found.weights == pytest.approx([0.4375, 0.5625])


def test_an_array_has_the_columns_of_its_rule(tmp_path: Path) -> None:
    found = steelyard.weigh(np.array([[0.5, 300], [0.9, 100]]), "quality>DS")
    assert found.clients == ("0", "1")
    assert found.weights == pytest.approx([0.4375, 0.5625])
    assert steelyard.weigh([1, 3], "quality").weights == pytest.approx([0.25, 0.75])
    path = tmp_path / "t.csv"
    path.write_text("client,quality,DS\nann,0.5,300\nbob,0.9,100\n")
    assert steelyard.weigh(path, "quality>DS").weights == pytest.approx([0.4375, 0.5625])


def test_one_measure_by_client() -> None:
    for table in ({"ann": 300, "bob": 100}, pd.Series({"ann": 300, "bob": 100})):
        found = steelyard.weigh(table, "size")
        assert (found.clients, found.criteria) == (("ann", "bob"), ("size",))
        assert found.weights.tolist() == [0.75, 0.25]


def test_rows_may_come_one_by_one() -> None:
    found = steelyard.weigh((row for row in [[0.5, 300], [0.9, 100]]), "quality>DS")
    assert found.weights == pytest.approx([0.4375, 0.5625])


def test_many_clients_take_no_longer_than_their_number(tmp_path: Path) -> None:
    """Seconds for 20,000 clients, not minutes: looking for names that come twice goes through them once."""
    count = 20_000
    path = tmp_path / "many.csv"
    path.write_text("client,DS\n" + "".join(f"{'c' * 30}{number},1\n" for number in range(count)))
    began = time.process_time()
    assert len(steelyard.weigh(np.ones(count), "DS").clients) == count
    assert len(steelyard.weigh(path, "DS").clients) == count
    assert time.process_time() - began < 4


@given(st.lists(st.tuples(*[st.floats(0, 1e6)] * 3), min_size=1, max_size=9), st.sampled_from(["share", "max", "rank"]))
def test_weights_are_those_of_a_run(rows: list[tuple[float, ...]], how: Any) -> None:
    """Bit for bit: the same rule weighs both."""
    raw = np.array(rows)
    expected = Rule(WeighingSettings(criteria=("DS", "LD", "MD"), normalise=how)).weigh(raw)
    found = steelyard.weigh(raw, "DS>LD>MD", how)
    assert np.array_equal(found.weights, expected.weights)
    assert np.array_equal(found.scores, expected.scores)
    assert found.weights.sum() == pytest.approx(1)


def test_words_that_the_rule_says_itself() -> None:
    best = steelyard.weigh(CLIENTS, "quality/max")
    assert best.scores == pytest.approx([5 / 9, 1])
    assert steelyard.weigh(CLIENTS, "").criteria == ("quality", "DS")
    assert steelyard.weigh(CLIENTS, "EQ").weights.tolist() == [0.5, 0.5]
    assert steelyard.weigh(CLIENTS, WeighingSettings(criteria=("DS",))).weights.tolist() == [0.75, 0.25]
    assert steelyard.weigh({"a": {"x": 0.2}, "b": {"x": 0.3}}, "x", None).scores.tolist() == [0.2, 0.3]


def test_reasons_say_what_was_made_up_for() -> None:
    found = steelyard.weigh([1, 2, 9], "capped(x;bound=2;max_shares=1.2)")
    assert found.weights == pytest.approx([0.2, 0.4, 0.4])
    assert found.reasons == ("", "", "x cut at the bound, capped")
    nothing = steelyard.weigh({"a": {"x": 0}, "b": {"x": 0}}, "x", None)
    assert (nothing.uniform, set(nothing.reasons)) == (True, {"all scores are 0: equal weights"})


def test_it_prints_as_a_table() -> None:
    lines = repr(steelyard.weigh(CLIENTS, "quality>DS")).splitlines()
    assert lines[0].split() == ["client", "quality", "DS", "score", "weight"]
    assert lines[1].split() == ["ann", "0.5", "300", "0.625000", "0.437500"]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("table", "rule", "line"),
    [
        ({"ann": {"DS": float("nan")}}, "DS", "table: client 'ann', DS: got nan; allowed: a number from 0 to 1e30"),
        ({"ann": {"DS": -1}}, "DS", "table: client 'ann', DS: got -1; allowed: a number from 0 to 1e30"),
        ({"ann": {"DS": "many"}}, "DS", "table: client 'ann', DS: got 'many'; allowed: a number from 0 to 1e30"),
        ({"ann": {"DS": None}}, "DS", "table: client 'ann', DS: got None; allowed: a number from 0 to 1e30"),
        ({"a": {"DS": 1}, "b": {}}, "DS", "table: DS is missing for client 'b' and not for others"),
        ({"a": {"DS": 1}, "b": {"DS": 1, "X": 2}}, "DS", "table: X is there for client 'b' and not for others"),
        ({"client": ["a"], "DS": [1, 2]}, "DS", "table: columns of different lengths (client 1, DS 2)"),
        ([{"client": "a", "DS": 1}, {"client": "a", "DS": 2}], "DS", "table: names client 'a' twice"),
        ({"a": {"DS": 1}}, "LD", "rule: 'LD' names no rule or criterion 'LD'"),
        ([[1, 2], [3, 4]], "DS", "table: an array of shape (2, 2); allowed: (2, 1)"),
        ([[1, 2], [3]], "DS>LD", "table: rows of different lengths"),
        ([["many"], [1]], "DS", "table: client '0', DS: got 'many'; allowed: a number from 0 to 1e30"),
        (np.array([[1j]]), "DS", "table: client '0', DS: got "),
        ({"client": "ab", "DS": "12"}, "DS", "table: got 'ab'; allowed: a mapping of clients to measures"),
        ({"": {"DS": 1}}, "DS", "table: client 1 has no name; allowed: a name for each client"),
        (pd.DataFrame({"client": ["a", None], "DS": [1, 2]}), "DS", "table: client 2 has no name"),
        ({"a": 1, "b": 2}, "VP>DS", "table: got 1; allowed: a mapping of clients to measures"),
        (pd.Series([1, 2], index=["a", "a"]), "DS", "table: names client 'a' twice"),
        ([[1, 2]], "VP>>DS", "rule: got 'VP>>DS'; allowed: a name between two signs"),
        ({"a": {"DS": 1}}, "all", "rule: got 'all'; allowed: criteria, orders of them, online"),
        ([], "DS", "table: is empty"),
        ({}, "DS", "table: is empty"),
        (7, "DS", "table: got 7; allowed: a mapping of clients to measures"),
        ({"a": {"DS": 1}}, 7, "rule: got 7; allowed: words as in"),
        ({"a": {"DS": 1}}, "online(DS>EQ)", "rule: 'online(DS>EQ)' needs updates or rounds"),
        ({"a": {"DS": 1}}, "DS/max/rank", "rule: got 'DS/max/rank'; allowed: one of /share, /max, /rank"),
    ],
)
def test_what_cannot_be_weighed_is_one_line(table: Any, rule: Any, line: str) -> None:
    with pytest.raises(UserError) as found:
        steelyard.weigh(table, rule)
    assert str(found.value).startswith(line), found.value
    assert "\n" not in str(found.value)


def test_another_way_of_normalising_than_the_rules_is_refused() -> None:
    with pytest.raises(UserError, match="normalise: got rank with a rule that says /max"):
        steelyard.weigh(CLIENTS, "DS/max", "rank")
    with pytest.raises(UserError, match="normalise: got 'sum'; allowed: share, max, rank, None"):
        steelyard.weigh(CLIENTS, "DS", "sum")  # type: ignore[arg-type]


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, steelyard; steelyard.weigh([1, 2], 'DS'); print('torch' in sys.modules, 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
