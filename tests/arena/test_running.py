"""An arena that runs: paired with FedAvg alone bit for bit, going on where it stopped, and ideas that fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.arena.made import QUICK, SUITE, small_arena, trusting

from steelyard import UserError
from steelyard.arena import running
from steelyard.arena.archive import ARCHIVE, check_archive, digest, read_archive, write_archive
from steelyard.arena.candidate import read_candidates
from steelyard.arena.figures import SceneFigures, read_figures, scene_folder
from steelyard.arena.plan import arena_folder, plan, read_arena
from steelyard.arena.replay import replayed_scene
from steelyard.arena.running import run_arena
from steelyard.arena.suite import load_suite
from steelyard.errors import MachineError, Stopped
from steelyard.runs import setup
from steelyard.runs.reader import History
from steelyard.sweeps.plan import PlannedRun
from steelyard.sweeps.running import How

CODE = """
import numpy as np
from steelyard import {kind}_criterion
@{kind}_criterion("FAILS", {about}description="fails")
def fails({what}):
    {body}
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small_arena("LD>DS/max", tmp_path_factory.mktemp("arena") / "out")
    run_arena(folder)
    write_archive(folder)
    return folder


def changed(path: Path, old: str, new: str, to: Path) -> Path:
    text = path.read_text()
    assert old in text
    to.write_text(text.replace(old, new, 1))
    return to


def test_every_rival_and_the_candidate_run_on_the_suites_seeds(done: Path) -> None:
    history = History(scene_folder(done, "hospitals"))
    assert history.info["status"] == "finished"
    assert list(history.federations["rule"].unique()) == [*SUITE.rivals, "LD>DS/max"]
    assert set(history.federations["seed"]) == {SUITE.report[0]}
    found = read_figures(done, read_arena(done))["hospitals"]
    assert found.head == history.chain.head
    assert set(found.values) == set(found.worst) == set(found.models) == {*SUITE.rivals, "LD>DS/max"}
    assert all(found.worst[rule][0] <= 1 for rule in found.worst)
    assert "server's" in found.where


def test_a_rival_is_run_once_as_candidate(tmp_path: Path) -> None:
    arena = read_arena(small_arena("EQ", tmp_path / "out"))
    assert list(arena.scene("hospitals").rules()) == list(SUITE.rivals)


def test_the_archive_holds_and_replays_to_the_same_bits(done: Path) -> None:
    found = check_archive(done / ARCHIVE)
    assert not found.differs, found.lines
    assert any(line.startswith("the runs of 1 scene are whole") for line in found.lines)
    assert found.lines[-1] == "replayed fedavg in scene hospitals, seed 101: the same model, bit for bit"


def test_a_suite_of_large_networks_replays_the_scene_that_it_names() -> None:
    suite = load_suite("standard")
    (candidate,) = read_candidates("LD", None, suite, trusting)
    arena = plan(suite, candidate, seeds=1)
    both = {name: SceneFigures(values={"fedavg": (0.5,)}) for name in ("iid", "hospitals")}
    assert (replayed_scene(arena, both), replayed_scene(arena, {"iid": both["iid"]})) == ("hospitals", "iid")
    assert replayed_scene(replace(arena, suite=SUITE), both) == "iid", "the first, where a suite names none"
    assert replayed_scene(arena, {"iid": SceneFigures(values={"LD": (0.5,)})}) is None


def test_an_archive_away_from_its_runs_is_still_checked(done: Path, tmp_path: Path) -> None:
    (tmp_path / "away.json").write_bytes((done / ARCHIVE).read_bytes())
    found = check_archive(tmp_path / "away.json", anew=False)
    assert not found.differs
    assert any("not beside it" in line for line in found.lines)


def test_a_sentence_in_older_words_says_the_same_and_one_with_other_numbers_does_not(
    done: Path, tmp_path: Path
) -> None:
    content = json.loads((done / ARCHIVE).read_bytes())
    del content["digest"]
    sentence = content["sentence"]
    assert ": over 1 scene it is" in sentence
    for words, differs in (
        (sentence.replace(": over 1 scene it is", ", which in 1 scenes is"), False),
        (sentence.replace(": over 1 scene it is", ": over 2 scenes it is"), True),
        (sentence.replace("cannot be told from", "is better than"), True),
        (sentence.translate(str.maketrans({"0": "7", "1": "8"})), True),
    ):
        content["sentence"] = words
        (tmp_path / "older.json").write_text(json.dumps({**content, "digest": digest(content)}))
        found = check_archive(tmp_path / "older.json", anew=False)
        assert found.differs == differs, words
        assert found.lines[-1 if differs else 1].endswith(f"the figures say {sentence!r}" if differs else sentence)
    assert "the figures say the same: " in "".join(check_archive(done / ARCHIVE, anew=False).lines)


def test_a_changed_archive_is_refused(done: Path, tmp_path: Path) -> None:
    written = changed(done / ARCHIVE, '"seed', '"sead', tmp_path / "a.json")
    with pytest.raises(UserError, match="was changed since it was written"):
        read_archive(written)
    for text, says in (("{", "is no archive"), ("[]", "is no archive"), ('{"format": 9}', "of format 1")):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(UserError, match=says):
            read_archive(tmp_path / "b.json")
    with pytest.raises(UserError, match="there is no file"):
        read_archive(tmp_path / "none.json")


def test_figures_that_are_not_those_of_the_runs_are_found(done: Path, tmp_path: Path) -> None:
    """Whoever writes a better figure and the digest of it is found by the runs, and by the model that is run anew."""
    content = json.loads((done / ARCHIVE).read_bytes())
    del content["digest"]
    content["figures"]["hospitals"]["values"]["LD>DS/max"] = [0.99]
    content["replayed"]["model"] = "0" * 64
    original = (done / ARCHIVE).read_bytes()
    try:
        forged = json.dumps({**content, "digest": digest(content)})
        (done / ARCHIVE).write_text(forged)
        found = check_archive(done / ARCHIVE)
    finally:
        (done / ARCHIVE).write_bytes(original)
    assert found.differs
    said = [line for line in found.lines if line.startswith("DIFFERS")]
    assert "the sentence is" in said[0]
    assert "scene hospitals has other figures" in said[1]
    assert "another model (with the same versions)" in said[2]


def test_a_baseline_made_worse_is_found_without_the_runs(done: Path, tmp_path: Path) -> None:
    content = json.loads((done / ARCHIVE).read_bytes())
    del content["digest"]
    content["figures"]["hospitals"]["values"]["fedavg"] = [0.2]
    (tmp_path / "forged.json").write_text(json.dumps({**content, "digest": digest(content)}))
    said = check_archive(tmp_path / "forged.json").lines[-1]
    assert said.startswith("DIFFERS: replayed fedavg in scene hospitals, seed 101: ")
    assert said.endswith(" points from the figure of the scene")


def test_the_part_is_the_same_whatever_the_scene_was_trained_with(tmp_path: Path) -> None:
    """A scene trains its rules in stacks, which changes last bits; the part that is run anew does not."""
    (candidate,) = read_candidates("LD", None, SUITE, trusting)
    planned = plan(
        SUITE, candidate, scenes=["hospitals"], seeds=1, changes=["rounds.count=1", "compute.engine=stacked"]
    )
    folder = arena_folder(planned, tmp_path / "out")
    run_arena(folder)
    write_archive(folder)
    assert not (found := check_archive(folder / ARCHIVE)).differs, found.lines


def test_a_second_call_runs_nothing_and_another_arena_is_refused(done: Path) -> None:
    before = (scene_folder(done, "hospitals") / "run.sqlite").read_bytes()
    lines: list[str] = []
    run_arena(small_arena("LD>DS/max", done), How(announce=lines.append))
    assert lines == []
    assert (scene_folder(done, "hospitals") / "run.sqlite").read_bytes() == before
    with pytest.raises(UserError, match="holds another arena, which differs in seeds"):
        small_arena("LD>DS/max", done, seeds=2)
    with pytest.raises(UserError, match="holds another arena, which differs in"):
        small_arena("LD", done)


def test_scenes_named_later_are_added_to_those_that_are_done(tmp_path: Path) -> None:
    folder = small_arena("LD", tmp_path, scenes=["hospitals"])
    run_arena(folder)
    before = (scene_folder(folder, "hospitals") / "run.sqlite").read_bytes()
    assert read_arena(small_arena("LD", tmp_path, scenes=["clean"])).scenes == ("clean", "hospitals")
    lines: list[str] = []
    run_arena(folder, How(announce=lines.append))
    assert [line.split(",")[0] for line in lines] == ["scene 2 of 2: clean"]
    assert (scene_folder(folder, "hospitals") / "run.sqlite").read_bytes() == before
    with pytest.raises(UserError, match="holds another arena, which differs in"):
        small_arena("DS", tmp_path, scenes=["sizes"])
    assert read_arena(folder).scenes == ("clean", "hospitals")


def test_a_stopped_arena_goes_on_to_the_same_figures(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_arena("LD>DS/max", tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr(running, "run_or_resume", _interrupted)
        with pytest.raises(Stopped):
            run_arena(folder)
    assert write_archive(folder)["sentence"].startswith("Nothing can be said of LD>DS/max yet")
    lines: list[str] = []
    run_arena(folder, How(announce=lines.append))
    assert lines == ["scene 1 of 1: hospitals, heart disease in four hospitals (UCI)"]
    assert (
        read_figures(folder, read_arena(folder))["hospitals"].models
        == read_archive(done / ARCHIVE).figures["hospitals"].models
    )


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        ("server", "raise RuntimeError('no idea')", "RuntimeError: no idea"),
        ("server", "return np.full(len(it.clients), np.nan)", "measured nan"),
        ("server", "return -np.ones(len(it.clients))", "measured -1.0"),
        ("server", "return np.ones(1)", "measured shape (1,)"),
        ("client", "return float('nan') if len(it.labels) > 150 else 1.0", "criterion FAILS = nan"),
    ],
)
def test_an_idea_that_fails_is_a_row_and_the_others_go_on(
    kind: str, body: str, says: str, done: Path, tmp_path: Path
) -> None:
    fedavg_alone = read_archive(done / ARCHIVE).figures["hospitals"].values["fedavg"][0]
    about = 'about="data", ' if kind == "client" else ""
    (tmp_path / "mine.py").write_text(CODE.format(kind=kind, about=about, what="it", body=body))
    folder = small_arena(str(tmp_path / "mine.py"), tmp_path / "out")
    run_arena(folder)
    document = write_archive(folder)
    assert document["scenes"][0]["verdict"] == "failed"
    assert says in document["scenes"][0]["failed"]
    assert document["sentence"].startswith("FAILS failed in 1 of 1 scene: ")
    assert {row["rule"] for row in document["scenes"][0]["rules"]} == set(SUITE.rivals), "the rivals have figures"
    assert document["scenes"][0]["rules"][0]["value"]["mean"] == fedavg_alone
    assert not check_archive(folder / ARCHIVE).differs
    run_arena(folder)
    assert write_archive(folder) == document


def test_what_fails_without_the_candidate_too_is_no_failure_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(part: PlannedRun, *_: object) -> None:
        raise UserError(f"{part.folder}: no rule can run here; allowed: another scene")

    monkeypatch.setattr(running, "run_or_resume", refused)
    folder = small_arena("LD", tmp_path / "out")
    with pytest.raises(UserError, match="scenes/hospitals-rivals: no rule can run here"):
        run_arena(folder)
    assert not read_figures(folder, read_arena(folder))


def test_rivals_that_were_stopped_after_a_spoilt_scene_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "return float('nan') if len(it.labels) > 150 else 1.0"
    (tmp_path / "mine.py").write_text(CODE.format(kind="client", about='about="data", ', what="it", body=body))
    folder = small_arena(str(tmp_path / "mine.py"), tmp_path / "out")
    real = running.run_or_resume

    def stopped(part: PlannedRun, *words: Any) -> Path:
        if part.folder.endswith("-rivals"):
            raise KeyboardInterrupt
        return real(part, *words)

    with monkeypatch.context() as patched:
        patched.setattr(running, "run_or_resume", stopped)
        with pytest.raises(Stopped):
            run_arena(folder)
    assert not read_figures(folder, read_arena(folder))["hospitals"].values
    run_arena(folder)
    assert set(read_figures(folder, read_arena(folder))["hospitals"].values) == set(SUITE.rivals)


def test_an_algorithm_that_raises_is_a_row_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from steelyard import Algorithm, algorithm\n@algorithm('arena-falls')\nclass Falls(Algorithm):\n"
        "    '''Falls.'''\n    def step(self, server):\n        raise KeyError('gone')\n"
    )
    folder = small_arena(str(tmp_path / "mine.py"), tmp_path / "out")
    run_arena(folder)
    assert write_archive(folder)["sentence"].startswith(
        "arena-falls failed in 1 of 1 scene: round 1 of arena-falls: algorithm arena-falls: its step fails: "
        "KeyError: 'gone'; allowed: "
    )


def test_a_fault_of_ours_is_no_failure_of_a_named_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(running, "run_or_resume", broken)
    with pytest.raises(RuntimeError, match="ours"):
        run_arena(small_arena("LD", tmp_path / "out"))


def test_what_the_machine_lacks_is_no_failure_of_the_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise UserError("data.path: found no 'digits'")

    folder = small_arena("LD", tmp_path / "out")
    with monkeypatch.context() as missing:
        missing.setattr("steelyard.data.loading.load", gone)
        with pytest.raises(MachineError, match=r"scene \w+: data\.path: found no"):
            run_arena(folder)
    assert not read_figures(folder, read_arena(folder))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(setup, "_put_together", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        run_arena(folder)
    assert not read_figures(folder, read_arena(folder))


def test_missing_data_of_any_scene_are_said_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = load_suite("standard")
    (candidate,) = read_candidates("LD", None, suite, trusting)
    planned = plan(suite, candidate, seeds=1, changes=QUICK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEELYARD_DATA", str(tmp_path / "none"))
    with pytest.raises(
        MachineError, match=r"scene iid: data\.path: found no 'mnist'.*nor can those of scene writers be read"
    ):
        arena_folder(planned, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("STEELYARD_STATE", str(tmp_path / "state"))
    with pytest.raises(MachineError, match="scene iid"):
        plan(suite, candidate, until_decided=True)
    assert not (tmp_path / "state").exists(), "nor are held-out seeds opened"
    monkeypatch.setattr("steelyard.data.mnist.read_mnist", lambda _: None)
    folder = arena_folder(replace(planned, scenes=("iid",)), tmp_path / "out")
    with pytest.raises(MachineError, match=r"scene writers: data\.path: found no 'unipen62/unipen62_28x28\.npz'"):
        arena_folder(planned, folder)
    assert read_arena(folder).scenes == ("iid",)


def test_what_does_not_fit_the_suite_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    (candidate,) = read_candidates("LD", None, SUITE, trusting)
    with pytest.raises(UserError, match="--seeds: got 99; allowed: a whole number from 1 to 10"):
        plan(SUITE, candidate, seeds=99)
    with pytest.raises(UserError, match="cuont"):
        plan(SUITE, candidate, changes=["rounds.cuont=1"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UserError, match="is not empty"):
        arena_folder(plan(SUITE, candidate, changes=QUICK), tmp_path / "full")
    draft = plan(SUITE, candidate, draft=True)
    assert (draft.draft, draft.whole, draft.seeds) == (True, False, SUITE.choose)
    assert plan(SUITE, candidate).whole
