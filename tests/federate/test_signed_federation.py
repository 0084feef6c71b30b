"""A real SuperLink with two nodes: what they sign holds by their keys alone, and their own files show that they took
part, or did not, without the server.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.federate.test_federate_processes import wait_for_round

from steelyard.errors import UserError
from steelyard.experiment.loading import load
from steelyard.federate import receipts
from steelyard.federate.local import follow, resume_local, run_local
from steelyard.federate.local_federation import started
from steelyard.federate.local_launch import Launch
from steelyard.federate.receipt_answers import listed
from steelyard.report.verification import verify
from steelyard.runs.chain import Records
from steelyard.runs.opening import reading
from steelyard.runs.verifying import Keys


@pytest.mark.slow
def test_two_nodes_sign_get_the_signed_heads_and_show_alone_that_they_took_part(tmp_path: Path) -> None:
    # One client a round: in each round one of the nodes is absent.
    experiment = load("quickstart", ["rounds.count=4", "rounds.fraction=0.01", "store.checkpoint_every=2"], None)
    run = run_local(experiment, nodes=2, tls=True, out=tmp_path / "run", progress=False)
    keys = public_keys(run, tmp_path / "keys")
    assert (run / "flower" / "tls" / "server-head").stat().st_mode & 0o777 == 0o600
    found = verify(run, keys)
    assert (found.code, found.lines()[0].split(";")[0]) == (0, f"{run}: whole"), found.lines()
    with reading(run) as db:
        signed = {
            (one.federation, one.round, tuple(one.digests))
            for round in range(1, 5)
            for one, *_ in Records(db).statements(round)
        }
        rules = db.execute("SELECT COUNT(*) FROM federations").fetchone()[0]
    states = [shutil.copytree(state, tmp_path / state.name) for state in sorted((run / "flower" / "private").iterdir())]
    named = changed_digest(run, keys)
    shutil.rmtree(run)

    shown = [answer for state in states for answer in listed(state, Keys.read(keys))]
    took = {(answer.place[1], answer.place[2], answer.clients) for answer in shown if answer.outcome == "took part"}
    absent = [answer for answer in shown if answer.outcome == "absent"]
    assert len(states) == 2
    assert took == signed
    assert named in {(round, client) for _, round, clients in took for client in clients}
    assert len(took) + len(absent) == len(shown) == 2 * 4 * rules, "of every round each node knows what its head says"
    assert len(absent) == 4 * rules


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_is_whole_and_each_nodes_signatures_follow_one_another(tmp_path: Path) -> None:
    changes = ["rounds.count=7", "rounds.fraction=1.0", "rounds.evaluate_every=7", "store.checkpoint_every=3"]
    experiment = load("quickstart", [*changes, "federate.nodes=2"], None)
    run = tmp_path / "run"
    with started(run, experiment, Launch(2, tls=True)) as federation:
        federation.submit()
        wait_for_round(run, 4)  # One more than the last checkpoint has: it is repeated.
        assert federation.superlink is not None
        os.kill(federation.superlink.pid, signal.SIGKILL)
        with pytest.raises(UserError, match=r"the superlink ended \(code -9"):
            follow(federation, 7)
    resume_local(run)

    keys = public_keys(run, tmp_path / "keys")
    found = verify(run, keys)
    assert (found.code, found.round) == (0, 7), found.lines()
    states = sorted((run / "flower" / "private").iterdir())
    assert len(states) == 2
    for state in states:
        written = (state / receipts.FILE).read_bytes().count(b"\n")
        said = receipts.read(state)
        assert written > len(said), "a round that is repeated has the same statement"
        for name in {one.federation for one in said}:
            digests = {one.round: one.statement.digest() for one in said if one.federation == name}
            assert {one.round: one.before for one in said if one.federation == name} == {
                round: digests.get(round - 1, "") for round in range(1, 8)
            }
        assert {answer.outcome for answer in listed(state, Keys.read(keys))} == {"took part"}
        assert len(listed(state)) == len(said)


def public_keys(run: Path, folder: Path) -> Path:
    """Copy the public keys of a federation on this machine, as its operator hands them out."""
    folder.mkdir()
    for file in (run / "flower" / "tls").glob("*.pub"):
        shutil.copy(file, folder / ("server.pub" if file.stem == "server-head" else file.name))
    return folder


def changed_digest(run: Path, keys: Path) -> tuple[int | None, str | None]:
    """Change a digest of the run's folder; returns which round and client `verify` names for it."""
    connection = sqlite3.connect(run / "run.sqlite")
    with connection:
        ((digests,),) = connection.execute("SELECT updates FROM digests WHERE round = 2 AND federation = 1").fetchall()
        one = bytes([digests[0] ^ 1]) + digests[1:]
        connection.execute("UPDATE digests SET updates = ? WHERE round = 2 AND federation = 1", (one,))
    connection.close()
    found = verify(run, keys)
    assert found.code == 1
    (named,) = {(finding.round, finding.client) for finding in found.found.changed}
    assert "its node's signature does not hold" in "".join(finding.what for finding in found.found.changed)
    return named
