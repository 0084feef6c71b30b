"""The grid of a sweep: its order by hand, what each point is, its file, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.kit import assert_refused, small

from steelyard import Experiment
from steelyard.experiment.loading import build
from steelyard.studies.study import difference
from steelyard.studies.sweep import Sweep, measures_of, plan

BASE = small(
    partition={"scheme": "iid", "clients": 4},
    rounds={"count": 40},
    weighing={"criteria": ["DS", "LD", "MD"], "priority": "LD>DS>MD"},
    beside={"fedavg": {"criteria": ["DS"], "name": "fedavg"}},
)


RECOMMEND = {"kind": "recommend", "interactions": {"path": "nowhere.tsv"}}


def test_the_last_field_changes_fastest():
    found = plan(BASE, ["training.learning_rate=0.1,0.2", "training.epochs=1,2,3"])
    points = [tuple(cell.changes.values()) for cell in found.cells()]
    assert points == [(0.1, 1), (0.1, 2), (0.1, 3), (0.2, 1), (0.2, 2), (0.2, 3)]
    names = [cell.folder for cell in found.cells()]
    assert names[:2] == ["1-learning_rate=0.1,epochs=1", "2-learning_rate=0.1,epochs=2"]
    last = found.described(found.cells()[-1]).model_dump()
    assert (last["training"]["learning_rate"], last["training"]["epochs"]) == (0.2, 3)
    assert last["partition"]["validation"] == 0.1


def test_rules_and_seeds_of_a_point_are_one_run():
    def rules(over: list[str], **options: Any) -> list[list[str]]:
        planned = plan(BASE, over, **options)
        return [list(planned.described(cell).rules()) for cell in planned.cells()]

    (cell,) = plan(BASE, ["training.epochs=1"], rules=["DS,MD>DS>LD"], seeds=2).cells()
    assert cell.seeds == (5, 6)
    assert rules(["training.epochs=1"], rules=["DS,MD>DS>LD"]) == [["DS", "MD>DS>LD"]]
    # Without rules the main rule alone is swept.
    assert rules(["weighing.priority=DS>LD>MD,MD>DS>LD"]) == [["DS>LD>MD"], ["MD>DS>LD"]]
    assert rules(["training.epochs=2"], rules=["recipe"]) == [["LD>DS>MD", "fedavg"]]
    assert rules([], rules=["DS", "MD>DS>LD"]) == [["DS", "MD>DS>LD"]]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("training.learning_rate=0.005, 5e-2,1", (0.005, 0.05, 1)),
        ("training.batch_size=10,full", (10, "full")),
    ],
)
def test_values_are_read_as_in_an_experiment_file(text: str, values: tuple[Any, ...]) -> None:
    ((field, read),) = plan(BASE, [text]).over.items()
    assert (field, read) == (text.partition("=")[0], values)
    assert [type(value) for value in read] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("over", "parts"),
    [
        ("training.epochs", ("'training.epochs'", "section.field=value,value")),
        ("=1", ("'=1'", "section.field=value,value")),
        ("training.epochs= ", ("'training.epochs= '", "section.field=value,value")),
        ("training.epochs=1,,2", ("'1,,2'", "empty")),
        ("seed=1,2", ("seed", "--seeds")),
        ("beside=1", ("beside", "--rules")),
        ("name=a", ("name", "can choose; allowed")),
        ("store.checkpoint_every=1", ("store.checkpoint_every", "not a setting")),
        ("partition.validation=0.1", ("partition.validation", "--validation gives the share")),
        ("weighing=1", ("weighing is a section", "one value")),
        ("weighing.criteria=DS", ("weighing.criteria is a list", "one value")),
        ("flaws.0=1", ("flaws.0 is a section", "one value")),
        ("training.epochs=1,1", ("'training.epochs=1 LD>DS>MD'", "same experiment", "each point once")),
    ],
)
def test_fields_that_cannot_be_swept_are_named(over: str, parts: tuple[str, ...]) -> None:
    flawed = BASE.changed({"flaws": [{"kind": "noisy", "pick": "biggest", "count": 1}]})
    assert_refused(lambda: plan(flawed, [over]), "--over", *parts)
    assert len(plan(flawed, ["flaws.0.count=1,2"]).cells()) == 2


def test_nothing_to_sweep_and_too_many_points_are_refused() -> None:
    assert_refused(lambda: plan(BASE, []), "--over", "got nothing", "--rules")
    assert_refused(lambda: plan(BASE, ["training.epochs=1", "training.epochs=2"]), "training.epochs", "twice")
    assert_refused(lambda: plan(BASE, ["training.epochs=1"], seeds=0), "--seeds", 0)
    epochs, half = (f"training.epochs={','.join(map(str, range(1, most)))}" for most in (51, 52))
    assert_refused(lambda: plan(BASE, [half], rules=["EQ", "DS"]), "a grid of 102 points", "--yes")
    for over, many, points in ((epochs, False, 50), (half, True, 51)):
        assert len(plan(BASE, [over], rules=["EQ", "DS"], many=many).cells()) == points
    rates = f"training.learning_rate={','.join(f'0.{number:03d}' for number in range(1, 200))}"
    assert_refused(lambda: plan(BASE, [half, rates], many=True), "a grid of 10,149 points", "at most 10,000")


def test_names_of_runs_are_short_and_plain() -> None:
    found = plan(BASE, {"training.batch_size": ["full", 10], "model.name": ["logistic"]}).cells()
    assert [cell.folder for cell in found] == ["1-batch_size=full,name=logistic", "2-batch_size=10,name=logistic"]
    assert plan(BASE, [], rules=["EQ"]).cells()[0].folder == "1"
    ten = plan(BASE, [f"training.epochs={','.join(map(str, range(1, 11)))}"]).cells()
    assert [cell.folder for cell in ten][8:] == ["09-epochs=9", "10-epochs=10"]
    odd = BASE.changed({"data": {"source": "images", "path": "x"}})
    name = plan(odd, {"data.path": ["A B/c_d", "e" * 100]}).cells()[0].folder
    assert name == "1-path=A-B-c_d"
    assert len(plan(odd, {"data.path": ["A", "e" * 100]}).cells()[1].folder) == 2 + 80


def test_the_share_is_the_given_one_or_the_experiments_own_or_a_tenth():
    own = BASE.changed({"partition.validation": 0.25})
    assert plan(own, ["training.epochs=1"]).validation == 0.25
    found = plan(own, ["training.epochs=1"], validation=0.3)
    assert found.validation == found.described(found.cells()[0]).validation == 0.3
    assert found.experiment.validation is None, "the best would not run on the test set"


def test_each_kind_says_how_it_is_tested_on_a_validation_split():
    recommend = build(RECOMMEND)
    assert recommend.validation is None
    assert recommend.on_validation(0.2).model_dump()["interactions"]["validation"] == 0.2
    assert recommend.on_validation(0.2).on_validation(None).model_dump() == recommend.model_dump()
    assert BASE.on_validation(0.2).partition.validation == BASE.on_validation(0.2).validation == 0.2


def test_measures_are_those_that_a_run_records():
    assert measures_of(BASE) == ["score", "worst10", "rounds-to-target", "loss", "accuracy"]
    served = BASE.changed(
        {"partition.server": "fraction", "partition.server_report": "apart", "partition.test": "none"}
    )
    assert measures_of(served) == ["server-accuracy", "server-macro-f1"]
    regression = Experiment.model_validate({"data": {"source": "diabetes"}})
    assert measures_of(regression) == ["score", "rmse", "mae", "mape", "worst10", "rounds-to-target", "loss"]
    untested = BASE.changed({"partition.test": "none"})
    assert_refused(lambda: plan(untested, ["training.epochs=1"]), "nothing to choose by")


def test_a_sweep_is_read_back_as_it_was_written(tmp_path: Path):
    over = ["training.learning_rate=0.1,0.30000000000000004", "training.batch_size=full,10"]
    given = plan(BASE, over, rules=["DS"], seeds=2)
    given.write(tmp_path / "sweep")
    kept = Sweep.read(tmp_path / "sweep")
    assert difference(kept, given) is None
    assert kept.document() == given.document()
    assert kept.cells() == given.cells()


def test_a_sweep_that_is_not_as_it_was_written_is_refused(tmp_path: Path) -> None:
    now = plan(BASE, ["training.epochs=1,2"]).document()
    for document, words in (
        (now | {"stacked": True}, "stacked: unknown field"),
        (now | {"over": [3]}, "over"),
        (now | {"measure": "speed"}, "measure: got 'speed'"),
        (now | {"part": "3"}, "part: got '3'"),
        (now | {"over": {"training.epochs": []}}, "over.training.epochs: got []"),
    ):
        (tmp_path / "sweep.toml").write_text(tomli_w.dumps(document))
        assert_refused(lambda: Sweep.read(tmp_path), tmp_path / "sweep.toml", words)


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    """A file of the same name with other content is another model, with the same content the same one."""

    def modelled(folder: str, text: str) -> Any:
        file = tmp_path / folder / "model.py"
        file.parent.mkdir()
        file.write_text(text)
        return plan(BASE.changed({"model.name": f"{file}:make"}), ["training.epochs=1,2"])

    given = plan(BASE, ["training.epochs=1,2"])
    mine = modelled("mine", "a = 1")
    for one, other, found in (
        (given, plan(BASE, ["training.epochs=1,3"]), "over.training.epochs"),
        (mine, modelled("same", "a = 1"), None),
        (mine, modelled("other", "a = 2"), "model.name"),
    ):
        assert difference(one, other) == found


def test_a_cut_off_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text('measure = "score"\nexperiment = 3\n')
    assert_refused(lambda: Sweep.read(tmp_path), tmp_path / "sweep.toml", "missing")
    assert_refused(lambda: Sweep.read(tmp_path / "elsewhere"), "no sweep.toml")


@pytest.mark.parametrize(("rules", "named"), [((), "the main rule"), (["DS"], "DS")])
def test_points_that_exploded_before_they_had_a_folder_have_no_best(
    rules: list[str], named: str, tmp_path: Path
) -> None:
    planned = plan(BASE, ["training.epochs=1,2"], rules=rules)
    for cell in planned.cells():
        planned.note_failure(tmp_path, cell, "exploded")
    found = planned.write_files(tmp_path)
    assert [(row.point, row.rule, row.diverged) for row in found.rows] == [(1, named, True), (2, named, True)]
    assert (found.best, found.left, len(found.diverged)) == (None, (), 2)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".diverged", ".diverged"]
