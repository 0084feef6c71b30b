"""A run that was stopped goes on with [contributions]: same models, values as if they had been measured all along."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from tests.conftest import CommandLine
from tests.contributions.test_replaying import experiment, rows
from tests.runs.contents import query

from steelyard.errors import Stopped
from steelyard.experiment.running import run
from steelyard.runs.reader import History


def stopped(out: Path, **sections: object) -> Path:
    def stop(round: int, figures: Mapping[str, float | None]) -> None:
        if round == 1:
            raise KeyboardInterrupt

    # As many threads as the commands have that go on and replay: other tests change this process's number.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.raises(Stopped):
            run(experiment(**sections), out=out, progress=stop)
    finally:
        torch.set_num_threads(threads)
    return out


def test_a_run_measures_from_where_it_goes_on(
    tmp_path: Path, steelyard: CommandLine, refused: Callable[..., str]
) -> None:
    # Both go on in processes of the same kind: how many threads torch has in this one, other tests decide.
    whole = stopped(tmp_path / "whole", contributions={"measure": "loss"})
    assert steelyard("resume", whole).returncode == 0
    folder = stopped(tmp_path / "run")
    done = steelyard("resume", folder, "--contributions")
    assert done.returncode == 0, done.stderr
    models = "SELECT federation, round, model FROM digests ORDER BY federation, round"
    assert query(folder, models) == query(whole, models)
    assert rows(folder) == {key: row for key, row in rows(whole).items() if key[1] > 1}
    assert not History(folder).chain.problem
    assert "What each client added" in steelyard("contributions", folder).stdout
    assert {key[1] for key in rows(folder)} == {1, 2, 3}
    finished = run(experiment(), out=tmp_path / "finished")
    assert "--contributions" in refused("resume", finished, "--contributions")


def test_what_cannot_be_measured_is_refused_and_nothing_changes(tmp_path: Path, refused: Callable[..., str]) -> None:
    folder = stopped(tmp_path / "run", privacy={"aggregation": {"kind": "secure"}}, beside={"VP": {"criteria": ["DS"]}})
    text = (folder / "experiment.toml").read_bytes()
    assert "hides single" in refused("resume", folder, "--contributions")
    assert (folder / "experiment.toml").read_bytes() == text
