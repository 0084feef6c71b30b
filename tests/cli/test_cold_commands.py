"""Every command once in a process that has read nothing of ours yet: the other tests fork theirs from a warm one.

Other packages are read already, but for a few commands that start from nothing at all: they take seconds each.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from tests.conftest import CommandLine
from tests.recommend.conftest import two_tastes
from tests.runs.signed_runs import a_key
from tests.warm import forget_steelyard, warm_command

from steelyard.cli.main import command_line
from steelyard.clients.flower.register import Entry, enter
from steelyard.federate.outcomes import note_outcome
from steelyard.federate.receipts import keep
from steelyard.federate.server_folder import ServerFolder
from steelyard.federate.server_runs import new_run
from steelyard.messages import LossState, Signed, Task
from steelyard.statements import Statement

QUICK = "--set rounds.count=1 --set training.epochs=1 --set compute.engine=stacked"
# What each command must have printed or written.
COMMANDS = {
    f"compare quickstart {QUICK} --rules DS,EQ --out both": "both/run.sqlite",
    f"arena EQ {QUICK} --scenes hospitals --seeds 1 --out arena": "EQ cannot be told from fedavg by one seed",
    f"sweep quickstart {QUICK} --over training.learning_rate=0.1 --out grid": "grid/best.toml",
    f"attack quickstart {QUICK} --attack inflation --rules DS --out hostile": "inflation: 20% of the clients hostile",
    "join part --out joined": "joined/run.sqlite",
    "resume done": "accuracy",
    "report done -o done.html": "done.html",
    "ls .": "finished",
    "table done": "accuracy",
    "weigh clients.csv": "Alice",
    "verify done": "whole",
    "record done -o record.html": "record.html",
    "contributions done": "What each client added (shapley)",
    "withdraw done client-000 --out fewer": "fewer/run.sqlite",
    "export done --to csv": "done/export",
    "import rounds.csv --out theirs --by DS": "theirs",
    "new mine.toml --csv people.csv --label y": "mine.toml",
    "recipes": "quickstart",
    "show quickstart": "[partition]",
    "criteria": "label diversity",
    "models": "cnn-digits",
    "algorithms": "scaffold",
    "policies": "feddisco",
    "docs --no-open --out manual hostile clients": "manual/guide/hostile-clients.html",
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
    "recommend split tastes.tsv --out cut": "cut/train.tsv",
    "recommend baseline popular --train tastes.tsv --out popular.tsv": "popular.tsv",
    "recommend evaluate --train before.tsv --test tastes.tsv --recommendations lists.tsv": "hit_rate",
    "recommend features kgflex.toml": "known to the sources: 40",
    "recommend top kgflex --user u02": "i0",
    "recommend lists kgflex --out of-kgflex.tsv": "of-kgflex.tsv",
    "recommend report kgflex": "ndcg",
    "recommend explain kgflex --user u02 --item i07": "half 0",
    "recommend kept kgflex": "median",
    "recommend clouds kgflex --out clouds.svg": "clouds.svg",
    "recommend cost --users 10 --items 20 --interactions 30": "tcc_vectors",
    "recommend audit fpl.toml --rounds 1": "everything sent",
}
FROM_NOTHING = ("report", "weigh")
# Others start these cold: test_lists.py, tests/page and tests/federate.
ELSEWHERE = {
    "run",
    "watch",
    "top",
    "federate serve",
    "federate register",
    "federate submit",
    "federate local",
    "federate node",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, a run of KGFlex, and a few small files of data."""
    folder = tmp_path_factory.mktemp("cold")
    (folder / "clients.csv").write_text("client,DS,LD\nAlice,.9,.2\nBob,.1,.8\n")
    (folder / "rounds.csv").write_text("round,client,DS\n1,a,10\n1,b,30\n")
    (folder / "people.csv").write_text("x,y\n" + "".join(f"{n % 7},{n % 2}\n" for n in range(200)))
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
    keep(folder / "signed", "7", task, "asked", Signed(key.line, "", said.digests, {}, key.sign(said.content())))
    (folder / "lists.tsv").write_text("user\titem\tscore\nu02\ti07\t1\n")
    about = [f"i{item:02d}\thalf {item // 20}" for item in range(40)]
    (folder / "about.tsv").write_text("item\thalf\n" + "\n".join(about) + "\n")
    fpl = {
        "kind": "recommend",
        "interactions": {"path": "tastes.tsv"},
        "fpl": {"factors": 4, "learning_rate": 0.2},
        "rounds": {"epochs": 1},
    }
    source = {"path": "about.tsv", "format": "attributes", "columns": {"item": "item", "half": "half"}}
    kgflex = {**fpl, "knowledge": {"sources": [source], "min_items": 2}, "kgflex": {}}
    (folder / "fpl.toml").write_text(tomli_w.dumps(fpl))
    (folder / "kgflex.toml").write_text(tomli_w.dumps(kgflex))
    part = f"compare quickstart {QUICK} --rules DS,EQ --part 1/1 --out part"
    for words in (f"run quickstart {QUICK} --out done", "run kgflex.toml --out kgflex", part):
        made = warm_command(*shlex.split(words), folder=folder)
        assert made.returncode == 0, made.stderr
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
    """A new command needs a line above: what it imports is seen by no warm process."""

    def paths(command: Any, before: str = "") -> set[str]:
        inside: dict[str, Any] = getattr(command, "commands", {})
        deeper = [paths(each, f"{before} {name}".strip()) for name, each in inside.items()]
        return set().union(*deeper) if inside else {before}

    named = {path for path in paths(command_line()) for line in COMMANDS if f"{line} ".startswith(f"{path} ")}
    assert named | ELSEWHERE == paths(command_line())


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_starts_by_itself(words: str, folder: Path, cold: CommandLine) -> None:
    if words.startswith(FROM_NOTHING):
        done = cold(*shlex.split(words), cwd=folder)
    else:
        done = warm_command(*shlex.split(words), folder=folder, before=forget_steelyard)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    expected = COMMANDS[words]
    assert (folder / expected).exists() or expected in done.stdout, done.stdout + done.stderr
