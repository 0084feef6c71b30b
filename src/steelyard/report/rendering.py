"""One table of ready-made cells, and its renderers: plain text, Markdown, LaTeX, CSV; HTML from templates; letters.

Everything that is shown as a table goes through here, so that no name out of a run's database reaches a terminal, a
page or a spreadsheet as anything but text.
"""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from steelyard.base.errors import no_formula, printable
from steelyard.runs.columns import sampled

if TYPE_CHECKING:
    from jinja2 import Environment

    from steelyard.data.dataset import Population

Style = Literal["text", "markdown", "latex"]
BARS = "▁▂▃▄▅▆▇█"
LEAST_TEXT = 20
"""Letters of a line of text in a column."""
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
class Table:
    """A titled table: the first columns name the row, the others are aligned to the right."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    names: int = 1
    """How many columns name the row; they are aligned to the left. Where all do, the last one is folded to fit."""
    best: int | None = None
    """The row that a page marks as the best."""


class Copied(str):
    """A line that is copied, such as a command or a path: no terminal breaks it."""


Block = Table | str | tuple[str, ...]
"""What a document is made of: a table, a paragraph, a list of sentences."""


def render(parts: Iterable[Block], style: Style = "text", width: int | None = None) -> str:
    """Write tables, paragraphs and lists as one document; use it for what people read or put into a paper.

    `width` is that of a terminal: plain text is then broken between columns and words, nothing else is.
    """
    shown: list[str] = []
    before: Block | None = None
    for part in parts:
        lines = style == "text" and isinstance(part, str) and isinstance(before, str)
        shown += [] if before is None else ["\n" if lines else "\n\n"]
        shown.append(_written(part, style, width))
        before = part
    return "".join([*shown, "\n"])


def _written(part: Block, style: Style, width: int | None) -> str:
    if isinstance(part, Table):
        return {"markdown": as_markdown, "latex": as_latex}[style](part) if style != "text" else as_text(part, width)
    if isinstance(part, tuple):
        return _list([*map(printable, part)], style, width if style == "text" else None)
    return paragraph(part, style, None if isinstance(part, Copied) else width)


def _plain(table: Table) -> Table:
    """Return a table whose texts no terminal acts on: names of rules come from databases that anybody may have made."""
    rows = tuple(tuple(map(printable, row)) for row in table.rows)
    headings = tuple(map(printable, table.headings))
    return Table(printable(table.title), headings, rows, printable(table.note), table.names)


def _list(sentences: Sequence[str], style: Style, width: int | None) -> str:
    if style == "latex":
        items = "\n".join(f"\\item {_escape(sentence)}" for sentence in sentences)
        return f"\\begin{{itemize}}\n{items}\n\\end{{itemize}}"
    return "\n".join(wrapped(f"- {sentence}", width, "  ") for sentence in sentences)


def paragraph(text: str, style: Style, width: int | None = None) -> str:
    """Write a paragraph as plain text, Markdown or LaTeX; plain text is broken to the width, where one is given."""
    return (
        _escape(printable(text)) if style == "latex" else wrapped(printable(text), width if style == "text" else None)
    )


def wrapped(text: str, width: int | None, indent: str = "") -> str:
    """Return a text broken between words to a terminal's width, later lines indented; as it is where there is none."""
    if width is None:
        return text
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def as_text(table: Table, width: int | None = None) -> str:
    """Write a table as plain text; one too wide is broken into titled blocks of columns, each with the first."""
    table = _plain(table)
    lines = [table.headings, *table.rows]
    widths = _widths(table, width)
    parts = [wrapped(table.title, width)] if table.title else []
    for number, columns in enumerate(_blocks(widths, width)):
        parts += ["", wrapped(f"{table.title or table.headings[0][:width]} (continued)", width)] if number else []
        folded = [_folded(row, table.names, columns, widths) for row in lines]
        rule = "-" * max(len(line) for row in folded for line in row)
        parts += [rule, *folded[0], rule, *(line for row in folded[1:] for line in row), rule]
    return "\n".join([*parts, wrapped(table.note, width)] if table.note else parts)


def _widths(table: Table, width: int | None) -> list[int]:
    """Return the widths of columns: whole cells, or where that is too much headings broken between words, or less."""
    cells = [max([len(row[column]) for row in table.rows], default=0) for column in range(len(table.headings))]
    whole = [max(cell, len(heading)) for cell, heading in zip(cells, table.headings, strict=True)]
    if width is None or sum(whole) + 2 * (len(whole) - 1) <= width:
        return whole
    words = [max(map(len, heading.split()), default=0) for heading in table.headings]
    least = [max(cell, word) for cell, word in zip(cells, words, strict=True)]
    left = width - sum(least[:-1]) - 2 * (len(least) - 1)
    if table.names == len(least) and left >= LEAST_TEXT:
        return [*least[:-1], left]
    # A column and the first beside it always fit: very long names and reasons are folded.
    first = min(least[0], max(width - 2 - max(least[1:], default=0), width // 2))
    return [first, *(min(column, width - 2 - first) for column in least[1:])]


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


def _folded(row: tuple[str, ...], names: int, columns: Sequence[int], widths: Sequence[int]) -> list[str]:
    """Return the lines of a row, as many as its longest cell needs."""
    cells = [textwrap.wrap(row[c], max(1, widths[c])) if len(row[c]) > widths[c] else [row[c]] for c in columns]
    lines: list[str] = []
    for parts in zip_longest(*cells, fillvalue=""):
        pairs = zip(columns, parts, strict=True)
        padded = (part.ljust(widths[c]) if c < names else part.rjust(widths[c]) for c, part in pairs)
        lines.append("  ".join(padded).rstrip())
    return lines


def as_markdown(table: Table) -> str:
    """Write a table as Markdown."""
    table = _plain(table)

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    marks = ["---" if column < table.names else "---:" for column in range(len(table.headings))]
    lines = [f"**{table.title}**", "", line(table.headings), line(marks), *(line(row) for row in table.rows)]
    return "\n".join([*lines, "", table.note] if table.note else lines)


def as_latex(table: Table) -> str:
    """Write a table as LaTeX, with its title and note as the caption."""
    table = _plain(table)

    def line(cells: Sequence[str]) -> str:
        return " & ".join(_escape(cell) for cell in cells) + r" \\"

    columns = "".join("l" if column < table.names else "r" for column in range(len(table.headings)))
    caption = _escape(" ".join(part for part in (f"{table.title}.", table.note) if part))
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            line(table.headings),
            r"\midrule",
            *(line(row) for row in table.rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _escape(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def asset(name: str) -> str:
    """Return a style sheet or a script of the report."""
    return files("steelyard.report").joinpath("assets", name).read_text(encoding="utf-8")


def filled(template: str, **context: object) -> str:
    """Fill a file of `templates`: what is put in is escaped, and what it lacks is an error."""
    return _templates().get_template(template).render(context).lstrip()


@cache
def _templates() -> Environment:
    # For speed of start: only what writes HTML needs it.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("steelyard.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    cast("dict[str, Any]", made.globals)["asset"] = asset
    return made


def as_csv(headings: Sequence[str], rows: Iterable[Sequence[str | float | None]]) -> str:
    """Write values as CSV: what is not known is empty, and no text is a formula to a spreadsheet."""

    def cell(value: str | float | None) -> str | float:
        if isinstance(value, str):
            return no_formula(printable(value))
        return "" if value is None or math.isnan(value) else value

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([cell(heading) for heading in headings])
    writer.writerows([cell(value) for value in row] for row in rows)
    return out.getvalue()


def tables_csv(parts: Sequence[Block]) -> str:
    """Return the tables of a document as CSV, a blank line between two; of one without tables its lines."""
    tables = [as_csv(part.headings, part.rows) for part in parts if isinstance(part, Table)]
    return "\n".join(tables or [as_csv(("line",), [(part,) for part in parts if isinstance(part, str)])])


def spark(values: Sequence[float], low: float, high: float, width: int = 24) -> str:
    """Draw a curve in one line of block characters, all curves of a table on the same scale."""
    width = min(width, len(values))
    indices = [round(i * (len(values) - 1) / max(1, width - 1)) for i in range(width)]
    return bars([values[index] for index in indices], low, high)


def bars(values: Sequence[float], low: float, high: float) -> str:
    """Draw each value as one letter, a bar whose height says where it lies between low and high."""
    span = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int(len(BARS) * (value - low) / span))] for value in values)


# A split drawn in letters: how many rows each client has, and of which classes, for a terminal of any width.


MOST_LINES = 40
"""Clients that get a line; of more, some from the biggest to the smallest."""
SHADES = "·░▒▓█"
"""No rows of a class; then up to a quarter, a half, three quarters and all of the most that any client has of one."""
_BAR, _LONGEST = 10, 40
"""How long a bar is beside classes, and without."""


@dataclass(frozen=True)
class Split:
    """How rows are shared out: the training rows and test rows of each client, and its training rows by class."""

    sizes: Mapping[str, int]
    tests: Mapping[str, int]
    labels: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    """Empty where there are no classes."""
    server: int = 0
    """Rows that the server holds."""
    flaws: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    notes: Sequence[str] = ()


def split_of(population: Population) -> Split:
    """Return how a population shares its rows out; use it before anything is trained."""
    held = np.union1d(population.server, population.report)
    return Split(
        {rows.client: len(rows.train) for rows in population.clients},
        {rows.client: len(rows.test) for rows in population.clients},
        population.label_counts() if population.dataset.classes else {},
        len(held),
        {name: tuple(words) for name, words in population.flaws.items()},
        population.notes,
    )


def draw_letters(split: Split, width: int) -> list[str]:
    """Draw a split in lines of at most `width`, one for each client: its rows, a bar, and a letter for each class."""
    names = list(split.sizes)
    if len(names) > MOST_LINES:
        names.sort(key=lambda name: -split.sizes[name])
    shown = [names[index] for index in sampled(len(names), MOST_LINES).tolist()]
    marked = {name: f"{name}*" if name in split.flaws else name for name in shown}
    column = max(6, min(max(map(len, marked.values())), width // 3))
    number = max(4, *(len(f"{split.sizes[name]:,}") for name in shown))
    left = width - column - number - 2
    classes = max((len(counts) for counts in split.labels.values()), default=0)
    bar = min(left, _LONGEST) if not classes else _BAR if left - classes > _BAR + 1 else 0
    together = -(-classes // max(1, left - bar)) or 1
    biggest = max(split.sizes.values())
    most = max((max(_bundled(counts, together)) for counts in split.labels.values()), default=0)
    space = " " * (bar + 1 if bar else 0)
    lines = [f"{'client':<{column}} {'rows':>{number}} {space}{_classes_head(classes, together)}".rstrip()]
    for name in shown:
        size = split.sizes[name]
        drawn = "█" * max(int(size > 0), round(bar * size / biggest)) if bar else ""
        counts = _bundled(split.labels.get(name, ()), together)
        cells = "".join(SHADES[min(4, 1 + 4 * count // max(most, 1)) if count else 0] for count in counts)
        lines.append(f"{_cut(marked[name], column):<{column}} {size:>{number},} {drawn:<{len(space)}}{cells}".rstrip())
    return lines


def account(split: Split) -> list[str]:
    """Say in sentences what the drawing leaves out: totals, tests, the server, flaws, clients without a line."""
    sizes, tests = split.sizes.values(), sum(split.tests.values())
    found = [f"{len(split.sizes):,} clients, {min(sizes):,} to {max(sizes):,} training rows, {sum(sizes):,} in all"]
    if split.labels:
        have = [sum(count > 0 for count in counts) for counts in split.labels.values()]
        spread = f"{min(have)} to {max(have)}" if min(have) < max(have) else f"{min(have)}"
        found.append(f"classes of a client: {spread} of {len(next(iter(split.labels.values())))}")
    found.append(f"test rows at the clients: {tests:,}; at the server: {split.server:,}")
    if len(split.sizes) > MOST_LINES:
        found.append(f"drawn: {MOST_LINES} of them, from the biggest to the smallest, evenly spaced")
    if split.flaws:
        found.append(f"* has a flaw: {len(split.flaws)} of {len(split.sizes)} clients")
    return [*found, *split.notes]


def _bundled(counts: Sequence[int], together: int) -> list[int]:
    """Add up so many neighbouring classes each, where a line has no room for all."""
    return [sum(counts[begin : begin + together]) for begin in range(0, len(counts), together)]


def _classes_head(classes: int, together: int) -> str:
    if not classes:
        return ""
    return f"class 0 to {classes - 1}" + (f", {together} each" if together > 1 else "")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
