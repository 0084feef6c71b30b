"""A split drawn in letters: how many rows each client has, and of which classes, for a terminal of any width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from steelyard.data.dataset import Population
from steelyard.report.view import sampled

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
