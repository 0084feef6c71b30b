"""A global model that is not finite is never kept: the culprit is left out, or its rule ends and the others go on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import SMALL, changed
from tests.runs.contents import assert_same_bits
from tests.stopping import stopped_and_resumed

from steelyard.clients.local import Simulation
from steelyard.experiment.loading import build
from steelyard.experiment.running import resume, run
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Failure, Task, Updates
from steelyard.privacy.accounting import Release, spent
from steelyard.report.result import computed
from steelyard.rounds.weigh import Exploded, is_sound, without_culprit
from steelyard.runs.history import History

ROUNDS = 4
DOCUMENT = changed(
    SMALL,
    seed=1,
    partition={"clients": 4, "test": "local"},
    rounds={"count": ROUNDS, "samples": True},
    store={"checkpoint_every": 2},
    weighing={"criteria": ["LD"]},
    beside={"fedavg": {"criteria": ["DS"]}},
)
MAIN = "LD"
WHY = "no client's model is finite after local training (4 asked)"


def broken_from(monkeypatch: pytest.MonkeyPatch, federation: str, first: int) -> None:
    """From a round on, what clients of one federation train holds NaN, as after a learning rate too large."""
    honest = Simulation.train

    def train(self: Simulation, tasks: list[Task]) -> list[Updates]:
        found = honest(self, tasks)
        for number, updates in enumerate(found):
            if updates.federation == federation and updates.round >= first:
                models = updates.payload.models.clone()
                models[:, 0] = float("nan")
                found[number] = replace(updates, payload=DenseModels(models))
        return found

    monkeypatch.setattr(Simulation, "train", train)


@pytest.mark.parametrize(
    ("model", "sound"),
    [
        ([1e15], True),
        ([], True),
        ([1.0, float("nan")], False),
        ([1.0, float("-inf")], False),
        ([2e15], False),
    ],
)
def test_sound_is_finite_and_not_absurd(model: list[float], sound: bool):
    assert is_sound(torch.tensor(model, dtype=torch.float64)) == sound


TASK = Task("f", 0, 1, ("a", "b", "c"), torch.zeros(2))


def without_one(models: list[list[float]]) -> Updates:
    """The updates of a, b and c that are left."""
    ones = np.ones(3, dtype=np.int64)
    return without_culprit(
        TASK, Updates("f", 1, TASK.clients, ones, {}, np.zeros(3), DenseModels(torch.tensor(models))), 1
    )


def test_the_culprit_is_the_one_farthest_away():
    left = without_one([[1.0, 0.0], [9e37, 0.0], [0.0, 2.0]])
    assert left.clients == ("a", "c")
    assert left.failures == (Failure("b", "excluded: with its update (9e+37 away) training diverges"),)
    assert without_culprit(TASK, left, 1).clients == ("a",)
    # Two must stay: leaving out one more would look like a lack of clients, which stops a whole comparison.
    with pytest.raises(Exploded, match=r"^round 1 of f: ") as ended:
        without_culprit(TASK, left, 2)
    assert ended.value.reason == "training diverged, even with clients excluded"
    # At least one stays, also where nobody has to.
    with pytest.raises(Exploded):
        without_culprit(TASK, left.select([0], []), 0)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_what_is_no_number_is_farther_away_than_everything_else(number: float, culprit: int):
    """Wherever it stands, and however far the others are: sparing it would leave out honest clients one by one."""
    models = [[9e37, 0.0], [9e37, 9e37], [0.0, 2.0]]
    models[culprit] = [number, 0.0]
    assert [failure.client for failure in without_one(models).failures] == [TASK.clients[culprit]]


def without_seconds(history: History) -> list[dict[str, Any]]:
    frame = history.rounds.drop(columns=["seconds", "cpu", "gpu"])
    return frame.astype(object).where(frame.notna(), None).to_dict("records")  # NaN would equal nothing, not itself


def test_the_others_go_on_and_everyone_who_looks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    whole = History(run(build(DOCUMENT), out=tmp_path / "whole"))
    broken_from(monkeypatch, "fedavg", 3)
    folder = run(build(DOCUMENT), out=tmp_path / "run")
    history = History(folder)
    assert history.info["status"] == "finished"
    assert messages[-1] == f"fedavg: ended in round 3: {WHY}"
    assert history.ended == {("fedavg", 1): (3, WHY)}
    expected = [row for row in without_seconds(whole) if row["rule"] != "fedavg" or row["round"] < 3]
    assert without_seconds(history) == expected
    states, _ = history.last_checkpoint()
    assert {name: (state.round, state.ended) for name, state in states.items()} == {MAIN: (4, ""), "fedavg": (2, WHY)}
    assert states["fedavg"].parameters.isfinite().all()

    document = computed(folder, build(DOCUMENT))
    assert document.tested().rule is None
    assert dict(document.rule("fedavg").seeds[0].ended) == {"round": 3, "reason": WHY}


@pytest.mark.parametrize(("stopped", "every"), [(3, 2), (4, 1)])
def test_a_run_that_is_resumed_after_or_before_the_end_of_a_rule_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: int, every: int
) -> None:
    """The checkpoint of round 3 holds the rule that has ended, where there is one."""
    broken_from(monkeypatch, "fedavg", 3)
    described = build(changed(DOCUMENT, store={"checkpoint_every": every}))
    whole = run(described, out=tmp_path / "whole")
    again = stopped_and_resumed(described, tmp_path / "cut", after=stopped)
    assert_same_bits(again, whole)
    assert History(again).ended == History(whole).ended


def test_where_every_rule_explodes_the_run_stops_and_can_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_from(monkeypatch, "fedavg", 2)
    broken_from(monkeypatch, MAIN, 3)
    with pytest.raises(Exploded, match=rf"^round 3 of {MAIN}: {re.escape(WHY)}; "):
        run(build(DOCUMENT), out=tmp_path / "run")
    history = History(tmp_path / "run")
    assert history.info["status"] == "stopped"
    assert history.ended == {("fedavg", 1): (2, WHY)}
    with pytest.raises(Exploded, match=r"^round 3 of "):
        resume(tmp_path / "run")


def test_a_budget_is_not_blamed_for_a_model_that_exploded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    broken_from(monkeypatch, "fedavg", 2)
    budget = {"epsilon": spent({Release(2.0): 2}, 1e-5) + 0.01}
    central = {"clip": 1.0, "noise": 2.0, "weights": "cohort", "cohorts": "public"}
    capped = changed(
        DOCUMENT,
        weighing={"max_weight": 0.5},
        beside={"fedavg": {"criteria": ["DS"], "max_weight": 0.5}},
        privacy={"central": central, "criteria": "public", "budget": budget},
    )
    history = History(run(build(capped), out=tmp_path / "run"))
    promise = json.loads(history.info["privacy"])
    lines = [line for line in messages if "fedavg" in line]
    assert list(promise["ended"].values()) == [2]
    assert "fedavg" not in promise["ended"]
    # The server told nobody of the round in which no model was sound: one round was told.
    assert promise["epsilon"]["fedavg"] == pytest.approx(spent({Release(2.0): 1}, 1e-5))
    assert lines == [f"fedavg: ended in round 2: {WHY}"]
