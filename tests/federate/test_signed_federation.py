"""A real SuperLink with two nodes: what they sign holds by their keys alone, and a changed folder does not."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from steelyard.experiment.loading import load
from steelyard.federate.local import run_local
from steelyard.report.verification import verify


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
