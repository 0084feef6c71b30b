"""An arena that runs: paired with FedAvg alone, going on where it stopped, in parts, until decided; its archive."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.kit import assert_refused
from tests.studies.made import QUICK, SUITE, figures, on_paper, trusting, written
from tests.studies.test_attack import BASE
from tests.studies.test_attack import made as recorded

from steelyard import UserError
from steelyard.base import files
from steelyard.base.errors import MachineError, Stopped
from steelyard.base.processor import MACHINE
from steelyard.experiment.loading import RUN_FILE, to_toml
from steelyard.experiment.parts import Part
from steelyard.report.statistics import ALPHA
from steelyard.runs.history import History
from steelyard.studies.archive import ARCHIVE, Archive, SceneFigures, digest, run_figures
from steelyard.studies.arena import Arena, judge, plan
from steelyard.studies.candidate import OPENED, Candidate, opening, read_candidates, state_folder, tuning_folder
from steelyard.studies.checking import ArenaArchive, check_archive
from steelyard.studies.study import Cell, How, go_on, join, run_or_resume
from steelyard.studies.suite import Suite, load_suite
from steelyard.studies.verdict import ArenaDocument, Decision

RUNS = "steelyard.studies.arena.run_or_resume"
CODE = """
from steelyard import {kind}_criterion
@{kind}_criterion("FAILS", {about}description="fails")
def fails(it):
    {body}
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small_arena("LD>DS/max", tmp_path_factory.mktemp("arena") / "out")
    go_on_in(folder)
    files_of(folder)
    return folder


def test_every_rival_and_the_candidate_run_on_the_suites_seeds(done: Path) -> None:
    history = History(done / "scenes" / "hospitals")
    assert history.info["status"] == "finished"
    assert list(history.federations["rule"].unique()) == [*SUITE.rivals, "LD>DS/max"]
    assert set(history.federations["seed"]) == {SUITE.report[0]}
    found = Arena.read(done).figures(done)["hospitals"]
    assert found.head == history.chain.head
    assert set(found.values) == set(found.worst) == set(found.models) == {*SUITE.rivals, "LD>DS/max"}
    assert "server's" in found.where


def test_the_figures_of_a_scene_by_hand(tmp_path: Path) -> None:
    """The worse client has 1/4 and 1/2 in two rounds; only where one rule is left has the server tested all."""
    for ended, rules, values in (("", ["size", "detector"], (0.25, 0.5)), ("detector", ["size"], (0.65, 0.65))):
        recorded(run := tmp_path / f"run{ended}", {}, 0.5, ended=ended)
        (run / RUN_FILE).write_text(to_toml(BASE))
        found, history = run_figures(run, "size", "detector"), History(run)
        assert found.values == dict.fromkeys(rules, pytest.approx(values))
        assert found.worst == dict.fromkeys(rules, (0.375, 0.375))
        assert found.models == {rule: (history.models[rule, 1], history.models[rule, 2]) for rule in rules}
        assert found.head == history.chain.head
        assert ("diverged in 2 of 2 seeds" in found.failed) == bool(ended)
    assert not run_figures(run, "size").failed, "a rival that exploded is left out"


def test_the_archive_holds_and_replays_to_the_same_bits(done: Path) -> None:
    found = check_archive(done / ARCHIVE)
    assert not found.differs, found.lines
    assert any(line.startswith("the runs of 1 task are intact") for line in found.lines)
    assert found.lines[1] == f"the figures say the same: {Arena.read(done).answer(done).sentence}"
    assert found.lines[-1] == "replayed fedavg in task hospitals, seed 101: the same model, bit for bit"


def test_a_verdict_that_is_not_that_of_the_figures_is_found(done: Path, tmp_path: Path) -> None:
    document = content(done)
    for changes, differs in (
        ({}, False),
        ({"decision": "better"}, True),
        ({"verdicts": {"hospitals": "better"}}, True),
        ({"mean_gain": 0.5}, True),
    ):
        path = forged(tmp_path / "forged.json", {**document, "verdict": {**document["verdict"], **changes}})
        found = check_archive(path, anew=False)
        assert found.differs == differs, changes
        assert any("not beside it" in line for line in found.lines)


@pytest.mark.parametrize("name", ["a", "better", "1 of 1"])
def test_no_name_of_a_candidate_hides_another_verdict(name: str, tmp_path: Path) -> None:
    arena = on_paper(["clean"], name=name)
    values = {"fedavg": (0.5,) * 10, name: tuple(0.6 + 0.001 * n for n in range(10))}
    made = {"clean": SceneFigures(values=values)}
    verdict = judge(arena, made).verdict
    path = tmp_path / "arena.json"
    for held, differs in ((verdict, False), (verdict.model_copy(update={"decision": Decision.NOT_BETTER}), True)):
        Archive(verdict=held, versions={}, plan=arena.by_content(), figures=made, replayed=None).write(path)
        assert check_archive(path).differs == differs


def test_figures_that_are_not_those_of_the_runs_are_found(done: Path, tmp_path: Path) -> None:
    """Whoever writes a better figure and the digest of it is found by the runs, and by the model that is run anew."""
    document = content(done)
    values = document["figures"]["hospitals"]["values"]
    values["LD>DS/max"] = [0.99]
    document["replayed"]["model"] = "0" * 64
    original = (done / ARCHIVE).read_bytes()
    try:
        found = check_archive(forged(done / ARCHIVE, document))
    finally:
        (done / ARCHIVE).write_bytes(original)
    assert found.differs
    said = [line for line in found.lines if line.startswith("DIFFERS")]
    assert "the verdict is not that of the figures" in said[0]
    assert "task hospitals has other figures" in said[1]
    assert "another model, on the same kind of processor" in said[2]
    # A baseline made worse is found without the runs.
    values["fedavg"] = [0.2]
    last = check_archive(forged(tmp_path / "forged.json", document)).lines[-1]
    assert last.startswith("DIFFERS: replayed fedavg in task hospitals, seed 101: ")
    # One that only another kind of processor would excuse is undecided.
    was = document["replayed"]
    document["versions"][MACHINE], values["fedavg"] = "other", [was["value"] + SUITE.margin + 1 / was["samples"]]
    assert check_archive(forged(tmp_path / "forged.json", document)).undecided


def test_a_second_call_runs_nothing_and_another_arena_is_refused(done: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    go_on_in(small_arena("LD>DS/max", done), How(announce=lines.append))
    assert lines == []
    assert_refused(lambda: small_arena("LD>DS/max", done, seeds=2), "--out", done, "seeds")
    assert_refused(lambda: small_arena("LD", done), "--out", done)
    (tmp_path / "file").touch()
    assert_refused(lambda: small_arena("LD", tmp_path), "--out", tmp_path, "not empty")
    assert list(Arena.read(small_arena("EQ", tmp_path / "rival")).scene("hospitals").rules()) == list(SUITE.rivals)


def test_a_stopped_arena_goes_on_to_the_same_figures(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_arena("LD>DS/max", tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr(RUNS, raising(KeyboardInterrupt()))
        with pytest.raises(Stopped):
            go_on_in(folder)
    assert files_of(folder).sentence.startswith("No recommendation: no task has ended")
    lines: list[str] = []
    go_on(Arena.read(folder), folder, How(announce=lines.append))
    assert lines == ["task 1 of 1: hospitals, heart disease in four hospitals (UCI)"]
    went_on, at_once = (Arena.read(each).figures(each)["hospitals"].models for each in (folder, done))
    assert went_on == at_once


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        pytest.param("server", "raise RuntimeError('no idea')", "RuntimeError: no idea", marks=pytest.mark.slow),
        ("client", "return float('nan') if len(it.labels) > 150 else 1.0", "criterion FAILS = nan"),
    ],
)
def test_an_idea_that_fails_is_a_row_and_the_others_go_on(
    kind: str, body: str, says: str, done: Path, tmp_path: Path
) -> None:
    fedavg_alone = ArenaArchive.read(done / ARCHIVE).figures["hospitals"].values["fedavg"][0]
    about = 'about="data", ' if kind == "client" else ""
    (tmp_path / "mine.py").write_text(CODE.format(kind=kind, about=about, body=body))
    folder = small_arena(str(tmp_path / "mine.py"), tmp_path / "out")
    go_on_in(folder)
    document = files_of(folder)
    (scene,) = document.scenes
    assert scene.verdict == "failed"
    assert says in scene.failed
    assert "scenes/" not in scene.failed
    assert document.sentence.startswith("FAILS failed in 1 of 1 task: ")
    assert {row.rule for row in scene.rules} == set(SUITE.rivals), "the rivals have figures"
    assert scene.rules[0].value.mean == fedavg_alone
    assert not check_archive(folder / ARCHIVE).differs
    go_on_in(folder)
    assert files_of(folder) == document


def test_what_fails_without_the_candidate_too_is_no_failure_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path, part: Cell, *_: object) -> None:
        raise UserError(f"{part.folder}: no rule can run here; allowed: another scene")

    monkeypatch.setattr(RUNS, refused)
    folder = small_arena("LD", tmp_path / "out")
    assert_refused(lambda: go_on_in(folder), "scenes/hospitals-rivals", "no rule can run here")
    assert not Arena.read(folder).figures(folder)


def test_what_the_machine_lacks_is_no_failure_of_the_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_arena("LD", tmp_path / "out")
    for place, error, expected, words in (
        ("steelyard.data.scaling.load", UserError("data.path: found no 'digits'"), MachineError, r"task \w+: data"),
        ("steelyard.studies.arena.run_or_resume", RuntimeError("ours"), RuntimeError, "ours"),
        (
            "steelyard.runs.joining._put_together",
            OSError(28, "No space left"),
            UserError,
            "cannot be written: No space",
        ),
    ):
        with monkeypatch.context() as missing:
            missing.setattr(place, raising(error))
            with pytest.raises(expected, match=words):
                go_on_in(folder)
    assert not Arena.read(folder).figures(folder)


def test_missing_data_of_any_scene_are_said_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = candidate_plan("LD", suite=load_suite("standard"), scenes=())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEELYARD_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("STEELYARD_STATE", str(tmp_path / "state"))
    both = r"task iid: data\.path: found no 'mnist'.*nor can those of task writers be read"
    with pytest.raises(MachineError, match=both):
        written(planned, tmp_path / "out")
    with pytest.raises(MachineError, match="task iid"):
        plan(planned.suite, Candidate("LD", planned.experiment), until_decided=True)
    assert list(tmp_path.iterdir()) == [], "nor are held-out seeds opened"


def test_a_file_that_is_no_arena_is_refused_by_its_name(done: Path, tmp_path: Path) -> None:
    path, document = tmp_path / "x.json", content(done)
    (tmp_path / "arena.toml").write_text((done / "arena.toml").read_text())
    assert_refused(lambda: ArenaArchive.read(path), path, "there is no file")
    text = (done / ARCHIVE).read_text()
    for changed, word in (
        (text.replace('"seed', '"sead', 1), "was changed since"),
        ("{", "is no archive of the arena (JSONDecodeError)"),
        ("[]", "is no archive"),
        ('{"format": 1}', "is of format 1, without the verdict"),
        ('{"format": 9}', "of format 2"),
    ):
        path.write_text(changed)
        assert_refused(lambda: ArenaArchive.read(path), path, word)
    for field, value in (("plan", {}), ("figures", []), ("versions", None), ("replayed", {}), ("plan", 3)):
        forged(path, {**document, field: value})
        assert_refused(lambda: ArenaArchive.read(path), path)
    for field, value, word in (
        ("seeds", [], "plan.seeds"),
        ("version", 1, "plan.version: got 1"),
        ("tried", 3, "plan.tried"),
    ):
        forged(path, {**document, "plan": {**document["plan"], field: value}})
        assert_refused(lambda: ArenaArchive.read(path), path, word)


def test_settings_are_tried_in_a_folder_that_is_new_or_holds_them(done: Path, tmp_path: Path) -> None:
    assert tuning_folder(SUITE, tmp_path / "new") == tmp_path / "new"
    (tmp_path / "had" / "tuning").mkdir(parents=True)
    assert tuning_folder(SUITE, tmp_path / "had") == tmp_path / "had"
    assert tuning_folder(SUITE, done) == done
    assert tuning_folder(SUITE, None).name.startswith("arena-")
    assert_refused(lambda: tuning_folder(SUITE, Path()), "--out")
    (tmp_path / "had" / "letter").touch()
    assert_refused(lambda: tuning_folder(SUITE, tmp_path / "had"), "--out", tmp_path / "had")


SCENES = ["two-labels", "hospitals"]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("parts")
    made: list[Path] = []
    for number in (1, 2):
        share = candidate_plan("LD", scenes=SCENES, part=Part(number, 2))
        go_on_in(folder := written(share, place / str(number)))
        made.append(folder)
    return made


def test_a_part_runs_its_scenes_and_says_what_is_not_done(parts: list[Path]) -> None:
    part = Arena.read(parts[1])
    assert [cell.name for cell in part.own] == list(part.figures(parts[1])) == ["hospitals"]
    assert "1 task not done" in files_of(parts[1]).sentence


@pytest.mark.slow
def test_joined_parts_are_the_whole_with_its_models(parts: list[Path], tmp_path: Path) -> None:
    whole = join(Arena, [parts[1], parts[0]], tmp_path / "joined")
    joined = Arena.read(whole)
    assert joined.document() == candidate_plan("LD", scenes=SCENES).document()
    assert joined.figures(whole) == {
        name: figures for part in parts for name, figures in Arena.read(part).figures(part).items()
    }
    document = files_of(whole)
    assert "not done" not in document.sentence
    page = (whole / files.REPORT).read_text()
    assert document.sentence in page.replace("&gt;", ">")
    assert "<script" not in page
    checked = check_archive(whole / ARCHIVE, anew=False)
    assert "the runs of 2 tasks are intact and have these figures" in checked.lines
    # A run that is not as it was written, though its figures are.
    with sqlite3.connect(whole / "scenes" / "hospitals" / "run.sqlite") as db:
        db.execute("UPDATE rounds SET cohort = 9")
    db.close()
    assert "task hospitals: round 0" in check_archive(whole / ARCHIVE, anew=False).lines[-1]


def test_a_part_of_another_arena_is_not_joined(parts: list[Path], tmp_path: Path) -> None:
    other = written(candidate_plan("MD", scenes=SCENES, part=Part(2, 2)), tmp_path / "other")
    assert_refused(lambda: join(Arena, [parts[0], other], tmp_path / "c"), other, "another study", "candidate")


@pytest.fixture
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEELYARD_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def planned(rule: str) -> Arena:
    return candidate_plan(rule, seeds=10, until_decided=True)


def test_the_same_candidate_keeps_its_number_and_others_get_the_next(own_state: Path) -> None:
    candidates = ({"a": 1, "b": 2}, {"a": 2}, {"b": 2, "a": 1})
    assert [opening("small 2", candidate) for candidate in candidates] == [1, 2, 1]
    assert (opening("standard 1", {"a": 2}), planned("LD").opened) == (1, 3)
    assert list(json.loads((own_state / OPENED).read_text())) == ["small 2", "standard 1"]
    for text in ("{", "[]", '{"small 2": 3}'):
        (own_state / OPENED).write_text(text)
        assert_refused(lambda: opening("small 2", {"a": 3}), own_state / OPENED)


def test_who_opened_what_lies_with_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STEELYARD_STATE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder() == tmp_path / "steelyard"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_folder() == tmp_path / ".local" / "state" / "steelyard"
    (tmp_path / "file").touch()
    monkeypatch.setenv("STEELYARD_STATE", str(tmp_path / "file" / "inside"))
    assert_refused(lambda: opening("small 2", {}), tmp_path / "file" / "inside" / OPENED)


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


def test_levels_fall_for_candidates_that_come_later(own_state: Path) -> None:
    first, second = planned("LD"), planned("MD")
    assert (first.opened, second.opened, planned("LD").opened) == (1, 2, 1)
    assert judge(first, {}).level == ALPHA / 2
    assert judge(second, {}).level == ALPHA / 6


@pytest.mark.slow
def test_a_scene_that_is_decided_gets_no_more_seeds_and_a_stop_changes_nothing(
    own_state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EQ against FedAvg in one round differs little: it is not decided by five seeds, so a second batch runs."""
    folder = written(planned("EQ"), tmp_path / "out")
    run, calls = run_or_resume, list[str]()
    with monkeypatch.context() as patched:

        def stops_in_the_second(folder: Path, part: Cell, *rest: Any) -> object:
            calls.append(part.folder)
            return raising(KeyboardInterrupt())() if len(calls) == 2 else run(folder, part, *rest)

        patched.setattr(RUNS, stops_in_the_second)
        with pytest.raises(Stopped):
            go_on_in(folder)
    assert calls == ["scenes/hospitals", "scenes/hospitals-2"]
    lines: list[str] = []
    go_on_in(folder, How(announce=lines.append))
    assert lines == ["task 1 of 1: hospitals, heart disease in four hospitals (UCI), seeds 206 to 210"]
    found = Arena.read(folder).figures(folder)["hospitals"]
    assert {rule: len(values) for rule, values in found.values.items()} == {"fedavg": 10, "EQ": 10}
    assert set(History(folder / "scenes" / "hospitals-2").federations["seed"]) == set(SUITE.held_out[5:10])
    assert "decided by" in files_of(folder).sentence
    assert not (checked := check_archive(folder / ARCHIVE)).differs, checked.lines


def test_decided_scenes_are_left_alone(own_state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(planned("LD"), tmp_path / "out")
    decided = figures([0.1] * 12, [0.9] * 12)
    monkeypatch.setattr(Arena, "figures", lambda *_: {"hospitals": decided})
    monkeypatch.setattr(RUNS, lambda *_: pytest.fail("a decided scene was run"))
    go_on_in(folder)


def go_on_in(folder: Path, how: How | None = None) -> None:
    """Run what is left of the arena of a folder."""
    go_on(Arena.read(folder), folder, how or How())


def files_of(folder: Path) -> ArenaDocument:
    """Write what an arena's folder holds beside its runs; return the answer."""
    return Arena.read(folder).write_files(folder)


def content(done: Path) -> Any:
    """What an archive holds."""
    return {name: value for name, value in json.loads((done / ARCHIVE).read_bytes()).items() if name != "digest"}


def forged(path: Path, document: Any) -> Path:
    """Write an archive with the digest of what it holds."""
    path.write_text(json.dumps({**document, "digest": digest(document)}))
    return path


def candidate_plan(rule: str, *, suite: Suite = SUITE, **options: Any) -> Arena:
    """Plan an arena of a second."""
    (candidate,) = read_candidates(rule, None, suite, trusting)
    return plan(suite, candidate, **{"scenes": ["hospitals"], "seeds": 1, "changes": QUICK, **options})


def small_arena(candidate: str, folder: Path, **options: Any) -> Path:
    """Make the folder of an arena of a second."""
    return written(candidate_plan(candidate, **options), folder)


def raising(error: BaseException) -> Callable[..., None]:
    def call(*_: object) -> None:
        raise error

    return call
