"""A real SuperLink with two nodes: what they sign holds by their keys alone, and a changed folder does not."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from steelyard.experiment.loading import load
from steelyard.federate import receipts
from steelyard.federate.local import run_local
from steelyard.report.verification import verify
from steelyard.runs.chain import Records
from steelyard.runs.schema import reading
from steelyard.runs.verifying import Keys


@pytest.mark.slow
def test_two_nodes_sign_and_a_changed_digest_is_named_by_its_client(tmp_path: Path) -> None:
    experiment = load("quickstart", ["rounds.count=2"], None)
    run = run_local(experiment, nodes=2, tls=True, out=tmp_path / "run", progress=False)
    keys = tmp_path / "keys"
    keys.mkdir()
    for file in (run / "flower" / "tls").glob("*.pub"):
        shutil.copy(file, keys / ("server.pub" if file.stem == "server-head" else file.name))
    assert (run / "flower" / "tls" / "server-head").stat().st_mode & 0o777 == 0o600
    found = verify(run, keys)
    assert (found.code, found.lines()[0].split(";")[0]) == (0, f"{run}: whole"), found.lines()
    states = sorted((run / "flower" / "private").iterdir())
    shown = [answer for state in states for answer in receipts.prove(state, run, Keys.read(keys))]
    assert len(states) == 2
    assert {answer.outcome for answer in shown} == {"took part"}
    with reading(run) as db:
        signed = {(one.federation, one.round, one.client) for n in (1, 2) for one, *_ in Records(db).statements(n)}
    assert {answer.receipt.place[1:] for answer in shown} == signed
    connection = sqlite3.connect(run / "run.sqlite")
    with connection:
        ((digests,),) = connection.execute("SELECT updates FROM digests WHERE round = 2 AND federation = 1").fetchall()
        one = bytes([digests[0] ^ 1]) + digests[1:]
        connection.execute("UPDATE digests SET updates = ? WHERE round = 2 AND federation = 1", (one,))
    connection.close()
    found = verify(run, keys)
    assert found.code == 1
    named = {(finding.round, finding.client) for finding in found.found.changed}
    assert len(named) == 1
    assert "its node's signature does not hold" in "".join(finding.what for finding in found.found.changed)
    shown = [answer for state in states for answer in receipts.prove(state, run, Keys.read(keys))]
    assert {(answer.receipt.round, answer.receipt.client) for answer in shown if "the run says" in answer.why} == named
    (run / "run.sqlite").unlink()
    kept = [answer for state in states for answer in receipts.listed(state, Keys.read(keys))]
    assert {answer.outcome for answer in kept} == {"took part"}, "what was proved before stays so, without the run"
