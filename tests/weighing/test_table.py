"""Weighing on paper: a CSV in, a document out, every fault with its row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steelyard.errors import UserError
from steelyard.weighing.measures import read_table
from steelyard.weighing.rule import WeighingSettings
from steelyard.weighing.table import RuleOptions, read_words, weigh, weigh_file

PLAIN: dict[str, Any] = {
    "score": "prioritized",
    "priority": None,
    "weights": None,
    "quantifier": None,
    "capacity": None,
    "power": None,
    "normalised": False,
}


def weighed(path: Path, *, normalised: bool, **options: Any) -> dict[str, Any]:
    how = "share" if normalised else None
    return dict(weigh_file(path, RuleOptions(**options), how).document())


def written(folder: Path, text: str) -> Path:
    path = folder / "clients.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_is_read_with_its_client_column_wherever_it_stands(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeffDS, Client ,LD\n3,ann ,yes\n\n 4 ,bob,FALSE\n5,cy,true\n6,di,no\n")
    found = read_table(path)
    assert (found.clients, found.criteria) == (("ann", "bob", "cy", "di"), ("DS", "LD"))
    assert found.values.tolist() == [[3, 1], [4, 0], [5, 1], [6, 0]]


def test_without_such_a_column_the_first_names_the_clients(tmp_path: Path) -> None:
    found = read_table(written(tmp_path, "name,DS\nann,3\n"))
    assert (found.clients, found.criteria, found.values.tolist()) == (("ann",), ("DS",), [[3.0]])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("client,DS\n", ": holds no table; allowed: a header with a client column and criteria, then a row per client"),
        (
            "client\nann\n",
            ": holds no table; allowed: a header with a client column and criteria, then a row per client",
        ),
        ("client,DS,DS\nann,1,2\n", ": header client,DS,DS; allowed: each column named, each name once"),
        ("client,DS,\nann,1,2\n", ": header client,DS,; allowed: each column named, each name once"),
        ("client,DS\nann,1\nbob,1,2\n", ", row 3: 3 cells; allowed: 2, as in the header"),
        ("client,DS\nann, much \n", ", row 2, DS: got 'much'; allowed: a number from 0 to 1e30, true or false"),
        ("client,DS\nann,-1\n", ", row 2, DS: got '-1'; allowed: a number from 0 to 1e30, true or false"),
        ("client,DS\nann,1\n ,2\n", ", row 3: the client has no name; allowed: a name for each client"),
        ("client,DS\nann,1\nann ,2\n", ", row 3: names client 'ann' twice; allowed: each client once"),
        (
            "client;DS\nann;1\n",
            ": the header 'client;DS' has no commas; allowed: commas between cells, a point in numbers (not the "
            "semicolons, tabs or decimal commas of some spreadsheets)",
        ),
        ("ann,1\nbob,2\n", ": the first line 'ann,1' holds numbers; allowed: a header of names"),
        ("client,DS\nann,1e31\n", ", row 2, DS: got '1e31'; allowed: a number from 0 to 1e30, true or false"),
        ("client,DS\nann,inf\n", ", row 2, DS: got 'inf'; allowed: a number from 0 to 1e30, true or false"),
    ],
)
def test_a_fault_is_named_with_its_row(tmp_path: Path, text: str, fault: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError) as found:
        read_table(path)
    assert str(found.value) == f"{path}{fault}"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError) as found:
        read_table(tmp_path / "none.csv")
    expected = "cannot be read: No such file or directory; allowed: a CSV with a header"
    assert str(found.value) == f"{tmp_path / 'none.csv'}: {expected}"


def test_scores_and_weights_of_the_papers_example(tmp_path: Path) -> None:
    path = written(tmp_path, "client,DS,CD,IS\nAlice,0.9,0.2,0.4\nBob,0.1,0.8,0.5\n")
    found = weighed(path, **{**PLAIN, "priority": "DS>IS>CD"})
    assert [row["client"] for row in found["clients"]] == ["Alice", "Bob"]
    assert [row["score"] for row in found["clients"]] == pytest.approx([1.332, 0.190])
    # The weights are written with six decimals.
    assert [row["weight"] for row in found["clients"]] == pytest.approx([0.875164, 0.124836], abs=5e-7)
    assert found["criteria"] == ["DS", "CD", "IS"]
    assert found["rule"] == "DS>IS>CD"
    assert found["flags"] == {"zero_criteria": [], "uniform": False}


@pytest.mark.parametrize(
    ("options", "scores"),
    [
        ({"score": "weighted-mean", "weights": "1, 3"}, [0.25, 0.5]),
        ({"score": "owa", "weights": "1,0"}, [1.0, 0.5]),
        ({"score": "owa", "quantifier": "all"}, [0.0, 0.5]),
        ({"score": "power", "power": 2.0}, [0.0, 0.0625]),
        ({"score": "mean"}, [0.5, 0.5]),
    ],
)
def test_every_option_reaches_the_rule(tmp_path: Path, options: dict[str, Any], scores: list[float]) -> None:
    found = weighed(written(tmp_path, "client,DS,LD\nann,1,0\nbob,0.5,0.5\n"), **{**PLAIN, **options})
    assert [row["score"] for row in found["clients"]] == pytest.approx(scores)


def test_a_capacity_is_read_from_its_file(tmp_path: Path) -> None:
    path = written(tmp_path, "client,DS,LD\nann,1,0\nbob,0.5,0.5\n")
    (tmp_path / "capacity.toml").write_text("[capacity]\nDS = 0.25\nLD = 0.5\n")
    found = weighed(path, **{**PLAIN, "score": "choquet", "capacity": tmp_path / "capacity.toml"})
    assert [row["score"] for row in found["clients"]] == pytest.approx([0.25, 0.5])
    with pytest.raises(UserError, match=r"^--capacity: .*none\.toml cannot be read: No such file or directory"):
        weighed(path, **{**PLAIN, "score": "choquet", "capacity": tmp_path / "none.toml"})


def test_values_as_they_are_lie_between_0_and_1(tmp_path: Path) -> None:
    path = written(tmp_path, "client,DS,LD\nann,30,0\nbob,10,0\n")
    found = weighed(path, **{**PLAIN, "normalised": True})
    assert [row["weight"] for row in found["clients"]] == [0.75, 0.25]
    assert found["flags"] == {"zero_criteria": ["LD"], "uniform": False}
    with pytest.raises(UserError) as fault:
        weighed(path, **PLAIN)
    assert str(fault.value) == "table: holds 30; allowed without normalising: values from 0 to 1"
    with pytest.raises(UserError, match=r"holds 1\.5; allowed without normalising: values from 0 to 1"):
        weighed(written(tmp_path, "client,DS\nann,1.5\nbob,0\n"), **PLAIN)
    ones = weighed(written(tmp_path, "client,DS\nann,1\nbob,0\n"), **PLAIN)
    assert [row["weight"] for row in ones["clients"]] == [1.0, 0.0]


def test_nobody_with_a_score_gives_uniform_weights(tmp_path: Path) -> None:
    found = weighed(written(tmp_path, "client,DS\nann,0\nbob,0\n"), **PLAIN)
    assert [row["weight"] for row in found["clients"]] == [0.5, 0.5]
    assert found["flags"]["uniform"] is True


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"score": "owa", "weights": "1,x"}, "--weights: got '1,x'; allowed: numbers with commas, such as 0.5,0.3,0.2"),
        ({"priority": "DS"}, "priority: got 'DS'; allowed: an order that names each of DS, LD once"),
    ],
)
def test_a_wrong_option_is_one_line(tmp_path: Path, options: dict[str, Any], line: str) -> None:
    path = written(tmp_path, "client,DS,LD\nann,1,0\nbob,0.5,0.5\n")
    with pytest.raises(UserError) as found:
        weighed(path, **{**PLAIN, **options})
    assert str(found.value) == line


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"client,DS\n\xff,1\n")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        read_table(tmp_path / "bytes")
    good = written(tmp_path, "client,DS\nann,1\n")
    with pytest.raises(UserError, match=r"--capacity: .*bytes is not UTF-8 text"):
        weighed(good, **{**PLAIN, "score": "choquet", "capacity": tmp_path / "bytes"})
    (tmp_path / "broken.toml").write_text("DS = ")
    with pytest.raises(UserError, match=r"broken\.toml"):
        weighed(good, **{**PLAIN, "score": "choquet", "capacity": tmp_path / "broken.toml"})


def test_a_quoted_cell_may_hold_a_line_break(tmp_path: Path) -> None:
    path = tmp_path / "quoted.csv"
    path.write_bytes(b'client,DS\r\n"an\r\nn",1\r\n')
    assert read_table(path).clients == ("an\r\nn",)


def test_values_are_numbers(tmp_path: Path) -> None:
    assert read_table(written(tmp_path, "client,DS\nann,1\n")).values.dtype == np.float64


def test_a_table_with_the_server_s_measures_knows_the_words_that_need_them(tmp_path: Path) -> None:
    for name in ("VP", "VE"):
        path = written(tmp_path, f"client,{name}\nann,0.5\nbob,1.0\n")
        with pytest.raises(UserError, match="needs updates or rounds") as found:
            weigh_file(path, "guarded")
        assert str(found.value) == (
            "rule: 'guarded' needs updates or rounds; allowed for a table: rules of measures alone"
        )
        # The cube of the one measure that the server took itself.
        settings = read_words("guarded", (name,))
        assert (settings.criteria, settings.score, settings.power) == ((name,), "power", 3.0)
    assert read_words("guarded", ("DS",)).criteria == ("TR",)
    assert read_words("guarded", ("VE", "VP")).criteria == ("VP",)
    assert read_words("guarded", None).criteria == ("TR",)


@pytest.mark.parametrize("word", ["fitted(DS)", "median(DS)", "online(DS>LD)", "server-only", "adafed-weights"])
def test_a_rule_that_needs_rounds_is_refused_by_its_name(tmp_path: Path, word: str) -> None:
    path = written(tmp_path, "client,DS,LD,VP\nann,0.5,1,1\nbob,1,1,1\n")
    if word == "adafed-weights":  # AdaFed's weights alone are a rule of measures
        assert weigh_file(path, word).criteria == ("VP",)
        word = "adafed"
    with pytest.raises(UserError) as found:
        weigh_file(path, word)
    assert str(found.value) == (f"rule: '{word}' needs updates or rounds; allowed for a table: rules of measures alone")


def test_what_a_document_and_a_print_hold(tmp_path: Path) -> None:
    path = written(tmp_path, "client,DS\na,1\nsomebody,2\nc,9\n")
    found = weigh_file(path, "capped(DS;bound=2)")
    document = found.document()
    assert document == {
        "clients": [
            {"client": "a", "score": 1 / 7, "weight": 1 / 7, "reason": ""},
            {"client": "somebody", "score": 2 / 7, "weight": 2 / 7, "reason": ""},
            {"client": "c", "score": 4 / 7, "weight": 4 / 7, "reason": "DS cut at the bound"},
        ],
        "criteria": ["DS"],
        "rule": "capped(DS;bound=2)",
        "flags": {"zero_criteria": [], "uniform": False},
    }
    assert repr(found).splitlines() == [
        "client    DS     score    weight",
        "a          1  0.142857  0.142857",
        "somebody   2  0.285714  0.285714",
        "c          9  0.571429  0.571429",
        "DS cut at the bound",
    ]


def test_a_column_that_the_rule_names_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UserError) as found:
        weigh({"a": {"DS": 1.0}}, WeighingSettings(criteria=("DS", "LD")))
    assert str(found.value) == "table: has no column 'LD'; allowed for this rule: DS, LD"
    assert weigh({"a": {"DS": 1.0}, "b": {"DS": 3.0}}, WeighingSettings(criteria=("EQ", "DS"))).values.tolist() == [
        [1.0, 1.0],
        [1.0, 3.0],
    ]


def test_a_measure_of_the_server_is_not_cut_at_the_bound() -> None:
    # MD is the server's, DS and an unknown column what clients say of themselves.
    table = {name: {"MD": value, "DS": value, "mine": value} for name, value in (("a", 1.0), ("b", 1.0), ("c", 9.0))}
    for column, weight in (("MD", 9 / 11), ("DS", 2 / 4), ("mine", 2 / 4)):
        assert weigh(table, f"capped({column};bound=2)").weights[2] == pytest.approx(weight)


def test_options_name_the_criteria_of_their_priority() -> None:
    assert RuleOptions(priority="LD > DS").named() == ["LD", "DS"]
    assert RuleOptions().named() == []
    assert RuleOptions().settings(["DS"], "max").normalise == "max"
    assert RuleOptions().settings(["DS"]).normalise == "share"
