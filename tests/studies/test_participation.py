"""A comparison at several shares of the clients: which shares, a run for each, a column for each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.conftest import CommandLine
from tests.kit import assert_refused, small

from steelyard.base.measures import estimate
from steelyard.report.result import Comparison, RuleResult
from steelyard.studies.participation import Participation, parse_shares, participation_tables, plan

BASE = small(partition={"scheme": "iid", "clients": 8})


def test_shares_are_read_the_largest_first() -> None:
    assert parse_shares("0.1, 1,0.75") == [1.0, 0.75, 0.1]
    for text in ("", "0.5,", "0", "1.01", "half", "0.5,nan", "1,1.0"):
        assert_refused(lambda text=text: parse_shares(text), "--participation", repr(text))


def test_a_share_of_one_client_is_left_out_and_said() -> None:
    found = plan(BASE, ["EQ", "DS"], 2, "0.1,1,0.25")
    assert (found.shares, found.rules, found.seeds) == ((1.0, 0.25), ("EQ", "DS"), 2)
    assert found.left_out == ("10% of 8 clients is one client alone: skipped.",)
    assert [(cell.folder, cell.seeds) for cell in found.cells()] == [
        ("participation-100", (5, 6)),
        ("participation-025", (5, 6)),
    ]
    described = found.described(found.cells()[1])
    assert (described.rounds.fraction, list(described.rules())) == (0.25, ["EQ", "DS"])
    assert_refused(lambda: plan(BASE, ["EQ"], 1, "0.1"), "--participation", "'0.1'")
    assert_refused(lambda: plan(BASE, ["none"], 1, "1"), "--rules", "'none'")


def test_a_folder_without_a_share_that_is_done_is_refused(tmp_path: Path) -> None:
    found = plan(BASE, ["EQ"], 1, "1,0.5")
    found.write(tmp_path / "out")
    assert_refused(lambda: Participation.read(tmp_path / "out").answer(tmp_path / "out"), tmp_path, "no share is done")


def test_a_column_for_each_share_and_a_table_for_each_figure_that_decides() -> None:
    """The clients' mean has a table where the worst of them has one; what a share lacks is a dash."""

    def compared(measure: str, **figures: float) -> Comparison:
        known = {name: estimate([value]) for name, value in figures.items()}
        rules = (RuleResult.model_construct(rule="EQ", figures=known),)
        return Comparison.model_construct(measure=measure, seeds=(5,), rules=rules)

    both = [compared("accuracy", final=value, worst=value / 2, late=0.1) for value in (0.5, 0.25)]
    mean, worst = participation_tables({1.0: both[0], 0.25: both[1]}, ["Some are left out."])
    assert (mean.headings, mean.rows) == (("rule", "100%", "25%"), (("EQ", "50.00", "25.00"),))
    assert worst.rows == (("EQ", "25.00", "12.50"),)
    assert mean.note.endswith("One seed. Some are left out.")
    (served,) = participation_tables({1.0: compared("C-index", server_accuracy=0.5, final=0.75)})
    assert served.rows == (("EQ", "50.00"),)
    scores = participation_tables({1.0: compared("C-index", worst=0.5, final=0.75)})
    assert [table.rows for table in scores] == [(("EQ", "0.7500"),), (("EQ", "0.5000"),)]


FEW = ["rounds.count=1", "partition.clients=8", "flaws=[]", "compute.engine=stacked", "training.epochs=1"]
COMPARE = ["--quiet", "compare", "quickstart", "--rules", "fedavg,EQ", *(f"--set={change}" for change in FEW)]


def test_each_share_of_participation_is_a_run_and_a_column(command: CommandLine, tmp_path: Path) -> None:
    shown = command(*COMPARE, "--participation", "0.1,1,0.75", "--format", "json", "--out", "out")
    assert "10% of 8 clients" in shown.stdout + shown.stderr
    document = json.loads(shown.stdout[shown.stdout.index("{") :])
    # The folder holds them all: it is shown again, and what was removed from it is run again.
    shutil.rmtree(tmp_path / "out" / "participation-075")
    assert len(json.loads(command("table", "out", "--format", "json").stdout)["participation"]) == 1
    found = json.loads(command("resume", "out", "--format", "json", "--quiet").stdout)["participation"]
    one, other = ([row["table"]["recommendation"] for row in rows] for rows in (found, document["participation"]))
    assert one == other
    assert [row["share"] for row in found] == [1.0, 0.75]
    for rule in found[1]["table"]["rules"]:
        assert rule["figures"]["worst"]["mean"] == pytest.approx(min(each["score"] for each in rule["clients"]))
    shown = command("table", "out").stdout
    assert "next: steelyard table out/participation-100" in shown
    assert [line for line in shown.splitlines() if "run stored in" in line] == [
        f"{share}%: run stored in out/participation-{share:03d}" for share in (100, 75)
    ]
    assert "run stored in" not in command("table", "out", "--format", "markdown").stdout
