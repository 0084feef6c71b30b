"""Retrained coalitions are the runs that one would make of their clients; without one client; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.contributions.test_replaying import experiment

from steelyard.contributions.document import stored_contributions
from steelyard.contributions.finding import contributions, without
from steelyard.errors import UserError
from steelyard.experiment.parts import as_begun
from steelyard.experiment.running import run
from steelyard.rounds.loop import one_round
from steelyard.runs.reader import History


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(experiment(contributions={"measure": "loss"}), out=tmp_path_factory.mktemp("retrained") / "run")


def losses(folder: Path, left_out: str | None) -> tuple[float, float]:
    """The loss of the first and the last model of a loop over some clients, step by step with no stacking."""
    with as_begun(History(folder)) as (parts, _):
        from dataclasses import replace

        main = parts.federations[0]
        names = frozenset(parts.clients.names(main.seed)) - {left_out}
        alone = replace(main, members=names)
        states = {alone.name: alone.start(parts.server)}
        plan = replace(parts.plan, contributions=None)
        first = states[alone.name].parameters
        for round in range(1, plan.rounds + 1):
            one_round([alone], states, parts.clients, parts.server, plan, round)
        models = torch.stack([first, states[alone.name].parameters])
        before, after = parts.server.rows(main.seed, models).losses.mean(axis=1)  # type: ignore[attr-defined]
        return float(before), float(after)


def test_all_coalitions_trained_side_by_side_are_the_runs_of_their_clients(folder: Path) -> None:
    found = contributions(folder, retrained=True)
    before, after = losses(folder, None)
    assert (found["before"], found["after"]) == pytest.approx((before, after), rel=1e-5)
    # Efficiency: the values of all coalitions sum to what training with everybody gained.
    assert sum(row["value"] for row in found["clients"]) == pytest.approx(before - after, rel=1e-5)
    # The client with wrong labels is last, in truth and in the estimate.
    estimated = contributions(folder)
    assert found["clients"][-1]["client"] == estimated["clients"][-1]["client"]
    worst = found["clients"][-1]["client"]
    one_less = stored_contributions(folder, method="leave-one-out", retrained=True)
    assert not isinstance(one_less, str)
    (value,) = [row["value"] for row in one_less["clients"] if row["client"] == worst]
    _, other = losses(folder, worst)
    assert value == pytest.approx(other - after, rel=1e-4)
    truth = without(folder, worst, retrained=True)
    assert truth["without"] == pytest.approx(other, rel=1e-5)
    guess = without(folder, worst)
    assert guess["after"] == pytest.approx(after, rel=1e-5)
    assert guess["without"] < guess["after"]
    assert guess["low"] < guess["without"] < guess["high"]


def test_what_is_refused(folder: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "CLIENT: got 'nobody'; allowed: client-" in refused("contributions", folder, "--without", "nobody")
    assert "--method: got 'classes' with --retrain" in refused(
        "contributions", folder, "--retrain", "--method", "classes"
    )
    many = run(experiment(partition={"clients": 11}, rounds={"count": 1}), out=tmp_path / "many")
    with pytest.raises(UserError, match=r"--retrain: this run has 11 clients, and so 2\^11 coalitions"):
        contributions(many, retrained=True)
