"""Every fault of data between sites that issue 59 names, through a federation of four processes and their server."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("flwr")

from tests.federate.real_federation import NODE, Federation, hospitals
from tests.kit import wait_until

from steelyard.runs.history import History

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SITES = ("east", "north", "south", "west")
EXPERIMENT = """
name = "tumours"
seed = 1
[data]
{data}
path = "own.csv"
normalise = "standard"
[partition]
scheme = "iid"
clients = 2
[model]
name = "{model}"
[rounds]
count = 1
fraction = 1.0
{further}
[federate]
nodes = 4
timeout = 300
start_timeout = 600
"""
TERMS = """
statistics = "findings"
min-rows = {least}
[data]
path = "{name}.csv"
{data}
"""
CLASSES = 'source = "csv"\nlabels = "y"'
SURVIVAL = 'source = "csv"\nlabels = "time"\ntask = "survival"\nevent = "event"'
Tables = dict[str, Any]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Generator[Federation]:
    with hospitals(tmp_path_factory.mktemp("sites"), SITES) as made:
        yield made


def usual() -> Tables:
    chance, sites = np.random.default_rng(4), Tables()
    for name in SITES:
        ill = chance.random(100) < 0.4
        columns = {"age": chance.normal(50, 9, 100).round(2), "size": chance.gamma(9, 2, 100).round(2) + 6 * ill}
        sites[name] = pd.DataFrame({**columns, "y": np.where(ill, "malignant", "benign")})
    return sites


def spelled_scaled_coded_leaking_twice(sites: Tables) -> None:
    sites["south"]["y"] = sites["south"]["y"].str.replace("benign", "Benign ")
    sites["west"]["size"] *= 10
    sites["north"].loc[:20, "age"] = -999
    sites["north"].loc[30, "size"] = 1e12
    sites["east"] = pd.concat([sites["east"], sites["east"]])
    for frame in sites.values():
        frame["code"] = 2 * (frame["y"] == "malignant") + 1


def of_two_kinds_and_rare(sites: Tables) -> None:
    sites["south"]["y"] = (sites["south"]["y"] == "malignant").astype(int)
    for name in ("east", "north", "west"):
        sites[name]["y"] = np.where(np.arange(100) < 4, "malignant", "benign")
    for frame in sites.values():
        frame["patient"], frame["time"], frame["event"] = range(100), np.arange(100) * 7 % 101, np.arange(100) % 2


def unreadable(sites: Tables) -> None:
    sites["east"] = sites["east"][:1]
    for name, cell, rows in (("north", "<5", [4, 7]), ("south", "twelve", [3])):
        sites[name]["size"] = sites[name]["size"].astype(object)
        sites[name].loc[rows, "size"] = cell
    sites["west"].loc[10:30, "y"] = None


def without_events(sites: Tables) -> None:
    for frame in sites.values():
        frame["event"] = (frame["y"] == "malignant").astype(int)
        frame["time"] = np.arange(1.0, 101)
    sites["north"]["event"] = 0
    sites["south"].loc[5, "time"] = 0


def submit(
    made: Federation, name: str, damage: Callable[[Tables], None], data: str, least: int = 10, **settings: Any
) -> subprocess.Popen[str]:
    """Let four owners come back with these tables, and submit an experiment of one round."""
    sites = usual()
    damage(sites)
    for site in SITES:
        made.stop(site)
        (made.root / f"{site}.log").unlink(missing_ok=True)
        columns = [column for column in sites[site] if "y" in data.split('"') or column != "y"]
        sites[site][columns].to_csv(made.root / f"{site}.csv", index=False)
        own = NODE.format(address=f"127.0.0.1:{made.port}", name=site).replace(f'data = "{site}.npz"\n', "")
        (made.root / f"{site}.toml").write_text(own + TERMS.format(least=least, name=site, data=data))
        made.node(site)
    given = {"model": "logistic", "further": "", **settings}
    (made.root / f"{name}.toml").write_text(EXPERIMENT.format(data=data, **given))
    return made.start_and_listen("submit", "server", f"{name}.toml", "--out", f"runs/{name}")


def finished(made: Federation, run: subprocess.Popen[str]) -> Mapping[str, str]:
    """Wait for the end of a run; returns the owners' logs."""
    told = "".join(run.communicate(timeout=800))
    assert run.returncode == 0, told
    return {site: (made.root / f"{site}.log").read_text() for site in SITES}


def refused(made: Federation, name: str, run: subprocess.Popen[str], why: Mapping[str, str]) -> None:
    """Wait until owners have read why their nodes take no part, and the operator who they are; end the run."""

    def folder() -> Path | None:
        said = (made.root / "server" / "runs").glob("*/submitted.json")
        return next((file.parent for file in said if f"runs/{name}" in file.read_text()), None)

    def told(words: str) -> bool:
        here = folder()
        return here is not None and (here / "log.txt").exists() and words in (here / "log.txt").read_text()

    for site, line in why.items():
        own = made.root / f"{site}.log"
        wait_until(lambda own=own, line=line: line in own.read_text(), 600, f"{site}: {line}")
        wait_until(lambda site=site: told(f"node {site} was not admitted"), 600, site)
    here = folder()
    assert here is not None
    assert made.steelyard("stop", "server", here.name).returncode == 0
    run.communicate(timeout=300)


def found(root: Path, name: str) -> set[tuple[str, str, str]]:
    return {(one.name, one.site, one.column) for one in History(root / "runs" / name).facts.findings}


def test_units_codes_spellings_leaks_and_copies_are_said_before_round_1(four: Federation) -> None:
    logs = finished(four, submit(four, "first", spelled_scaled_coded_leaking_twice, CLASSES))
    named = found(four.root, "first")
    assert {("labels-spelled-alike", "south", ""), ("other-units", "west", "size")} <= named
    assert {("not-recorded", "north", "age"), ("not-recorded", "north", "size")} & named
    assert "1e+12 in 1 row" in logs["north"]
    assert {column for name, _, column in named if name == "gives-the-label-away"} == {"code"}
    assert "labels at 'south' differ from others in case or spaces alone" in logs["south"]
    assert "column 'size' at 'west' is about 10 times as large as at the others" in logs["west"]
    assert "100 of 200 rows are there before" in logs["east"]
    assert "test rows are rows that are trained on too" in logs["east"]
    for log in logs.values():
        assert "statistics: tells run" in log
        assert "gives-the-label-away code" in log


def test_labels_of_two_kinds_and_a_rare_class_are_said_before_round_1(four: Federation) -> None:
    logs = finished(four, submit(four, "second", of_two_kinds_and_rare, CLASSES, 1))
    named = found(four.root, "second")
    assert ("labels-of-two-kinds", "south", "") in named
    assert any(name == "rare-class" for name, *_ in named)
    assert "labels at 'south' are 0, 1, at the others benign, malignant" in logs["south"]
    for log in logs.values():
        assert "time, event: an input that is known only afterwards" in log
        assert "column 'patient' is another whole number in each row" in log


def test_tables_that_cannot_be_read_end_the_start_by_name_and_their_owners_read_why(four: Federation) -> None:
    why = {
        "east": "expected two classes or more",
        "north": "holds '<5' in",
        "south": "holds 'twelve' in",
        "west": "21 have none; data.unlabelled = 'drop' leaves them out",
    }
    refused(four, "third", submit(four, "third", unreadable, CLASSES), why)


def test_sites_without_events_and_steps_of_one_row_are_refused_for_survival(four: Federation) -> None:
    why = {
        "north": "says of no row that the event came",
        "south": "expected a time above 0; data.unlabelled = 'drop' leaves such rows out",
    }
    refused(four, "fourth", submit(four, "fourth", without_events, SURVIVAL), why)
    done = four.steelyard("submit", "server", "fourth.toml", "--set", "training.batch_size=1", "--out", "runs/one")
    assert done.returncode == 2
    assert "training.batch_size: got 1 with task survival" in done.stdout + done.stderr
