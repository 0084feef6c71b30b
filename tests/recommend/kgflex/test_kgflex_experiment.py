"""KGFlex through the one loop: description, resume, weights by expertise, commands of a run."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import kit
from tests.kit import assert_refused
from tests.recommend.conftest import two_tastes

from steelyard import Model, Recommender
from steelyard.clients.node import NodeConfig
from steelyard.experiment import running
from steelyard.experiment.loading import build
from steelyard.experiment.recommend import RecommendDescription
from steelyard.experiment.run_audits import watch
from steelyard.models.recommender import listed
from steelyard.recommend.histories import Histories
from steelyard.recommend.interactions import build as interactions
from steelyard.recommend.kgflex.selection import Selection, expertise
from steelyard.report.recommender import open_run
from steelyard.result import Result


@pytest.fixture
def features(tmp_path: Path) -> Path:
    """What is known of the items: which half they are of, which of four quarters, and nothing of the last."""
    path = tmp_path / "about.tsv"
    lines = [f"i{item:02d}\thalf {item // 20}\tquarter {item // 10}\tdigit {item % 10}" for item in range(39)]
    path.write_text("item\thalf\tquarter\tdigit\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture
def known(description: dict, features: Path) -> dict:
    columns = {"item": "item", "half": "half", "quarter": "quarter", "digit": "digit"}
    source = {"path": str(features), "format": "attributes", "columns": columns}
    return {
        **description,
        "knowledge": {"sources": [source], "min_items": 2},
        "kgflex": {},
        "fpl": {**description["fpl"], "mode": "pFPL+"},
    }


def changed(document: dict, **sections: Any) -> RecommendDescription:
    found = build(kit.changed(document, **sections))
    assert isinstance(found, RecommendDescription)
    return found


@pytest.mark.parametrize(
    ("fpl", "kgflex", "rounds"),
    [
        ({"mode": "pFPL+"}, {}, 30),
        ({"mode": "sFPL+"}, {}, 30),
        ({}, {"batch": 16}, 30),
    ],
)
def test_every_way_of_training_learns_what_the_two_tastes_are(known: dict, tmp_path: Path, fpl, kgflex, rounds: int):
    experiment = changed(known, fpl=fpl, kgflex=kgflex, rounds={"epochs": 30, "evaluate_every": 10, "fraction": 1.0})
    result = Result(running.run(experiment, out=tmp_path / "run"))
    history = result.history.rounds
    assert history["round"].max() == rounds
    # With two tastes told apart, 12 of 40 items are left to guess from; by chance the score is about 0.06.
    assert history["accuracy"].dropna().iloc[-1] > 0.15
    finished = open_run(tmp_path / "run")
    assert (finished.communication()["sent_vectors"] == 0) is (kgflex != {})


@pytest.mark.parametrize("kgflex", [False, True])
def test_a_recommender_leaves_its_run_with_nothing_of_users_but_of_her_who_asks(
    known: dict, description: dict, tastes: Path, tmp_path: Path, kgflex: bool
):
    experiment = changed(known if kgflex else description, rounds={"epochs": 4})
    result = Result(running.run(experiment, out=tmp_path / "run"))
    stored = result.history.evaluations.query("client == 'u03' and round == 4")["score"].item()
    known_list = [(row.item, row.score) for row in listed(open_run(tmp_path / "run"), "u03", 5).items]
    run_data = experiment.run_data()
    truth, number = run_data.users.truth, run_data.histories.names.index("u03")
    sides = {"later": truth.test_item[truth.test_user == number], "new": run_data.histories.own(number)}
    for name, items in sides.items():
        lines = [f"u03\t{run_data.data.items[item]}\t5" for item in items.tolist()]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["user\titem\trating", *lines]) + "\n")
    for out, whose in (("all", []), ("hers", ["--client", "u03"])):
        taken = kit.inside("model", "run", *whose, "--out", out, folder=tmp_path)
        assert taken.returncode == 0, taken.stderr
        assert kit.inside("verify", "run", "--model", out, folder=tmp_path).returncode == 0
    shutil.rmtree(tmp_path / "run")
    tastes.unlink()
    hers, everyone = Recommender.load(tmp_path / "hers"), Recommender.load(tmp_path / "all")
    assert [(one.item, one.score) for one in hers.list(cutoff=5).items] == known_list
    tested = kit.inside("recommend", "test", "hers", "later.tsv", "--format", "json", folder=tmp_path)
    (group,) = json.loads(tested.stdout)["groups"]
    assert (group["name"], group["rows"], group["figures"][0]["measure"]) == ("u03", len(sides["later"]), "ndcg@10")
    assert group["figures"][0]["value"] == pytest.approx(stored)
    told = "".join((tmp_path / "all" / name).read_text() for name in ("model.json", "card.md"))
    assert not [name for name in run_data.histories.names if name in told]
    assert (everyone.document.taken, set(everyone.tensors) - set(hers.tensors)) == ([], set())
    assert_refused(lambda: everyone.list("u03"), "'u03'", "no user's own part", "--rows FILE")
    assert_refused(lambda: Model.load(tmp_path / "all"), "is a recommender", "steelyard recommend list")
    answer = kit.inside("recommend", "list", "all", "--rows", "new.tsv", folder=tmp_path)
    assert (answer.returncode, "For u03" in answer.stdout, "half: half 1" in answer.stdout) == (0, True, kgflex)


def test_expertise_counts_features_that_chance_does_not_explain():
    """With 8 items and 8 others, 2 ln 2 · 16 · k is above 10.828 from k = 0.488 on; with 80 and 20, from 0.0781 on."""
    pairs = [(f"u{u}", str(i)) for u, count in enumerate((8, 8, 80)) for i in range(count)]
    pairs += [("u3", str(i)) for i in range(80, 100)]
    histories = Histories.of(interactions([u for u, _ in pairs], [i for _, i in pairs]))
    gains = np.array([0.5, 0.48, 0.49, 0.1, 0.07, 0.03], dtype=np.float32)
    selection = Selection(np.array([0, 2, 3, 6, 6]), np.zeros(6, dtype=np.int32), gains, 3)
    assert expertise(selection, histories).tolist() == [1, 1, 1, 0]
    # With half as many others, D_u has 12, 12 and 100: from k = 0.651 and 0.0781 on.
    assert expertise(selection, histories, 0.5).tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"knowledge": None}, ["kgflex", "[knowledge]"]),
        ({"kgflex": {"batch": 8}, "fpl": {"pi": 0.5}}, ["kgflex.batch", "fpl.pi"]),
        ({"kgflex": {"batch": 8}, "weighing": {"criteria": ["DS"]}}, ["weighing", "no clients"]),
        ({"kgflex": {"biases": "off"}, "fpl": {"bias_spread": 0.1}}, ["kgflex.biases", "fpl.bias_spread"]),
        ({"kgflex": None, "weighing": {"criteria": ["EX"]}}, ["EX has no meaning for users"]),
        ({"interactions": {"split": "fixed"}}, ["interactions.split", "'fixed'"]),
    ],
)
def test_what_does_not_fit_is_refused(known: dict, sections: dict, parts: list[str]):
    assert_refused(lambda: changed(known, **sections), *parts)


def test_what_is_for_items_alone_or_for_one_place_is_refused(known: dict):
    assert_refused(changed(known, knowledge={"min_items": 1000}).assemble, "knowledge", "no feature is left")
    assert_refused(lambda: watch(changed(known), [1]), "audit", "[kgflex]")
    central = changed(known, kgflex={"batch": 8})
    assert_refused(lambda: central.on_node(NodeConfig.read({"client": "u01"})), "kgflex.batch", "8")


def test_a_fixed_split_tests_on_the_rows_of_a_second_file(description: dict, tmp_path: Path):
    rows, files = two_tastes(), {"path": str(tmp_path / "train.tsv"), "test": str(tmp_path / "test.tsv")}
    for name, part in (("path", rows[:200]), ("test", rows[200:])):
        Path(files[name]).write_text("".join(f"{u}\t{i}\t{r}\n" for u, i, r, _ in part))
    fixed = changed(description, interactions={**files, "split": "fixed", "category_column": None}).run_data()
    users, items, test = fixed.data.users, fixed.data.items, fixed.split.test
    assert len(fixed.split.train) == 200
    assert {*zip(users[test.user], items[test.item], strict=True)} == {(u, i) for u, i, _, _ in rows[200:]}
