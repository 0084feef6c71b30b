"""The command line: every command answers, what is said and shown, what a cold start reads, what ends a command."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from tests.conftest import CommandLine
from tests.kit import inside, wait_until
from tests.recommend.conftest import two_tastes
from tests.runs.signed_runs import a_key
from tests.warm import WarmProcess, command_environment

from steelyard.cli import main
from steelyard.clients.flower.register import Entry, enter
from steelyard.federate.book import keep_receipt
from steelyard.federate.queue import ServerFolder, new_run, note_outcome
from steelyard.messages.updates import LossState, Signed, Task
from steelyard.proof.statements import Statement

Refused = Callable[..., str]
QUICK = ("--set", "rounds.count=1", "--set", "compute.engine=stacked", "--set", "model.name=logistic")
# What each command must have printed or written.
COMMANDS = {
    "join part --out joined": "joined/run.sqlite",
    "verify done": "intact",
    "record done -o record.html": "record.html",
    "contributions done": "What each client added (shapley)",
    "withdraw done client-000 --out fewer": "fewer/run.sqlite",
    "export done --to csv": "done/export",
    "import rounds.csv --out theirs --by DS": "theirs",
    "check hospitals": "920 rows at 4 sites: 14 warnings",
    "list recipes": "quickstart",
    "show quickstart --set rounds.count=7": "count = 7",
    "list": "every word that a rule may hold",
    "list rules --format csv": "fltrust(RULE),rule,",
    "list criteria": "label diversity",
    "explain VP>LD>DS/max": "Score of a client: VP + VP·LD + VP·LD·DS",
    "list models": "cnn-digits",
    "list algorithms": "scaffold",
    "list policies": "feddisco",
    "docs --no-open --out manual malicious clients": "manual/guide/hostile-clients.html",
    "privacy plan --rounds 10 --noise 1": "noise multiplier",
    "privacy audit --tries 1 --steps 0 --canaries 10 --questions 0": "gradient inversion on digits",
    "federate init app": "app/pyproject.toml",
    "federate certificates tls --host localhost": "tls/ca.pem",
    "federate key node-a": "node-a.pub",
    "federate receipts signed": "run 7, DS, round 1, client a: signed: no head of the server is kept with it yet",
    "federate list server": "1    finished  1/1    quickstart",
    "federate nodes server": "hospital-a  away    never",
    "federate log server 1": "round 1/1",
    "federate follow server 1": "/done",
    "federate stop server 2": "run 2 is stopped; nothing of it was kept",
    "federate ledger node.toml": "epsilon 0 of 8 in 0 answers in all (delta 1e-05)",
    "recommend baseline popular --train tastes.tsv --out popular.tsv": "popular.tsv",
    "recommend evaluate --train before.tsv --test tastes.tsv --recommendations lists.tsv": "hit_rate",
    "recommend features kgflex.toml": "known to the sources: 40",
    "recommend list kgflex --out of-kgflex.tsv": "of-kgflex.tsv",
    "recommend report kgflex --format markdown": "| ndcg |",
    "recommend kept kgflex --picture clouds.svg": "clouds.svg",
    "recommend cost --users 10 --items 20 --interactions 30": "tcc_vectors",
    "recommend audit fpl.toml --rounds 1": "everything sent",
}
COLD = {"report done -o done.html": "done.html", "weigh clients.csv": "Alice"}
ELSEWHERE = {
    *("run", "resume", "ls", "table", "top", "watch", "compare", "arena", "sweep", "attack", "paper", "new"),
    *("model", "predict", "test"),
    *(f"federate {name}" for name in ("serve", "register", "submit", "local", "node", "model")),
    *(f"recommend {name}" for name in ("split", "explain", "test")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, a run of KGFlex, and a few small files of data."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "clients.csv").write_text("client,DS,LD\nAlice,.9,.2\nBob,.1,.8\n")
    (folder / "rounds.csv").write_text("round,client,DS\n1,a,10\n1,b,30\n")
    rows = [f"{user}\t{item}\t{rating}\t{time}" for user, item, rating, time in two_tastes()]
    (folder / "tastes.tsv").write_text("user\titem\trating\ttime\n" + "\n".join(rows) + "\n")
    (folder / "before.tsv").write_text("user\titem\trating\ttime\nu02\ti30\t5\t1\n")
    (folder / "node.toml").write_text(
        'server = "h:1"\ninsecure = true\nclient = "a"\nrequire = "local"\nepsilon = 8\nstate = "state"\n'
    )
    key = a_key(folder / "node-key")
    said = Statement("7", "DS", 1, "asked", "", {"a": bytes(32)})
    task = Task("DS", 1, 1, ("a",), torch.zeros(1), LossState("cross-entropy"))
    (folder / "signed").mkdir()
    keep_receipt(
        folder / "signed", "7", task, "asked", Signed(key.line, "", said.digests, {}, key.sign(said.content()))
    )
    (folder / "lists.tsv").write_text("user\titem\tscore\nu02\ti07\t1\n")
    about = [f"i{item:02d}\thalf {item // 20}\tdigit {item % 10}" for item in range(40)]
    (folder / "about.tsv").write_text("item\thalf\tdigit\n" + "\n".join(about) + "\n")
    fpl = {
        "kind": "recommend",
        "interactions": {"path": "tastes.tsv"},
        "fpl": {"factors": 4, "learning_rate": 0.2},
        "rounds": {"epochs": 1},
    }
    source = {
        "path": "about.tsv",
        "format": "attributes",
        "columns": {"item": "item", "half": "half", "digit": "digit"},
    }
    kgflex = {**fpl, "knowledge": {"sources": [source], "min_items": 2}, "kgflex": {}}
    (folder / "fpl.toml").write_text(tomli_w.dumps(fpl))
    (folder / "kgflex.toml").write_text(tomli_w.dumps(kgflex))
    part = ("compare", "quickstart", *QUICK, "--rules", "DS,EQ", "--part", "1/1", "--out", "part")
    for words in (("run", "quickstart", *QUICK, "--out", "done"), ("run", "kgflex.toml", "--out", "kgflex"), part):
        answer = inside(*words, folder=folder)
        assert (answer.returncode, words == part or "next: steelyard model" in answer.stdout) == (0, True)
    serving = ServerFolder(folder / "server")
    serving.make()
    enter(serving.register, Entry("hospital-a", "ssh one"))
    for out in ("done", "later"):
        run = new_run(serving)
        run.note_submitted("quickstart", folder / out, 1)
        if out == "done":
            run.log.write_text("steelyard: waiting for 1 nodes\nround 1/1: DS 80%\n")
            note_outcome(run.folder, "finished", str(folder / out))
    return folder


def test_every_command_is_here() -> None:
    """A new command needs a line above, and all take the options that say how much is said."""

    def paths(command: Any, before: str = "") -> set[str]:
        names = [name for option in command.params for name in option.opts]
        assert {"-v", "--verbose", "-q", "--quiet", "--log-file"} <= set(names), before
        assert len(names) == len(set(names)), before
        below: dict[str, Any] = getattr(command, "commands", {})
        deeper = [paths(each, f"{before} {name}".strip()) for name, each in below.items()]
        return set().union(*deeper) if below else {before}

    known = paths(main.command_line())
    assert {path for path in known for line in (*COMMANDS, *COLD) if f"{line} ".startswith(f"{path} ")} == (
        known - ELSEWHERE
    )


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_answers(words: str, folder: Path) -> None:
    done = inside(*shlex.split(words), folder=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / COMMANDS[words]).exists() or COMMANDS[words] in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("words", COLD)
def test_a_command_starts_by_itself(words: str, folder: Path, cold: CommandLine) -> None:
    done = cold(*shlex.split(words), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / COLD[words]).exists() or COLD[words] in done.stdout


def test_help_and_light_commands_wait_for_nothing_heavy(folder: Path) -> None:
    code = (
        "import sys; from steelyard.cli.main import main\n"
        "heavy = lambda *names: [name for name in names if name in sys.modules]\n"
        "for words in ('--help', 'weigh clients.csv', 'list recipes', 'list criteria', 'run --help'):\n"
        "    sys.argv = ['steelyard', *words.split()]\n"
        "    try:\n        main()\n    except SystemExit as ended:\n        assert ended.code == 0\n"
        "    print('loaded', heavy('torch', 'numpy', 'pandas', 'pydantic', 'flwr', 'sklearn'))\n"
        "print(heavy('torch', 'pandas', 'flwr', 'sklearn', 'scipy', 'steelyard.cli.federate'))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=command_environment(), cwd=folder, check=True, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    by_help = next(line for line in lines if line.startswith("loaded"))
    assert (by_help, lines[-1]) == ("loaded []", "[]")


@pytest.mark.parametrize(
    ("words", "found"),
    [("fed", "federate"), ("run qui", "quickstart"), ("run quickstart --see", "--seed"), ("privacy pl", "plan")],
)
def test_bash_completes_commands_and_recipes(tmp_path: Path, words: str, found: str) -> None:
    place = str(len(words.split()))
    asked = {"_STEELYARD_COMPLETE": "complete_bash", "COMP_WORDS": f"steelyard {words}", "COMP_CWORD": place}
    command = [sys.executable, "-m", "steelyard"]
    done = subprocess.run(command, env={**command_environment(), **asked}, cwd=tmp_path, capture_output=True, text=True)
    assert found in done.stdout.split()


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m steelyard show --schema | head -1"
    done = subprocess.run(command, shell=True, env=command_environment(), capture_output=True, text=True)
    assert "Traceback" not in done.stderr


# recommend ------------------------------------------------------------------------------------------------------------


def test_explain_says_which_features_made_the_score(folder: Path) -> None:
    def told(*words: str) -> dict[str, Any]:
        return json.loads(inside("recommend", *words, "--user", "u02", "--format", "json", folder=folder).stdout)

    found = told("explain", "kgflex", "--item", "i07")
    assert found["score"] == pytest.approx(sum(each["part"] for each in found["reasons"]))
    assert sum(abs(each["share"]) for each in found["reasons"]) == pytest.approx(1)
    assert "half 0" in found["reasons"][0]["feature"]
    scores = {each["item"]: each["score"] for each in told("list", "kgflex", "--cutoff", "30")["items"]}
    assert scores.get("i07", found["score"]) == pytest.approx(found["score"], abs=1e-5)


def test_a_saved_recommender_gives_the_list_of_its_run(folder: Path) -> None:
    taken = inside("model", "kgflex", "--client", "u02", "--out", "hers", folder=folder)
    assert taken.returncode == 0, taken.stderr
    found = json.loads(inside("recommend", "list", "hers", "--format", "json", folder=folder).stdout)
    run = inside("recommend", "list", "kgflex", "--user", "u02", "--format", "json", folder=folder)
    assert [each["item"] for each in found["items"]] == [each["item"] for each in json.loads(run.stdout)["items"]]
    assert any("half" in reason for each in found["items"] for reason in each["reasons"])


def test_what_was_kept_is_said_in_quartiles(folder: Path) -> None:
    found = json.loads(inside("recommend", "kept", "kgflex", "--format", "json", folder=folder).stdout)
    assert found["kept"].keys() == {"shown", "informative"}
    quartiles = [each for shares in found["kept"].values() for each in shares.values()]
    assert [sorted(each) for each in quartiles] == quartiles
    # Two halves and ten digits are all there is, so no hundred can be the most prominent.
    assert 1 < found["prominent"] <= 12


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("explain kgflex --user nobody --item i07", "--user: got 'nobody'; allowed: one of 24 users"),
        ("explain kgflex --user u02 --item x", "--item: got 'x'"),
        ("kept done", "recommend"),
        ("explain kgflex --user u02 --item i07 --top 0", "--top: got"),
    ],
)
def test_mistakes_about_lists_are_one_line(folder: Path, words: str, told: str) -> None:
    done = inside("recommend", *words.split(), folder=folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert told in done.stderr


# weigh ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "clients.csv"
    path.write_text("client,DS,CD,IS\nAlice,.9,.2,.4\nBob,.1,.8,.5\n")
    return path


def weighed(command: CommandLine, *arguments: str | Path) -> dict[str, tuple[float, float]]:
    done = command("weigh", *arguments, "--normalise", "none", "--format", "json")
    assert done.returncode == 0, done.stderr
    return {row["client"]: (row["score"], row["weight"]) for row in json.loads(done.stdout)["clients"]}


def test_weigh_knows_every_score(command: CommandLine, table: Path, tmp_path: Path) -> None:
    capacity = tmp_path / "capacity.toml"
    capacity.write_text('[capacity]\nDS=0.5\nCD=0.3\nIS=0.2\n"DS,CD"=0.8\n"DS,IS"=0.7\n"CD,IS"=0.5\n')
    ordered = weighed(command, table, "--by", "DS>CD>IS")
    assert list(ordered) == ["Alice", "Bob"]
    assert ordered["Alice"] == pytest.approx((1.152, 0.83965), abs=5e-6)  # the paper has five digits
    mean = weighed(command, table, "--by", "weighted-mean(DS=0.5,CD=0.3,IS=0.2)")
    assert mean["Alice"][0] == pytest.approx(0.59)
    # A capacity that adds up is a weighted mean.
    choquet = weighed(command, table, "--by", f"choquet(DS,CD,IS;{capacity})")
    assert choquet["Bob"] == pytest.approx(mean["Bob"])
    assert weighed(command, table, "--by", "owa(DS,CD,IS;all)")["Alice"][0] == pytest.approx(0.2)
    power = weighed(command, table, "--by", "power(DS,CD,IS)^2")
    assert power["Alice"][0] == pytest.approx((0.9 * 0.2 * 0.4) ** 2)
    best = json.loads(command("weigh", table, "--by", "IS/max", "--format", "json").stdout)
    assert [row["score"] for row in best["clients"]] == [0.8, 1.0]


# run ------------------------------------------------------------------------------------------------------------------


def test_quickstart_end_to_end(steelyard: CommandLine, command: CommandLine, refused: Refused, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("run", "quickstart", *QUICK, "--set", "rounds.count=3", "--seed", "9", "--out", folder)
    done = steelyard(*words, "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["run"] == str(folder)
    assert [rule["rule"] for rule in document["rules"]] == ["fedavg", "VP>LD>DS/max", "equal", "DS>LD>MD"]
    for rule in document["rules"]:
        assert [seed["seed"] for seed in rule["seeds"]] == document["seeds"] == [9]
        worst, final = (rule["figures"][name]["mean"] for name in ("worst_tenth", "final"))
        assert 0 <= worst <= final <= 1
    # Without a terminal, progress is plain lines on standard error.
    assert "round 3/3" in done.stderr
    assert "\x1b" not in done.stderr
    assert "holds a run already" in refused(*words)
    text = command("resume", folder).stdout
    assert "worst 10%" in text
    assert str(folder) in text.replace("\n", "")


def test_rules_owners_and_folders_with_markup_are_printed_as_they_are(command: CommandLine, tmp_path: Path) -> None:
    rows = [f"{i / 7:.3f},{i % 2},{('[/b]ann', '[bold]bob', chr(27) + '[31mcy')[i % 3]}" for i in range(60)]
    (tmp_path / "d.csv").write_text("\n".join(["a,target,own", *rows]) + "\n")
    (tmp_path / "e.toml").write_text(
        'name = "t"\n[data]\nsource = "csv"\npath = "d.csv"\nlabels = "target"\nowner = "own"\n'
        '[partition]\nscheme = "natural"\n[weighing]\nname = "[/i]rule"\n[rounds]\ncount = 2\nfraction = 1.0\n'
        '[model]\nname = "logistic"\n[compute]\nengine = "loop"\n'
    )
    names = ("[/b]ann", "[bold]bob", "\\x1b[31mcy", "[/i]rule")
    for words in (("run", "e.toml", "--out", "[/b]out"), ("weigh", "[/b]out", "--by", "mean(DS)")):
        done = command(*words)
        assert done.returncode == 0, done.stderr
        assert [name for name in names if name not in done.stdout] == []
        assert "\x1b" not in done.stdout + done.stderr


def test_a_stop_names_the_folder_and_the_command(tmp_path: Path) -> None:
    words = ("run", "quickstart", *QUICK, "--set", "rounds.count=100000", "--out", "a run")
    printed, database = tmp_path / "printed", tmp_path / "a run" / "run.sqlite"

    def begun() -> bool:
        try:
            stored = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
            return stored.execute("SELECT COUNT(*) FROM rounds").fetchone()[0] > 0
        except sqlite3.OperationalError:
            return False

    started = WarmProcess(*words, folder=tmp_path, printed=printed)
    try:
        wait_until(begun, 120)
        started.send_signal(signal.SIGINT)
        assert started.wait(60) == 130
    finally:
        started.kill()
    last = printed.read_text(encoding="utf-8").strip().splitlines()[-1]
    assert last == "steelyard: stopped; what is done is in a run; continue with: steelyard resume 'a run'"


# how much is said -----------------------------------------------------------------------------------------------------


def test_quiet_leaves_warnings_and_the_answer(command: CommandLine) -> None:
    words = ("run", "quickstart", *QUICK, "--set", "rounds.fraction=0.01", "--set", "rounds.min_clients=1")
    done = command("--quiet", *words, "--format", "json")
    (line,) = done.stderr.splitlines()
    assert line.startswith("steelyard: warning: round 1 of ")
    assert json.loads(done.stdout)["run"]


def test_verbose_names_the_steps_and_a_file_gets_them_with_their_times(command: CommandLine, tmp_path: Path) -> None:
    words = ("run", "quickstart", *QUICK)
    assert "steelyard: reading the data" in command(*words, "-v", "--log-file", "log.txt").stderr.splitlines()
    # A file is added to, an error too.
    assert command("--log-file", "log.txt", "run", "nothing-like-it").returncode == 2
    lines = (tmp_path / "log.txt").read_text().splitlines()
    form = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (DEBUG|INFO|WARNING|ERROR) steelyard(\.\w+)+: \S.*"
    assert all(re.fullmatch(form, line) for line in lines)
    assert sum("INFO steelyard.rounds.progress: round 1/1: " in line for line in lines) == 1
    assert "ERROR steelyard.cli.main: " in lines[-1]
