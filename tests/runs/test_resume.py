"""A run that is killed (SIGKILL) and resumed by the real command line ends with the same bits as one that was not.

Checkpoints are written every third round and the runs die two rounds after one, so that the database holds rounds that
the checkpoint does not know of.
"""

from __future__ import annotations

import json
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.kit import SMALL, changed
from tests.runs.commands import steelyard
from tests.runs.contents import assert_same_bits, checkpoint, last_round, query, rows
from tests.runs.signed_runs import a_key

from steelyard.proof.signing import HEAD_KEY
from steelyard.report.verification import verify

ROUNDS, EVERY, KILLED_AFTER = 7, 3, 5

LEARNING = changed(
    SMALL,
    seed=3,
    partition={"minimum": 12},
    training={"learning_rate": 0.4, "batch_size": 60},
    rounds={"count": ROUNDS, "fraction": 0.5, "samples": True},
    store={"checkpoint_every": EVERY},
    compute={"threads": 1},
    weighing={"criteria": ["DS", "LD", "MD"], "priority": "LD>MD>DS"},
)
SERVER = {"server": "fraction", "server_report": "apart"}
CRITERIA = {"criteria": ["DS", "LD", "MD"]}


def described(**sections: Any) -> dict[str, Any]:
    """The small experiment with some fields of its sections changed."""
    return changed(LEARNING, **sections)


CASES: dict[str, dict[str, Any]] = {
    "a fixed rule, seldom tested and written": described(rounds={"evaluate_every": 2}, store={"clients_every": 2}),
    "adafed": described(
        partition=SERVER,
        rounds={"keep": "best", "patience": ROUNDS},
        weighing={"criteria": ["VP"], "priority": None, "when_zero": "keep", "loss": {}},
    ),
    "a budget": described(weighing={"adjust": {"strategy": "greedy", "budget": 22}}),
    "bandit": described(weighing={"adjust": {"strategy": "bandit"}}),
    "what clients keep of scaffold": described(
        algorithm={"name": "scaffold"}, weighing={"criteria": ["DS"], "priority": None}
    ),
    "clients that train on from their own models": described(
        flaws=[{"kind": "own-model", "clients": ["client-001", "client-004"]}], rounds={"fraction": 1.0}
    ),
    "clients that start from models of earlier rounds": described(
        flaws=[
            {"kind": "stale", "clients": ["client-001"], "amount": 2},
            {"kind": "few-steps", "clients": ["client-002"], "amount": 0.3},
            {"kind": "free-rider", "clients": ["client-003"]},
        ],
    ),
}


def write(document: dict[str, Any], folder: Path) -> Path:
    plain = {
        name: {key: entry for key, entry in value.items() if entry is not None} if isinstance(value, dict) else value
        for name, value in document.items()
    }
    path = folder / "experiment.toml"
    path.write_text(tomli_w.dumps(plain))
    return path


def interrupted(folder: Path, *command: str | Path, killed_after: int = KILLED_AFTER, **options: Any) -> Path:
    """Run a command whole and once more with a SIGKILL, check what the kill left, resume, compare; returns the run."""
    whole, part = folder / "whole", folder / "part"
    output = folder / "output"
    assert steelyard(*command, "--out", whole, folder=folder) == 0, output.read_text()
    code = steelyard(*command, "--out", part, folder=folder, killed_after=killed_after, **options)
    assert code == -signal.SIGKILL, output.read_text()
    assert query(part, "SELECT value FROM info WHERE key = 'status'") == [("running",)]
    # What the checkpoint does not know of is there, and is what the whole run wrote: the kill came in the middle.
    assert checkpoint(part)[0] == EVERY
    assert last_round(part) > EVERY
    assert set(rows(part)["rounds"]) < set(rows(whole)["rounds"])
    spoil(part)
    assert steelyard("resume", part, folder=folder) == 0, output.read_text()
    assert_same_bits(part, whole)
    return whole


def spoil(folder: Path) -> None:
    """Change what was written after the checkpoint, so that rows that a resume keeps can be told from new ones."""
    connection = sqlite3.connect(folder / "run.sqlite")
    with connection:
        connection.execute("UPDATE rounds SET accuracy = -1 WHERE round > ?", (EVERY,))
        connection.execute("UPDATE updates SET weight = zeroblob(length(weight)) WHERE round > ?", (EVERY,))
        connection.execute("UPDATE evaluations SET score = zeroblob(length(score)) WHERE round > ?", (EVERY,))
        # A round that the resumed run will not come to.
        for table in ("rounds", "updates", "evaluations"):
            columns = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
            taken = ", ".join(str(ROUNDS + 9) if name == "round" else name for name in columns)
            connection.execute(f"INSERT INTO {table} SELECT {taken} FROM {table} WHERE round = {EVERY + 1}")
        # Samples are recorded in the last round only, so this table has none to copy.
        connection.execute("INSERT INTO samples VALUES (1, ?, x'ff', 8)", (ROUNDS + 9,))
    connection.close()


SELDOM = ("a budget", "bandit", "clients that train on from their own models")
"""Cases for slow tests: others stop and go on with states of the same kinds."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SELDOM)) for case in CASES])
def test_learning(tmp_path: Path, case: str) -> None:
    whole = interrupted(tmp_path, "run", write(CASES[case], tmp_path))
    _, states, tensors = checkpoint(whole)
    (state,) = states.values()
    assert state["round"] == ROUNDS
    if case == "adafed":
        # The loss has adapted: its state is not the first round's any more.
        losses = [json.loads(loss) for (loss,) in query(whole, "SELECT loss FROM rounds ORDER BY round")]
        assert losses[1] != losses[EVERY] != losses[-1]
        assert state["best"]["round"] in range(1, ROUNDS + 1)
        assert tensors["best/" + next(iter(states))].shape == tensors["models/" + next(iter(states))].shape
    if case == "a budget":
        # Used up after the checkpoint: a resume that forgot what it had spent would spend too much.
        tests = [count for (count,) in query(whole, "SELECT tests FROM rounds ORDER BY round")]
        assert 0 < sum(tests[: EVERY + 1]) < 22 == sum(tests)
    kept = [json.loads(name.removeprefix("clients/")) for name in tensors if name.startswith("clients/")]
    if case == "clients that train on from their own models":
        assert [(kind, client) for kind, _, client in kept] == [("own", "client-001"), ("own", "client-004")]
    elif case == "clients that start from models of earlier rounds":
        # Sent out in the last round and the two before, which is as far back as the stale client looks.
        assert sorted((kind, round) for kind, _, round in kept) == [("global", ROUNDS - back) for back in (2, 1, 0)]
    elif case == "what clients keep of scaffold":
        assert len(kept) > 3
    else:
        assert kept == []


def test_a_kill_between_the_checkpoint_file_and_its_rows(tmp_path: Path) -> None:
    """The new file is there and the database still names the old one, which must be there too."""
    interrupted(tmp_path, "run", write(CASES["bandit"], tmp_path), killed_after=2 * EVERY, during="checkpoint")


def test_comparing_rules_with_two_seeds(tmp_path: Path) -> None:
    rounds = {"target": 0.8, "share": 0.5, "stop_at_target": True}
    document = described(partition=SERVER, rounds=rounds, weighing=CRITERIA)
    rules = ("--rules", "DS,LD>DS>MD,online,bandit,adafed,fitted(DS),server-only", "--seeds", "2")
    whole = interrupted(tmp_path, "compare", write(document, tmp_path), *rules)
    _, states, _ = checkpoint(whole)
    # Some rested at the target before the checkpoint, some between it and the kill, some after: all are carried on.
    ended = sorted(state["round"] for state in states.values() if state["finished"])
    assert ended[0] <= EVERY < KILLED_AFTER < ended[-1]
    assert any(EVERY < round <= KILLED_AFTER for round in ended)


def test_heads_that_a_server_signs_are_the_same_after_a_kill_and_hold_by_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_key(tmp_path / "keys" / "server")
    monkeypatch.setenv(HEAD_KEY, str(tmp_path / "keys" / "server"))
    interrupted(tmp_path, "run", write(described(), tmp_path))
    found = verify(tmp_path / "part", tmp_path / "keys")
    assert (found.code, found.round) == (0, ROUNDS)
    assert found.found.checked["signatures"].startswith(f"0 of nodes, {ROUNDS + 2} of the server")
