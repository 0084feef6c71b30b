"""A comparison at several participations: columns for shares, and what is refused or left out."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from steelyard.cli.main import app
from steelyard.cli.participation import parse_shares
from steelyard.errors import UserError


def test_shares_come_largest_first_and_once():
    assert parse_shares("0.1,1,0.75,1.0") == [1.0, 0.75, 0.1]


@pytest.mark.parametrize("text", ["", "a", "0", "1.5", "1,,0.5", "nan", "-1"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(UserError, match="--participation: got"):
        parse_shares(text)


def compare(out: object, *words: str) -> str:
    small = ["rounds.count=1", "partition.clients=8", "flaws=[]", "compute.engine=stacked", "training.epochs=1"]
    changes = [word for change in small for word in ("--set", change)]
    command = ["--quiet", "compare", "quickstart", "--rules", "fedavg,EQ", *changes, "--out", str(out), *words]
    return CliRunner().invoke(app, command, catch_exceptions=False, env={"COLUMNS": "60"}).stdout


def test_each_share_is_a_run_and_a_column(tmp_path):
    shown = compare(tmp_path / "text", "--participation", "1,0.75,0.1")
    assert "100%" in shown
    assert "Local accuracy of the worst client (%), by participation" in shown
    assert "10% of 8 clients is one alone: left out." in " ".join(shown.split())
    found = json.loads(compare(tmp_path / "json", "--participation", "0.75", "--format", "json"))
    (row,) = found["participation"]
    assert row["share"] == 0.75
    assert row["folder"].endswith("participation-075")
    worst = {device["rule"]: device["worst"]["mean"] for device in row["table"]["devices"]}
    least = {name: min(c["score"] for c in row["table"]["clients"] if c["rule"] == name) for name in worst}
    assert worst == pytest.approx(least)


def test_parts_and_baselines_belong_to_the_single_runs(tmp_path):
    with pytest.raises(UserError, match="--participation: got it with --part"):
        compare(tmp_path, "--participation", "1", "--full")
    with pytest.raises(UserError, match="allowed: shares of two clients or more"):
        compare(tmp_path, "--participation", "0.1")
