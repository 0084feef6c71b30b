"""Runs whose rows or ledger were changed, by the real command line: refused by resume, said by table and report."""

from __future__ import annotations

import json
import signal
import sqlite3
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.experiment.test_continuing import experiment
from tests.experiment.test_private_runs import BASE, described
from tests.runs.commands import steelyard
from tests.runs.contents import query

from steelyard.experiment.running import run as run_here
from steelyard.privacy.ledger_marks import FILE
from steelyard.runs.reader import History


def output(folder: Path) -> str:
    return (folder / "output").read_text()


def change(run: Path, statement: str, *values: str) -> None:
    connection = sqlite3.connect(run / "run.sqlite")
    with connection:
        assert connection.execute(statement, values).rowcount > 0
    connection.close()


def killed(folder: Path, document: Path, after: int = 2) -> Path:
    code = steelyard("run", document, "--out", folder / "run", folder=folder, killed_after=after)
    assert code == -signal.SIGKILL, output(folder)
    return folder / "run"


def private(folder: Path, **store: Any) -> Path:
    path = folder / "private.toml"
    path.write_text(tomli_w.dumps({"name": "private", **BASE, "store": store}))
    return path


def shortened(content: bytes) -> bytes:
    return content[: content.index(b"\n") + 1]


def edited(content: bytes) -> bytes:
    return content.replace(b'"noise": 2.0', b'"noise": 200.0', 1)


LEDGERS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "emptied": (lambda content: b"", "has 0 bytes, and had "),
    "shortened": (shortened, "when round 2 was written"),
    "edited": (edited, "no longer holds the charges that it held when round 1 was written"),
}


def test_a_changed_ledger_is_refused_and_nothing_excuses_it(tmp_path: Path) -> None:
    run = killed(tmp_path, private(tmp_path))
    whole = (run / FILE).read_bytes()
    spent = query(run, "SELECT epsilon FROM rounds WHERE round = 2")
    for what, (make, problem) in LEDGERS.items():
        (run / FILE).write_bytes(make(whole))
        for options in ((), ("--accept-changes",)):
            assert steelyard("resume", run, *options, folder=tmp_path) == 2, what
            (line,) = output(tmp_path).splitlines()
            assert line.startswith(f"steelyard: {run}: privacy.jsonl: the ledger of this run ")
            assert problem in line
            assert "--accept-changes excuses no run that keeps a privacy ledger" in line
        assert query(run, "SELECT epsilon FROM rounds WHERE round = 2") == spent, what  # nothing was touched
    (run / FILE).write_bytes(whole)
    assert steelyard("resume", run, folder=tmp_path) == 0, output(tmp_path)


@pytest.mark.parametrize("every", [1, 5])
def test_an_honest_kill_is_never_called_tampering(tmp_path: Path, every: int) -> None:
    """The ledger is ahead of the checkpoint by whole rounds, by a charge without a round, and by a torn line."""
    run = killed(tmp_path, private(tmp_path, checkpoint_every=every))
    content = (run / FILE).read_bytes()
    line = content.splitlines(keepends=True)[-1]
    (run / FILE).write_bytes(content + line.replace(b'"round": 2', b'"round": 3') + line[:-9])
    assert steelyard("table", run, folder=tmp_path) == 0, output(tmp_path)
    assert "CHANGED" not in output(tmp_path)
    assert steelyard("resume", run, folder=tmp_path) == 0, output(tmp_path)
    assert History(run).chain.problem == ""
    assert History(run).chain.round == 3


def test_a_round_without_a_checkpoint_holds_its_charges_too(tmp_path: Path) -> None:
    run = killed(tmp_path, private(tmp_path, checkpoint_every=5))
    assert query(run, "SELECT MAX(round) FROM checkpoints") == [(0,)]
    (run / FILE).write_bytes(shortened((run / FILE).read_bytes()))
    assert steelyard("resume", run, folder=tmp_path) == 2
    assert "when round 2 was written" in output(tmp_path)


def test_without_its_ledger_and_its_marks_a_private_run_is_not_excused(tmp_path: Path) -> None:
    run = killed(tmp_path, private(tmp_path))
    (run / FILE).unlink()
    change(run, "UPDATE chain SET ledger = NULL, ledger_bytes = NULL")
    assert steelyard("resume", run, "--accept-changes", folder=tmp_path) == 2
    assert "round 0 is not as it was written" in output(tmp_path)


def test_a_run_that_keeps_a_ledger_does_not_go_on_without_its_noise(tmp_path: Path) -> None:
    run = killed(tmp_path, private(tmp_path))
    document = tomllib.loads((run / "experiment.toml").read_text())
    del document["privacy"]
    (run / "experiment.toml").write_text(tomli_w.dumps(document))
    assert steelyard("resume", run, "--accept-changes", folder=tmp_path) == 2
    (line,) = output(tmp_path).splitlines()
    assert line == (
        f"steelyard: {run / 'experiment.toml'}: privacy: missing, but this run keeps a privacy ledger; allowed: the "
        "section with which it began, or a new run"
    )
    assert query(run, "SELECT MAX(round) FROM rounds") == [(2,)]


def test_a_chain_that_was_emptied_and_accepted_stays_seen(tmp_path: Path) -> None:
    run = killed(tmp_path, experiment(tmp_path))
    change(run, "DELETE FROM chain")
    assert steelyard("resume", run, "--accept-changes", folder=tmp_path) == 0, output(tmp_path)
    assert steelyard("table", run, folder=tmp_path) == 0
    assert "CHANGED since it was written: round 0 is missing from its chain" in output(tmp_path)


def test_an_edited_accuracy_is_refused_said_and_can_be_accepted(tmp_path: Path) -> None:
    run = killed(tmp_path, experiment(tmp_path))
    assert steelyard("table", run, folder=tmp_path) == 0
    assert f"chain head after round 2: {History(run).chain.head}" in output(tmp_path)
    change(run, "UPDATE rounds SET accuracy = 0.999 WHERE round = 1")
    assert steelyard("resume", run, folder=tmp_path) == 2
    (line,) = output(tmp_path).splitlines()
    assert line == (
        f"steelyard: {run}: round 1 is not as it was written; allowed: the folder as it was written, or `steelyard "
        f"resume {run} --accept-changes`"
    )
    said = "CHANGED since it was written: round 1 is not as it was written; what is shown is what is there now"
    for format in ("text", "markdown", "latex", "csv"):
        assert steelyard("table", run, "--format", format, folder=tmp_path) == 0
        assert said in output(tmp_path)
    assert steelyard("table", run, "--groups", folder=tmp_path) == 0
    assert said in output(tmp_path)
    assert steelyard("table", run, "--format", "json", folder=tmp_path) == 0
    assert json.loads(output(tmp_path))["chain"]["problem"] == "round 1 is not as it was written"
    assert steelyard("report", run, folder=tmp_path) == 0
    assert said in (run / "report.html").read_text()
    # Accepted, it goes on, and the difference stays for everybody to see.
    assert steelyard("resume", run, "--accept-changes", folder=tmp_path) == 0, output(tmp_path)
    assert "round 1 is not as it was written; going on from round 2" in output(tmp_path)
    assert said in output(tmp_path)
    assert steelyard("resume", run, folder=tmp_path) == 2  # at its end, too


def test_a_checkpoint_of_another_model_is_refused_also_with_its_checksum(tmp_path: Path) -> None:
    """A model from another run, put in place of ours with everything that a checkpoint's row says of it."""
    run = killed(tmp_path, experiment(tmp_path))
    (tmp_path / "other").mkdir()
    document = experiment(tmp_path / "other")
    document.write_text(document.read_text().replace("seed = 3", "seed = 4"))
    other = killed(tmp_path / "other", document)
    asked = "SELECT states, checksum, file FROM checkpoints WHERE round = 2"
    (theirs,), (ours,) = query(other, asked), query(run, asked)
    assert theirs[1] != ours[1]
    (run / "checkpoints" / ours[2]).write_bytes((other / "checkpoints" / theirs[2]).read_bytes())
    change(run, "UPDATE checkpoints SET states = ?, checksum = ? WHERE file = ?", *theirs)
    assert steelyard("resume", run, folder=tmp_path) == 2
    assert "the checkpoint's model of DS>LD is not the one that round 2 ended with" in output(tmp_path)


def test_the_head_is_printed_at_the_end_in_text_and_json(tmp_path: Path) -> None:
    document = experiment(tmp_path, rounds=2)
    assert steelyard("run", document, "--out", tmp_path / "a", folder=tmp_path) == 0
    head = History(tmp_path / "a").chain.head
    assert f"chain head after round 2: {head}" in output(tmp_path).splitlines()
    assert query(tmp_path / "a", "SELECT head FROM checkpoints") == [(head,)]
    code = steelyard("run", document, "--out", tmp_path / "b", "--format", "json", "--quiet", folder=tmp_path)
    assert code == 0
    assert json.loads(output(tmp_path))["chain"] == {"head": head, "round": 2, "problem": ""}


def test_heads_of_two_private_runs_have_nothing_in_common(tmp_path: Path) -> None:
    """The first record of a run that promises something begins with a secret: a head alone gives nothing away."""
    runs = [run_here(described(rounds={"count": 1}), out=tmp_path / name) for name in ("a", "b")]
    (a,), (b,) = (query(run, "SELECT value FROM info WHERE key = 'salt'") for run in runs)
    assert len(a[0]) == 64
    assert a != b
    first = [query(run, "SELECT head FROM chain WHERE round = 0") for run in runs]
    assert first[0] != first[1]
