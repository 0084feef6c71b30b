"""The real command line, in a subprocess."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import CommandLine
from tests.warm import command_environment

from steelyard.cli import main

Refused = Callable[..., str]
TABLE = "client,DS,CD,IS\nAlice,.9,.2,.4\nBob,.1,.8,.5\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "clients.csv"
    path.write_text(TABLE)
    return path


def weighed(steelyard: CommandLine, *arguments: str | Path) -> dict[str, tuple[float, float]]:
    done = steelyard("weigh", *arguments, "--normalise", "none", "--format", "json")
    assert done.returncode == 0, done.stderr
    return {row["client"]: (row["score"], row["weight"]) for row in json.loads(done.stdout)["clients"]}


def test_weigh_prints_the_papers_numbers(steelyard: CommandLine, table: Path) -> None:
    found = weighed(steelyard, table, "--score", "prioritized", "--priority", "DS>CD>IS")
    assert list(found) == ["Alice", "Bob"]
    assert found["Alice"] == pytest.approx((1.152, 0.83965), abs=5e-6)  # the paper has five digits
    found = weighed(steelyard, table, "--score", "mean")
    assert found["Alice"] == pytest.approx((0.5, 15 / 29))  # 0.5 / (0.5 + 0.466667)


def test_weigh_knows_every_score(steelyard: CommandLine, table: Path, tmp_path: Path) -> None:
    capacity = tmp_path / "capacity.toml"
    capacity.write_text('DS=0.5\nCD=0.3\nIS=0.2\n"DS,CD"=0.8\n"DS,IS"=0.7\n"CD,IS"=0.5\n')
    weighted = weighed(steelyard, table, "--score", "weighted-mean", "--weights", "0.5,0.3,0.2")
    assert weighted["Alice"][0] == pytest.approx(0.59)
    choquet = weighed(steelyard, table, "--score", "choquet", "--capacity", capacity)
    assert choquet["Alice"] == pytest.approx(weighted["Alice"])
    assert choquet["Bob"] == pytest.approx(weighted["Bob"])
    owa = weighed(steelyard, table, "--score", "owa", "--quantifier", "all")
    assert owa["Alice"][0] == pytest.approx(0.2)
    power = weighed(steelyard, table, "--score", "power", "--power", "2")
    assert power["Alice"][0] == pytest.approx((0.9 * 0.2 * 0.4) ** 2)
    assert "0.839650" in steelyard("weigh", table, "--priority", "DS>CD>IS", "--normalise", "none").stdout


def test_weigh_takes_the_words_of_a_comparison(steelyard: CommandLine, table: Path) -> None:
    assert weighed(steelyard, table, "--by", "DS>CD>IS") == weighed(steelyard, table, "--priority", "DS>CD>IS")
    product = json.loads(steelyard("weigh", table, "--by", "product", "--format", "json").stdout)
    assert product["clients"][0]["score"] == pytest.approx(0.9 * 0.2 * (0.4 / 0.9))  # as in a run: shares
    best = json.loads(steelyard("weigh", table, "--by", "IS/max", "--format", "json").stdout)
    assert [row["score"] for row in best["clients"]] == [0.8, 1.0]


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (TABLE, ["--priority", "DS>CD"], ["priority", "DS>CD"]),
        (TABLE, ["--score", "men"], ["did you mean 'mean'"]),
        (TABLE, ["--score", "weighted-mean", "--weights", "a,b"], ["--weights", "a,b"]),
        (TABLE, ["--score", "choquet", "--capacity", "nowhere.toml"], ["nowhere.toml"]),
        ("client,DS\nAlice,x\n", [], ["row 2", "DS", "'x'"]),
        ("client,DS\nAlice,-1\n", [], ["row 2", "-1"]),
        ("client,DS\nAlice,0.1,0.2\n", [], ["row 2", "3 cells"]),
        ("client,DS\nAlice,400\n", ["--normalise", "none"], ["400", "without normalising"]),
        ("client,DS,DS\nAlice,0.1,0.2\n", [], ["header"]),
        ("", [], ["no table"]),
    ],
)
def test_weigh_names_mistakes(
    tmp_path: Path, refused: Refused, text: str, arguments: list[str], words: list[str]
) -> None:
    path = tmp_path / "clients.csv"
    path.write_text(text)
    line = refused("weigh", path, *arguments)
    for word in words:
        assert word in line


def test_weigh_without_a_file(tmp_path: Path, refused: Refused) -> None:
    assert "nowhere.csv" in refused("weigh", tmp_path / "nowhere.csv")


QUICK = ["--set", "rounds.count=3", "--set", "compute.engine=stacked", "--set", "model.name=logistic"]


def test_quickstart_end_to_end(steelyard: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = steelyard("run", "quickstart", *QUICK, "--out", folder, "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["run"] == str(folder)
    assert [rule["rule"] for rule in document["rules"]] == ["VP>LD>DS/max", "fedavg", "equal", "DS>LD>MD"]
    assert len(document["flaws"]["1"]) == 6
    for rule in document["rules"]:
        assert 0 <= rule["worst_tenth"] <= rule["accuracy"] <= 1
        assert rule["heaviest_clients"]
        assert 0 <= rule["server"]["accuracy"] <= 1
        assert 0 <= rule["flawed_weight"] <= 1
        assert all(entry["measured_by"] in ("client", "server") for entry in rule["criteria"])
    assert {"rule", "target", "share", "round", "seed"} <= set(document["rounds_to_target"][0])
    # Without a terminal, progress is plain lines on standard error.
    assert "round 3/3" in done.stderr
    assert "\x1b" not in done.stderr

    text = steelyard("resume", folder).stdout
    assert "worst 10%" in text
    assert str(folder) in text.replace("\n", "")

    exported = steelyard("export", folder, "--to", "csv").stdout.split()
    tables = ("federations", "rounds", "clients", "evaluations", "untested", "listening")
    assert {Path(path).name for path in exported} == {f"{table}.csv" for table in tables}
    with (folder / "export" / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"client", "raw_DS", "normalised_LD", "score", "weight", "failure"} <= set(rows[0])


def test_a_run_is_never_overwritten(steelyard: CommandLine, refused: Refused, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert steelyard("run", "quickstart", *QUICK, "--out", folder).returncode == 0
    assert "holds a run already" in refused("run", "quickstart", *QUICK, "--out", folder)


def test_seed_and_default_folder(steelyard: CommandLine, tmp_path: Path) -> None:
    done = steelyard("run", "quickstart", *QUICK, "--seed", "9", "--format", "json")
    document = json.loads(done.stdout)
    assert document["rules"][0]["seed"] == 9
    assert (tmp_path / document["run"] / "run.sqlite").is_file()


def test_recipes_show_and_criteria(steelyard: CommandLine) -> None:
    assert "quickstart" in steelyard("recipes").stdout
    assert any(entry["name"] == "quickstart" for entry in json.loads(steelyard("recipes", "--format", "json").stdout))
    assert 'priority = "' in steelyard("show", "quickstart").stdout
    assert "count = 7" in steelyard("show", "quickstart", "--set", "rounds.count=7").stdout
    listed = steelyard("criteria").stdout
    assert "MD" in listed
    assert "server" in listed


def test_unknown_words_are_refused(steelyard: CommandLine, refused: Refused) -> None:
    assert "did you mean 'quickstart'" in refused("run", "quickstrat")
    assert steelyard("rnu").returncode == 2
    assert "no experiment named" in refused("show")


def test_a_misspelt_command_is_guessed_once(refused: Refused) -> None:
    assert refused("swep").count("Did you mean 'sweep'?") == 1


def test_only_the_commands_that_are_asked_for_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(root: Any) -> str:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            root(["--help"], prog_name="steelyard", standalone_mode=False)
        return text.getvalue()

    built = main._built  # pyright: ignore[reportPrivateUsage]
    assert shown(built(main.needed(["--help"]))) == shown(built(main.needed([]))) == shown(main.command_line())
    for word in ("run", "import", "federate", "privacy"):
        (one,) = built(main.needed([word, "-x"])).commands.values()
        whole = main.command_line().commands[word]
        assert [option.name for option in one.params] == [option.name for option in whole.params]
        assert getattr(one, "commands", {}).keys() == getattr(whole, "commands", {}).keys()
    for words in (["rnu"], ["--log-file", "run", "compare"], ["-v", "run"]):
        assert main.needed(words) is main.app
    monkeypatch.setenv("_STEELYARD_COMPLETE", "complete_bash")
    assert main.needed([]) is main.app


def test_help_does_not_wait_for_what_is_heavy() -> None:
    code = (
        "import sys; import steelyard.cli.main; "
        "print([name for name in ('torch', 'numpy', 'pandas', 'pydantic', 'flwr', 'sklearn') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=command_environment(), check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_a_closed_pipe_is_no_error(steelyard: CommandLine) -> None:
    done = subprocess.run(
        f"{sys.executable} -m steelyard show --schema | head -1", shell=True, env=os.environ | command_environment(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
