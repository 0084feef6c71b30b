"""Following a run of a federation on this machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.report.made_run import make_run

from steelyard.federate.local import follow


@pytest.mark.parametrize(("asked", "said"), [(2, 1), (4, 0)])
def test_a_round_of_one_client_is_said_once_to_whoever_started_the_run(
    asked: int, said: int, tmp_path: Path, messages: list[str]
) -> None:
    folder = make_run(tmp_path / "run", rounds=3, clients=5, seeds=(0,), rules=("fedavg",), asked=asked)
    polls = iter(["running", "running", "finished"])

    def outcome() -> dict[str, str]:
        return {"status": next(polls)}

    federation: Any = SimpleNamespace(
        folder=folder, reap=lambda: None, outcome=outcome, superlink=None, nodes=[SimpleNamespace(code=None)]
    )
    follow(federation, 3, progress=True)
    assert sum("of fedavg weighed one client only" in line for line in messages) == said


@pytest.mark.parametrize(("percent", "shown"), [(True, "%"), (False, "0.")])
def test_scores_are_in_per_cent_where_they_are_accuracies(
    percent: bool, shown: str, tmp_path: Path, messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run", rounds=3, clients=5, seeds=(0,), rules=("fedavg",))
    polls = iter(["running", "finished"])
    federation: Any = SimpleNamespace(folder=folder, reap=lambda: None, outcome=lambda: {"status": next(polls)})
    federation.superlink, federation.nodes = None, [SimpleNamespace(code=None)]
    follow(federation, 3, progress=True, percent=percent)
    (line,) = [line for line in [*messages, *capsys.readouterr().err.splitlines()] if line.startswith("round 3/3")]
    assert shown in line
    assert ("%" in line) == percent
