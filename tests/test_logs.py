"""What the library says goes through the standard loggers: where it comes out, and in which form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.warm import command_environment

START = "import logging, warnings\nfrom steelyard import logs\nlog = logs.logger('steelyard.here')\n"


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run lines in a process of their own: loggers belong to a process."""
    command = [sys.executable, "-c", START + script]
    return subprocess.run(command, capture_output=True, text=True, env=command_environment(**environment), check=False)


def test_what_a_command_in_this_process_asked_for_reaches_no_other_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_LOG_LEVEL", "warning")
    assert run("logs.show(); log.info('a step')").stderr == "steelyard: a step\n"


def test_without_any_set_up_python_shows_warnings_and_nothing_else() -> None:
    done = run("log.info('a step'); log.warning('look')")
    assert (done.stdout, done.stderr) == ("", "look\n")


def test_a_program_that_sets_up_logging_gets_every_message_once_by_the_name_of_its_module() -> None:
    done = run("logging.basicConfig(format='%(name)s|%(message)s', level='INFO'); log.info('a step')")
    assert done.stderr == "steelyard.here|a step\n"


def test_every_message_is_one_line_that_no_terminal_acts_on() -> None:
    done = run(r"log.warning('two\nlines \x1b[2J and 100 %s')")
    assert done.stderr == "two lines \\x1b[2J and 100 %s\n"


@pytest.mark.parametrize(
    ("level", "shown"), [("debug", ["d", "i", "w", "e"]), ("info", ["i", "w", "e"]), ("warning", ["w", "e"])]
)
def test_a_level_says_how_much_is_shown(level: str, shown: list[str]) -> None:
    done = run(
        "logs.show(); log.debug('d'); log.info('i'); log.warning('w'); log.error('e')", STEELYARD_LOG_LEVEL=level
    )
    assert done.stderr.splitlines() == [f"steelyard: {line}" for line in shown]


def test_a_warning_is_shown_once_an_event_each_time() -> None:
    done = run("logs.show()\nfor _ in range(3): log.warning('w'); log.error('e'); warnings.warn('of a library')")
    lines = [line.removeprefix("steelyard: ") for line in done.stderr.splitlines()]
    assert lines == ["w", "e", "warning: of a library", "e", "e"]


def test_a_process_that_a_command_started_says_as_much_and_into_the_same_file(tmp_path: Path) -> None:
    child = "from steelyard import logs; logs.show(); logs.logger('__main__').info('of the child')"
    done = run(
        f"import subprocess, sys; from pathlib import Path\nlogs.show('warning', Path('{tmp_path}/log'))\n"
        f'subprocess.run([sys.executable, "-c", """{child}"""], check=True)'
    )
    assert done.stderr == ""
    assert (tmp_path / "log").read_text().endswith("Z INFO steelyard.__main__: of the child\n")


def test_a_closed_standard_error_stops_nothing() -> None:
    done = run("import sys; logs.show(); sys.stderr.close(); log.warning('unread'); print('done')")
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_setting_up_again_neither_doubles_lines_nor_takes_away_what_the_program_added() -> None:
    done = run(
        "own = logging.StreamHandler(); logging.getLogger('steelyard').addHandler(own)\n"
        "logs.show(); logs.show('debug'); logs.show(); log.warning('w')"
    )
    assert sorted(done.stderr.splitlines()) == ["steelyard: w", "w"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_file_that_fills_up_is_left_in_one_line() -> None:
    done = run("from pathlib import Path; logs.show(file=Path('/dev/full')); log.info('a'); log.info('b')")
    left = (
        "steelyard: --log-file: /dev/full cannot be written ([Errno 28] No space left on device); going on without it"
    )
    assert done.stderr.splitlines() == ["steelyard: a", left, "steelyard: b"]
