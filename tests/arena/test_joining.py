"""An arena in parts, as in a job array, and put together: the same figures as one run of all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.arena.made import QUICK, SUITE, small_arena, trusting
from tests.warm import warm_processes

from steelyard import UserError
from steelyard.arena.archive import REPORT, write_arena_files
from steelyard.arena.candidate import read_candidates
from steelyard.arena.figures import read_figures
from steelyard.arena.joining import join_arenas
from steelyard.arena.plan import arena_folder, plan, read_arena
from steelyard.arena.running import run_arena
from steelyard.experiment.job_array import Part
from steelyard.sweeps import jobs
from steelyard.sweeps.running import How

SCENES = ["two-labels", "hospitals"]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("parts")
    (candidate,) = read_candidates("LD", None, SUITE, trusting)
    made: list[Path] = []
    for number in (1, 2):
        share = plan(SUITE, candidate, scenes=SCENES, seeds=1, changes=QUICK, part=Part(number, 2))
        folder = arena_folder(share, place / str(number))
        run_arena(folder)
        made.append(folder)
    return made


def test_a_part_runs_its_scenes_and_says_what_is_not_done(parts: list[Path]) -> None:
    arena = read_arena(parts[1])
    assert arena.own == ["hospitals"]
    assert list(read_figures(parts[1], arena)) == ["hospitals"]
    assert "1 scene not done" in write_arena_files(parts[1])["sentence"]


def test_joined_parts_are_the_whole_with_its_models(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Processes of their own, forked from a warm one; those that start from nothing are a slow test of tests/sweeps.
    monkeypatch.setattr(jobs, "multiprocessing", SimpleNamespace(get_context=lambda kind: warm_processes()))
    whole = join_arenas([parts[1], parts[0]], tmp_path / "joined")
    at_once = small_arena("LD", tmp_path / "once", scenes=SCENES)
    run_arena(at_once, How(jobs=2))
    arena = read_arena(whole)
    assert arena.document() == read_arena(at_once).document()
    found, expected = read_figures(whole, arena), read_figures(at_once, arena)
    assert {name: each.models for name, each in found.items()} == {n: each.models for n, each in expected.items()}
    document = write_arena_files(whole)
    assert "not done" not in document["sentence"]
    page = (whole / REPORT).read_text()
    assert document["sentence"] in page.replace("&gt;", ">")
    assert "<svg" in page
    assert "<script" not in page


def test_parts_that_are_missing_doubled_or_not_done_are_named(parts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing: 2/2"):
        join_arenas(parts[:1], tmp_path / "a")
    (candidate,) = read_candidates("LD", None, SUITE, trusting)
    share = plan(SUITE, candidate, scenes=SCENES, seeds=1, changes=QUICK, part=Part(2, 2))
    empty = arena_folder(share, tmp_path / "empty")
    with pytest.raises(UserError, match="scenes/hospitals is not done"):
        join_arenas([parts[0], empty], tmp_path / "b")
    with pytest.raises(UserError, match="--part: got 3/3, but there are 2 scenes"):
        plan(SUITE, candidate, scenes=SCENES, part=Part(3, 3))
    with pytest.raises(UserError, match="--until-decided: got it with --part"):
        plan(SUITE, candidate, until_decided=True, part=Part(1, 2))


def test_figures_of_rivals_without_a_candidate_that_failed_are_joined_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from steelyard import server_criterion\n@server_criterion('JOINED-FAILS', description='fails')\n"
        "def fails(view):\n    return None\n"
    )
    (candidate,) = read_candidates(str(tmp_path / "mine.py"), None, SUITE, trusting)
    share = plan(SUITE, candidate, scenes=["hospitals"], seeds=1, changes=QUICK, part=Part(1, 1))
    run_arena(folder := arena_folder(share, tmp_path / "part"))
    whole = join_arenas([folder], tmp_path / "joined")
    found = read_figures(whole, read_arena(whole))
    assert set(found["hospitals"].values) == set(SUITE.rivals)
    assert found == read_figures(folder, read_arena(folder))
