"""Canaries among the samples of a client: a whole run, stopped and resumed, shows no more than it states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import steelyard
from steelyard.base.errors import Stopped
from steelyard.clients.protocol import Clients, Server, WrappedClients
from steelyard.experiment.loading import build
from steelyard.experiment.running import resume, run
from steelyard.learning import records
from steelyard.messages.updates import Evaluations, Question
from steelyard.privacy import clipping
from steelyard.privacy.accounting import lower_bound
from steelyard.runs.history import History

CANARIES, ROUNDS, DELTA = 400, 4, 1e-4


class Straight(nn.Module):
    """A regression without a bias, so that a sample of zeros adds nothing to any sum."""

    def __init__(self, feature_shape: Sequence[int]) -> None:
        super().__init__()
        self.dense = nn.Linear(feature_shape[0], 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x)


class Watched(WrappedClients):
    """Clients whose models an attacker sees, stopped once after a model was released and before it was written."""

    def __init__(self, clients: Clients, seen: list[torch.Tensor], stop: int | None) -> None:
        super().__init__(clients)
        self.seen, self.stop = seen, stop

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        answers = self.clients.evaluate(questions)
        for question in questions:
            self.seen.append(question.models[0].cpu().double())
            if question.round == self.stop:
                raise KeyboardInterrupt
        return answers


def audited(folder: Path, batch: int | str, noise: float) -> tuple[float, float]:
    """Return what ε is at least by the canaries of a run, and what the run states.

    A canary has a coordinate of its own and a gradient that is a thousand times too long; in the other case of the
    guarantee zeros stand in its place. What its coordinate has moved, round by round, is the attacker's score.
    """
    draw = np.random.default_rng(1)
    inside = draw.random(CANARIES) < 0.5
    size = np.where(inside, 1e3, 0.0)
    data = steelyard.in_memory(torch.from_numpy(np.diag(size)).float(), torch.from_numpy(size).float())
    document: dict[str, Any] = {
        "name": "canaries",
        "data": {"source": "memory"},
        "partition": {"scheme": "iid", "clients": 1, "test": "none", "server": "none"},
        "model": {"name": Straight},
        "training": {"learning_rate": 0.01, "batch_size": batch, "epochs": 2},
        "rounds": {"count": ROUNDS, "fraction": 1.0, "min_clients": 1},
        "weighing": {"criteria": ["EQ"]},
        "privacy": {"records": {"clip": 1.0, "noise": noise}, "budget": {"delta": DELTA}},
    }
    experiment, seen = build(document), list[torch.Tensor]()

    def assembled(stop: int | None) -> Callable[[], tuple[Clients, Server]]:
        def assemble() -> tuple[Clients, Server]:
            clients, server = experiment.assemble(data)
            return Watched(clients, seen, stop), server

        return assemble

    try:
        run(experiment, out=folder, assemble=assembled(3))
    except Stopped:
        resume(folder, assemble=assembled(None))
    # Round 3 was done twice, each time from the model of round 2: both moves show something.
    first, one, two, three, again, last = seen
    moved = (one - first) + (two - one) + (three - two) + (again - two) + (last - again)
    promise = History(folder).facts.privacy
    assert promise is not None
    return lower_bound(inside, moved.numpy(), DELTA), promise.together


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "noise"), [("full", 3.0), (100, 1.0)])
def test_canaries_refute_no_epsilon_and_come_near_it_where_nothing_is_sampled(
    batch: int | str, noise: float, tmp_path: Path
) -> None:
    lower, stated = audited(tmp_path / "run", batch, noise)
    assert lower <= stated
    # Who is in no batch is in nobody's view: sampling leaves an attacker of 400 samples little to guess by.
    assert lower > (0.25 * stated if batch == "full" else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["a longer clip", "little noise", "sampled always"])
def test_canaries_find_what_is_wrong(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "a longer clip":
        factors = clipping.clip_factors
        monkeypatch.setattr(clipping, "clip_factors", lambda lengths, clip: factors(lengths, 8 * clip))
    elif fault == "little noise":
        drawn = records.noise_on
        monkeypatch.setattr(records, "noise_on", lambda *given: drawn(*given) / 8)
    else:
        monkeypatch.setattr(records, "uniforms", lambda source, count: np.zeros(count))
    lower, stated = audited(tmp_path / "run", 40, 1.5)
    assert lower > stated
