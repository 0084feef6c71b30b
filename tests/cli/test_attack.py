"""`steelyard attack` as a user runs it, on digits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.conftest import CommandLine
from tests.kit import SMALL, changed

# A fifth of the clients has flaws of the experiment's own, which must not count as hostile.
HOSTED = changed(
    SMALL,
    partition={"scheme": "iid", "clients": 10, "minimum": 12, "server": "fraction", "server_report": "apart"},
    flaws=[{"kind": "noisy", "pick": "biggest", "count": 2}],
    training={"learning_rate": 0.2, "batch_size": 60},
    rounds={"count": 3},
    compute={"engine": "stacked"},
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("attack") / "small.toml"
    path.write_text(tomli_w.dumps(HOSTED))
    return path


def by_rule(document: dict[str, Any], attack: str) -> dict[str, dict[str, Any]]:
    (block,) = (block for block in document["attacks"] if block["attack"] == attack)
    return {row["rule"]: row for row in block["rules"]}


def test_several_attacks_in_one_call(command: CommandLine, small: Path, tmp_path: Path) -> None:
    attacks = ("--attack", "scaled-reversal,inflation", "--attack", "backdoor+inflation")
    rules = ("--rules", "fedavg,EQ,clip(EQ),guarded")
    done = command("attack", small, *attacks, *rules, "--seeds", "2", "--out", "runs", "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    names = [block["attack"] for block in document["attacks"]]
    assert names == ["clean", "scaled-reversal", "inflation", "backdoor+inflation"]
    assert len(document["flawed_clients"]) == 2
    clean, reversal, inflation, door = (by_rule(document, name) for name in names)
    # Two of ten, alike: a fifth of the weight.
    assert reversal["EQ"]["weight"] == pytest.approx(0.2)
    assert reversal["EQ"]["lost"]["mean"] > 0.2 > reversal["guarded"]["lost"]["mean"]
    assert inflation["fedavg"]["weight"] > 0.95
    assert inflation["guarded"]["accuracy"] == clean["guarded"]["accuracy"]  # it believes no claim
    assert reversal["guarded"]["largest"] <= 2 / 10 + 1e-12
    assert all(0 <= row["backdoor"]["mean"] <= 1 for row in door.values())
    # The same once more trains nothing and shows the same.
    shown = command("table", "runs").stdout
    assert "backdoor: how often" in shown
    assert "false alarms" not in shown  # no such column, so no words on it
    same = command("attack", small, *attacks, *rules, "--seeds", "2", "--out", "runs", "--format", "json", "-q")
    assert (same.stdout, same.stderr) == (done.stdout, "")
    # So does going on with it, also where a run is gone.
    shutil.rmtree(tmp_path / "runs" / "inflation")
    assert command("resume", "runs", "--format", "json", "-q").stdout == done.stdout


def test_a_folder_with_something_else_in_it_is_refused(
    refused: Callable[..., str], small: Path, tmp_path: Path
) -> None:
    words = ("attack", small, "--attack", "alie", "--out", "runs", "-q")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "letter.txt").write_text("mine")
    assert "is not empty; allowed: a new folder" in refused(*words)
    (tmp_path / "runs" / "attack.toml").write_text("attacks = 3\n")
    assert "attack.toml: attacks: got 3" in refused(*words)
