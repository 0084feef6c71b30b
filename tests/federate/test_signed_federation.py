"""A real SuperLink with two nodes: what they sign holds by their keys alone, and their own files show that they took
part, or did not, without the server.
"""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from steelyard.experiment.loading import load
from steelyard.federate.local import run_local
from steelyard.federate.receipt_answers import listed
from steelyard.report.verification import verify
from steelyard.runs.chain import Records
from steelyard.runs.schema import reading
from steelyard.runs.verifying import Keys


@pytest.mark.slow
def test_two_nodes_sign_get_the_signed_heads_and_show_alone_that_they_took_part(tmp_path: Path) -> None:
    # One client a round: in each round one of the nodes is absent.
    experiment = load("quickstart", ["rounds.count=4", "rounds.fraction=0.01", "store.checkpoint_every=2"], None)
    run = run_local(experiment, nodes=2, tls=True, out=tmp_path / "run", progress=False)
    keys = tmp_path / "keys"
    keys.mkdir()
    for file in (run / "flower" / "tls").glob("*.pub"):
        shutil.copy(file, keys / ("server.pub" if file.stem == "server-head" else file.name))
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
