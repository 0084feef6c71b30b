"""Held-out seeds in batches until every scene is decided, and who opened them."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.arena.made import QUICK, SUITE, figures, on_paper, trusting

from steelyard import UserError, files
from steelyard.arena import running
from steelyard.arena.archive import ARCHIVE, check_archive, write_archive
from steelyard.arena.candidate import read_candidates
from steelyard.arena.figures import read_figures, scene_folder
from steelyard.arena.openings import OPENED, opening
from steelyard.arena.plan import Arena, arena_folder, plan, read_arena
from steelyard.arena.running import run_arena
from steelyard.arena.verdict import judge
from steelyard.errors import Stopped
from steelyard.report.statistics import ALPHA
from steelyard.runs.reader import History
from steelyard.sweeps.running import How


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEELYARD_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def planned(rule: str, seeds: int = 10) -> Arena:
    (candidate,) = read_candidates(rule, None, SUITE, trusting)
    return plan(SUITE, candidate, scenes=["hospitals"], seeds=seeds, until_decided=True, changes=QUICK)


def test_the_same_candidate_keeps_its_number_and_others_get_the_next(own_state: Path) -> None:
    assert [opening("small 2", {"a": 1}), opening("small 2", {"a": 2}), opening("small 2", {"a": 1})] == [1, 2, 1]
    assert opening("standard 1", {"a": 2}) == 1
    assert len(json.loads((own_state / OPENED).read_text())["small 2"]) == 2
    for text in ("{", "[]", '{"small 2": 3}'):
        (own_state / OPENED).write_text(text)
        with pytest.raises(UserError, match=OPENED):
            opening("small 2", {"a": 3})


def test_candidates_that_open_at_once_get_numbers_of_their_own(
    own_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.write

    def slow(path: Path, content: bytes) -> None:
        time.sleep(0.02)  # long enough for the others to have read what this one replaces
        write(path, content)

    monkeypatch.setattr(files, "write", slow)
    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(lambda number: opening("small 2", {"a": number}), range(4)))
    assert sorted(numbers) == [1, 2, 3, 4]


def test_levels_fall_for_candidates_that_come_later() -> None:
    first, second = planned("LD"), planned("MD")
    assert (first.opened, second.opened, planned("LD").opened) == (1, 2, 1)
    assert judge(first, {})["level"] == ALPHA / 2
    assert judge(second, {})["level"] == ALPHA / 6


def test_a_scene_that_is_decided_gets_no_more_seeds_and_a_stop_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EQ against FedAvg in one round differs little: it is not decided by five seeds, so a second batch runs."""
    folder = arena_folder(planned("EQ"), tmp_path / "out")
    run = running.run_or_resume
    with monkeypatch.context() as patched:
        calls: list[str] = []

        def stops_in_the_second(part: object, *rest: object) -> object:
            calls.append(getattr(part, "folder", ""))
            if len(calls) == 2:
                raise KeyboardInterrupt
            return run(part, *rest)  # type: ignore[arg-type]

        patched.setattr(running, "run_or_resume", stops_in_the_second)
        with pytest.raises(Stopped):
            run_arena(folder)
    assert calls == ["scenes/hospitals", "scenes/hospitals-2"]
    lines: list[str] = []
    arena = run_arena(folder, How(announce=lines.append))
    assert lines == ["seeds 206 to 210, scene 1 of 1: hospitals, heart disease in four hospitals (UCI)"]
    found = read_figures(folder, arena)["hospitals"]
    assert {rule: len(values) for rule, values in found.values.items()} == {"fedavg": 10, "EQ": 10}
    assert set(History(scene_folder(folder, "hospitals", 2)).federations["seed"]) == set(SUITE.held_out[5:10])
    document = write_archive(folder)
    assert "decided by" in document["sentence"]
    assert not (checked := check_archive(folder / ARCHIVE)).differs, checked.lines
    assert read_arena(folder).opened == 1


def test_decided_scenes_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = arena_folder(planned("LD"), tmp_path / "out")
    decided = figures([0.1] * 12, [0.9] * 12)
    monkeypatch.setattr(running, "read_figures", lambda *_: {"hospitals": decided})
    monkeypatch.setattr(running, "run_or_resume", lambda *_: pytest.fail("a decided scene was run"))
    run_arena(folder)


def test_what_does_not_go_together_is_one_line() -> None:
    (candidate,) = read_candidates("LD", None, SUITE, trusting)
    with pytest.raises(UserError, match="--until-decided: got it with --draft"):
        plan(SUITE, candidate, draft=True, until_decided=True)


def test_a_verdict_stays_and_scenes_that_wait_count_in_the_correction() -> None:
    names = ["clean", "sizes", "hospitals"]
    arena = Arena(SUITE, on_paper(names).candidate, tuple(names), SUITE.held_out, opened=1)
    draws = np.random.default_rng(1)
    gains = draws.normal(0.05, 0.01, 40)
    base = draws.normal(0.8, 0.02, 40)
    words: list[str] = []
    for count in range(5, 41, 5):
        made = figures(base[:count].tolist(), (base + gains)[:count].tolist())
        scene = judge(arena, {"clean": made})["scenes"][0]
        assert scene["p"] is not None
        assert scene["p_holm"] == pytest.approx(min(1.0, 3 * scene["p"]))
        words.append(scene["verdict"])
    assert words == sorted(words, key=lambda word: word == "better")
    assert words[-1] == "better"
    assert judge(arena, {"clean": figures(base.tolist(), (base + gains).tolist())})["sentence"].endswith(
        "2 scenes not done; 2 not decided by 40 seeds."
    )


def test_of_two_hundred_suites_without_a_difference_few_decide_for_one() -> None:
    """Every look of a whole suite, ten scenes with 40 seeds: one in twenty suites at most is wrong anywhere."""
    draws = np.random.default_rng(9)
    names = list(SUITE.scenes)
    arena = Arena(SUITE, on_paper(names).candidate, tuple(names), SUITE.held_out, opened=1)
    wrong = 0
    for _ in range(100):
        made = {name: figures(*draws.normal(0.9, 0.02, (2, 40)).tolist()) for name in names}
        document = judge(arena, made)
        wrong += document["better"] + document["worse"] > 0
    assert wrong / 100 <= ALPHA
