"""`steelyard recommend` on small runs: reasons, what was kept, clouds, lists, and where its files are found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit import inside
from tests.recommend.conftest import two_tastes

from steelyard.experiment import running
from steelyard.experiment.loading import build


def shown(*arguments: object, folder: Path) -> str:
    done = inside("recommend", *map(str, arguments), folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of KGFlex and one of FPL, of two tastes that show in what is known of the items."""
    folder = tmp_path_factory.mktemp("runs")
    rows = [f"{user}\t{item}\t{rating}\t{time}" for user, item, rating, time in two_tastes()]
    (folder / "tastes.tsv").write_text("user\titem\trating\ttime\n" + "\n".join(rows) + "\n")
    about = [f"i{item:02d}\thalf {item // 20}\tdigit {item % 10}" for item in range(40)]
    (folder / "about.tsv").write_text("item\thalf\tdigit\n" + "\n".join(about) + "\n")
    columns = {"item": "item", "half": "half", "digit": "digit"}
    source = {"path": str(folder / "about.tsv"), "format": "attributes", "columns": columns}
    document = {
        "kind": "recommend",
        "interactions": {"path": str(folder / "tastes.tsv")},
        "fpl": {"factors": 4, "learning_rate": 0.2},
        "rounds": {"epochs": 3},
    }
    running.run(build(document), out=folder / "fpl")
    knowledge = {"sources": [source], "min_items": 2}
    running.run(build({**document, "knowledge": knowledge, "kgflex": {}}), out=folder / "kgflex")
    return folder


def test_explain_says_which_features_made_the_score(runs: Path):
    asked = ("explain", "kgflex", "--user", "u02", "--item", "i07")
    found = json.loads(shown(*asked, "--format", "json", folder=runs))
    listed = json.loads(shown("top", "kgflex", "--user", "u02", "--cutoff", 30, "--format", "json", folder=runs))[
        "list"
    ]
    assert found["score"] == pytest.approx(sum(each["part"] for each in found["reasons"]))
    scores = {each["item"]: each["score"] for each in listed}
    assert scores.get("i07", found["score"]) == pytest.approx(found["score"], abs=1e-5)
    assert "half 0" in found["reasons"][0]["feature"]
    assert sum(abs(each["share"]) for each in found["reasons"]) == pytest.approx(1)
    assert shown(*asked, "--top", 1, folder=runs).rstrip().endswith("in 1 further feature")


def test_kept_and_clouds(runs: Path, tmp_path: Path):
    found = json.loads(shown("kept", "kgflex", "--format", "json", folder=runs))
    assert found["kept"].keys() == {"shown", "informative"}
    quartiles = [each for shares in found["kept"].values() for each in shares.values()]
    assert [sorted(each) for each in quartiles] == quartiles
    # Two halves and ten digits are all there is, so no hundred can be the most prominent.
    assert 1 < found["prominent"] <= 12
    assert f"{found['prominent_kept']:.0%}" in shown("kept", "kgflex", folder=runs)
    shown("clouds", "kgflex", "--out", tmp_path / "clouds.svg", folder=runs)
    assert "half 0" in (tmp_path / "clouds.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("explain", "kgflex", "--user", "nobody", "--item", "i07"), "--user: got 'nobody'; allowed: one of 24 users"),
        (("explain", "kgflex", "--user", "u02", "--item", "x"), "--item: got 'x'"),
        (("kept", "fpl"), "a run without [kgflex]"),
        (("explain", "kgflex", "--user", "u02", "--item", "i07", "--top", "0"), "--top: got"),
    ],
)
def test_mistakes_are_one_line(runs: Path, refused: Callable[..., str], arguments: tuple[str, ...], told: str):
    word, run, *rest = arguments
    assert told in refused("recommend", word, runs / run, *rest)
