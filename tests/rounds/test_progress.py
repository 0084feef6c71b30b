"""Progress on standard error: plain lines seldom enough for a log, a bar in a terminal."""

from __future__ import annotations

import io

import pytest

from steelyard.rounds import progress
from steelyard.rounds.progress import show_progress, show_score


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00%"), (1.0, "100.00%"), (0.12345, "12.35%"), (-3.14159, "-3.142"), (1.25, "1.25"), (-0.5, "-0.5")],
)
def test_scores_are_per_cent_and_errors_are_themselves(value: float, text: str) -> None:
    assert show_score(value) == text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_at_first_then_each_five_seconds_and_at_last(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with show_progress(9) as report:
        for round, seconds in [(0, 0.0), (1, 4.9), (2, 0.1), (3, 4.9), (8, 0.05), (9, 0.0)]:
            clock[0] += seconds
            report(round, {"DS": round / 10})
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["round 0/9: DS 0.00%", "round 2/9: DS 20.00%", "round 9/9: DS 90.00%"]


def test_the_first_line_comes_at_once_on_a_machine_that_just_started(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    clock[0] = 0.0
    with show_progress(9) as report:
        report(0, {"DS": 0.5})
    assert capsys.readouterr().err == "round 0/9: DS 50.00%\n"


def test_four_rules_are_shown_and_the_rest_counted(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(1) as report:
        report(1, {"a": 0.1, "b": None, "c": 0.2, "d": 0.3, "e": 0.4})
        report(1, dict.fromkeys("abcde", 0.5))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "round 1/1: a 10.00%, c 20.00%, d 30.00%, e 40.00%",
        "round 1/1: a 50.00%, b 50.00%, c 50.00%, d 50.00% and 1 more",
    ]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with show_progress(8) as report:
        report(3, {"DS": 0.25})
    shown = screen.getvalue()
    assert "rounds" in shown
    assert "3/8" in shown
    assert "DS 25.00%" in shown
    assert "round 3/8:" not in shown
