"""Progress on standard error: plain lines seldom enough for a log, a bar in a terminal."""

from __future__ import annotations

import io
import sys
import time
from types import SimpleNamespace

import pytest

from steelyard.activity import current, doing
from steelyard.rounds import progress
from steelyard.rounds.progress import (
    Expectation,
    paused,
    show_duration,
    show_progress,
    show_score,
    shown_by_default,
    watching,
    weighed_one,
)


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


def test_a_rule_of_several_seeds_is_named_with_its_seed_in_words(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with show_progress(1) as report:
        report(1, {"fedavg#101": 0.1, "LD>DS#101": 0.2, "fedavg#102": 0.3, "ε of fedavg#101": 1.25})
    assert capsys.readouterr().err == (
        "round 1/1: fedavg, seed 101: 10.00%; LD>DS, seed 101: 20.00%; fedavg, seed 102: 30.00%; "
        "ε of fedavg, seed 101: 1.25\n"
    )


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


def test_each_of_several_runs_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with watching():
        for rounds in (8, 9):
            with show_progress(rounds) as report:
                report(3, {"DS": rounds / 100})
    shown = screen.getvalue()
    assert "3/8" in shown
    assert "3/9" in shown
    assert "DS 9.00%" in shown


# what is being done --------------------------------------------------------------------------------------------------


def test_what_is_being_done_is_told_from_the_widest_word_in() -> None:
    assert current() is None
    with doing("round 1"):
        outer = current()
        with doing("training"):
            inner = current()
    assert outer is not None
    assert inner is not None
    assert (outer[0], inner[0]) == ("round 1", "round 1: training")
    assert inner[1] >= outer[1]
    assert current() is None


def test_an_error_ends_what_was_being_done() -> None:
    with pytest.raises(ValueError, match="x"), doing("round 1"):
        raise ValueError("x")
    assert current() is None


def test_silence_of_ten_seconds_is_broken(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("steelyard.activity.time.monotonic", lambda: clock[0])
    with watching():
        watch = progress._watch
        assert watch is not None
        clock[0] += 30
        watch.display.beat(clock[0])  # nothing is being done
        with doing("reading the data"):
            for seconds in (9.9, 0.1, 5, 4.9, 0.1):
                clock[0] += seconds
                watch.display.beat(clock[0])
        with show_progress(5) as report, doing("round 1/5"):
            report(0, {"DS": 0.5})
            clock[0] += 9.9
            watch.display.beat(clock[0])
            clock[0] += 0.1
            watch.display.beat(clock[0])
            clock[0] += 100
            watch.display.beat(clock[0])
    assert capsys.readouterr().err.splitlines() == [
        "reading the data, 10 s so far",
        "reading the data, 20 s so far",
        "round 0/5: DS 50.00%",
        "round 1/5, 10 s so far",
        "round 1/5, 2 min so far",
    ]


def test_work_that_has_just_begun_after_a_silence_is_named_without_a_time(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with watching():
        watch = progress._watch
        assert watch is not None
        with doing("starting"):
            clock[0] += 9
            watch.display.beat(clock[0])
        with doing("summing up"):
            for seconds in (1, 9, 1):
                clock[0] += seconds
                watch.display.beat(clock[0])
    assert capsys.readouterr().err.splitlines() == ["summing up", "summing up, 11 s so far"]


def test_without_watching_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with watching(False), doing("reading the data"):
        assert progress._watch is None
    assert capsys.readouterr().err == ""


def test_a_real_silence_is_broken_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "BEAT_SECONDS", 0.5)
    with watching(), doing("thinking"):
        time.sleep(2.5)
    assert "thinking, " in capsys.readouterr().err


def test_a_closed_standard_error_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(progress, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr("sys.stderr", Closed())
    with watching(), doing("thinking"):
        time.sleep(1.5)


# how long it will take -----------------------------------------------------------------------------------------------


def test_time_left_leaves_the_first_round_out() -> None:
    expected = Expectation(10)
    # ten seconds for the first round, which also sets up, then two each
    found = [expected.left(round, now) for round, now in ((0, 0.0), (1, 10.0), (2, 12.0), (3, 14.0), (4, 16.0))]
    assert found == [None, None, None, pytest.approx(14), pytest.approx(12)]


def test_time_left_of_long_rounds_is_told_after_the_first() -> None:
    expected = Expectation(3)
    assert expected.left(0, 0.0) is None
    assert expected.left(1, 60.0) == pytest.approx(120)
    assert expected.left(2, 100.0) == pytest.approx(40)


def test_time_left_of_a_run_that_goes_on() -> None:
    expected = Expectation(100)
    found = [expected.left(round, now) for round, now in ((51, 0.0), (52, 1.0), (53, 2.0), (54, 3.0))]
    assert found == [None, None, None, pytest.approx(46)]


def test_lines_name_the_time_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(100) as report:
        for round in range(6):
            report(round, {"DS": 0.5})
            clock[0] += 60
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "round 0/100: DS 50.00%"
    assert lines[1] == "round 1/100: DS 50.00%; about 1.6 h left"
    assert lines[5] == "round 5/100: DS 50.00%; about 1.6 h left"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (89.4, "89 s"), (90, "2 min"), (600, "10 min"), (5400, "1.5 h"), (9000, "2.5 h")],
)
def test_durations_have_the_unit_that_fits(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text


# notebooks -----------------------------------------------------------------------------------------------------------


class Handle:
    def __init__(self, shown: list[str]) -> None:
        self.shown = shown

    def update(self, bundle: dict[str, str], raw: bool) -> None:
        assert raw
        self.shown.append(f"again: {bundle['text/plain']}")


def notebook(shown: list[str], kernel: object) -> SimpleNamespace:
    def display(bundle: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        shown.append(bundle["text/plain"])
        return Handle(shown)

    shell = SimpleNamespace(kernel=kernel)
    return SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=display))


def test_a_notebook_gets_one_line_that_changes(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    monkeypatch.setitem(sys.modules, "IPython", notebook(shown, kernel=object()))
    assert shown_by_default()
    with show_progress(2) as report:
        report(0, {"DS": 0.5})
        clock[0] += 1
        report(1, {"DS": 0.6})
    assert shown == ["round 0/2: DS 50.00%", "again: round 1/2: DS 60.00%"]
    assert capsys.readouterr().err == ""


def test_a_plain_prompt_or_script_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", notebook([], kernel=None))
    assert not shown_by_default()
    monkeypatch.setattr("sys.stderr", Terminal())
    assert shown_by_default()


def test_a_bar_says_what_is_being_done_and_leaves_nothing_behind_when_no_round_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with watching():
        with doing("reading [the] data"):
            time.sleep(0.5)
        shown = screen.getvalue()
    assert "reading [the] data" in shown
    # the last thing written takes the bar away
    assert screen.getvalue().rstrip().endswith(("\x1b[2K", "\x1b[?25h"))
    assert "\x1b[1A\x1b[2K" in screen.getvalue()[len(shown) :]


def test_nothing_moves_while_a_question_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with watching(), doing("starting"):
        with paused():
            before = screen.getvalue()
            time.sleep(0.4)
            assert screen.getvalue() == before
        with show_progress(4) as report:
            report(4, {"DS": 0.5})
    assert "4/4" in screen.getvalue()


def test_no_line_comes_while_a_question_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "BEAT_SECONDS", 0.2)
    with watching(), doing("starting"), paused():
        time.sleep(1.5)
    assert capsys.readouterr().err == ""


def test_a_question_without_progress_is_just_asked() -> None:
    with paused():
        assert progress._watch is None


def test_the_line_on_a_round_that_weighed_one_client() -> None:
    assert weighed_one("f", 3) == (
        "warning: round 3 of f weighed one client only: no rule can prefer one client to another there. "
        "Raise rounds.fraction or rounds.min_clients, unless this is meant. Said once."
    )


def test_every_line_is_written_through_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(io.StringIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

    screen = Counting()
    monkeypatch.setattr("sys.stderr", screen)
    progress._to_standard_error("x")
    assert (screen.getvalue(), screen.flushed) == ("x\n", 1)


def test_a_pause_is_no_silence(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.activity.time.monotonic", lambda: clock[0])
    written: list[str] = []
    lines = progress._Lines(written.append)
    with doing("starting"):
        lines.pause()
        clock[0] += 1000
        lines.beat(clock[0])
        assert written == []
        lines.go_on()
        clock[0] += 9.9
        lines.beat(clock[0])
        assert written == []
        clock[0] += 0.1
        lines.beat(clock[0])
        assert written == ["starting, 17 min so far"]
        clock[0] += 9
        lines.end()  # the rounds are over, and silence counts anew
        clock[0] += 9
        lines.beat(clock[0])
        assert len(written) == 1


def test_lines_before_the_rounds_begin_and_without_figures(clock: list[float]) -> None:
    written: list[str] = []
    lines = progress._Lines(written.append)
    lines.begin(3)
    lines.report(0, {"DS": float("nan"), "MD": None})
    clock[0] += 5
    lines.report(1, {"ε": 0.5, "DS": 0.25})
    lines.begin(7, percent=False)
    clock[0] += 5
    lines.report(2, {"rmse": 0.98765})
    assert written == ["round 0/3", "round 1/3: ε 0.5, DS 25.00%", "round 2/7: rmse 0.988"]


def test_a_notebook_changes_its_line_each_half_second(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setitem(sys.modules, "IPython", notebook(shown, kernel=object()))
    with show_progress(9) as report:
        for round in range(4):
            report(round, {"DS": 0.5})
            clock[0] += 0.25
    assert shown == ["round 0/9: DS 50.00%", "again: round 2/9: DS 50.00%"]


def test_a_bar_by_its_parts(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "100")
    bar = progress._Bar()
    try:
        (task,) = bar._bar.tasks
        assert (task.total, task.completed, task.fields) == (None, 0, {"figures": ""})
        assert bar._bar.console.stderr
        bar.begin(8, percent=False)
        bar.report(3, {"rmse": 0.5, "ε": 2.0})
        assert (task.total, task.completed, task.fields) == (8, 3, {"figures": "rmse 0.5, ε 2"})
        with doing("round 4/8"):
            page = Console(width=100, file=io.StringIO())
            for part in bar._bar.get_renderables():
                page.print(part)
        assert isinstance(page.file, io.StringIO)
        first, *below = page.file.getvalue().splitlines()
        assert first.startswith("rounds ━")
        assert first.index(" 3/8 ") == len("rounds ") + 30  # the bar's width
        assert first.rstrip().endswith("0:00:00 -:--:--")
        assert below == ["rmse 0.5, ε 2", "round 4/8"]
        with doing("x" * 99):
            _, figures, line = bar._bar.get_renderables()
        assert (figures.plain, line.plain, line.no_wrap, line.overflow) == (below[0], "x" * 99, True, "ellipsis")
        assert len(list(bar._bar.get_renderables())) == 2  # nothing is being done
        bar.pause()
        assert bar._bar.live.transient
        assert not bar._bar.live.is_started
        bar.go_on()
        assert bar._bar.live.is_started
        bar.beat(clock[0])  # a bar moves by itself
        bar.end()
        assert not bar._bar.live.transient  # rounds had begun: their bar stays
        after = bar._after
        bar.end()
        bar.pause()
        bar.go_on()
        assert bar._after is after
        assert not bar._bar.live.is_started
        shown = len(screen.getvalue())
        with doing("summing up"):
            bar.beat(clock[0] + 9.9)
            assert len(screen.getvalue()) == shown
            bar.beat(clock[0] + 10)
        assert screen.getvalue()[shown:].startswith("summing up")
    finally:
        bar._bar.stop()


def test_the_thread_that_looks_ends_with_the_watch(capsys: pytest.CaptureFixture[str]) -> None:
    with watching():
        watch = progress._watch
        assert watch is not None
        assert (watch._thread.name, watch._thread.daemon, watch._thread.is_alive()) == (
            "steelyard-progress",
            True,
            True,
        )
        with watching():  # within another there is but one
            assert progress._watch is watch
        assert progress._watch is watch
    assert progress._watch is None
    assert not watch._thread.is_alive()
