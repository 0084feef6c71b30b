"""Commands on several real processes that meet over gloo: as in one process, and stopped in one line."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w
from tests.kit import SMALL, changed
from tests.ports import free_ports
from tests.runs.contents import models
from tests.warm import command_environment, warm_command

from steelyard import __version__
from steelyard.clients.ranks import engine
from steelyard.runs.history import History

Ranked = Callable[..., subprocess.CompletedProcess[str]]

FATAL = """
import os
import signal
from pathlib import Path
import torch.distributed as ranks
import steelyard

seen, one = [], Path("{flag}")
if ranks.is_initialized() and ranks.get_rank() == 1 and one.exists():
    one.write_text(str(os.getpid()))

@steelyard.client_criterion("FATAL", about="model", description="ends a rank in its second round")
def fatal(data):
    seen.append(data.client)
    if seen.count(data.client) == 2 and one.exists():
        os.kill(int(one.read_text()), signal.SIGKILL)
    return 1.0
"""
SHARED = changed(
    SMALL,
    seed=3,
    partition={"server": "fraction", "server_fraction": 0.3, "server_report": "apart", "test": "local"},
    model={"name": "mlp"},
    rounds={"count": 3},
    weighing={"criteria": ["VP", "MD", "DS"], "priority": "VP>MD>DS"},
)


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(tomli_w.dumps(SHARED), encoding="utf-8")
    return path


@pytest.fixture
def fatal(tmp_path: Path) -> list[str]:
    """Return the words by which rank 1 ends in its second round while there is a file `flag`."""
    (tmp_path / "flag").touch()
    plugin = tmp_path / "fatal.py"
    plugin.write_text(FATAL.format(flag=tmp_path / "flag"), encoding="utf-8")
    fields = ('weighing.criteria=["VP","FATAL"]', "weighing.priority=VP>FATAL", f'weighing.plugins=["{plugin}"]')
    return [word for field in fields for word in ("--set", field)] + ["--trust"]


def other_version() -> None:
    """Let this rank have another version of the package."""
    engine.__version__ = "0.0.7"


def become_ranks(count: int, port: int, differ: Callable[[], None] | None = None) -> None:
    """Fork a process into so many, each of which goes on as one rank; the last of them is made to differ."""
    os.environ.update(WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0")
    for rank in range(1, count):
        if os.fork() == 0:
            os.environ["RANK"] = str(rank)
            if differ is not None and rank == count - 1:
                differ()
            return


@pytest.fixture
def ranked(tmp_path: Path) -> Ranked:
    """Run `steelyard ...` on so many ranks; what all of them write comes together, the exit code is that of rank 0."""

    def call(
        count: int, *words: str | Path, differ: Callable[[], None] | None = None
    ) -> subprocess.CompletedProcess[str]:
        before = functools.partial(become_ranks, count, free_ports(1)[0], differ) if count > 1 else None
        return warm_command(*words, folder=tmp_path, before=before, environment=command_environment())

    return call


def difference(one: Path, other: Path) -> float:
    left, right = models(one), models(other)
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def test_a_round_on_several_ranks_gives_the_model_of_one_process(
    ranked: Ranked, experiment: Path, tmp_path: Path
) -> None:
    # More than a megabyte each: large arrays take another way than small ones.
    words = ["--set", "rounds.count=1", "--set", "model.hidden=[500,500]"]
    for name, count in {"one": 1, "two": 2, "three": 3, "again": 2}.items():
        done = ranked(count, "-q", "run", experiment, *words, "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
    assert 0 < difference(tmp_path / "one", tmp_path / "three") < 1e-5
    assert difference(tmp_path / "one", tmp_path / "two") < 1e-5
    # The same number of ranks gives the same bits.
    assert difference(tmp_path / "two", tmp_path / "again") == 0
    assert [History(tmp_path / name).info.get("ranks") for name in ("one", "two", "three")] == ["1", "2", "3"]


def test_a_rank_that_dies_stops_the_run_in_one_line_and_any_number_of_ranks_goes_on(
    ranked: Ranked, experiment: Path, fatal: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    done = ranked(2, "-q", "run", experiment, *fatal, "--out", folder)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"steelyard: rank 1 of 2 has ended; what is done is in {folder}; go on, with as many ranks")
    assert line.endswith(f"steelyard resume {folder}")
    assert History(folder).rounds["round"].max() == 1
    assert "rank 1 of 2 has ended" in History(folder).info["stopped"]
    (tmp_path / "flag").unlink()
    alone = shutil.copytree(folder, tmp_path / "alone")
    done = ranked(1, "-q", "resume", alone, "--trust")
    assert done.returncode == 0, done.stderr
    assert "the number of ranks was 2 when the run began, and is 1 now" in done.stderr
    for given in (("resume", folder, "--trust"), ("run", experiment, *fatal, "--out", tmp_path / "whole")):
        assert ranked(2, "-q", *given).returncode == 0
    # As many ranks give the same bits, another number of them the same up to rounding.
    assert difference(folder, tmp_path / "whole") == 0
    assert difference(folder, alone) < 1e-3


def test_a_rank_with_another_version_stops_the_run_in_one_line(
    ranked: Ranked, experiment: Path, tmp_path: Path
) -> None:
    done = ranked(2, "-q", "run", experiment, "--out", tmp_path / "run", differ=other_version)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"steelyard: rank 1: steelyard: 0.0.7 here, {__version__} on rank 0")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "quickstart", "--set", "rounds.count=0"], "rounds.count"),
        (["run", "fpl-ml1m"], "WORLD_SIZE: several processes were started"),
    ],
)
def test_a_mistake_is_one_line_of_rank_0(ranked: Ranked, words: list[str], told: str) -> None:
    done = ranked(2, *words)
    assert done.returncode == 2
    assert told in done.stderr.splitlines()[-1]
    assert done.stderr.count(told) == 1
