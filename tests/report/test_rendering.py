"""Plain text that fits a terminal: columns in blocks, sentences broken between words."""

from __future__ import annotations

import csv
import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.report.rendering import Table, as_csv, as_html, as_text, render

TABLE = Table("Title", ("rule", "one", "two", "three"), (("fedavg", "1", "22", "333"),), "A note of several words.")


@pytest.mark.parametrize("width", [16, 20, 60])
def test_no_line_is_wider_than_the_terminal_and_no_cell_is_missing(width: int) -> None:
    text = render([TABLE], ["a sentence of many words"], "text", width)
    assert max(map(len, text.splitlines())) <= width
    for cell in ("one", "two", "three", "1", "22", "333"):
        assert text.split().count(cell) == 1


def test_each_block_begins_with_the_name_of_the_row() -> None:
    assert render([TABLE], [], "text", 16).split().count("fedavg") == 2
    assert render([TABLE], [], "text").split().count("fedavg") == 1


def test_markdown_is_never_broken() -> None:
    assert render([TABLE], ["x " * 50], "markdown", 16) == render([TABLE], ["x " * 50], "markdown")


CELLS = st.text(st.characters(codec="ascii", categories=("L", "N", "P", "Zs")), max_size=50)


@given(
    st.integers(1, 5).flatmap(lambda n: st.lists(st.tuples(*[CELLS] * n), min_size=2, max_size=5)), st.integers(20, 90)
)
def test_any_table_fits_and_keeps_its_letters(rows: list[tuple[str, ...]], width: int) -> None:
    table = Table("", rows[0], tuple(rows[1:]))
    text = as_text(table, width)
    assert all(len(line) <= width for line in text.splitlines())
    letters = "".join("".join(row) for row in rows)
    for letter in set(letters) - {" ", "-"}:
        assert text.count(letter) >= letters.count(letter)


def test_headings_are_broken_before_columns_are() -> None:
    table = Table("", ("rule", "accuracy on clean rows", "rounds until half"), (("DS", "1.00", "7"),))
    assert as_text(table, 24).splitlines()[1:4] == [
        "rule  accuracy  rounds",
        "      on clean   until",
        "          rows    half",
    ]


def test_html_escapes_every_text_and_marks_the_best_row() -> None:
    evil = "<script>&"
    text = as_html(Table(evil, (evil, evil), ((evil, "1"), ("b", "2")), evil, best=1))
    assert "<script>" not in text
    assert text.count("&lt;script&gt;&amp;") == 6
    assert "<tr><td>&lt;" in text
    assert "<tr class=best><td>b" in text


def test_csv_holds_no_formula_and_no_nan() -> None:
    text = as_csv(("rule", "=x"), [("=1+1", math.nan), ("a,b", 0.5), ("\x1b", None)])
    assert list(csv.reader(io.StringIO(text))) == [["rule", "'=x"], ["'=1+1", ""], ["a,b", "0.5"], ["\\x1b", ""]]
