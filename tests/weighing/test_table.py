"""Weighing on paper: tables in every form that people have them, a document out, every fault with its row."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.kit import assert_refused
from tests.warm import command_environment

import steelyard
from steelyard.weighing.rule import WeighingSettings
from steelyard.weighing.table import read_table, read_words, weigh

CLIENTS = {"ann": {"quality": 0.5, "DS": 300}, "bob": {"quality": 0.9, "DS": 100}}


FORMS: dict[str, Any] = {
    "by client": CLIENTS,
    "columns": {"client": ["ann", "bob"], "quality": [0.5, 0.9], "DS": [300, 100]},
    "rows": [{"client": name, **row} for name, row in CLIENTS.items()],
    "a frame": pd.DataFrame({"Client": ["ann", "bob"], "quality": [0.5, 0.9], "DS": [300, 100]}),
    "a frame by index": pd.DataFrame(CLIENTS).T,
    "a frame of another library": SimpleNamespace(columns=["quality", "DS"], to_dict=lambda: CLIENTS),
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
    assert found.clients == steelyard.weigh({"quality": [5, 9]}, "quality").clients == ("0", "1")
    assert found.weights == pytest.approx([0.4375, 0.5625])
    path = written(tmp_path, "client,quality,DS\nann,0.5,300\nbob,0.9,100\n")
    assert steelyard.weigh(path, "quality>DS").weights == pytest.approx([0.4375, 0.5625])
    for table in ({"ann": 300, "bob": 100}, pd.Series({"ann": 300, "bob": 100})):
        found = steelyard.weigh(table, "size")
        assert (found.clients, found.criteria, found.weights.tolist()) == (("ann", "bob"), ("size",), [0.75, 0.25])


def test_words_that_the_rule_says_itself() -> None:
    for best in (steelyard.weigh(CLIENTS, "quality/max"), steelyard.weigh(CLIENTS, "quality", "max")):
        assert best.scores == pytest.approx([5 / 9, 1])
        assert set(best.reasons) == {""}
    assert steelyard.weigh(CLIENTS, "").criteria == ("quality", "DS")
    assert steelyard.weigh(CLIENTS, WeighingSettings(criteria=("DS",))).weights.tolist() == [0.75, 0.25]
    assert steelyard.weigh({"a": {"x": 0.2}, "b": {"x": 0.3}}, "x", None).scores.tolist() == [0.2, 0.3]


def test_a_capacity_comes_from_its_file(tmp_path: Path) -> None:
    path, capacity = tmp_path / "worth.toml", {"quality": 0.4, "DS": 0.3, "quality,DS": 1.0}
    path.write_text("".join(f'"{names}" = {worth}\n' for names, worth in capacity.items()), encoding="utf-8")
    wanted, word = (
        WeighingSettings(criteria=("quality", "DS"), score="choquet", capacity=capacity),
        f"choquet(quality,DS;{path})",
    )
    for rule in (wanted, word):
        assert steelyard.weigh(CLIENTS, rule).scores == pytest.approx([5 / 14 + 0.3 * 11 / 28, 1 / 4 + 0.4 * 11 / 28])
    path.write_text("quality =", encoding="utf-8")
    assert_refused(lambda: steelyard.weigh(CLIENTS, word), path)
    assert_refused(lambda: steelyard.weigh(CLIENTS, "choquet(quality,DS;none.toml)"), "rule", "none.toml")


def test_reasons_say_what_was_made_up_for() -> None:
    found = steelyard.weigh([1, 2, 9], "capped(x;bound=2;max_shares=1.2)")
    assert found.weights == pytest.approx([0.2, 0.4, 0.4])
    assert found.reasons == ("", "", "x cut at the bound, capped")
    nothing = steelyard.weigh({"a": {"x": 0}, "b": {"x": 0}}, "x", None)
    assert (nothing.uniform, set(nothing.reasons)) == (True, {"all scores are 0: equal weights"})


@pytest.mark.parametrize(
    ("table", "rule", "parts"),
    [
        ({"ann": {"DS": float("nan")}}, "DS", ("client 'ann', DS", "nan", "1e30")),
        ({"a": {"DS": 1}, "b": {}}, "DS", ("client 'b', DS", "nan")),
        ([[1, 2], [3, 4]], "DS", ("(2, 2)", "(2, 1)")),
        ({"a": {"DS": 1}, "b": {"DS": 1, "LD": 1}}, "DS", ("client 'a', LD", "nan")),
        (np.array([[1j]]), "DS", ("client '0', DS",)),
        ({"client": ["a", None], "DS": [1, 2]}, "DS", ("row 2", "no name")),
        (pd.DataFrame({"client": ["a", None], "DS": [1, 2]}), "DS", ("row 2", "no name")),
        ({"client": ["a"], "DS": [1, 2]}, "DS", ("different lengths", "client 1, DS 2")),
        ([], "DS", ("is empty",)),
        (7, "DS", ("got 7",)),
        ({"a": {"DS": 1}}, 7, ("got 7",)),
    ],
)
def test_what_cannot_be_weighed_is_one_line(table: Any, rule: Any, parts: tuple[Any, ...]) -> None:
    assert_refused(lambda: steelyard.weigh(table, rule), *parts)


def test_another_way_of_normalising_than_the_rules_is_refused() -> None:
    assert_refused(lambda: steelyard.weigh(CLIENTS, "DS/max", "rank"), "normalise", "rank", "/max")
    assert steelyard.weigh({"a": {"x": 1e30}}, "x").weights.tolist() == [1.0]
    assert_refused(lambda: steelyard.weigh(CLIENTS, "DS", "sum"), "normalise", "'sum'")  # type: ignore[arg-type]


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    """Criteria are listed and clients weighed on paper without waiting for torch."""
    path = written(tmp_path, "client,DS\nann,1\n")
    modules = ("messages", "data", "weighing.rule", "weighing.table", "cli.printing")
    heavy = {"torch", "scipy", "pandas", "sklearn", "flwr"}
    text = "import sys, steelyard; " + "".join(f"import steelyard.{name}; " for name in modules)
    text += f"steelyard.weigh({str(path)!r}, 'DS'); print({heavy} & set(sys.modules))"
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, env=command_environment(), check=True, timeout=120)
    assert done.stdout == "set()\n"


def weighed(path: Path, *, normalised: bool = False) -> dict[str, Any]:
    return dict(weigh(path, "", "share" if normalised else None).document())


def written(folder: Path, text: str) -> Path:
    path = folder / "clients.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_is_read_with_its_client_column_wherever_it_stands(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeffDS, Client ,LD\n3,ann ,yes\n\n 4 ,bob,FALSE\n5,cy,true\n6,di,no\n")
    found = read_table(path)
    assert (found.clients, found.criteria) == (("ann", "bob", "cy", "di"), ("DS", "LD"))
    assert found.values.tolist() == [[3, 1], [4, 0], [5, 1], [6, 0]]
    assert found.values.dtype == np.float64
    # Without such a column the first names the clients; a quoted cell may hold a line break.
    found = read_table(written(tmp_path, "name,DS\nann,3\n"))
    assert (found.clients, found.criteria, found.values.tolist()) == (("ann",), ("DS",), [[3.0]])
    path.write_bytes(b'client,DS\r\n"an\r\nn",1\r\n')
    assert read_table(path).clients == ("an\r\nn",)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("client,DS\n", ("holds no table",)),
        ("client\nann\n", ("holds no table",)),
        ("client;DS\nann;1\n", ("has no commas",)),
        ("client,DS,DS\nann,1,2\n", ("header client,DS,DS",)),
        ("client,DS\nann,1\nbob,1,2\n", (", line 3", "3 cells", 2)),
        ("client,DS\nann,1\n ,2\n", (", line 3", "no name")),
        ("client,DS\n\nann,1\n\nbob,much\n", (", line 5, client 'bob', DS", "'much'")),
        ("client,DS\nann,1\nann ,2\n", (", line 3, client 'ann'", "twice")),
        ("ann,1\nbob,2\n", ("'ann,1'", "a header")),
    ],
)
def test_a_fault_is_named_with_its_row(tmp_path: Path, text: str, parts: tuple[Any, ...]) -> None:
    path = tmp_path / "clients.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert_refused(lambda: read_table(path), path, *parts)
    assert_refused(lambda: read_table(tmp_path / "none.csv"), "none.csv", "No such file")


def test_values_as_they_are_lie_between_0_and_1(tmp_path: Path) -> None:
    path = written(tmp_path, "client,DS,LD\nann,30,0\nbob,10,0\n")
    found = weighed(path, normalised=True)
    assert [row["weight"] for row in found["clients"]] == [0.75, 0.25]
    assert found["flags"] == {"zero_criteria": ["LD"], "uniform": False}
    assert_refused(lambda: weighed(path), "table", 30, "0 to 1")
    none = weighed(written(tmp_path, "client,DS\nann,0\nbob,0\n"))
    assert [row["weight"] for row in none["clients"]] == [0.5, 0.5]
    assert none["flags"]["uniform"] is True


def test_rules_that_need_more_than_measures_are_refused_by_their_name(tmp_path: Path) -> None:
    path = written(tmp_path, "client,DS,LD,VP\nann,0.5,1,1\nbob,1,1,1\n")
    for word in ("fitted(DS)", "median(DS)", "online(DS>LD)", "server-only", "adafed"):
        assert_refused(lambda w=word: weigh(path, w), "rule", f"'{word}'", "updates or rounds")
    assert weigh(path, "adafed-weights").criteria == ("VP",)
    assert [read_words(*given).criteria for given in (("EQ", ("LD",)), ("", None))] == [("EQ",), ("DS",)]
    # The cube of the one measure that the server took itself.
    for columns, criterion in ((("VE",), "VE"), (("VE", "VP"), "VP"), (None, "TR")):
        settings = read_words("guarded", columns)
        assert settings.criteria == (criterion,)
        assert criterion == "TR" or (settings.score, settings.power) == ("power", 3.0)


def test_what_a_document_and_a_print_hold(tmp_path: Path) -> None:
    path = written(tmp_path, "client,DS\na,1\nsomebody,2\nc,9\n")
    found = weigh(path, "capped(DS;bound=2)")
    assert found.document() == {
        "clients": [
            {"client": "a", "score": 1 / 7, "weight": 1 / 7, "reason": ""},
            {"client": "somebody", "score": 2 / 7, "weight": 2 / 7, "reason": ""},
            {"client": "c", "score": 4 / 7, "weight": 4 / 7, "reason": "DS cut at the bound"},
        ],
        "criteria": ["DS"],
        "rule": "capped(DS;bound=2)",
        "flags": {"zero_criteria": [], "uniform": False},
    }
    *_, last, note = repr(found).splitlines()
    assert (last.split(), note) == (["c", "9", "0.571429", "0.571429"], "DS cut at the bound")


def test_a_column_that_the_rule_names_must_be_there() -> None:
    lacking, held = (WeighingSettings(criteria=names) for names in (("DS", "LD"), ("EQ", "DS")))
    assert_refused(lambda: weigh({"a": {"DS": 1.0}}, lacking), "table", "'LD'")
    assert weigh({"a": {"DS": 3.0}}, held).values.tolist() == [[1.0, 3.0]]
