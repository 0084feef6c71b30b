"""A table of ready-made cells, written as plain text, Markdown or LaTeX."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from steelyard.errors import printable

Style = Literal["text", "markdown", "latex"]
_LATEX = {
    "\\": r"\textbackslash{}",
    "%": r"\%",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "^": r"\^{}",
    "~": r"\~{}",
    ">": r"$\succ$",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
}


@dataclass(frozen=True)
class Grid:
    """A titled table: the first column names the row, the others are aligned to the right."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def render(grids: Sequence[Grid], sentences: Sequence[str], style: Style, width: int | None = None) -> str:
    """Write tables and sentences as one document; use it for what people read or put into a paper.

    `width` is that of a terminal: plain text is then broken between columns and words, nothing else is.
    """
    writer = {"text": lambda grid: _text(grid, width), "markdown": _markdown, "latex": _latex}[style]
    parts = [writer(_plain(grid)) for grid in grids]
    if sentences:
        parts.append(_list([*map(printable, sentences)], style, width if style == "text" else None))
    return "\n\n".join(parts) + "\n"


def _plain(grid: Grid) -> Grid:
    """Return a table whose texts no terminal acts on: names of rules come from databases that anybody may have made."""
    rows = tuple(tuple(map(printable, row)) for row in grid.rows)
    return Grid(printable(grid.title), tuple(map(printable, grid.headings)), rows, printable(grid.note))


def _list(sentences: Sequence[str], style: Style, width: int | None) -> str:
    if style == "latex":
        items = "\n".join(f"\\item {_escape(sentence)}" for sentence in sentences)
        return f"\\begin{{itemize}}\n{items}\n\\end{{itemize}}"
    return "\n".join(_wrapped(f"- {sentence}", width, "  ") for sentence in sentences)


def _wrapped(text: str, width: int | None, indent: str = "") -> str:
    if width is None:
        return text
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _text(grid: Grid, width: int | None) -> str:
    table = [grid.headings, *grid.rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(grid.headings))]
    parts = [_wrapped(grid.title, width)]
    for columns in _blocks(widths, width):
        chosen = [widths[column] for column in columns]
        lines = ["  ".join(_aligned(tuple(row[c] for c in columns), chosen)).rstrip() for row in table]
        rule = "-" * max(map(len, lines))
        parts += [rule, lines[0], rule, *lines[1:], rule]
    return "\n".join([*parts, _wrapped(grid.note, width)] if grid.note else parts)


def _blocks(widths: Sequence[int], width: int | None) -> list[list[int]]:
    """Return the columns in blocks that fit the width, one below the other; each begins with the first column."""
    blocks: list[list[int]] = []
    used = 0
    for column in range(1, len(widths)):
        if not blocks or (width is not None and used + 2 + widths[column] > width):
            blocks.append([0])
            used = widths[0]
        blocks[-1].append(column)
        used += 2 + widths[column]
    return blocks or [[0]]


def _aligned(row: tuple[str, ...], widths: list[int]) -> list[str]:
    return [
        cell.ljust(width) if column == 0 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def _markdown(grid: Grid) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    marks = ["---", *["---:"] * (len(grid.headings) - 1)]
    lines = [f"**{grid.title}**", "", line(grid.headings), line(marks), *(line(row) for row in grid.rows)]
    return "\n".join([*lines, "", grid.note] if grid.note else lines)


def _latex(grid: Grid) -> str:
    def line(cells: Sequence[str]) -> str:
        return " & ".join(_escape(cell) for cell in cells) + r" \\"

    columns = "l" + "r" * (len(grid.headings) - 1)
    caption = _escape(" ".join(part for part in (f"{grid.title}.", grid.note) if part))
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            line(grid.headings),
            r"\midrule",
            *(line(row) for row in grid.rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _escape(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
