"""`steelyard recommend explain`, `kept` and `clouds` on a small run of KGFlex."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.recommend.conftest import two_tastes
from tests.warm import warm_command

from steelyard.experiment import running
from steelyard.experiment.loading import build


def _cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    return warm_command("recommend", *map(str, arguments), folder=Path.cwd())


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
    found = json.loads(_cli("explain", runs / "kgflex", "--user", "u02", "--item", "i07", "--format", "json").stdout)
    listed = json.loads(_cli("top", runs / "kgflex", "--user", "u02", "--cutoff", 30, "--format", "json").stdout)[
        "list"
    ]
    assert found["score"] == pytest.approx(sum(each["part"] for each in found["reasons"]))
    shown = {each["item"]: each["score"] for each in listed}
    assert shown.get("i07", found["score"]) == pytest.approx(found["score"], abs=1e-5)
    assert "half 0" in found["reasons"][0]["feature"]
    assert sum(abs(each["share"]) for each in found["reasons"]) == pytest.approx(1)
    text = _cli("explain", runs / "kgflex", "--user", "u02", "--item", "i07", "--top", 1).stdout
    assert text.splitlines()[0].startswith("i07 for u02: score")
    assert "half 0" in text


def test_kept_and_clouds(runs: Path, tmp_path: Path):
    found = json.loads(_cli("kept", runs / "kgflex", "--format", "json").stdout)
    assert found["kept"].keys() == {"shown", "informative"}
    for quartiles in (each for shares in found["kept"].values() for each in shares.values()):
        assert 0 <= quartiles[0] <= quartiles[1] <= quartiles[2] <= 1
    assert "would select it again" in _cli("kept", runs / "kgflex").stdout
    picture = tmp_path / "clouds.svg"
    assert _cli("clouds", runs / "kgflex", "--out", picture).returncode == 0
    assert "half 0" in picture.read_text()
    assert "in what they are shown" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "kgflex", "--user", "nobody", "--item", "i07"), "--user: got 'nobody'; allowed: one of 24 users"),
        (("explain", "kgflex", "--user", "u02", "--item", "x"), "--item: got 'x'; allowed: one of"),
        (("explain", "fpl", "--user", "u02", "--item", "i07"), "a run without [kgflex]"),
        (("kept", "fpl"), "a run without [kgflex]"),
        (("explain", "kgflex", "--user", "u02", "--item", "i07", "--top", "0"), "--top: got"),
    ],
)
def test_mistakes_are_one_line(runs: Path, arguments: tuple[str, ...], message: str):
    command, run, *rest = arguments
    failed = _cli(command, runs / run, *rest)
    assert failed.returncode == 2
    assert message in failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1
    assert "Traceback" not in failed.stderr
