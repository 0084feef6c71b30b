"""Everything is recorded: faults of tests as those of training, why a run stopped, what was noted, a full disk."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Error
from tests.federate.small_experiment import SMALL
from tests.federate.test_federate_apps import described, grid_of

from steelyard.clients.flower.forms import EVALUATE, INTRODUCE
from steelyard.errors import UserError
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.federate import server_app
from steelyard.federate.outcomes import read_outcome
from steelyard.federate.server_app import federate
from steelyard.runs import tensor_files
from steelyard.runs.reader import History


def test_a_node_that_fails_to_test_is_recorded_with_its_reason(tmp_path: Path):
    grid, config = grid_of(described(rounds={"count": 2, "fraction": 1.0}), 2, out=str(tmp_path / "run"))
    honest = grid.nodes[41]
    grid.nodes[41] = lambda m: Error(2, "ValueError") if m.metadata.message_type == EVALUATE else honest(m)
    history = History(federate(grid, config, "1"))  # type: ignore[arg-type]
    faults = history.untested
    assert faults["round"].tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert set(faults["client"]) == {"client-001", "client-003", "client-005"}
    assert set(faults["failure"]) == {"raised an error: ValueError"}
    assert history.clients["failure"].isna().all()  # Their training was fine.


def test_what_is_noted_of_nodes_is_there_while_the_run_goes_on(tmp_path: Path):
    grid, config = grid_of(described(rounds={"count": 2, "fraction": 1.0}), 2, out=str(tmp_path / "run"))
    honest = grid.nodes[40]
    noted: list[str] = []

    def answer(message: Any) -> Any:
        if message.metadata.group_id.startswith("1:") and 99 not in grid.nodes:
            grid.nodes[99] = lambda m: (
                Error(2, "UserError: model.name") if m.metadata.message_type == INTRODUCE else None
            )
        if message.metadata.group_id.startswith("2:") and message.metadata.message_type == EVALUATE:
            noted.append(History(tmp_path / "run").info["federation_notes"])  # The last round is not stored yet.
        return honest(message)

    grid.nodes[40] = answer
    federate(grid, config, "1")  # type: ignore[arg-type]
    assert noted
    assert "round 1: node 99 was not admitted: raised an error: UserError: model.name" in noted[0]


def test_why_a_run_stopped_is_in_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(path: Path, *rest: Any) -> Any:
        if "round-000002" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *rest)

    write = tensor_files.write_tensors
    monkeypatch.setattr(tensor_files, "write_tensors", full)
    with pytest.raises(
        UserError, match=r"round 2 cannot be (stored|written): No space left on device; .*`steelyard resume"
    ):
        run(build(SMALL), out=tmp_path / "run")
    info = History(tmp_path / "run").info
    assert info["status"] == "stopped"
    assert "No space left on device" in info["stopped"]
    assert History(tmp_path / "run").rounds["round"].tolist() == [0, 1]


def test_a_run_that_was_stopped_before_its_first_round_is_resumed_by_starting_it(tmp_path: Path):
    grid, config = grid_of(described(rounds={"count": 1}), 2, out=str(tmp_path / "run"), resume=True)
    folder = federate(grid, config, "1")  # type: ignore[arg-type]
    assert History(folder).info["status"] == "finished"


def test_a_run_whose_app_is_ended_by_a_signal_of_flowers_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def ended(*_: object) -> Path:
        raise SystemExit(0)

    monkeypatch.setattr(server_app, "federate", ended)
    monkeypatch.setattr(server_app, "_print_into", lambda file: None)
    context: Any = SimpleNamespace(run_config={"report": str(tmp_path)}, run_id=1)
    with pytest.raises(SystemExit):
        server_app.main(context, context)
    outcome = read_outcome(tmp_path)
    assert (outcome["status"], outcome["line"]) == ("stopped", "the SuperLink stopped this run (`flwr stop`?)")
