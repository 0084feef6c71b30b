"""The options of every command: how much is said, and a file that gets all of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import CommandLine
from tests.warm import warm_command

from steelyard.cli import federate, privacy
from steelyard.cli.main import command_line
from steelyard.errors import UserError
from steelyard.logs import LEVEL

SMALL = ("run", "quickstart", "--set", "rounds.count=1", "--set", "compute.engine=stacked", "--format", "json")
ONE_CLIENT = ("--set", "rounds.fraction=0.01", "--set", "rounds.min_clients=1")


def commands(found: Any) -> list[Any]:
    return [found, *(each for child in getattr(found, "commands", {}).values() for each in commands(child))]


def test_every_command_and_group_takes_them() -> None:
    for command in commands(command_line()):
        names = [name for option in command.params for name in option.opts]
        assert {"-v", "--verbose", "-q", "--quiet", "--log-file"} <= set(names), command.name
        assert len(names) == len(set(names)), command.name


@pytest.mark.parametrize("before", [True, False])
def test_quiet_leaves_warnings_and_the_answer(steelyard: CommandLine, before: bool) -> None:
    command = (*SMALL, *ONE_CLIENT)
    done = steelyard("--quiet", *command) if before else steelyard(*command, "-q")
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("steelyard: warning: round 1 of ")
    assert json.loads(done.stdout)["run"]


def test_verbose_names_the_steps_and_a_file_gets_them_with_their_times(steelyard: CommandLine, tmp_path: Path) -> None:
    done = steelyard(*SMALL, "-v", "--log-file", "log.txt")
    assert "steelyard: reading the data" in done.stderr.splitlines()
    assert json.loads(done.stdout)["run"]
    silent = steelyard(*SMALL, "-q", "--log-file", "log.txt")  # A file is added to, and gets all in either case.
    assert silent.stderr == ""
    lines = (tmp_path / "log.txt").read_text().splitlines()
    form = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (DEBUG|INFO|WARNING|ERROR) steelyard(\.\w+)+: \S.*"
    assert all(re.fullmatch(form, line) for line in lines)
    assert sum("steelyard.activity: reading the data" in line for line in lines) == 2
    assert sum("INFO steelyard.rounds.progress: round 1/1: " in line for line in lines) == 1


def test_an_error_is_in_the_file_too(steelyard: CommandLine, tmp_path: Path) -> None:
    assert steelyard("--log-file", "log.txt", "run", "nothing-like-it").returncode == 2
    assert "ERROR steelyard.cli.main: " in (tmp_path / "log.txt").read_text().splitlines()[-1]


def test_what_cannot_be_is_refused_in_one_line(refused: Callable[..., str], tmp_path: Path) -> None:
    assert refused("--quiet", "recipes", "--verbose") == (
        "steelyard: --verbose, --quiet: got both; allowed: one of them"
    )
    assert "--log-file: " in (line := refused("recipes", "--log-file", tmp_path))
    assert line.endswith("cannot be written (Is a directory); allowed: a file")
    assert refused("recipes", "--log-file", "no/where").endswith("(No such file or directory); allowed: a file")


def test_a_level_of_the_environment_that_is_none(tmp_path: Path) -> None:
    done = warm_command("recipes", folder=tmp_path, environment={"STEELYARD_LOG_LEVEL": "loud"})
    line = "steelyard: STEELYARD_LOG_LEVEL: got 'loud'; allowed: debug, info, warning\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_a_federation_on_this_machine_and_an_audit_are_quiet_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def run_local(*_: object, progress: bool, **more: object) -> Any:
        asked.append(progress)
        raise UserError("seen")

    def watching(on: bool = True) -> Any:
        asked.append(on)
        raise UserError("seen")

    monkeypatch.setenv(LEVEL, "warning")
    monkeypatch.setattr("steelyard.federate.local.run_local", run_local)
    monkeypatch.setattr("steelyard.cli.privacy.watching", watching)
    with pytest.raises(UserError, match="seen"):
        federate.local("quickstart")
    with pytest.raises(UserError, match="seen"):
        privacy.audit()
    assert asked == [False, False]
