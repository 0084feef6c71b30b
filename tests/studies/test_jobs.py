"""Processes of `--jobs`: none outlives the one that began it, and each has as many cores as the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from tests.kit import assert_refused, wait_until
from tests.warm import PROCESSES

from steelyard import UserError
from steelyard.studies import study
from steelyard.studies.study import in_processes


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin processes that need not read torch anew."""
    monkeypatch.setattr(study.multiprocessing, "get_context", lambda _: PROCESSES)


def wait_for_ever(folder: Path, number: int) -> None:
    """Write the process' id down and work on."""
    (folder / "writing").write_text(str(os.getpid()))
    (folder / "writing").rename(folder / f"{number}.pid")
    time.sleep(600)


def _gone(process: int) -> bool:
    try:
        os.kill(process, 0)
        # One that has ended, and that nobody waits for any more, is still listed.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


@pytest.mark.slow
def test_a_killed_process_takes_its_runs_with_it(tmp_path: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, __file__, str(tmp_path)], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    try:
        wait_until((tmp_path / "3.pid").exists, 240)
        inner = int((tmp_path / "3.pid").read_text())
        assert not _gone(inner)
        first.send_signal(signal.SIGKILL)
        first.wait()
        wait_until(lambda: _gone(inner))
    finally:
        first.kill()
        first.wait()


def fails(folder: Path, number: int) -> None:
    """Refuse, or die without a word."""
    if number:
        os._exit(number)
    raise UserError("cell: refused")


@pytest.mark.usefixtures("warm")
def test_a_process_that_fails_or_dies_ends_the_others_in_one_line(tmp_path: Path) -> None:
    for number, words in ((0, ("cell: refused",)), (3, ("--jobs", "code 3"))):
        with_one = partial(in_processes, partial(fails, tmp_path), [number, 0, 0], 1, lambda _: None)
        assert_refused(with_one, *words)


def note_cores(folder: Path, number: int) -> None:
    """Write down how many cores this process may use."""
    (folder / f"{number}.cores").write_text(str(len(os.sched_getaffinity(0))))


@pytest.mark.usefixtures("warm")
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes cannot be held to cores here")
def test_each_run_has_the_same_number_of_cores_however_many_are_left(tmp_path: Path) -> None:
    cores, jobs = len(os.sched_getaffinity(0)), 3
    in_processes(partial(note_cores, tmp_path), [0, 1], jobs, lambda _: None)
    assert [path.read_text() for path in tmp_path.glob("*.cores")] == [str(max(1, cores // jobs))] * 2


if __name__ == "__main__":
    in_processes(partial(wait_for_ever, Path(sys.argv[1])), [3], 1, lambda _: None)
