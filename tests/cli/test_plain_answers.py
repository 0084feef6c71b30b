"""What people see: help, completion, narrow terminals, names with markup, a stop by Ctrl-C, clients without tests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import CommandLine
from tests.warm import WarmProcess, command_environment, warm_command

QUICK = ["--set", "rounds.count=1", "--set", "compute.engine=stacked", "--set", "model.name=logistic"]
TABLE = "client,[/b]DS,\x1b[31mLD\n[/b]ann,.9,.2\n\x1b[31mbob,.1,.8\n"


def test_arguments_have_their_help(steelyard: CommandLine) -> None:
    assert "Name of a recipe, or path of a TOML file." in steelyard("run", "--help").stdout
    assert "Folder of a run" in steelyard("resume", "--help").stdout


@pytest.mark.parametrize("arguments", ["weigh clients.csv", "recipes", "criteria"])
def test_light_commands_do_not_wait_for_torch(arguments: str, tmp_path: Path) -> None:
    (tmp_path / "clients.csv").write_text("client,DS\nA,1\n")
    code = (
        "import sys; from steelyard.cli.main import main\n"
        f"sys.argv = ['steelyard', *{arguments.split()!r}]\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert ended.code == 0\n"
        "print([name for name in ('torch', 'pandas', 'flwr', 'sklearn', 'scipy') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=command_environment(), cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "expected"), [("run qui", "quickstart"), ("rec", "recipes"), ("compare ada", "adafed-1")]
)
def test_bash_completes_commands_and_recipes(words: str, expected: str, tmp_path: Path) -> None:
    line = f"steelyard {words}"
    asked = {"_STEELYARD_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "steelyard"],
        env={**command_environment(), **asked},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert expected in done.stdout.split()


def test_the_completion_script_is_shown(tmp_path: Path) -> None:
    asked = {"_STEELYARD_COMPLETE": "source_bash"}
    done = subprocess.run(
        [sys.executable, "-m", "steelyard"],
        env={**command_environment(), **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "complete -o default -F _steelyard_completion steelyard" in done.stdout
    assert (
        "--show-completion"
        in subprocess.run(
            [sys.executable, "-m", "steelyard", "--help"],
            env=command_environment(),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )


@pytest.mark.parametrize("arguments", ["criteria", "recipes", "models"])
def test_lists_fit_narrow_terminals(arguments: str, tmp_path: Path) -> None:
    done = warm_command(arguments, folder=tmp_path, environment=command_environment(COLUMNS="60"))
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 60


def test_names_are_printed_as_they_are(steelyard: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "clients.csv").write_text(TABLE)
    shown = steelyard("weigh", "clients.csv").stdout
    assert "[/b]ann" in shown
    assert "\\x1b[31mbob" in shown
    assert "\x1b" not in shown


def test_rules_owners_and_folders_with_markup(steelyard: CommandLine, tmp_path: Path) -> None:
    rows = [f"{i / 7:.3f},{i % 2},{('[/b]ann', '[bold]bob', chr(27) + '[31mcy')[i % 3]}" for i in range(60)]
    (tmp_path / "d.csv").write_text("\n".join(["a,target,own", *rows]) + "\n")
    experiment = (
        'name = "t"\n[data]\nsource = "csv"\npath = "d.csv"\nlabels = "target"\nowner = "own"\n'
        '[partition]\nscheme = "natural"\n[weighing]\nname = "[/i]rule"\n[rounds]\ncount = 2\nfraction = 1.0\n'
        '[model]\nname = "logistic"\n[compute]\nengine = "loop"\n'
    )
    (tmp_path / "e.toml").write_text(experiment)
    done = steelyard("run", "e.toml", "--out", "[/b]out")
    assert done.returncode == 0, done.stderr
    for name in ("[/b]ann", "[bold]bob", "\\x1b[31mcy", "[/i]rule", "[/b]out"):
        assert name in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert "[/i]rule" in steelyard("table", "[/b]out").stdout
    again = steelyard("weigh", "[/b]out", "--score", "mean", "--criteria", "DS")
    assert again.returncode == 0, again.stderr
    for name in ("[/b]ann", "[bold]bob", "\\x1b[31mcy", "[/i]rule"):
        assert name in again.stdout
    assert "\x1b" not in again.stdout


def test_a_misspelt_option_reads_as_a_sentence(steelyard: CommandLine) -> None:
    told = steelyard("resume", "x", "--quit").stderr
    assert told.endswith("? see `steelyard resume --help`\n")


def test_without_test_rows_no_accuracy_is_shown(steelyard: CommandLine, tmp_path: Path) -> None:
    arguments = ["run", "quickstart", *QUICK, "--set", "partition.test=none", "--out", "o"]
    done = steelyard(*arguments)
    assert done.returncode == 0, done.stderr
    assert "accuracy on the clients" not in done.stdout
    assert "no accuracy is known" in done.stdout
    assert "0.00%" not in done.stderr
    document = json.loads(steelyard("resume", "o", "--format", "json").stdout)
    assert {rule["accuracy"] for rule in document["rules"]} == {None}


def test_a_stop_names_the_folder_and_the_command(tmp_path: Path) -> None:
    command = ("run", "quickstart", *QUICK, "--set", "rounds.count=100000", "--out", "a run")
    started = WarmProcess(*command, folder=tmp_path, printed=tmp_path / "printed")
    database = tmp_path / "a run" / "run.sqlite"
    for _ in range(600):
        if database.is_file():
            break
        time.sleep(0.1)
    time.sleep(1.0)
    started.send_signal(signal.SIGINT)
    try:
        assert started.wait(60) == 130
    finally:
        started.kill()
    printed = (tmp_path / "printed").read_text(encoding="utf-8")
    last = printed.strip().splitlines()[-1]
    assert last == "steelyard: stopped; what is done is in a run; go on with: steelyard resume 'a run'"
