"""`steelyard recommend explain`, `kept` and `clouds` on a small run of KGFlex."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from tests.recommend.conftest import two_tastes
from tests.warm import command_environment, warm_command

from steelyard.experiment import running
from steelyard.experiment.loading import build


def _cli(*arguments: object, columns: int = 160) -> subprocess.CompletedProcess[str]:
    environment = command_environment(COLUMNS=str(columns))
    return warm_command("recommend", *map(str, arguments), folder=Path.cwd(), environment=environment)


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
    lines = _cli("explain", runs / "kgflex", "--user", "u02", "--item", "i07", "--top", 1).stdout.splitlines()
    assert lines[0].startswith("i07 for user u02: score")
    assert lines[1] == f"2 features shared: the user has {found['features_of_user']}, the item 2"
    assert lines[3].split() == ["feature", "share", "part", "gain", "hers", "common"]
    assert lines[5].startswith("half: half 0 ")
    assert lines[-1].endswith("in 1 further feature")


def test_explain_on_a_narrow_terminal_breaks_no_line(runs: Path):
    lines = _cli("explain", runs / "kgflex", "--user", "u02", "--item", "i07", columns=50).stdout.splitlines()
    assert max(map(len, lines)) <= 50
    shown = " ".join(line.removeprefix("half: half 0") for line in lines if line.startswith("half: half 0"))
    _, part, gain, personal, common = (float(number) for number in re.findall(r"-?\d+\.\d+", shown))
    assert part == pytest.approx(gain * (personal + common), abs=0.01)


def test_an_item_that_shares_nothing_is_said_to(runs: Path):
    """u02 takes of the first half of the items; the second half has another half and digits that she may not select.

    Ten of its twenty items have all ten digits.
    """
    found = [_cli("explain", runs / "kgflex", "--user", "u02", "--item", f"i{item}").stdout for item in range(20, 30)]
    none = [text.splitlines() for text in found if "no feature shared" in text]
    assert none
    assert all(len(lines) == 2 and lines[0].endswith("score 0.0000") for lines in none)


def test_kept_and_clouds(runs: Path, tmp_path: Path):
    found = json.loads(_cli("kept", runs / "kgflex", "--format", "json").stdout)
    assert found["kept"].keys() == {"shown", "informative"}
    for quartiles in (each for shares in found["kept"].values() for each in shares.values()):
        assert 0 <= quartiles[0] <= quartiles[1] <= quartiles[2] <= 1
    lines = _cli("kept", runs / "kgflex").stdout.splitlines()
    assert "a feature is kept if the list would select it again:" in lines
    # Two halves and ten digits are all there is, so no hundred can be the most prominent.
    assert 1 < found["prominent"] <= 12
    share = f"{found['prominent_kept']:.0%}"
    assert lines[-2] == f"of the {found['prominent']} most prominent features in what users took, {share}"
    assert lines[-1] == f"are among the {found['prominent_after']} most prominent in what they are shown"
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
