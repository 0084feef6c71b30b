"""The nodes of a server as its operator sees them: who is there, and who refused what, also before the first round."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from steelyard.federate.server_folder import ServerFolder
from steelyard.federate.server_nodes import nodes_of
from steelyard.federate.server_runs import new_run


def served(folder: Path) -> ServerFolder:
    """Return the folder of a server with two registered nodes, one of which has called, and a run that has begun."""
    home = ServerFolder(folder)
    home.make()
    entries = [{"name": name, "key": f"k {name}", "clients": [name], "most": 1} for name in ("a.b", "axb")]
    home.register.write_text(json.dumps({"nodes": entries}))
    contact = {"last": datetime.now(UTC).isoformat(), "clock": 6.0, "steelyard": "1", "flower": "2"}
    home.contacts.write_text(json.dumps({"k a.b": contact}))
    run = new_run(home)
    run.note_submitted("x", folder.parent / "out", 4)
    run.note_started("mark", 1, 7)
    return home


def test_a_refusal_is_shown_while_the_run_still_waits(tmp_path: Path):
    home = served(tmp_path / "server")
    (home.runs / "1" / "log.txt").write_text(
        "steelyard: waiting for 2 nodes\n"
        "steelyard: node axb was not admitted: raised an error: NotAllowed: data.labels: got 'y'; allowed: 'z'\n"
        "steelyard: round 2: node axb was not admitted: node a.b was not admitted: a lie\n"
        "node a.b was not admitted: printed by somebody else\n"
    )
    with home.held():
        one, other = nodes_of(home)
    assert (one["name"], one["status"], one["clock"], one["refused"]) == ("a.b", "connected", 6.0, None)
    assert (other["name"], other["status"], other["last"]) == ("axb", "away", None)
    assert other["refused"] == "round 2: node axb was not admitted: node a.b was not admitted: a lie"
