"""One reader for delimited files: what divides cells, which bytes are text, one line for what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.warm import ROOT

from steelyard.data.delimited import read_cells, separator_of
from steelyard.errors import UserError
from steelyard.recommend.reading import read, read_columns

APART = {
    "src/steelyard/data/facts.py",  # a few lines about clients, read with the settings: pandas would slow the start
    "src/steelyard/rounds/selecting.py",  # who is there when, read with the settings likewise
    "src/steelyard/adapters/importing.py",  # a log of rounds, line by line and named by line, or JSON lines
    "src/steelyard/weighing/measures.py",  # a room below data: clients and criteria to weigh on paper
}


def test_no_other_file_parses_tables() -> None:
    calls = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "src").rglob("*.py")
        if re.search(r"\.read_csv\(|csv\.(reader|DictReader)\(", path.read_text())
    }
    assert calls - APART == {"src/steelyard/data/delimited.py"}


@pytest.mark.parametrize(
    ("first", "name", "expected"),
    [
        ("1::2::3", "a.dat", "::"),
        ("a\tb,c", "a.tsv", "\t"),
        ("1|Toy Story, the film|x|", "u.item", "|"),
        ("id,genre|genre|genre", "a.csv", ","),
        ("a|b|c", "a.csv", "|"),
        ("a;b,c;d", "a.txt", ";"),
        ("alone", "a.csv", None),
    ],
)
def test_the_sign_between_cells(first: str, name: str, expected: str | None) -> None:
    assert separator_of(first, Path(name)) == expected


CELL = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Z"), exclude_characters='"'), min_size=1)


@given(st.lists(st.lists(CELL, min_size=3, max_size=3), min_size=1, max_size=6))
def test_cells_come_back_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]]) -> None:
    path = tmp_path_factory.mktemp("cells") / "cells.tsv"
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    assert read_cells(path, "cells", "\t").to_numpy().tolist() == rows


def test_a_line_of_another_length_and_an_empty_line_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.tsv"
    path.write_text("user\titem\n1\t2\n1\t2\t3\n")
    with pytest.raises(UserError, match=r"bad\.tsv: cannot be read as a table \(Expected 2 fields in line 3, saw 3\)"):
        read(path)
    path.write_text("user\titem\n1\t2\n\n1\t3\n")
    with pytest.raises(UserError, match=r"bad\.tsv: line 3: user is ''; allowed: a value"):
        read(path)


def test_quotes_and_latin_letters_of_item_tables(tmp_path: Path) -> None:
    path = tmp_path / "items.csv"
    path.write_bytes('item,title\n1,"Amélie, the film"\n'.encode("latin-1"))
    assert read_columns(path, {"item": "item", "title": "title"}) == {"item": ["1"], "title": ["Amélie, the film"]}
