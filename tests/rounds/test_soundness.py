"""A global model that is not finite is never kept: the culprit is left out, or the run stops with what it had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.clients.local import Simulation
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.messages import Failure, Task, Updates
from steelyard.rounds.soundness import Exploded, is_sound, without_culprit
from steelyard.runs.reader import History
from steelyard.runs.store import Store
from steelyard.update_payloads import DenseModels

SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"source": "digits"},
    "partition": {"scheme": "iid", "clients": 4, "test": "local"},
    "model": {"name": "logistic"},
    "rounds": {"count": 2, "fraction": 1.0},
    "compute": {"engine": "loop", "device": "cpu"},
}


def poisoned(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], value: float) -> None:
    """From round 2 on, these clients send numbers that are finite one by one, but not their sum."""
    honest = Simulation.train

    def train(self: Simulation, tasks: list[Task]) -> list[Updates]:
        found = honest(self, tasks)
        for number, updates in enumerate(found):
            if updates.round >= 2:
                assert isinstance(updates.payload, DenseModels)
                models = updates.payload.models.clone()
                models[[updates.clients.index(name) for name in names]] = value
                found[number] = replace(updates, payload=DenseModels(models))
        return found

    monkeypatch.setattr(Simulation, "train", train)
    monkeypatch.setattr(DenseModels, "finite", lambda self: np.ones(len(self.models), dtype=np.bool_))


def test_the_round_is_weighed_again_without_the_culprit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    poisoned(monkeypatch, ("client-002",), 3e38)
    history = History(run(build(SMALL), out=tmp_path / "run"))
    last = history.clients[history.clients["round"] == 2].set_index("client")
    assert last["failure"]["client-002"].startswith("left out: with its update (")
    assert last["weight"].drop("client-002").sum() == pytest.approx(1.0)
    assert history.rounds["accuracy"].iloc[-1] > 0.5


def test_where_nothing_helps_the_run_stops_and_the_last_good_model_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    poisoned(monkeypatch, ("client-000", "client-001", "client-002", "client-003"), 3e38)
    with pytest.raises(Exploded, match=r"round 2 of .*: the global model is no longer finite"):
        run(build(SMALL), out=tmp_path / "run")
    assert History(tmp_path / "run").rounds["round"].tolist() == [0, 1]
    store = Store(tmp_path / "run")
    (state,) = store.resume().states.values()
    store.close()
    assert state.round == 1
    assert state.parameters.isfinite().all()


def test_sound_is_finite_and_not_absurd():
    assert is_sound(torch.tensor([1e14, -3.0]))
    assert not is_sound(torch.tensor([1.0, float("nan")]))
    assert not is_sound(torch.tensor([1.0, float("-inf")]))
    assert not is_sound(torch.tensor([2e15]))
    assert not is_sound(torch.tensor([-2e15, 0.0]))
    assert is_sound(torch.tensor([1e15, -1e15], dtype=torch.float64))
    assert is_sound(torch.zeros(0))


def test_the_culprit_is_the_one_farthest_away():
    task = Task("f", 0, 1, ("a", "b", "c"), torch.zeros(2))
    models = torch.tensor([[1.0, 0.0], [9e37, 0.0], [0.0, 2.0]])
    updates = Updates("f", 1, task.clients, np.ones(3, dtype=np.int64), {}, np.zeros(3), DenseModels(models))
    left = without_culprit(task, updates, 1)
    assert left.clients == ("a", "c")
    assert left.failures == (Failure("b", "left out: with its update (9e+37 away) the global model explodes"),)
    assert without_culprit(task, left, 1).clients == ("a",)
    # One that is no number at all is farther than any that is.
    broken = torch.tensor([[1.0, 0.0], [9e30, 0.0], [float("nan"), 2.0]])
    spoilt = without_culprit(task, replace(updates, payload=DenseModels(broken)), 1)
    assert spoilt.clients == ("a", "b")
    assert [failure.client for failure in spoilt.failures] == ["c"]
    # Two must stay: leaving out one more would look like a lack of clients, which stops a whole comparison.
    with pytest.raises(Exploded) as ended:
        without_culprit(task, left, 2)
    assert ended.value.reason == "the global model is no longer finite, whichever client is left out"
    assert str(ended.value) == (
        f"round 1 of f: {ended.value.reason}; the model before this round is kept (allowed: a smaller learning rate)"
    )
    # At least one stays, also where nobody has to.
    with pytest.raises(Exploded):
        without_culprit(task, left.select([0], []), 0)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_what_is_no_number_is_farther_away_than_everything_else(number: float, culprit: int):
    """Wherever it stands, and however far the others are: sparing it would leave out honest clients one by one."""
    task = Task("f", 0, 1, ("a", "b", "c"), torch.zeros(2))
    models = torch.tensor([[9e37, 0.0], [9e37, 9e37], [0.0, 2.0]])
    models[culprit] = torch.tensor([number, 0.0])
    updates = Updates("f", 1, task.clients, np.ones(3, dtype=np.int64), {}, np.zeros(3), DenseModels(models))
    left = without_culprit(task, updates, 1)
    assert [failure.client for failure in left.failures] == [task.clients[culprit]]
    assert left.clients == tuple(name for name in task.clients if name != task.clients[culprit])
