"""A list of runs on the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.text import Text

from steelyard.base.errors import without_controls
from steelyard.base.files import in_bytes
from steelyard.base.measures import measure_of
from steelyard.report.rendering import Table, as_text, bars
from steelyard.runs.glance import Glance

STYLES = {"running": "bold cyan", "finished": "green", "stopped": "yellow", "killed": "red", "unreadable": "red"}
"""How states look; each is also a word, so that nothing hangs on colour."""


def show_runs(folder: Path, found: Sequence[Glance]) -> None:
    """Print the runs of a folder, newest first, as a table that fits the terminal."""
    console = Console()
    if not found:
        console.print(nothing(folder), highlight=False, markup=False, soft_wrap=True)
        return
    rows = tuple(
        (
            *(without_controls(run.name, "�"), run.state, f"{run.round}/{'?' if run.rounds is None else run.rounds}"),
            *(score_of(run), age(run.changed), in_bytes(run.bytes)),
        )
        for run in found
    )
    table = Table("", ("run", "state", "rounds", "accuracy", "age", "size"), rows, names=2)
    text = Text(as_text(table, console.width))
    for state, style in STYLES.items():
        text.highlight_regex(rf"(?<= ){state}(?= )", style)
    console.print(text)
    for run in found:
        if run.problem:
            console.print(plain(run.problem), style="red", soft_wrap=True)
        if run.ended:
            console.print(plain(f"{run.name}: {run.ended}"), style="yellow", soft_wrap=True)


def nothing(folder: Path) -> str:
    """Return what to say where there is no run yet."""
    return f"no run in {folder} yet; start one: steelyard run quickstart --out {folder}/first"


def plain(text: str) -> Text:
    """Return text from a file as it is: no markup, no control characters."""
    return Text(without_controls(text, "�"))


def state_of(run: Glance) -> Text:
    """Return the state of a run as a coloured word."""
    return Text(run.state, style=STYLES.get(run.state, "dim"))


def score_of(run: Glance) -> str:
    """Return the main rule's accuracy, named where it is something else than accuracy."""
    if run.accuracy is None:
        return "–"
    measure = measure_of(run.measure)
    return measure.show(run.accuracy) if measure.percent else f"{measure.show(run.accuracy)} {measure.name}"


def age(seconds: float) -> str:
    """Write how long ago something was, short: "40 s", "5 min", "3 h", "2 d"."""
    passed = max(0.0, time.time() - seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= length:
            return f"{int(passed // length)} {unit}"
    return f"{int(passed)} s"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a curve in one line of at most `width` letters: means of equal parts, from the lowest to the highest."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [len(values) * part // count for part in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    return bars(means, min(means), max(means))
