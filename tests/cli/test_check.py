"""What goes wrong between sites is said before anybody trains: each fault of issue 59 through the real command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from tests.conftest import CommandLine

import steelyard
from steelyard.experiment.data_check import DataCheck
from steelyard.runs.history import History

Refused = Callable[..., str]
ROWS = 80
EXPERIMENT = """
name = "tumours"
[data]
source = "csv"
path = "sites"
labels = "{labels}"
{data}
[partition]
scheme = "natural"
[model]
name = "{model}"
[training]
{training}
[rounds]
count = 1
"""


def usual() -> dict[str, Any]:
    """Four hospitals with the same kind of patients."""
    chance, sites = np.random.default_rng(4), dict[str, Any]()
    for name in ("east", "north", "south", "west"):
        ill = chance.random(ROWS) < 0.4
        columns = {"age": chance.normal(50, 9, ROWS).round(2), "size": chance.gamma(9, 2, ROWS).round(2) + 6 * ill}
        sites[name] = pandas.DataFrame({**columns, "y": np.where(ill, "malignant", "benign")})
    return sites


def write(
    folder: Path, sites: dict[str, Any], data: str = "", labels: str = "y", model: str = "logistic", training: str = ""
) -> str:
    (folder / "sites").mkdir(exist_ok=True)
    for name, frame in sites.items():
        frame.to_csv(folder / "sites" / f"{name}.csv", index=False)
    filled = EXPERIMENT.format(labels=labels, data=data, model=model, training=training)
    (folder / "my.toml").write_text(filled, encoding="utf-8")
    return "my.toml"


def checked(command: CommandLine, file: str) -> tuple[int, list[dict[str, Any]]]:
    done = command("check", file, "--format", "json")
    assert done.returncode in (0, 1), done.stderr
    document = json.loads(done.stdout)
    assert DataCheck.model_validate(document).model_dump(mode="json") == document
    return done.returncode, document["findings"]


def sentences(found: list[dict[str, Any]]) -> str:
    return "\n".join(f"{one['name']} {one['site']} {one['sentence']} {one['row']} {one['mend']}" for one in found)


def capitals(sites: dict[str, Any]) -> None:
    sites["south"]["y"] = sites["south"]["y"].str.replace("benign", "Benign ")


def coded(sites: dict[str, Any]) -> None:
    sites["south"]["y"] = (sites["south"]["y"] == "malignant").astype(int)


def tenfold(sites: dict[str, Any]) -> None:
    sites["south"]["size"] *= 10


def not_recorded(sites: dict[str, Any]) -> None:
    sites["north"].loc[:8, "age"] = -999
    sites["north"].loc[9, "size"] = 1e12


def below_limit(sites: dict[str, Any]) -> None:
    sites["north"]["size"] = sites["north"]["size"].astype(object)
    sites["north"].loc[[4, 7], "size"] = "<5"


def in_words(sites: dict[str, Any]) -> None:
    sites["north"]["age"] = sites["north"]["age"].astype(object)
    sites["north"].loc[3, "age"] = "twelve"


def leaking(sites: dict[str, Any]) -> None:
    for frame in sites.values():
        frame["code"] = 2 * (frame["y"] == "malignant") + 1


def twice(sites: dict[str, Any]) -> None:
    sites["west"] = pandas.concat([sites["west"], sites["west"]])


def counted(sites: dict[str, Any]) -> None:
    for number, frame in enumerate(sites.values()):
        frame["patient"] = np.arange(len(frame)) + 1000 * number


def renamed(sites: dict[str, Any]) -> None:
    sites["west"] = sites["west"].rename(columns={"age": "Age"})


def alone(sites: dict[str, Any]) -> None:
    sites["tiny"] = sites["east"][:1]


def unlabelled(sites: dict[str, Any]) -> None:
    sites["east"].loc[10:30, "y"] = None


def rare(sites: dict[str, Any]) -> None:
    for name, frame in sites.items():
        frame["y"] = "benign"
        frame.loc[:1, "y"] = "benign" if name == "west" else "malignant"


def words_at_one_site(sites: dict[str, Any]) -> None:
    sites["south"]["age"] = np.where(sites["south"]["age"] > 50, "old", "young")


def afterwards(sites: dict[str, Any]) -> None:
    for frame in sites.values():
        frame["time"] = np.arange(len(frame)) + 1
        frame["event"] = np.arange(len(frame)) % 2


def nothing_in_common(sites: dict[str, Any]) -> None:
    sites["west"] = sites["west"].rename(columns={"age": "alter", "size": "umfang"})


def constant(sites: dict[str, Any]) -> None:
    for frame in sites.values():
        frame["scanner"] = 3


def moved(sites: dict[str, Any]) -> None:
    sites["west"]["age"] += 14


FAULTS: dict[str, tuple[list[Callable[[dict[str, Any]], None]], list[tuple[str, str]]]] = {
    "certain": (
        [capitals, in_words, tenfold, leaking, moved],
        [
            ("labels-spelled-alike south", "'Benign' beside 'benign'"),
            ("words-among-numbers north", "'twelve' row 4 of north.csv data.columns.age.missing"),
            ("gives-the-label-away", "column 'code'"),
            ("other-units south", "is about 10 times as large as at the others  data.columns.size.factor"),
        ],
    ),
    "of two kinds": (
        [coded, words_at_one_site, below_limit, unlabelled],
        [
            ("labels-of-two-kinds south", "labels at 'south' are"),
            ("types-clash south", "row 1 of south.csv data.columns.age.type"),
            ("words-among-numbers north", "in 2 rows, '<5' row 5 of north.csv data.columns.size.limits"),
            ("labels-empty", "is empty in 21 of 320 rows row 11 of east.csv data.unlabelled"),
        ],
    ),
    "rows": (
        [rare, afterwards, twice, alone],
        [
            ("rows-in-train-and-test", "data.duplicates"),
            ("cannot-train tiny", "'tiny' (1 row)"),
            ("survival-columns", "time, event: an input that is known only afterwards"),
            ("rare-class", "label 'malignant' is 7 of 401 rows"),
            ("rows-repeated west 80 of 160", "data.duplicates"),
        ],
    ),
    "columns": (
        [not_recorded, constant],
        [
            ("not-recorded north", "-999 in 9 rows"),
            ("not-recorded north", "1e+12 in 1 row"),
            ("constant", "column 'scanner'"),
        ],
    ),
    "likely alone": ([moved, tenfold], [("other-units south", "10 times"), ("drift west", "column 'age'")]),
    "names": (
        [renamed, counted],
        [("no-values west", "no value in 'age', is it 'Age'?"), ("counts-rows", "column 'patient'")],
    ),
}


@pytest.mark.parametrize("faults", FAULTS)
def test_each_fault_is_found_by_name_with_its_site_and_what_mends_it(
    faults: str, tmp_path: Path, command: CommandLine
) -> None:
    sites, (changes, told) = usual(), FAULTS[faults]
    for change in changes:
        change(sites)
    ended, found = checked(command, write(tmp_path, sites))
    lines = sentences(found).splitlines()
    assert [one for one in told if not any(line.startswith(one[0]) and one[1] in line for line in lines)] == [], lines
    order = ["error", "warning", "note"]
    assert [one["level"] for one in found] == sorted((one["level"] for one in found), key=order.index)
    assert ended == (found[0]["level"] == "error") == (faults not in ("likely alone", "columns", "names"))


def test_sites_without_a_common_column_are_refused(tmp_path: Path, command: CommandLine) -> None:
    sites = usual()
    nothing_in_common(sites)
    ended, found = checked(command, write(tmp_path, sites))
    assert (ended, found[0]["name"], found[0]["site"]) == (1, "no-common-column", "west")


def test_a_site_that_is_empty_after_leaving_out_is_named(
    tmp_path: Path, command: CommandLine, refused: Refused
) -> None:
    sites = usual()
    sites["east"]["y"] = None
    ended, found = checked(command, write(tmp_path, sites, 'unlabelled = "drop"'))
    assert (ended, [(one["name"], one["site"]) for one in found]) == (1, [("cannot-train", "east")])
    assert found[0]["mend"] == "data.unlabelled"
    assert "check: got an experiment of kind 'recommend'" in refused("check", "fpl-ml1m")


def test_data_without_faults_are_left_in_peace(tmp_path: Path, command: CommandLine) -> None:
    done = command("check", write(tmp_path, usual()))
    assert (done.returncode, done.stdout) == (0, "320 rows at 4 sites: nothing found\n"), done.stderr


def survival() -> dict[str, Any]:
    sites = usual()
    for number, frame in enumerate(sites.values()):
        frame["T"] = np.arange(ROWS) + 1.5
        frame["E"] = np.arange(ROWS) % (number + 2) == 0
        del frame["y"]
    return sites


COX = {"labels": "T", "model": "linear", "training": 'batch_size = "full"'}


@pytest.mark.parametrize(
    ("change", "data", "training", "words"),
    [
        ("no event", 'task = "survival"\nevent = "E"', "", "cannot-train south the site 'south' has no event in"),
        ("time", 'task = "survival"\nevent = "E"', "", "times-of-zero  time 'T' is 0 or less in 2 rows row 6 of east"),
        ("leak", 'task = "survival"\nevent = "E"', "", "gives-the-label-away  column 'alive' at 'east' alone"),
        ("", 'task = "survival"\nevent = "E"', "batch_size = 1", "cannot-train  Cox's loss holds the rows of a step"),
        ("", 'task = "regression"', "", "survival-columns  'T' and 'E' look like the time to an event"),
    ],
)
def test_what_goes_wrong_with_times_to_an_event(
    change: str, data: str, training: str, words: str, tmp_path: Path, command: CommandLine
) -> None:
    sites = survival()
    if change == "no event":
        sites["south"]["E"] = False
    elif change == "time":
        sites["east"].loc[5:6, "T"] = 0
    elif change == "leak":
        for frame in sites.values():
            frame["alive"] = 2 * frame["T"] + 1
    file = write(tmp_path, sites, data, **(COX | ({"training": training} if training else {})))
    _, found = checked(command, file)
    assert words in sentences(found)


def test_a_run_stops_at_what_is_certain_and_goes_on_where_it_is_accepted(
    tmp_path: Path, command: CommandLine, refused: Refused
) -> None:
    sites = usual()
    capitals(sites)
    tenfold(sites)
    file = write(tmp_path, sites)
    told = refused("run", file, "--out", "r")
    assert "data: labels at 'south' differ from others in case or spaces alone" in told
    assert "allowed: data.columns.y.synonyms, or --accept labels-spelled-alike" in told
    assert not (tmp_path / "r").exists()
    assert "--accept: got 'labels' (did you mean 'labels-empty'?); allowed: " in refused(
        "run", file, "--accept", "labels"
    )
    done = command("run", file, "--out", "r", "--accept", "labels-spelled-alike")
    assert done.returncode == 0, done.stderr
    assert "data: labels at 'south' differ" in done.stderr
    facts = History(tmp_path / "r").facts
    kept = {finding.name: finding.accepted for finding in facts.findings}
    assert kept == {"labels-spelled-alike": True, "other-units": False}
    assert facts.drift["south"]["size"] > 1 > facts.drift["west"]["age"]


def test_what_is_declared_mends_what_was_found(tmp_path: Path, command: CommandLine) -> None:
    sites = usual()
    for fault in (capitals, tenfold, not_recorded, unlabelled, twice):
        fault(sites)
    declared = """unlabelled = "drop"
duplicates = "drop"
[data.columns]
y = { synonyms = { benign = ["Benign"] } }
size = { unit = "mm", factor = { south = 0.1 }, range = [0, 1000] }
age = { missing = [-999] }"""
    done = command("check", write(tmp_path, sites, declared))
    assert (done.returncode, done.stdout) == (0, "299 rows at 4 sites: nothing found\n")


def test_new_looks_too_and_proposes_what_mends(tmp_path: Path, command: CommandLine) -> None:
    sites = usual()
    for fault in (below_limit, unlabelled, afterwards, not_recorded):
        fault(sites)
    for frame in sites.values():
        frame.insert(0, "patient", 3 * np.arange(len(frame)) + 100)
    write(tmp_path, sites)
    done = command("new", "own.toml", "--csv", "sites")
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "own.toml").read_text()
    assert 'unlabelled = "drop"' in written
    assert 'columns = { "size" = { "limits" = true } }' in written
    assert "time, event (known only afterwards)" in done.stdout
    assert "warning: not-recorded: column 'age' at 'north': -999 in 9 rows" in done.stdout
    whole = pandas.concat(list(sites.values()), ignore_index=True)
    whole["patient"] = np.random.default_rng(1).permutation(len(whole))
    whole.to_csv(tmp_path / "whole.csv", index=False)
    assert "perhaps --owner patient" not in command("new", "whole.toml", "--csv", "whole.csv").stdout


def test_python_gets_the_same_findings_also_of_data_that_it_holds(tmp_path: Path) -> None:
    sites = usual()
    tenfold(sites)
    looked = steelyard.check(tmp_path / write(tmp_path, sites))
    assert [finding.name for finding in looked.findings] == ["other-units"]
    frame = pandas.concat([one.assign(site=name) for name, one in sites.items()])
    rows = steelyard.in_memory(frame, label="y", owner="site")
    fields: dict[str, Any] = {"data": {"source": "memory"}, "partition": {"scheme": "natural"}, "rounds": {"count": 1}}
    experiment, asked = steelyard.Experiment(**fields), list[int]()
    run = experiment.run(dataset=lambda seed: (asked.append(seed), rows)[1], out=tmp_path / "r")
    told = [(finding.name, finding.site) for finding in History(run.folder).facts.findings]
    assert (asked, told) == ([0], [("other-units", "south")])
    rows = steelyard.in_memory(frame[["age", "size"]].to_numpy()[:161], [0, 1] * 80 + [0], [*"ab" * 80, "c"])
    with pytest.raises(steelyard.UserError, match=r"sites have fewer than .* 'c'"):
        experiment.run(dataset=rows, out=tmp_path / "s")
