"""Nodes that protect single rows: what they count, how much noise they add of their own accord, and where they stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error
from tests.clients.flower.flower_fakes import FakeGrid
from tests.federate.small_experiment import node
from tests.federate.test_node_rules import ask_to_train, private, private_node, reason

from steelyard.experiment.loading import build
from steelyard.federate.app_folder import experiment_text
from steelyard.federate.book import NodeLedger
from steelyard.federate.server_app import federate
from steelyard.privacy.accounting import Release, spent
from steelyard.report.verification import verify
from steelyard.runs.history import History


def records(rounds: int = 2, **more: Any) -> dict[str, Any]:
    privacy = {"records": {"clip": 1.0, "noise": 1.0}, "budget": {"delta": 1e-4}}
    return {**private(rounds), "privacy": privacy, **more}


def test_rows_are_counted_by_the_server_and_by_each_node_which_may_add_noise(tmp_path: Path) -> None:
    """A node whose owner allows less takes more noise of its own accord; the server counts what it asked for."""
    document, owners = records(), {0: 0.5, 1: 1e6}
    config = {"experiment": experiment_text(build(document)), "set": "", "out": str(tmp_path / "run")}
    nodes = {}
    for number, most in owners.items():
        own = {"require": "records", "epsilon": most, "state": str(tmp_path / str(number))}
        nodes[40 + number] = node({"partition-id": number, "num-partitions": 2, **own}, config)
    history = History(federate(FakeGrid(nodes), config, "77"))  # type: ignore[arg-type]
    assert verify(history.folder).found.changed == []
    promise = history.facts.privacy
    assert promise is not None
    clients = history.clients[history.clients["round"] == 1]
    assert promise.clients["DS"].keys() == set(clients["client"].tolist())
    for name, samples in zip(clients["client"].tolist(), clients["samples"].tolist(), strict=True):
        release = Release(1.0, "poisson", 50 / samples if samples > 50 else 1.0)
        cost = spent({release: 2 * -(-int(samples) // 50)}, 1e-4)
        assert promise.clients["DS"][name] == pytest.approx(cost)
    careful, other = (NodeLedger(tmp_path / str(number), 1e6).entries() for number in owners)
    assert len(careful) == len(other) == 2
    assert {entry.noise for entry in other} == {1.0}
    assert min(entry.noise for entry in careful) > 5
    assert 0.49 < careful[-1].epsilon <= 0.5


def test_a_node_that_protects_rows_takes_part_in_no_other_experiment_and_stops_at_its_limit(tmp_path: Path) -> None:
    asked = private_node(0, tmp_path, require="records", epsilon=8)
    assert reason(ask_to_train(asked, private(), 1)).startswith("NotAllowed: privacy.records: missing")
    document = records(1)
    for run in ("one", "two", "three", "four", "five"):
        found = ask_to_train(asked, document, 1, run=run)
        if isinstance(found, Error):
            break
    assert "privacy.records: round 1 would take the total" in reason(found)
    assert 4 < NodeLedger(tmp_path, 8.0).entries()[-1].epsilon <= 8
