"""`steelyard recommend` on small runs: reasons, what was kept, clouds, lists, and where its files are found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit import inside
from tests.recommend.conftest import two_tastes
from tests.warm import command_environment, warm_command

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
    lines = shown(*asked, "--top", 1, folder=runs).splitlines()
    assert lines[0].startswith("i07 for user u02: score")
    assert lines[1] == f"2 features shared: the user has {found['features_of_user']}, the item 2"
    assert lines[5].startswith("half: half 0 ")
    assert lines[-1].endswith("in 1 further feature")


def test_explain_on_a_narrow_terminal_breaks_no_line(runs: Path):
    words = ("recommend", "explain", "kgflex", "--user", "u02", "--item", "i07")
    lines = warm_command(*words, folder=runs, environment=command_environment(COLUMNS="50")).stdout.splitlines()
    assert max(map(len, lines)) <= 50
    row = " ".join(line.removeprefix("half: half 0") for line in lines if line.startswith("half: half 0"))
    _, part, gain, personal, common = (float(number) for number in re.findall(r"-?\d+\.\d+", row))
    assert part == pytest.approx(gain * (personal + common), abs=0.01)


def test_kept_and_clouds(runs: Path, tmp_path: Path):
    found = json.loads(shown("kept", "kgflex", "--format", "json", folder=runs))
    assert found["kept"].keys() == {"shown", "informative"}
    for quartiles in (each for shares in found["kept"].values() for each in shares.values()):
        assert 0 <= quartiles[0] <= quartiles[1] <= quartiles[2] <= 1
    # Two halves and ten digits are all there is, so no hundred can be the most prominent.
    assert 1 < found["prominent"] <= 12
    text = shown("kept", "kgflex", folder=runs)
    assert f"of the {found['prominent']} most prominent features in what users took" in text
    assert f"{found['prominent_kept']:.0%}" in text
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


def rows(users: int = 6, items: int = 8) -> list[tuple[str, str]]:
    return [(f"u{user}", f"i{(user + step) % items}") for user in range(users) for step in range(5)]


def test_split_looks_where_experiments_look(tmp_path: Path) -> None:
    data = tmp_path / "elsewhere"
    data.mkdir()
    lines = [f"{user}\t{item}\t1\t{time}" for time, (user, item) in enumerate(rows())]
    (data / "taken.tsv").write_text("user\titem\trating\ttime\n" + "\n".join(lines) + "\n")
    command = ("recommend", "split", "taken.tsv", "--out", "halves")
    environment = command_environment(STEELYARD_DATA=str(data))
    done = warm_command(*command, folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "halves" / "train.tsv").exists()
    other = warm_command(*command[:-1], "others", folder=tmp_path, environment=command_environment())
    assert other.returncode == 2
    assert "taken.tsv" in other.stderr
