"""One rule whose model explodes ends there and says so; the others go on as if it had never been."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import CommandLine

from steelyard.clients.local import Simulation
from steelyard.experiment.loading import build
from steelyard.experiment.running import resume, run
from steelyard.messages import Task, Updates
from steelyard.privacy.accounting import Release, spent
from steelyard.report.answer import write_comparison
from steelyard.report.comparison import compare_run
from steelyard.report.headline import headline
from steelyard.report.summary import summarise
from steelyard.report.view import RunView
from steelyard.rounds.drafting import TooFewClients
from steelyard.rounds.soundness import Exploded
from steelyard.runs.glance import glance
from steelyard.runs.reader import History
from steelyard.update_payloads import DenseModels

ROUNDS = 4
SMALL: dict[str, Any] = {
    "name": "small",
    "seed": 1,
    "data": {"source": "digits"},
    "partition": {"scheme": "dirichlet", "clients": 4, "alpha": 0.5, "test": "local"},
    "model": {"name": "logistic"},
    "training": {"batch_size": 60},
    "rounds": {"count": ROUNDS, "fraction": 1.0, "samples": True},
    "store": {"checkpoint_every": 2},
    "weighing": {"criteria": ["LD"]},
    "beside": {"fedavg": {"criteria": ["DS"]}},
    "compute": {"engine": "loop", "device": "cpu"},
}
WHY = "no client's model is finite after local training (4 asked)"


def broken_from(monkeypatch: pytest.MonkeyPatch, federation: str, first: int, most: int | None = None) -> None:
    """From a round on, what (so many) clients of one federation train holds NaN, as after a learning rate too large."""
    honest = Simulation.train

    def train(self: Simulation, tasks: list[Task]) -> list[Updates]:
        found = honest(self, tasks)
        for number, updates in enumerate(found):
            if updates.federation == federation and updates.round >= first:
                assert isinstance(updates.payload, DenseModels)
                models = updates.payload.models.clone()
                models[:most, 0] = float("nan")
                found[number] = replace(updates, payload=DenseModels(models))
        return found

    monkeypatch.setattr(Simulation, "train", train)


def without_seconds(history: History) -> list[dict[str, Any]]:
    frame = history.rounds.drop(columns=["seconds", "cpu", "gpu"])
    return frame.astype(object).where(frame.notna(), None).to_dict("records")  # NaN would equal nothing, not itself


def test_the_others_go_on_and_everyone_who_looks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str], steelyard: CommandLine
) -> None:
    whole = History(run(build(SMALL), out=tmp_path / "whole"))
    broken_from(monkeypatch, "fedavg", 3)
    folder = run(build(SMALL), out=tmp_path / "run")
    history = History(folder)
    assert history.info["status"] == "finished"
    assert messages[-1] == f"fedavg: ended in round 3: {WHY}"
    assert history.ended == {("fedavg", 1): (3, WHY)}
    expected = [row for row in without_seconds(whole) if row["rule"] != "fedavg" or row["round"] < 3]
    assert without_seconds(history) == expected
    states, _ = history.last_checkpoint()
    assert (states["fedavg"].round, states["fedavg"].ended) == (2, WHY)
    assert states["fedavg"].parameters.isfinite().all()
    main = next(name for name in states if name != "fedavg")
    assert states[main].round == ROUNDS
    assert not states[main].ended

    rounds = build(SMALL).rounds
    document = compare_run(folder, build(SMALL))
    assert document["recommendation"]["rule"] is None
    assert (
        "fedavg, which the others are held against, exploded in 1 of 1 seeds" in document["recommendation"]["sentence"]
    )
    assert document["ended"] == [{"rule": "fedavg", "seed": 1, "round": 3, "reason": WHY}]
    assert document["devices"][0]["final"]["values"] == [
        whole.rounds[whole.rounds["rule"] == "fedavg"].accuracy.iloc[2]
    ]
    assert "Ended early, without a sound model" in write_comparison(document, "markdown")
    ends = {rule["rule"]: rule["ended"] for rule in summarise(folder, rounds)["rules"]}
    assert ends == {main: None, "fedavg": {"round": 3, "reason": WHY}}
    assert any(line.startswith(f"fedavg, seed 1, ended in round 3: {WHY}.") for line in headline(RunView([folder])))
    assert glance(tmp_path, "run").ended == f"fedavg, seed 1, ended in round 3: {WHY}"
    assert f"ended in round 3: {WHY}" in steelyard("ls", tmp_path).stdout
    told = json.loads(steelyard("ls", tmp_path, "--format", "json").stdout)
    assert [run["ended"] for run in told if run["name"] == "whole"] == [""]
    assert "Ended early, without a sound model" in steelyard("table", folder).stdout


@pytest.mark.parametrize("stopped", [3, 4])
def test_a_run_that_is_resumed_after_or_before_the_end_of_a_rule_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: int
) -> None:
    broken_from(monkeypatch, "fedavg", 3)
    whole = History(run(build(SMALL), out=tmp_path / "whole"))
    if stopped == 4:  # the checkpoint of round 3 then holds the rule that has ended
        monkeypatch.setitem(SMALL, "store", {"checkpoint_every": 1})

    class Cut(Exception): ...

    def stop(round: int, _: object) -> None:
        if round == stopped:
            raise Cut

    with pytest.raises(Cut):
        run(build(SMALL), out=tmp_path / "cut", progress=stop)
    assert History(tmp_path / "cut").ended == whole.ended
    again = History(resume(tmp_path / "cut"))
    assert again.info["status"] == "finished"
    assert without_seconds(again) == without_seconds(whole)
    assert again.ended == whole.ended
    ours, theirs = again.last_checkpoint()[0], whole.last_checkpoint()[0]
    for name, state in ours.items():
        assert state.parameters.numpy().tobytes() == theirs[name].parameters.numpy().tobytes()
        assert (state.round, state.ended) == (theirs[name].round, theirs[name].ended)


def test_a_rule_that_explodes_at_once_is_shown_with_its_first_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_from(monkeypatch, "fedavg", 1)
    folder = run(build(SMALL), out=tmp_path / "run")
    history = History(folder)
    document = compare_run(folder, build(SMALL))
    untrained = history.rounds[(history.rounds["rule"] == "fedavg") & (history.rounds["round"] == 0)]
    assert document["devices"][0]["rule"] == "fedavg"
    assert document["devices"][0]["final"]["values"] == untrained.accuracy.tolist()
    assert "fedavg, which the others are held against, exploded in 1" in headline(RunView([folder]))[0]


def test_where_every_rule_explodes_the_run_stops_with_one_line_and_can_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_from(monkeypatch, "fedavg", 2)
    main = next(iter(build(SMALL).rules()))
    broken_from(monkeypatch, main, 3)
    with pytest.raises(
        Exploded, match=rf"^round 3 of {main}: {re.escape(WHY)}; the model before this round is kept \(allowed: "
    ):
        run(build(SMALL), out=tmp_path / "run")
    history = History(tmp_path / "run")
    assert history.info["status"] == "stopped"
    assert history.ended == {("fedavg", 1): (2, WHY)}
    with pytest.raises(Exploded, match=r"^round 3 of "):
        resume(tmp_path / "run")


def test_one_broken_model_of_too_few_clients_stops_the_run_and_says_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four clients are well: no model exploded, there are only fewer than the experiment asks for."""
    broken_from(monkeypatch, "fedavg", 2, most=1)
    strict = {**SMALL, "rounds": {**SMALL["rounds"], "min_clients": 4}}
    with pytest.raises(TooFewClients, match=r"^round 2 of fedavg: 3 of 4 clients gave a usable update, .*min_clients"):
        run(build(strict), out=tmp_path / "run")
    assert History(tmp_path / "run").ended == {}


def test_a_rule_that_ended_before_its_first_test_has_no_place_among_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = {name: {"criteria": [name]} for name in ("DS", "EQ", "MD")}
    broken_from(monkeypatch, "MD", 2)
    flawed = {
        **SMALL,
        "beside": beside,
        "flaws": [{"kind": "labels-flipped", "pick": "random", "count": 1}],
        "rounds": {**SMALL["rounds"], "evaluate_every": ROUNDS},
    }
    folder = run(build(flawed), out=tmp_path / "run")
    assert History(folder).ended == {("MD", 1): (2, WHY)}
    told = headline(RunView([folder]))
    assert any(line.startswith("MD, seed 1, ended in round 2") for line in told)
    assert "1 of 4 clients were flawed" in told[-1]
    assert "MD" not in told[-1]


def test_a_budget_is_not_blamed_for_a_model_that_exploded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    broken_from(monkeypatch, "fedavg", 2)
    limit = spent({Release(2.0): 2}, 1e-5) + 0.01
    central = {"clip": 1.0, "noise": 2.0, "weights": "cohort", "cohorts": "public"}
    privacy = {"central": central, "criteria": "public", "budget": {"epsilon": limit}}
    capped = {
        "weighing": {"criteria": ["LD"], "max_weight": 0.5},
        "beside": {"fedavg": {"criteria": ["DS"], "max_weight": 0.5}},
    }
    folder = run(build({**SMALL, **capped, "privacy": privacy}), out=tmp_path / "run")
    promise = json.loads(History(folder).info["privacy"])
    main = next(name for name in promise["epsilon"] if name != "fedavg")
    assert promise["ended"] == {main: 2}
    # The server told nobody of the round in which no model was sound: one round was told.
    assert promise["epsilon"]["fedavg"] == pytest.approx(spent({Release(2.0): 1}, 1e-5))
    lines = [line for line in messages if "fedavg" in line]
    assert lines == [f"fedavg: ended in round 2: {WHY}"]


def test_devices_with_noise_tell_nobody_that_their_models_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_from(monkeypatch, "fedavg", 2)
    limit = spent({Release(2.0): 2}, 1e-5) + 0.01
    privacy = {"local": {"clip": 1.0, "noise": 2.0}, "criteria": "public", "budget": {"epsilon": limit}}
    folder = run(build({**SMALL, "privacy": privacy}), out=tmp_path / "run")
    assert History(folder).ended == {}  # What they sent was noise alone.
    promise = json.loads(History(folder).info["privacy"])
    assert promise["ended"] == dict.fromkeys(promise["epsilon"], 2)
    assert promise["epsilon"]["fedavg"] == pytest.approx(limit - 0.01)
