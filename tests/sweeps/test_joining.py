"""Parts of a sweep: joined they are the sweep made at once."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.runs.contents import assert_same_bits
from tests.sweeps.test_running import SMALL

from steelyard import UserError
from steelyard.experiment.job_array import Part
from steelyard.experiment.loading import build
from steelyard.sweeps.joining import join_sweeps
from steelyard.sweeps.plan import plan
from steelyard.sweeps.result import RESULTS, write_sweep_files
from steelyard.sweeps.running import resume_sweep, sweep

OVER = ["training.learning_rate=0.1,0.4,0.2"]


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_joined_they_are_the_sweep_made_at_once(tmp_path: Path) -> None:
    base = build({**SMALL, "rounds": {"count": 2, "fraction": 0.5}})
    whole = sweep(plan(base, OVER), out=tmp_path / "whole")
    parts = [sweep(plan(base, OVER, part=Part(n, 2)), out=tmp_path / str(n)) for n in (1, 2)]
    joined = join_sweeps(parts[::-1], tmp_path / "joined")
    for folder in (joined, whole):
        write_sweep_files(folder)
    runs = sorted(path.name for path in whole.iterdir() if path.is_dir())
    names = [{path.name for path in folder.iterdir()} - {"lock"} for folder in (joined, whole)]
    assert names[0] == names[1]
    for run in runs:
        assert_same_bits(joined / run, whole / run)
    for file in (RESULTS, "best.toml", "sweep.toml"):
        assert (joined / file).read_bytes() == (whole / file).read_bytes()
    assert [path.name for path in sorted(parts[1].iterdir()) if path.is_dir()] == runs[1:2]
    resume_sweep(parts[1])  # does its own runs alone
    assert [path.name for path in sorted(parts[1].iterdir()) if path.is_dir()] == runs[1:2]

    def refused(*folders: Path) -> str:
        with pytest.raises(UserError) as caught:
            join_sweeps(folders, tmp_path / "other")
        return str(caught.value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.copyfile", full_disk)
        with pytest.raises(UserError, match=r"other: cannot be written: .*No space left on device; allowed"):
            join_sweeps(parts, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert refused(parts[0]) == "join: missing: 2/2; allowed: each of the 2 parts once"
    assert refused(parts[0], whole) == f"{whole}: is not a part; allowed: folders that were made with --part"
    (parts[1] / runs[1] / "run.sqlite").unlink()
    assert refused(*parts).startswith(f"{parts[1]}: {runs[1]} is not done; allowed: parts that are (`steelyard resume")
    with pytest.raises(UserError, match="--part: got 1/4, but there are 3 runs"):
        plan(base, OVER, part=Part(1, 4))
