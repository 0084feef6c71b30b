"""Hidden updates over a real SuperLink on loopback, with nodes as processes, one of which dies."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.federate.small_experiment import assert_same_weights
from tests.federate.test_federate_processes import experiment, left_running, wait_for_round

from steelyard.experiment.running import run
from steelyard.federate.local import follow
from steelyard.federate.local_federation import started
from steelyard.federate.local_launch import Launch
from steelyard.runs.reader import History

RULE = {"criteria": ["DS", "LD"], "priority": "LD>DS"}
HIDDEN = {"aggregation": {"kind": "secure"}}


@pytest.mark.slow
def test_four_nodes_with_tls_give_the_model_of_a_simulation_in_the_open(tmp_path: Path):
    rounds = {"count": 3, "fraction": 1.0, "evaluate_every": 3}
    run(experiment(4, rounds=rounds, weighing=RULE), out=tmp_path / "open")
    folder = tmp_path / "hidden"
    described = experiment(4, rounds=rounds, weighing=RULE, privacy=HIDDEN)
    with started(folder, described, Launch(4, tls=True)) as federation:
        federation.submit()
        follow(federation, 3)
    assert_same_weights(tmp_path / "open", folder)
    history = History(folder)
    assert history.clients["failure"].isna().all()
    assert (history.clients["bytes"] < 650 * 4 + 8 * (82 + 33) + 4000).all()
    assert left_running(folder) == []


@pytest.mark.slow
def test_a_node_that_is_killed_costs_its_own_clients_only(tmp_path: Path):
    """Of eight clients six must stay, and a node has two."""
    described = experiment(
        4, timeout=15.0, rounds={"count": 3, "fraction": 1.0, "evaluate_every": 3}, weighing=RULE, privacy=HIDDEN
    )
    folder = tmp_path / "run"
    with started(folder, described, Launch(4), apart=True) as federation:
        federation.submit()
        wait_for_round(folder, 1)
        os.kill(federation.nodes[1].pid, signal.SIGKILL)
        follow(federation, 3)
    history = History(folder)
    failed = history.clients[history.clients["failure"].notna()]
    assert set(failed["client"]) == {"client-001", "client-005"}
    assert set(failed["round"]) <= {2, 3}
    last = history.clients[(history.clients["round"] == 3) & history.clients["failure"].isna()]
    assert len(last) == 6
    assert last["weight"].sum() == pytest.approx(1.0)
    assert history.info["status"] == "finished"
    assert left_running(folder) == []


SPOILING = """
import sys

sys.path[:0] = {paths!r}
from steelyard.privacy.secure_client import SecureClient

honest = SecureClient.share


def share(self, cohort):
    found = honest(self, cohort)
    return {{name: bytes(len(text)) for name, text in found.items()}} if self.name == "client-005" else found


SecureClient.share = share
"""


@pytest.mark.slow
def test_a_node_with_a_client_whose_key_shares_nobody_can_read_costs_that_client_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every process of the federation reads a changed program, in which one client spoils what it sends to others."""
    changed = tmp_path / "changed"
    changed.mkdir()
    paths = [path for path in sys.path if path]
    (changed / "sitecustomize.py").write_text(SPOILING.format(paths=paths), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(changed), *paths]))
    described = experiment(
        4, timeout=60.0, rounds={"count": 2, "fraction": 1.0, "evaluate_every": 2}, weighing=RULE, privacy=HIDDEN
    )
    folder = tmp_path / "run"
    with started(folder, described, Launch(4), apart=True) as federation:
        federation.submit()
        follow(federation, 2)
    there = History(folder).clients
    failed = there[there["failure"].notna()]
    assert set(zip(failed["client"], failed["round"], strict=True)) == {("client-005", 1), ("client-005", 2)}
    assert failed["failure"].str.startswith("left out: sent key shares that client-000, client-001").all()
    for _, weighed in there[there["failure"].isna()].groupby("round"):
        assert len(weighed) == 7
        assert weighed["weight"].sum() == pytest.approx(1.0)
    assert left_running(folder) == []
