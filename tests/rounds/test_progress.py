"""Progress on standard error: plain lines seldom enough for a log, a bar in a terminal, one line in a notebook."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from steelyard.base.logs import current, doing
from steelyard.rounds import progress
from steelyard.rounds.progress import (
    paused,
    show_duration,
    show_progress,
    show_score,
    shown_by_default,
    watching,
)


class Clock:
    """The time, and in the place of a watch's thread and its waiting: each look at the display is a second later."""

    def __init__(self) -> None:
        self.now, self.looks = 100.0, 0
        self.look: Callable[[], None] = lambda: None

    def goes_on(self, seconds: int) -> None:
        self.looks = seconds
        self.look()

    def wait(self, seconds: float) -> bool:
        if self.looks == 0:
            return True
        self.now += seconds
        self.looks -= 1
        return False

    def thread(self, target: Callable[[], None], **_: object) -> SimpleNamespace:
        self.look = target
        return SimpleNamespace(start=lambda: None, join=lambda: None)

    def event(self) -> SimpleNamespace:
        return SimpleNamespace(wait=self.wait, set=lambda: None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(progress, "threading", SimpleNamespace(Thread=made.thread, Event=made.event))
    return made


class Screen(io.StringIO):
    """A terminal, or a file."""

    def __init__(self, terminal: bool = True) -> None:
        super().__init__()
        self.terminal, self.flushed = terminal, 0

    def isatty(self) -> bool:
        return self.terminal

    def flush(self) -> None:
        self.flushed += 1


@pytest.fixture
def error(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Screen]:
    """Make standard error a terminal or a file."""

    def make(**how: bool) -> Screen:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setattr("sys.stderr", made := Screen(**how))
        return made

    return make


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (show_score, 0.12345, "12.35%"),
        (show_score, -3.14159, "-3.142"),
        (show_duration, 0.2, "1 s"),
        (show_duration, 89.4, "89 s"),
        (show_duration, 90, "2 min"),
        (show_duration, 5399, "90 min"),
        (show_duration, 5400, "1.5 h"),
        (show_duration, 1e6, "277.8 h"),
    ],
)
def test_scores_and_durations_have_the_unit_that_fits(show: Callable[[float], str], value: float, text: str) -> None:
    assert show(value) == text


@pytest.mark.parametrize(
    ("rounds", "percent", "reports", "lines"),
    [
        # At first, then each five seconds, and at last.
        (
            *(9, True),
            [(round, seconds, {"DS": round / 10}) for round, seconds in ((0, 0), (1, 4.9), (2, 0.1), (3, 4.9), (9, 0))],
            ["round 0/9: DS 0.00%", "round 2/9: DS 20.00%; about 1 s left", "round 9/9: DS 90.00%"],
        ),
        # Nobody is told of what is not known, nor of what does not fit the line.
        (
            *(1, True),
            [
                (1, 0, {"a": 0.1, "b": None, "c": float("nan"), "ε": 0.5}),
                (1, 0, dict.fromkeys("abcdefg", 0.5)),
            ],
            [
                "round 1/1: a 10.00%, ε 0.5",
                "round 1/1: a 50.00%, b 50.00%, c 50.00%, d 50.00%, e 50.00% and 2 more",
            ],
        ),
        (
            *(1, True),
            [(1, 0, {"fedavg#101": 0.1, "ε of fedavg#101": 1.25})],
            ["round 1/1: fedavg, seed 101: 10.00%; ε of fedavg, seed 101: 1.25"],
        ),
        (7, False, [(2, 0, {"rmse": 0.98765})], ["round 2/7: rmse 0.988"]),
        # The first round, which also sets up, says nothing of how long the others take.
        (
            *(100, False),
            [(0, 0, {}), (1, 90, {}), (2, 60, {}), (3, 30, {})],
            [
                *("round 0/100", "round 1/100", "round 2/100; about 1.6 h left"),
                "round 3/100; about 73 min left",
            ],
        ),
        # A run that goes on.
        (99, False, [(51, 0, {}), (52, 1, {}), (53, 4, {})], ["round 51/99", "round 53/99; about 2 min left"]),
    ],
)
def test_lines_of_rounds(
    clock: Clock,
    error: Callable[..., Screen],
    rounds: int,
    percent: bool,
    reports: list[tuple[int, float, dict]],
    lines: list[str],
) -> None:
    screen = error(terminal=False)
    clock.now = 0.0  # as on a machine that has just started
    with show_progress(rounds, percent) as report:
        for round, seconds, figures in reports:
            clock.now += seconds
            report(round, figures)
    assert screen.getvalue().splitlines() == lines
    assert screen.flushed >= len(lines)  # each is written through at once


# what is being done --------------------------------------------------------------------------------------------------


def test_what_is_being_done_is_told_from_the_widest_word_in() -> None:
    with doing("round 1"):
        outer = current()
        with doing("training"):
            inner = current()
    with pytest.raises(ValueError, match="x"), doing("round 2"):
        raise ValueError("x")
    assert (outer[0], inner[0]) == ("round 1", "round 1: training")
    assert inner[1] >= outer[1]
    assert current() is None


def test_silence_of_ten_seconds_is_broken(clock: Clock, error: Callable[..., Screen]) -> None:
    screen = error(terminal=False)
    with watching():
        clock.goes_on(30)  # nothing is being done
        with doing("reading the data"):
            for seconds in (9, 1, 9, 1):
                clock.goes_on(seconds)
        with show_progress(5) as report, doing("round 1/5"):
            report(0, {"DS": 0.5})
            for seconds in (9, 1):
                clock.goes_on(seconds)
        # The rounds are over, and silence counts anew; other work filled most of it.
        with doing("summing up"):
            clock.goes_on(9)
        with doing("writing"):
            clock.goes_on(1)
            clock.goes_on(10)
        with doing("starting"):
            with paused():  # a question is no silence
                clock.goes_on(1000)
            clock.goes_on(9)
            clock.goes_on(1)
    assert screen.getvalue().splitlines() == [
        "reading the data, 10 s so far",
        "reading the data, 20 s so far",
        "round 0/5: DS 50.00%",
        "round 1/5, 10 s so far",
        "writing",
        "writing, 11 s so far",
        "starting, 17 min so far",
    ]


def test_a_closed_standard_error_does_not_stop_the_run(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Closed())
    with watching(), doing("thinking"):
        clock.goes_on(20)


# terminals and notebooks ---------------------------------------------------------------------------------------------


def test_each_of_several_runs_gets_a_bar_and_what_comes_after_it_lines(
    clock: Clock, error: Callable[..., Screen]
) -> None:
    screen = error()
    assert shown_by_default()
    with watching():
        for rounds in (8, 9):
            with doing("round 4"), show_progress(rounds) as report:
                report(3, {"DS": rounds / 100})
        ended = len(screen.getvalue())
        with doing("summing up"):
            clock.goes_on(9)
            assert len(screen.getvalue()) == ended
            clock.goes_on(1)
    shown = screen.getvalue()
    for text in ("rounds", "3/8", "3/9", "DS 8.00%", "DS 9.00%", "round 4"):
        assert text in shown
    assert "round 3/8:" not in shown
    assert shown[ended:].startswith("summing up")


def seen(screen: Screen) -> list[str]:
    """The lines that a terminal shows after what was written to it, without those that are empty."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\n)", screen.getvalue()):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith("\x1b"):
            lines[row] += part.strip("\r")
    return [line.strip() for line in lines if line.strip()]


def test_a_bar_stays_once_its_rounds_began_and_makes_way_for_a_question(
    clock: Clock, error: Callable[..., Screen]
) -> None:
    screen = error()
    with watching(), doing("reading"), paused():
        assert seen(screen) == []
        screen.write("Go on? yes\n")
    assert seen(screen) == ["Go on? yes"]  # and no empty bar, where no round began
    with show_progress(8) as report:
        report(3, {"DS": 0.5})
    bar, figures = seen(screen)[1:]
    assert (bar.startswith("rounds"), " 3/8 " in bar, figures) == (True, True, "DS 50.00%")
    with show_progress(9):
        pass
    assert [" 0/9 " in line for line in seen(screen)] == [False, False, False, True]


def notebook(shown: list[str], kernel: object) -> SimpleNamespace:
    def display(bundle: dict[str, str], raw: bool, display_id: bool) -> SimpleNamespace:
        assert raw
        assert display_id
        shown.append(bundle["text/plain"])
        return SimpleNamespace(update=lambda bundle, raw: shown.append(f"again: {bundle['text/plain']}"))

    shell = SimpleNamespace(kernel=kernel)
    return SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=display))


def test_a_notebook_gets_one_line_that_changes_each_half_second(
    clock: Clock, error: Callable[..., Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, shown = error(terminal=False), list[str]()
    monkeypatch.setitem(sys.modules, "IPython", notebook([], kernel=None))
    assert not shown_by_default()  # a plain prompt
    monkeypatch.setitem(sys.modules, "IPython", notebook(shown, kernel=object()))
    assert shown_by_default()
    with show_progress(9) as report:
        for round in range(4):
            report(round, {"DS": 0.5})
            clock.now += 0.25
    assert shown == ["round 0/9: DS 50.00%", "again: round 2/9: DS 50.00%; about 2 s left"]
    assert screen.getvalue() == ""
