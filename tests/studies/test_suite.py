"""Suites that come with the package, frozen; what can be put to the test in them; settings that are tried."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.kit import assert_refused
from tests.studies.made import QUICK, SUITE, figures, on_paper, trusting
from tests.studies.test_attack import BASE
from tests.studies.test_attack import made as recorded

from steelyard import UserError
from steelyard.base.errors import MachineError
from steelyard.experiment.description import Description, FederationSettings
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.loading import RUN_FILE, to_toml
from steelyard.experiment.parts import Part
from steelyard.experiment.rules import parse_rules
from steelyard.report.curves import read_curves
from steelyard.report.rendering import render
from steelyard.runs.history import History
from steelyard.studies.archive import Replayed, SceneFigures
from steelyard.studies.arena import Arena, judge, plan
from steelyard.studies.arena_page import arena_parts
from steelyard.studies.candidate import TUNING, Candidate, Tried, Tuning, read_candidates, tune_rivals, tuning_parts
from steelyard.studies.checking import distance
from steelyard.studies.study import How, go_on
from steelyard.studies.suite import load_suite, suites

FROZEN = {
    ("small", 2): "771a6df38607fbf917346ac39895f2b28f06cf16a7d10762d34a500743ce5f60",
    ("standard", 4): "2b2b5224c3318a1df4da555ccbc2ff90d25a4bbb1885a55848d77e1c6a5d0641",
    ("full", 4): "5097c391f0b69d7df163aa5ec85c09594153861b84338c09dd4f0be5fd24349c",
}
"""A suite that was published under a version is never changed: another file is another version, with a line here."""


def test_published_suites_are_as_they_were() -> None:
    assert {(suite.name, suite.version): suite.sha256 for suite in map(load_suite, suites())} == FROZEN


@pytest.mark.parametrize("name", suites())
def test_every_suite_is_whole(name: str) -> None:
    """Seeds that choose never report, and every rival with settings has one of them and no more than the budget."""
    suite = load_suite(name)
    assert not set(suite.choose) & {*suite.report, *suite.held_out}
    assert suite.baseline in suite.rivals
    for words in suite.tuning.settings.values():
        assert len(words) <= suite.tuning.budget
        assert sum(word in suite.rivals for word in words) == 1


@pytest.mark.parametrize("name", SUITE.scenes)
def test_rows_that_report_choose_nothing_in_any_scene(name: str) -> None:
    experiment = SUITE.experiment(name)
    assert isinstance(experiment, LearningDescription)
    assert experiment.partition.server_report == "apart"
    assert experiment.data.source == "digits" or str(experiment.data.path).startswith("included/")
    assert next(iter(parse_rules(SUITE.rivals, experiment))) == SUITE.baseline


def test_a_scene_differs_from_its_base_in_what_it_says() -> None:
    clean, sizes = SUITE.experiment("clean"), SUITE.experiment("sizes", ["rounds.count=2"])
    assert isinstance(clean, LearningDescription)
    assert isinstance(sizes, LearningDescription)
    assert (clean.partition.size_spread, sizes.partition.size_spread) == (0.8, 1.5)
    assert (clean.partition.clients, sizes.partition.clients) == (20, 20)
    assert (clean.rounds.count, sizes.rounds.count) == (12, 2)
    standard, full = (load_suite(name).experiment("iid") for name in ("standard", "full"))
    assert isinstance(standard, LearningDescription)
    assert isinstance(full, LearningDescription)
    assert (full.data, full.rounds.count, full.training.epochs) == (standard.data, 50, 10)


def test_an_arena_of_a_suite_is_what_was_asked_for() -> None:
    (candidate,) = read_candidates("LD", None, SUITE, trusting)
    whole = plan(SUITE, candidate)
    assert (whole.whole, whole.draft, whole.seeds, whole.scenes) == (True, False, SUITE.report, tuple(SUITE.scenes))
    assert (whole.batches, whole.opened) == ([SUITE.report], 0)
    assert [cell.name for cell in whole.own] == list(SUITE.scenes)
    draft = plan(SUITE, candidate, draft=True, tried={"LD": 0.5})
    assert (draft.draft, draft.whole, draft.seeds) == (True, False, SUITE.choose)
    for arena in (whole, draft):
        found = judge(arena, {}, "here")
        assert (found.folder, found.suite, found.version, found.sha256) == ("here", "small", 2, SUITE.sha256)
        assert (found.whole, found.draft, found.tried) == (arena.whole, arena.draft, arena.tried)
        assert (found.seeds, found.margin, found.level) == (arena.seeds, SUITE.margin, 0.05)
    few = plan(SUITE, candidate, scenes=["sizes", "clean"], seeds=3, changes=QUICK, part=Part(2, 2))
    assert (few.scenes, few.seeds, few.whole) == (("clean", "sizes"), SUITE.report[:3], False)
    assert [cell.name for cell in few.own] == ["sizes"]
    assert not plan(SUITE, candidate, seeds=3).whole
    assert not plan(SUITE, candidate, changes=QUICK).whole
    opened = whole.model_copy(update={"seeds": SUITE.held_out[:7], "opened": 1})
    assert opened.batches == [SUITE.held_out[:5], SUITE.held_out[5:7]]
    assert list(opened.scene("clean").rules()) == [SUITE.baseline, "LD"]
    assert list(whole.scene("clean").rules()) == [*SUITE.rivals, "LD"]
    assert list(whole.rivals_of("clean").rules()) == list(SUITE.rivals)
    assert whole.scene("clean").seed == SUITE.report[0]


def test_cells_of_an_arena_are_scenes_and_until_decided_their_looks() -> None:
    arena = on_paper(["clean", "sizes"])
    assert [(cell.folder, cell.name, cell.seeds) for cell in arena.cells()] == [
        (f"scenes/{name}", name, SUITE.report) for name in ("clean", "sizes")
    ]
    (first, _) = arena.cells()
    assert arena.folders(first) == ("scenes/clean", "scenes/clean-rivals")
    assert arena.about(first) == f"clean, {SUITE.scenes['clean'].about}"
    opened = arena.model_copy(update={"seeds": SUITE.held_out[:10], "opened": 2})
    assert [cell.folder for cell in opened.cells()] == [
        *("scenes/clean", "scenes/sizes", "scenes/clean-2", "scenes/sizes-2")
    ]
    assert opened.about(opened.cells()[2]) == f"{arena.about(first)}, seeds 206 to 210"
    assert arena.failure(Path("out"), first) == Path("out/scenes/clean.failed")


def test_scenes_are_added_to_an_arena_that_was_begun_unless_it_is_a_part_or_opened() -> None:
    one, other = on_paper(["sizes"]), on_paper(["clean", "two-labels"])
    both = tuple(name for name in SUITE.scenes if name in ("clean", "sizes", "two-labels"))
    assert one.added_to(other).scenes == other.added_to(one).scenes == both
    part = one.model_copy(update={"part": Part(1, 2)})
    for begun, more in ((other, part), (part, other), (other, one.model_copy(update={"opened": 1}))):
        assert more.added_to(begun) is more
    assert one.added_to(Tuning(suite=SUITE, rules={}, scenes=())) is one


def test_an_arena_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    (candidate,) = read_candidates("fedprox(mu=0.5)+LD>DS", None, SUITE, trusting)
    options = {"changes": QUICK, "tried": {"a": 0.5, "b": 0.25}, "part": Part(2, 2)}
    given = plan(SUITE, candidate, scenes=["clean", "sizes"], seeds=2, **options)
    given.write(tmp_path)
    kept = Arena.read(tmp_path)
    assert kept == given
    assert (kept.candidate, kept.tried, kept.changes) == (candidate.label, options["tried"], tuple(QUICK))
    assert kept.experiment.algorithm == candidate.settings.algorithm
    assert kept.experiment.algorithm.parameters == {"mu": 0.5}
    assert kept.experiment.criteria == ("LD", "DS")
    named = plan(SUITE, Candidate("mine", candidate.settings), scenes=["clean"])
    assert list(named.scene("clean").rules())[-1] == named.candidate == named.experiment.name == "mine"
    assert plan(SUITE, candidate).experiment.name is None
    text = (tmp_path / "arena.toml").read_text()
    for old, new, words in (
        ('suite = "small"', 'suite = "smal"', ("suite", "'smal'", "standard")),
        ('suite = "small"', "suite = 3", ("suite", "3")),
        ("mu = 0.5", "mu = -0.5", ("mu", "-0.5")),
        ('scenes = [\n    "clean"', 'scenes = [\n    "cleen"', ("'cleen'", "clean")),
    ):
        assert old in text
        (tmp_path / "arena.toml").write_text(text.replace(old, new))
        assert_refused(lambda: Arena.read(tmp_path), *words)


def test_what_no_arena_can_be_is_refused_before_it_runs() -> None:
    (candidate,) = read_candidates("LD", None, SUITE, trusting)
    for options, words in (
        ({"until_decided": True, "draft": True}, ("--until-decided", "--draft")),
        ({"until_decided": True, "part": Part(1, 2)}, ("--until-decided", "--part")),
        ({"seeds": 0}, ("--seeds", "0", "1 to 10")),
        ({"seeds": 11}, ("--seeds", "11", "1 to 10")),
        ({"seeds": 6, "draft": True}, ("--seeds", "6", "1 to 5")),
        ({"seeds": len(SUITE.held_out) + 1, "until_decided": True}, ("--seeds", f"1 to {len(SUITE.held_out)}")),
        ({"scenes": ["cleen"]}, ("--scenes", "'cleen'", "'clean'")),
        ({"scenes": ["clean"], "part": Part(2, 2)}, ("--part", "2/2")),
        ({"changes": ["rounds.cuont=1"]}, ("cuont", "task clean")),
    ):
        assert_refused(lambda options=options: plan(SUITE, candidate, **options), *words)
    assert_refused(lambda: load_suite("smal"), "--suite", "'smal'", "'small'")
    assert plan(SUITE, candidate, seeds=10).seeds == SUITE.report
    assert plan(SUITE, candidate, seeds=5, draft=True).seeds == SUITE.choose


def test_an_answer_says_where_its_files_are_once_they_are_written(tmp_path: Path) -> None:
    arena = on_paper(["clean"])
    found = judge(arena, {"clean": SceneFigures(failed="it fails")}, str(tmp_path))
    assert arena.parts(found) == arena_parts(found)
    assert arena.next_lines(found) == ()
    (tmp_path / "arena.json").touch()
    stored = f"runs stored in {tmp_path}; archive: {tmp_path}/arena.json"
    assert arena.next_lines(found) == [
        *(stored, f"report: {tmp_path}/report.html", f"next: steelyard arena --check {tmp_path}")
    ]
    assert arena.problem(found) == "arena: no verdict: X failed in 1 of 1 task: it fails."
    assert arena.problem(judge(arena, {})) == ""


def test_a_replayed_accuracy_is_held_against_its_own_seed() -> None:
    arena = on_paper(["clean"]).model_copy(update={"seeds": (7, 3, 5)})
    made = {"clean": SceneFigures(values={"fedavg": (0.25, 0.5, 0.75)})}
    for seed, apart in ((3, 0.5), (5, 0.25), (7, 0.0)):
        assert distance(arena, made, Replayed(scene="clean", seed=seed, model="", value=0.75)) == apart


def test_the_part_that_is_run_anew_is_the_baselines_first_seed_in_a_quick_scene(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []

    def runs(experiment: Description, *, out: Path, seeds: list[int], progress: bool) -> None:
        compute = experiment.model_dump()["compute"]
        begun.append((out, seeds, list(experiment.rules()), compute["engine"], compute["device"]))
        raise MachineError("no more")

    monkeypatch.setattr("steelyard.studies.arena.run", runs)
    quick = SUITE.model_copy(update={"replay": "two-labels"})
    names = ["sizes", "clean", "two-labels"]
    made = dict.fromkeys(names, figures([0.5], [0.6])) | {"sizes": SceneFigures(failed="why")}
    for suite, scenes, scene in ((quick, 3, "two-labels"), (quick, 2, "clean"), (SUITE, 3, "clean")):
        arena = on_paper(names).model_copy(update={"suite": suite, "seeds": (7, 3)})
        found = {name: made[name] for name in names[:scenes]}
        with pytest.raises(MachineError, match="no more"):
            arena.replay(found, tmp_path)
        assert begun.pop() == (tmp_path / scene, [3], ["fedavg"], "loop", "cpu")
    assert on_paper(names).replay({"sizes": made["sizes"]}, tmp_path) is None


CRITERION = """
from steelyard import server_criterion
@server_criterion("{name}", description="every client alike")
def alike(view):
    return [1.0] * len(view.clients)
"""


ALGORITHM = """
from steelyard import Algorithm, algorithm
@algorithm("arena-half")
class Half(Algorithm):
    '''Goes half of the way.'''
    def step(self, server):
        return server.parameters + 0.5 * server.change, {}
"""


def test_an_experiment_gives_its_main_rule_and_algorithm(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        '[partition]\nclients = 5\n[weighing]\ncriteria = ["LD", "DS"]\nnormalise = "max"\n'
        '[algorithm]\nname = "fedprox"\nmu = 0.5\n[beside.fedavg]\ncriteria = ["DS"]\n'
    )
    (found,) = read_candidates(str(tmp_path / "mine.toml"), None, SUITE, trusting)
    assert found.settings.criteria == ("LD", "DS")
    assert found.settings.algorithm.parameters == {"mu": 0.5}
    (other,) = read_candidates(str(tmp_path / "mine.toml"), "MD", SUITE, trusting)
    assert other.settings.criteria == ("MD",)


def test_code_is_asked_for_before_it_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")

    def refusing(where: str, code: Mapping[str, str]) -> None:
        raise UserError(f"{where}: not trusted")

    with pytest.raises(UserError, match="not trusted"):
        read_candidates(str(tmp_path / "mine.py"), None, SUITE, refusing)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("candidate", "rule", "parts"),
    [
        ("fedavg", None, ("'fedavg'", "the baseline")),
        ("DS,LD,MD,EQ,VP", None, ("5 rules", SUITE.tuning.budget)),
        ("EQ", "LD", ("--rule", "'LD'", "'EQ'")),
        ("missing.toml", None, ("missing.toml",)),
        ("missing.py", None, ("arena", "'missing.py'")),
        ("nothing.py", None, ("nothing.py", "no criterion and no algorithm")),
        ("taken.toml", None, ("arena", "another rule", "'EQ'")),
        ("items.toml", None, ("items.toml", "kind 'learning'")),
    ],
)
def test_what_cannot_be_tested_is_one_line(
    candidate: str, rule: str | None, parts: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nothing.py").write_text("x = 1\n")
    Path("taken.toml").write_text('[partition]\nclients = 5\n[weighing]\ncriteria = ["LD"]\nname = "EQ"\n')
    Path("items.toml").write_text('kind = "recommend"\n[interactions]\npath = "x.tsv"\n')
    assert_refused(lambda: read_candidates(candidate, rule, SUITE, trusting), *parts)


def test_settings_are_judged_by_the_clients_own_rows_on_seeds_that_never_report(tmp_path: Path) -> None:
    rules = parse_rules(["fedadam(server_rate=0.03)", "fedadam"], SUITE.experiment("hospitals"))
    told: list[str] = []
    few = SUITE.model_copy(update={"tuning": SUITE.tuning.model_copy(update={"settings": {"adam": tuple(rules)}})})
    (tried,) = tune_rivals(few, tmp_path, ["hospitals"], QUICK, How(announce=told.append))
    assert told == ["task 1 of 1: hospitals, choosing among 2 settings"]
    assert (tried.rule, tried.frozen) == ("adam", next((word for word in rules if word in SUITE.rivals), ""))
    history = History(tmp_path / TUNING / "hospitals")
    seeds = set(history.federations["seed"])
    assert seeds == set(SUITE.choose[: SUITE.tuning.seeds])
    assert not seeds & {*SUITE.report, *SUITE.held_out}
    curves = [curve for curve in read_curves(history) if curve.rule == "fedadam"]
    assert tried.values["fedadam"] == pytest.approx(sum(float(curve.overall[-1]) for curve in curves) / len(curves))
    again = Tuning(suite=SUITE, rules=rules, scenes=("hospitals",), changes=tuple(QUICK))
    assert again.answer(go_on(again, tmp_path, How(announce=told.append))) == tried.values
    assert len(told) == 1, "nothing runs twice"
    others = again.model_copy(update={"rules": parse_rules(["EQ", "LD"], SUITE.experiment("hospitals"))})
    assert_refused(lambda: others.answer(go_on(others, tmp_path)), "other settings")


def test_settings_have_their_mean_over_scenes_and_seeds(tmp_path: Path) -> None:
    """Accuracy is a quarter of the seed in both scenes; in one of them a rule explodes."""
    for scene, ended in (("clean", ""), ("sizes", "detector")):
        recorded(run := tmp_path / TUNING / scene, {}, 0.5, ended=ended)
        (run / RUN_FILE).write_text(to_toml(BASE))
    rules = dict.fromkeys(("size", "detector"), FederationSettings())
    found = Tuning(suite=SUITE, rules=rules, scenes=("clean", "sizes")).answer(tmp_path)
    assert found == pytest.approx({"size": 0.375, "detector": math.nan}, nan_ok=True)


def test_the_best_is_the_first_of_the_best_and_none_that_exploded() -> None:
    values = {"a1": 0.5, "a2": 0.7, "a3": 0.7, "a4": math.nan}
    assert Tried("a", values).best == "a2"
    assert [Tried("a", values, frozen).best for frozen in ("a1", "a3")] == ["a2", "a3"]
    assert_refused(lambda: Tried("a", {"a1": math.nan}).best, "arena", "with a diverged", "a1")


TRIED = """
Other settings than the frozen ones are best for a.

Settings of the rivals: suite small, version 2, not the whole suite
-----------------------------------
setting  accuracy (%)  best  frozen
-----------------------------------
a(1)            50.00   yes
a(2)                –
EQ              25.00           yes
-----------------------------------
On the clients' own test samples, mean over the tasks and the seeds 11, 12, 13.
"""


def test_what_is_frozen_is_said_beside_what_is_best() -> None:
    tried = Tried("a", {"a(1)": 0.5, "a(2)": math.nan, "EQ": 0.25})
    assert render(tuning_parts(SUITE, [tried], whole=False), width=80).strip() == TRIED.strip()
    text = render(tuning_parts(SUITE, [Tried("a", {"a(1)": 0.25, "EQ": 0.5})]))
    assert text.startswith("As frozen.")
    assert "not the whole suite" not in text


def test_a_file_is_the_criterion_or_the_algorithm_that_it_defines(tmp_path: Path) -> None:
    mine, two, half = (tmp_path / f"{name}.py" for name in ("mine", "two", "half"))
    mine.write_text(CRITERION.format(name="ALIKE"))
    two.write_text(CRITERION.format(name="FIRST_IDEA") + CRITERION.format(name="SECOND_IDEA"))
    half.write_text(ALGORITHM)

    def read(path: Path, rule: str | None = None) -> Candidate:
        (found,) = read_candidates(str(path), rule, SUITE, trusting)
        return found

    assert (read(mine).label, read(mine).settings.criteria) == ("ALIKE", ("ALIKE",))
    assert read(mine).settings.plugins == (str(mine.resolve()),)
    assert read(mine, "VP>ALIKE/max").settings.criteria == ("VP", "ALIKE")
    assert (read(half).label, read(half).settings.plugins) == ("arena-half", ())
    assert read(half).settings.algorithm.plugins == (str(half.resolve()),)
    assert_refused(lambda: read(two), two, "FIRST_IDEA, SECOND_IDEA", "--rule")
    assert read(two, "SECOND_IDEA").label == "SECOND_IDEA"
