"""A run that is stopped between two rounds and resumed, to be held against one that was left alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.runs.contents import assert_same_bits

from steelyard import Experiment
from steelyard.base.errors import Stopped
from steelyard.clients.local import Simulation
from steelyard.experiment.description import Description
from steelyard.experiment.running import resume, run


def stopped(experiment: Experiment, out: Path, after: int) -> Path:
    """Run an experiment and stop it after a round as Ctrl-C does; returns its folder."""

    def stop(round: int, figures: Mapping[str, float | None]) -> None:
        if round == after:
            raise KeyboardInterrupt

    with pytest.raises(Stopped):
        run(experiment, out=out, progress=stop)
    return out


def stopped_and_resumed(experiment: Experiment, out: Path, after: int) -> Path:
    """Run an experiment, stop it after a round, resume it to its end, and return its folder."""
    return resume(stopped(experiment, out, after))


def stop_in_round(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every simulation stop in a round as Ctrl-C does, in the middle of its training."""
    train = Simulation.train

    def until(self: Simulation, tasks: Any) -> Any:
        if tasks[0].round >= number:
            raise KeyboardInterrupt
        return train(self, tasks)

    monkeypatch.setattr(Simulation, "train", until)


def assert_a_stop_changes_nothing(described: Description, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold a run that was stopped in round 3 and resumed to one that was left alone (`folder / "whole"`)."""
    whole, stopped = run(described, out=folder / "whole"), folder / "stopped"
    with monkeypatch.context() as stopping:
        stop_in_round(3, stopping)
        with pytest.raises(KeyboardInterrupt):
            run(described, out=stopped)
    assert_same_bits(resume(stopped), whole)
