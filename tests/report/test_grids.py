"""Plain text that fits a terminal: columns in blocks, sentences broken between words."""

from __future__ import annotations

import pytest

from steelyard.report.grids import Grid, render

GRID = Grid("Title", ("rule", "one", "two", "three"), (("fedavg", "1", "22", "333"),), "A note of several words.")


@pytest.mark.parametrize("width", [16, 20, 60])
def test_no_line_is_wider_than_the_terminal_and_no_cell_is_missing(width: int) -> None:
    text = render([GRID], ["a sentence of many words"], "text", width)
    assert max(map(len, text.splitlines())) <= width
    for cell in ("one", "two", "three", "1", "22", "333"):
        assert text.split().count(cell) == 1


def test_each_block_begins_with_the_name_of_the_row() -> None:
    assert render([GRID], [], "text", 16).split().count("fedavg") == 2
    assert render([GRID], [], "text").split().count("fedavg") == 1


def test_markdown_is_never_broken() -> None:
    assert render([GRID], ["x " * 50], "markdown", 16) == render([GRID], ["x " * 50], "markdown")
