"""A sweep that runs: killed and continued, in parts and processes it has the same bits; test rows play no part."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from tests import kit
from tests.kit import assert_refused, changed
from tests.recommend.conftest import description, tastes  # noqa: F401
from tests.rounds.test_soundness import broken_from
from tests.runs.commands import steelyard
from tests.runs.contents import assert_same_bits, query

from steelyard import Experiment, in_memory
from steelyard.experiment.loading import build
from steelyard.experiment.parts import Part
from steelyard.runs.store import held
from steelyard.studies.study import Cell, How, finished, go_on, join
from steelyard.studies.sweep import Sweep, plan, sweep
from steelyard.studies.sweep_table import RESULTS, SweepDocument, sweep_table

SMALL = changed(
    kit.SMALL,
    seed=3,
    partition={"minimum": 12},
    training={"batch_size": 60},
    rounds={"count": 7, "fraction": 0.5},
    store={"checkpoint_every": 3},
    compute={"threads": 1},
    weighing={"criteria": ["DS", "LD"]},
)


OVER = ("--over", "training.learning_rate=0.1,0.4", "--rules", "DS,LD>DS", "--seeds", "2", "--quiet")


ONE_ROUND = build({**SMALL, "rounds": {"count": 1}})


def answer(folder: Path) -> SweepDocument:
    return Sweep.read(folder).answer(folder)


def test_killed_twice_and_continued_it_ends_with_the_same_bits(tmp_path: Path):
    (tmp_path / "small.toml").write_text(tomli_w.dumps(SMALL))
    command = ("sweep", "small.toml", *OVER)
    whole, part, output = tmp_path / "whole", tmp_path / "part", tmp_path / "output"
    assert steelyard(*command, "--out", whole, folder=tmp_path) == 0, output.read_text()
    # The first kill comes after the last round of the first run, before it is marked as finished.
    assert steelyard(*command, "--out", part, folder=tmp_path, killed_after=7) == -signal.SIGKILL
    runs = sorted(path.name for path in whole.iterdir() if path.is_dir())
    assert [path.name for path in part.iterdir() if path.is_dir()] == runs[:1]
    assert not finished(part / runs[0])
    # The second comes in the middle of the second run: the first has no round left to commit.
    assert steelyard(*command, "--out", part, folder=tmp_path, killed_after=5) == -signal.SIGKILL
    assert finished(part / runs[0])
    assert query(part / runs[1], "SELECT MAX(round) FROM rounds") == [(5,)]
    before = (part / runs[0] / "run.sqlite").read_bytes()
    assert steelyard("resume", part, "--quiet", folder=tmp_path) == 0, output.read_text()
    for run in runs:
        assert_same_bits(part / run, whole / run)
    assert (part / runs[0] / "run.sqlite").read_bytes() == before, "a run that was done was written again"
    assert (part / RESULTS).read_text() == (whole / RESULTS).read_text()
    assert (part / "best.toml").read_text() == (whole / "best.toml").read_text()


def test_the_test_set_plays_no_part(tmp_path: Path):
    """Every test row, at the clients and at the server, is made unusable: the sweep's bits stay the same."""
    chance = np.random.default_rng(0)
    features = chance.normal(size=(200, 4)).astype(np.float32)
    labels = (features[:, 0] > 0).astype(np.int64)
    held_out = np.arange(200) >= 140
    spoilt, wrong = features.copy(), labels.copy()
    spoilt[held_out], wrong[held_out] = 1e6, 1 - wrong[held_out]
    experiment = Experiment.model_validate(
        {
            **SMALL,
            "data": {"source": "memory"},
            "partition": {
                "scheme": "iid",
                "clients": 4,
                "test": "held-out",
                "server": "held-out",
                "server_report": "apart",
                "validation": 0.2,
            },
            "rounds": {"count": 2},
            "weighing": {"criteria": ["VP"], "when_zero": "keep"},
        }
    )
    folders = []
    for name, (samples, classes) in {"as it is": (features, labels), "spoilt": (spoilt, wrong)}.items():
        dataset = in_memory(samples, classes, held_out=held_out)
        result = experiment.sweep({"training.learning_rate": [0.1, 0.5]}, out=tmp_path / name, dataset=dataset)
        folders.append(result.folder)
    for run in ("1-learning_rate=0.1", "2-learning_rate=0.5"):
        assert_same_bits(folders[1] / run, folders[0] / run)
    # On the test set itself the two differ: the rows were test rows, and the best runs there.
    best = result.best
    assert best.validation is None
    dataset = in_memory(features, labels, held_out=held_out)
    true = best.run(tmp_path / "true", dataset=dataset).comparison.rules[0].figures["final"].mean
    false = best.run(tmp_path / "false", dataset=in_memory(spoilt, wrong, held_out=held_out)).comparison.rules[0]
    assert true != false.figures["final"].mean


def test_another_sweep_is_not_mixed_in_and_one_process_writes_at_a_time(tmp_path: Path) -> None:
    mine, other = plan(ONE_ROUND, ["training.epochs=1"]), plan(ONE_ROUND, ["training.epochs=2"])
    folder = sweep(mine, out=tmp_path / "sweep")
    assert_refused(lambda: sweep(other, out=folder), "over.training.epochs")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    assert_refused(lambda: sweep(mine, out=tmp_path / "other"), "--out", "not empty")
    with held(folder):
        assert_refused(lambda: go_on(mine, folder), "another process")
    broken = plan(ONE_ROUND, ["partition.minimum=12,9000"])
    assert_refused(lambda: sweep(broken, out=tmp_path / "broken"), "2-minimum=9000: partition")
    assert answer(tmp_path / "broken").left == ("2-minimum=9000",)
    in_python = plan(build({**SMALL, "data": {"source": "memory"}}), ["training.epochs=1,2"])
    how = How(jobs=2, dataset=lambda seed: in_memory([], []))
    assert_refused(lambda: sweep(in_python, tmp_path / "s", how), "jobs", 2)
    for jobs in (0, 257):
        assert_refused(lambda jobs=jobs: go_on(mine, folder, How(jobs=jobs)), "--jobs", jobs, "1 to 256")


def test_a_rate_at_which_training_explodes_is_an_answer(tmp_path: Path):
    base = build({**SMALL, "rounds": {"count": 3}, "model": {"name": "cnn-digits"}})
    planned = plan(base, {"training.learning_rate": [1e30, 0.1]}, seeds=2)
    folder = sweep(planned, out=tmp_path / "sweep")
    document = answer(folder)
    first = planned.cells()[0]
    assert (document.left, document.diverged) == ((), (first.folder,))
    assert document.best.values == {"training.learning_rate": 0.1}
    assert document.rows[1].diverged
    assert all(np.isnan(document.rows[1].value.values))
    reason = folder / f"{first.folder}.diverged"
    written = reason.stat().st_mtime_ns
    assert "of DS>LD, seed " in reason.read_text()
    go_on(planned, folder)
    assert reason.stat().st_mtime_ns == written, "it was run again"


def test_one_seed_that_explodes_makes_its_point_diverge_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    broken_from(monkeypatch, "DS#4", 2)
    planned = plan(build({**SMALL, "rounds": {"count": 2}}), {"training.epochs": [1]}, rules=["DS", "LD>DS"], seeds=2)
    document = answer(sweep(planned, out=tmp_path / "sweep"))
    assert document.diverged == document.left == ()
    first, second = document.rows
    assert (first.rule, first.diverged) == ("LD>DS", False)
    assert np.isfinite(first.value.values).all()
    assert (second.rule, second.diverged) == ("DS", True)
    assert np.isnan(second.value.values).tolist() == [False, True]
    assert document.best == first
    assert "diverged: " in sweep_table(document).note


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_joined_parts_are_the_sweep_made_at_once(tmp_path: Path) -> None:
    base = build({**SMALL, "rounds": {"count": 2, "fraction": 0.5}})
    over = ["training.learning_rate=0.1,0.4,0.2"]
    whole = sweep(plan(base, over), out=tmp_path / "whole")
    parts = [sweep(plan(base, over, part=Part(n, 2)), out=tmp_path / str(n)) for n in (1, 2)]
    joined = join(Sweep, parts[::-1], tmp_path / "joined")
    for folder in (joined, whole):
        Sweep.read(folder).write_files(folder)
    runs = sorted(path.name for path in whole.iterdir() if path.is_dir())
    for run in runs:
        assert_same_bits(joined / run, whole / run)
    for file in (RESULTS, "best.toml", "sweep.toml"):
        assert (joined / file).read_bytes() == (whole / file).read_bytes()
    go_on(Sweep.read(parts[1]), parts[1])  # does its own runs alone
    assert [path.name for path in parts[1].iterdir() if path.is_dir()] == runs[1:2]
    other = tmp_path / "other"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.copyfile", full_disk)
        assert_refused(lambda: join(Sweep, parts, other), other, "No space left on device")
    assert not other.exists()
    assert_refused(lambda: join(Sweep, parts[:1], other), "missing: 2/2")
    assert_refused(lambda: join(Sweep, [parts[0], whole], other), whole, "not a part")
    (parts[1] / runs[1] / "run.sqlite").unlink()
    assert_refused(lambda: join(Sweep, parts, other), parts[1], f"{runs[1]} is not done")


@pytest.mark.parametrize(
    ("jobs", "left"), [(1, ["", "; about 3 min left", "; about 2 min left"]), (2, ["", "", "; about 3 min left"])]
)
def test_what_is_left_is_told_from_the_runs_that_are_done(
    jobs: int, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run takes 90 seconds; of two at a time none is done when the second begins."""
    clock, lines = [0.0], list[str]()

    def passes(seconds: float) -> None:
        clock[0] += seconds

    def processes(work: object, cells: Sequence[Cell], jobs: int, announce: Callable[[Cell], None]) -> None:
        for cell in cells:
            announce(cell)
            passes(90 / jobs)

    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(Sweep, "run", lambda *_: passes(90))
    monkeypatch.setattr("steelyard.studies.study.in_processes", processes)
    planned = plan(ONE_ROUND, ["training.epochs=1,2,3"])
    go_on(planned, tmp_path, How(announce=lines.append, jobs=jobs))
    assert lines == [f"run {number} of 3: {number}-epochs={number}{said}" for number, said in enumerate(left, 1)]
