"""Round 0: rules that run side by side start from one model, which is tested once for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.rounds.test_soundness import SMALL

from steelyard.clients.local import Simulation
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.messages import Question
from steelyard.runs.reader import History


def test_the_first_model_is_tested_once_for_each_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, int]] = []
    evaluate = Simulation.evaluate

    def counting(self: Simulation, questions: list[Question]) -> Any:
        asked.extend((question.round, question.seed) for question in questions)
        return evaluate(self, questions)

    monkeypatch.setattr(Simulation, "evaluate", counting)
    document = {**SMALL, "rounds": {"count": 1, "fraction": 1.0}, "beside": {"equal": {"criteria": ["EQ"]}}}
    history = History(run(build(document), out=tmp_path / "run", seeds=[0, 1]))
    assert sorted(asked) == [(0, 0), (0, 1), (1, 0), (1, 0), (1, 1), (1, 1)]
    first = history.evaluations[history.evaluations["round"] == 0]
    assert len(first) == 2 * 2 * 4  # Both rules, both seeds, four clients.
    one, other = (first[first["rule"] == rule]["score"].tolist() for rule in ("DS", "equal"))
    assert one == other
