"""What a node's clients keep between rounds: rolled back on a resume, never shared between runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from flwr.app import RecordDict

from steelyard.errors import UserError
from steelyard.federate.node_state import NodeStates
from steelyard.runs.tensor_files import read_tensors, write_tensors


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


def test_what_did_not_change_is_written_once(tmp_path: Path):
    node, still = RecordDict(), torch.zeros(1000)
    for round in range(1, 6):
        states = NodeStates(node, "run", "fed", 5, tmp_path)  # A message each; all that is left is the node's state.
        before = states.before(round)
        states.keep(round, {"still": before.get("still", still), "moving": torch.full((10,), float(round))})
    (file,) = tmp_path.iterdir()
    tensors = read_tensors(file)
    del tensors["about"]
    assert sorted(tensor.numel() for tensor in tensors.values()) == [10] * 5 + [1000]
    assert sum(array.numpy().size for array in node["steelyard/fed/tensors"].values()) == 1050  # type: ignore[union-attr]
    fresh = NodeStates(RecordDict(), "run", "fed", 5, tmp_path)
    assert [fresh.before(round)["moving"][0].item() for round in range(2, 7)] == [1, 2, 3, 4, 5]
    assert torch.equal(fresh.before(3)["still"], still)


def test_another_run_leaves_nothing_of_the_one_before_in_the_node_state():
    node = RecordDict()
    NodeStates(node, "run-a", "one", 2).keep(1, {"own": torch.ones(1)})
    NodeStates(node, "run-a", "two/about", 2).keep(1, {"own": torch.ones(1)})
    assert len(node) == 4
    assert NodeStates(node, "run-a", "one", 2).before(2)["own"].tolist() == [1.0]
    NodeStates(node, "run-b", "three", 2)
    assert not node


def test_a_file_of_another_make_is_named(tmp_path: Path):
    NodeStates(RecordDict(), "run", "fed", 2, tmp_path).keep(1, {"own": torch.ones(1)})
    (file,) = tmp_path.iterdir()
    write_tensors(file, {"0": torch.ones(1)})
    with pytest.raises(UserError, match=r"node config state: .* is not a file of states of this version"):
        NodeStates(RecordDict(), "run", "fed", 2, tmp_path)
