"""Progress while a run goes on: a bar in a terminal, one line in a notebook, plain lines elsewhere, on standard error.

Whatever takes long is named after ten seconds of silence, before the rounds, between them and after.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from steelyard.base.errors import in_words
from steelyard.base.logs import current, logger

if TYPE_CHECKING:
    # Only for annotations: tables show scores without waiting for torch, and lines need no bar.
    from rich.progress import Progress as Bar

    from steelyard.rounds.loop import Progress

_log = logger(__name__)

PLAIN_SECONDS = 5.0
"""At most so often a round is a line."""
BEAT_SECONDS = 10.0
"""After so long a silence a line says what is being done."""
SPENT = "ε"
"""Figures under names that begin so are privacy spent, not scores."""


RAISE = "Raise rounds.fraction or rounds.min_clients, unless this is meant."
"""What to do about rounds that weigh one client."""


def weighed_one(federation: str, round: int) -> str:
    """Return the line on the first round that weighed one client."""
    return (
        f"warning: round {round} of {in_words(federation)} weighted one client only: no rule can prefer one client "
        f"to another there. {RAISE} Said once."
    )


def show_score(value: float) -> str:
    """Write a score: an accuracy in per cent, an error (below 0 or above 1) as it is."""
    return f"{value:.2%}" if 0 <= value <= 1 else f"{value:.4g}"


def show_duration(seconds: float) -> str:
    """Write a duration in the unit that fits: 40 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def shown_by_default() -> bool:
    """Whether somebody watches: in a notebook or at a terminal."""
    return _notebook() is not None or sys.stderr.isatty()


class _Display:
    """Lines now and then: often enough to see life, seldom enough for a log. With a bar of rich's that instead.

    A bar is a line again once it has ended; what comes after it is told by lines.
    """

    def __init__(self, write: Callable[[str], None], seconds: float = PLAIN_SECONDS, *, bar: bool = False) -> None:
        self._write, self._seconds, self._draws = write, seconds, bar
        self._percent, self._last, self._round_last = True, time.monotonic(), float("-inf")
        self._bar, self._drawn = _bar(drawn=bar), bar

    def begin(self, rounds: int, percent: bool = True) -> None:
        if not self._drawn:  # it may be the next of several runs, such as a scene of an arena
            self._bar, self._drawn = _bar(drawn=self._draws), self._draws
        self._percent = percent
        self._bar.update(_TASK, total=rounds)

    def report(self, round: int, accuracies: Mapping[str, float | None]) -> None:
        now, figures, task = time.monotonic(), _figures(accuracies, self._percent), self._bar.tasks[_TASK]
        self._bar.update(_TASK, completed=round, figures=figures)
        if not self._drawn and (task.finished or now - self._round_last >= self._seconds):
            self._last = self._round_last = now
            rest = f"; about {show_duration(task.time_remaining)} left" if task.time_remaining else ""
            self._write(f"round {round}/{task.total}{f': {figures}' if figures else ''}{rest}")

    def beat(self, now: float) -> None:
        doing = current()
        if doing is None:
            self._last = max(self._last, now)  # while nothing is done there is nothing to be silent about
        if doing is None or self._drawn or now - self._last < BEAT_SECONDS:
            return
        self._last = now
        what, since = doing
        # Other work may have filled most of the silence: then how long this has taken says nothing yet.
        taken = f", {show_duration(now - since)} so far" if round(now - since, 1) >= BEAT_SECONDS else ""
        self._write(f"{what}{taken}")

    def pause(self) -> None:
        self._last = float("inf")
        if self._drawn:
            # Questions come before the rounds: what is taken away holds nothing yet.
            self._bar.live.transient = True
            self._bar.stop()

    def go_on(self) -> None:
        self._last = time.monotonic()
        if self._drawn:
            self._bar = _bar(drawn=True)  # the old one would wipe out the answer when it is drawn again

    def end(self) -> None:
        self._last = time.monotonic()
        if self._drawn:
            # What ends before its rounds begin, such as a refusal, leaves no empty bar behind.
            self._bar.live.transient = self._bar.tasks[_TASK].total is None
            self._bar.stop()
        self._drawn = False


_TASK: Any = 0
"""The one task of a bar."""


def _bar(*, drawn: bool) -> Bar:
    """Return a bar that has been started; it goes on moving by itself, and also says what is being done.

    One that is not drawn still knows how much time is left.
    """
    # For speed of start: tables show scores without it.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as TimeLeftColumn
    from rich.text import Text

    class Lines(Progress):
        """The bar and below it, cut to the terminal's width, what is reached and what is being done."""

        def get_renderables(self) -> Iterable[Any]:
            yield self.make_tasks_table(self.tasks)
            doing = current()
            for line in (*(task.fields["figures"] for task in self.tasks), "" if doing is None else doing[0]):
                if line:
                    yield Text(line, no_wrap=True, overflow="ellipsis")

    columns = (TextColumn("rounds"), BarColumn(bar_width=30), MofNCompleteColumn())
    made = Lines(
        *columns,
        TimeElapsedColumn(),
        TimeLeftColumn(),
        console=Console(stderr=True),
        # All rounds but the first, which also sets up; by default those of the last 30 seconds, which may be none.
        speed_estimate_period=math.inf,
        get_time=time.monotonic,
        disable=not drawn,
    )
    made.add_task("rounds", total=None, figures="")
    made.start()
    return made


class _Watch:
    """The display of this process, and the thread that looks whether it has been silent for long."""

    def __init__(self, display: _Display) -> None:
        self.display = display
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="steelyard-progress", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(1.0):
            try:
                self.display.beat(time.monotonic())
            except (OSError, ValueError):
                # Standard error has been closed: nobody watches any more, and the run goes on.
                return

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.display.end()


_watch: _Watch | None = None


@contextmanager
def watching(on: bool = True) -> Generator[None]:
    """Say what goes on inside whenever it is silent for long; use it around set-up, rounds and summing up together."""
    global _watch
    if not on or _watch is not None:
        yield
        return
    _watch = _Watch(_display())
    try:
        yield
    finally:
        closing, _watch = _watch, None
        closing.close()


@contextmanager
def paused() -> Generator[None]:
    """Show nothing inside; use it around a question to the user, which a moving bar would write over."""
    display = None if _watch is None else _watch.display
    if display is not None:
        display.pause()
    try:
        yield
    finally:
        if display is not None:
            display.go_on()


@contextmanager
def show_progress(rounds: int, percent: bool = True) -> Generator[Progress]:
    """Show how far the rounds are and the current score of each rule; yields the function that the loop calls.

    `percent`: scores are accuracies, shown in per cent; those of recommenders and regressions are not.
    """
    with watching():
        assert _watch is not None
        display = _watch.display
        display.begin(rounds, percent)

        def report(round: int, accuracies: Mapping[str, float | None]) -> None:
            display.report(round, accuracies)
            # For a log: what the display shows in its own way is not shown twice.
            figures = _figures(accuracies, percent)
            _log.info(f"round {round}/{rounds}{f': {figures}' if figures else ''}")

        try:
            yield report
        finally:
            display.end()


def _display() -> _Display:
    if write := _notebook():
        return _Display(write, seconds=0.5)
    return _Display(_to_standard_error, bar=sys.stderr.isatty())


def _to_standard_error(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _notebook() -> Callable[[str], None] | None:
    """Return what writes a line of a notebook over and over; None outside of one."""
    # Whoever runs in a notebook has IPython loaded; nobody else should wait for it.
    ipython: Any = sys.modules.get("IPython")
    if ipython is None or getattr(ipython.get_ipython(), "kernel", None) is None:
        return None
    show: Any = ipython.display.display
    handle: Any = None

    def write(line: str) -> None:
        nonlocal handle
        bundle = {"text/plain": line}
        if handle is None:
            handle = show(bundle, raw=True, display_id=True)
        else:
            handle.update(bundle, raw=True)

    return write


ROOM = 56
"""Letters of figures in one line."""


def _figures(accuracies: Mapping[str, float | None], percent: bool = True) -> str:
    # Clients without test rows give no figure.
    known = {name: value for name, value in accuracies.items() if value is not None and not math.isnan(value)}
    # Of several seeds a name has a comma itself: "fedavg, seed 101".
    is_, and_ = (": ", "; ") if any("#" in name for name in known) else (" ", ", ")
    shown = [
        f"{in_words(name)}{is_}{show_score(value) if percent and not name.startswith(SPENT) else f'{value:.3g}'}"
        for name, value in known.items()
    ]
    # With the round before it and the time left behind, a line fits 80 columns.
    kept = next((count for count in range(len(shown), 1, -1) if len(and_.join(shown[:count])) <= ROOM), 1)
    rest = f" and {len(shown) - kept} more" if len(shown) > kept else ""
    return and_.join(shown[:kept]) + rest
