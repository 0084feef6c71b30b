"""A run that is stopped between two rounds and resumed, to be held against one that was left alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from steelyard import Experiment
from steelyard.errors import Stopped
from steelyard.experiment.running import resume, run


def stopped_and_resumed(experiment: Experiment, out: Path, after: int) -> Path:
    """Run an experiment, stop it after a round as Ctrl-C does, resume it to its end, and return its folder."""

    def stop(round: int, figures: Mapping[str, float | None]) -> None:
        if round == after:
            raise KeyboardInterrupt

    with pytest.raises(Stopped):
        run(experiment, out=out, progress=stop)
    resume(out)
    return out
