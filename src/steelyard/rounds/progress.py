"""Progress while a run goes on: a bar in a terminal, plain lines elsewhere, always on standard error."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    # Only for annotations: tables show scores without waiting for torch.
    from steelyard.rounds.loop import Progress

PLAIN_SECONDS = 5.0


def show_score(value: float) -> str:
    """Write a score: an accuracy in per cent, an error (below 0 or above 1) as it is."""
    return f"{value:.2%}" if 0 <= value <= 1 else f"{value:.4g}"


@contextmanager
def show_progress(rounds: int) -> Generator[Progress]:
    """Show how far the rounds are and the current accuracy of each rule; yields the function that the loop calls."""
    if sys.stderr.isatty():
        with _bar(rounds) as report:
            yield report
    else:
        yield _plain(rounds)


def _known(value: float | None) -> bool:
    """Whether there is a figure: clients without test rows give none."""
    return value is not None and not math.isnan(value)


def _figures(accuracies: Mapping[str, float | None]) -> str:
    shown = [f"{name} {show_score(cast('float', value))}" for name, value in accuracies.items() if _known(value)]
    rest = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    return ", ".join(shown[:4]) + rest


@contextmanager
def _bar(rounds: int) -> Generator[Progress]:
    # For speed of start: a run without a terminal draws no bar.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("rounds"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("rounds", total=rounds, figures="")

        def report(round: int, accuracies: Mapping[str, float | None]) -> None:
            bar.update(task, completed=round, figures=_figures(accuracies))

        yield report


def _plain(rounds: int) -> Progress:
    """Return a reporter that prints a line now and then: often enough to see life, seldom enough for a log."""
    last = -PLAIN_SECONDS

    def report(round: int, accuracies: Mapping[str, float | None]) -> None:
        nonlocal last
        now = time.monotonic()
        if round == rounds or now - last >= PLAIN_SECONDS:
            last = now
            print(f"round {round}/{rounds}: {_figures(accuracies)}", file=sys.stderr, flush=True)

    return report
