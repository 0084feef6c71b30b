"""A table of ready-made cells, written as plain text, Markdown or LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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


def render(grids: Sequence[Grid], sentences: Sequence[str], style: Style) -> str:
    """Write tables and sentences as one document; use it for what people read or put into a paper."""
    writer = {"text": _text, "markdown": _markdown, "latex": _latex}[style]
    parts = [writer(grid) for grid in grids]
    if sentences:
        parts.append(_list(sentences, style))
    return "\n\n".join(parts) + "\n"


def _list(sentences: Sequence[str], style: Style) -> str:
    if style == "latex":
        items = "\n".join(f"\\item {_escape(sentence)}" for sentence in sentences)
        return f"\\begin{{itemize}}\n{items}\n\\end{{itemize}}"
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _text(grid: Grid) -> str:
    table = [grid.headings, *grid.rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(grid.headings))]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in table]
    rule = "-" * max(map(len, lines))
    parts = [grid.title, rule, lines[0], rule, *lines[1:], rule]
    return "\n".join([*parts, grid.note] if grid.note else parts)


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
