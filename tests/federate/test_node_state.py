"""What a node's clients keep between rounds: rolled back on a resume, never shared between runs."""

from __future__ import annotations

from pathlib import Path

import torch
from flwr.app import RecordDict

from steelyard.federate.node_state import NodeStates


def test_node_states_roll_back_and_outlive_the_node(tmp_path: Path):
    state = RecordDict()
    kept = NodeStates(state, "run-a", "fed", 2, tmp_path)
    assert kept.before(1) == {}
    for round in (1, 2, 4):
        kept.keep(round, {"own": torch.tensor([float(round)])})
    again = NodeStates(state, "run-a", "fed", 2)
    assert again.before(5)["own"].tolist() == [4.0]
    assert again.before(4)["own"].tolist() == [2.0]
    assert again.before(2) == {}  # Only the last two are kept.
    again.keep(3, {"own": torch.tensor([30.0])})  # A resumed run repeats: what came after is dropped.
    assert again.before(9)["own"].tolist() == [30.0]
    assert NodeStates(state, "run-b", "fed", 2).before(9) == {}
    assert NodeStates(state, "run-a", "other", 2).before(9) == {}
    fresh = NodeStates(RecordDict(), "run-a", "fed", 2, tmp_path)  # A SuperNode that was started anew.
    assert fresh.before(9)["own"].tolist() == [4.0]
    assert NodeStates(RecordDict(), "run-b", "fed", 2, tmp_path).before(9) == {}
    empty = RecordDict()
    NodeStates(empty, "run-a", "fed", 2).keep(1, {})
    assert not empty
