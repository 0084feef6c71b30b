"""What the library says goes through the standard loggers: where it comes out, and in which form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit import named
from tests.warm import command_environment

START = "import logging, warnings\nfrom steelyard.base import logs\nlog = logs.logger('steelyard.here')\n"


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run lines in a process of their own: loggers belong to a process."""
    command = [sys.executable, "-c", START + script]
    return subprocess.run(command, capture_output=True, text=True, env=command_environment(**environment), check=False)


def test_what_a_command_in_this_process_asked_for_reaches_no_other_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_LOG_LEVEL", "warning")
    assert run("logs.show(); log.info('a step')").stderr == "steelyard: a step\n"


def test_a_process_that_a_command_started_says_as_much_and_into_the_same_file(tmp_path: Path) -> None:
    child = "from steelyard.base import logs; logs.show(); logs.logger('__main__').info('of the child')"
    done = run(
        f"import subprocess, sys; from pathlib import Path\nlogs.show('warning', Path('{tmp_path}/log'))\n"
        f'subprocess.run([sys.executable, "-c", """{child}"""], check=True)'
    )
    assert done.stderr == ""
    assert (tmp_path / "log").read_text().endswith("Z INFO steelyard.__main__: of the child\n")


@pytest.mark.parametrize(
    ("script", "lines"),
    named(
        [
            ("Python shows warnings and nothing else", "log.info('a step'); log.warning('look')", ["look"]),
            (
                "a program that sets up logging gets every message once",
                "logging.basicConfig(format='%(name)s|%(message)s', level='INFO'); log.info('a step')",
                ["steelyard.here|a step"],
            ),
            (
                "a message is one line that no terminal acts on",
                r"log.warning('two\nlines \x1b[2J and 100 %s')",
                ["two lines \\x1b[2J and 100 %s"],
            ),
            (
                "a warning once, an event each time",
                "logs.show()\nfor _ in range(3): log.warning('w'); log.error('e'); warnings.warn('of a library')",
                [f"steelyard: {line}" for line in ("w", "e", "warning: of a library", "e", "e")],
            ),
            (
                "a closed standard error stops nothing",
                "import sys; logs.show(); sys.stderr.close(); log.warning('x')",
                [],
            ),
            (
                "set up again",
                "own = logging.StreamHandler(); logging.getLogger('steelyard').addHandler(own)\n"
                "logs.show(); logs.show('debug'); logs.show(); log.warning('w')",
                ["steelyard: w", "w"],
            ),
        ]
    ),
)
def test_where_a_message_comes_out(script: str, lines: list[str]) -> None:
    done = run(script)
    assert (done.returncode, done.stdout) == (0, "")
    assert sorted(done.stderr.splitlines()) == sorted(lines)


@pytest.mark.parametrize(("level", "shown"), [("debug", "diwe"), ("warning", "we")])
def test_a_level_says_how_much_is_shown(level: str, shown: str) -> None:
    done = run(
        "logs.show(); log.debug('d'); log.info('i'); log.warning('w'); log.error('e')", STEELYARD_LOG_LEVEL=level
    )
    assert done.stderr.splitlines() == [f"steelyard: {letter}" for letter in shown]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_file_that_fills_up_is_left_in_one_line() -> None:
    done = run("from pathlib import Path; logs.show(file=Path('/dev/full')); log.info('a'); log.info('b')")
    before, left, after = done.stderr.splitlines()
    assert (before, after) == ("steelyard: a", "steelyard: b")
    assert left.startswith("steelyard: --log-file: /dev/full cannot be written")
