"""A run's folder that came from elsewhere: no link in it is followed, and a full disk leaves what was there."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.conftest import CommandLine
from tests.kit import assert_refused
from tests.report.made_run import make_run
from tests.runs.contents import change
from tests.runs.test_resume import LEARNING
from tests.stopping import stopped
from tests.warm import warm_command

from steelyard import Experiment
from steelyard.runs.history import History
from steelyard.runs.store import Store

KEPT = "of somebody else"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that broke off after round 5."""
    return stopped(Experiment(**LEARNING), tmp_path_factory.mktemp("killed") / "run", 5)


@pytest.fixture
def run(killed: Path, tmp_path: Path) -> Path:
    shutil.copytree(killed, tmp_path / "run")
    return tmp_path / "run"


def victim(folder: Path) -> Path:
    """A folder of somebody else, with files whose names are like ours."""
    (folder / "theirs").mkdir()
    for name in ("notes.txt", "round-000001.safetensors", "rounds.csv", "run.sqlite", "accuracy.svg"):
        (folder / "theirs" / name).write_text(KEPT, encoding="utf-8")
    return folder / "theirs"


def state_of(folder: Path) -> dict[str, object]:
    """Every name below a folder, with what it holds or leads to."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def replaced(path: Path, target: Path) -> None:
    """Put a link where a run has a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)


FOLDERS = ("checkpoints", "code", "export", "figures", "flower")


FILES = (
    *("run.sqlite", "run.sqlite-wal", "run.sqlite-shm", "run.sqlite-journal"),
    *("lock", "experiment.toml", "privacy.jsonl", "report.html"),
)


@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
def test_a_link_where_a_run_writes_is_refused_before_anything_is_touched(
    run: Path, tmp_path: Path, refused: Callable[..., str], name: str
) -> None:
    theirs = victim(tmp_path)
    replaced(run / name, theirs if name in FOLDERS else theirs / "notes.txt")
    before = state_of(run), state_of(theirs)
    assert refused("resume", run) == f"steelyard: {run / name}: is a link; allowed: a {_kind(name)} of the run's own"
    assert (state_of(run), state_of(theirs)) == before


def _kind(name: str) -> str:
    return "folder" if name in FOLDERS else "file"


def test_the_folder_itself_and_those_above_may_be_links(run: Path, tmp_path: Path, command: CommandLine) -> None:
    """Runs are kept on other disks; a user's own sweep file above a linked folder of runs is nothing to us."""
    (tmp_path / "disk").mkdir()
    run.rename(tmp_path / "far")
    (tmp_path / "disk" / "run").symlink_to(tmp_path / "far")
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    (tmp_path / "sweep.toml").write_text("rates = [0.1, 0.2]\n")
    assert command("resume", "runs/run", "--quiet").returncode == 0
    assert History(tmp_path / "far").info["status"] == "finished"


WRITERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "report.html": ("theirs/notes.txt", ("report", "run")),
    "figures": ("theirs", ("report", "run", "-o", "r.html", "--figures", "run/figures")),
    "export/rounds.csv": ("theirs/rounds.csv", ("export", "run", "--force")),
    "sub": ("theirs", ("table", "run", "--curves", "run/sub/rounds.csv")),
}


@pytest.mark.parametrize("name", WRITERS)
def test_nothing_is_written_through_a_link(tmp_path: Path, refused: Callable[..., str], name: str) -> None:
    made(tmp_path)
    target, command = WRITERS[name]
    theirs = victim(tmp_path)
    replaced(tmp_path / "run" / name.split()[0], tmp_path / target)
    before = state_of(theirs)
    assert f"{name.split()[0]}: is a link" in refused(*command)
    assert state_of(theirs) == before


@pytest.mark.parametrize("name", ["run.sqlite", "run.sqlite-wal", "privacy.jsonl"])
def test_what_is_written_in_place_must_have_one_name(
    run: Path, tmp_path: Path, refused: Callable[..., str], name: str
) -> None:
    (run / name).touch()
    (tmp_path / "theirs").hardlink_to(run / name)
    before = (tmp_path / "theirs").read_bytes()
    assert f"{name}: has 2 names (hard links); allowed: a copy of its own" in refused("resume", run)
    assert (tmp_path / "theirs").read_bytes() == before


def test_only_names_of_ours_are_removed(tmp_path: Path) -> None:
    run = made(tmp_path)
    for name in ("notes.txt", "round-000001.safetensors", "round-000002.safetensors.part"):
        (run / "checkpoints" / name).write_text("x", encoding="utf-8")
    store = Store(run)
    store.sweep()
    store.close()
    kept = ["notes.txt", "round-000000.safetensors", "round-000003.safetensors"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == kept


def test_a_point_of_a_sweep_is_no_link(tmp_path: Path, command: CommandLine, refused: Callable[..., str]) -> None:
    """The runs of a sweep lie in its folder, which came as a whole."""
    pytest.importorskip("vl_convert")  # a sweep draws its figures
    plan = ["sweep", "quickstart", "--set", "rounds.count=1", "--over", "training.learning_rate=0.1", "--out", "s"]
    assert command(*plan, "--quiet").returncode == 0
    (point,) = (path for path in (tmp_path / "s").iterdir() if path.is_dir())
    point.rename(tmp_path / "moved")
    change(tmp_path / "moved", "UPDATE info SET value = 'stopped' WHERE key = 'status'")
    point.symlink_to(tmp_path / "moved")
    before = state_of(tmp_path / "moved")
    assert f"{point.name}: is a link" in refused("resume", "s")
    assert state_of(tmp_path / "moved") == before


def no_more_than(limit: int) -> None:
    sys.dont_write_bytecode = True  # what Python compiles meanwhile would be cut off, and stay so
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


OUTPUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "report": (("report", "run"), ("run/report.html",)),
    "export": (("export", "run", "--force"), ("run/export/clients.csv",)),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_what_is_too_large_for_the_disk_leaves_the_old_files_whole(tmp_path: Path, kind: str) -> None:
    """No file may grow beyond 400 bytes: as on a full disk, writing fails half-way."""
    made(tmp_path, rounds=30, clients=20)
    command, files = OUTPUTS[kind]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(KEPT, encoding="utf-8")
    before = state_of(tmp_path)
    done = warm_command(*command, folder=tmp_path, timeout=120, before=partial(no_more_than, 400))
    assert done.returncode == 2
    assert "cannot be written: File too large" in done.stderr
    assert state_of(tmp_path) == before


def test_a_run_for_which_there_is_no_room_is_refused_in_one_line(tmp_path: Path) -> None:
    words = ("run", "quickstart", "--quiet", "--out", "run")
    full = warm_command(*words, folder=tmp_path, timeout=120, before=partial(no_more_than, 6000))
    (line,) = full.stderr.strip().splitlines()
    assert (full.returncode, "cannot be written: disk I/O error" in line, "readable" in line) == (2, True, False)
    limits = partial(resource.setrlimit, resource.RLIMIT_AS, (600 << 20, 600 << 20))
    command = [sys.executable, "-m", "steelyard", *words]
    small = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, preexec_fn=limits)
    (line,) = small.stderr.strip().splitlines()
    assert (small.returncode, "not enough memory" in line, "allows 600 MB" in line) == (2, True, True)
    assert not (tmp_path / "run" / "run.sqlite").exists()


def made(folder: Path, rounds: int = 3, clients: int = 4) -> Path:
    return make_run(folder / "run", rounds=rounds, clients=clients, seeds=(0,), rules=("fedavg",), status="stopped")


def test_a_link_that_leads_nowhere_a_pipe_and_a_second_name_are_refused(
    run: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    replaced(run / "lock", tmp_path / "new")
    assert "lock: is a link" in refused("resume", run)
    assert not (tmp_path / "new").exists()
    (run / "lock").unlink()
    os.mkfifo(run / "lock")  # not waited for
    assert "lock: is no plain file; allowed: a file of the run's own" in refused("resume", run)
    (run / "lock").unlink()
    # SQLite shortens the shared memory whenever it is the first to open it, for readers too.
    theirs = victim(tmp_path) / "notes.txt"
    (run / "run.sqlite-shm").unlink(missing_ok=True)
    (run / "run.sqlite-shm").hardlink_to(theirs)
    assert_refused(lambda: History(run), "run.sqlite-shm: has 2 names")
    assert theirs.read_text(encoding="utf-8") == KEPT
