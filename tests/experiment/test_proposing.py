"""Proposals for data of many shapes: what they say is valid, and fits what the data hold."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.base.errors import UserError
from steelyard.data.inspect import DataSummary
from steelyard.experiment.proposing import propose, toml
from steelyard.rounds.plan import cohort_size


def seen(**changes: Any) -> DataSummary:
    usual: dict[str, Any] = {
        "source": "npz",
        "rows": 1000,
        "shape": (10,),
        "task": "classes",
        "classes": {"0": 700, "1": 300},
        "owners": None,
        "held_out": 0,
        "owners_held_out": False,
        "fields": {},
        "account": (),
    }
    return DataSummary(**{**usual, **changes})


def proposed(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    text, _ = propose(seen(**changes), [tmp_path / "data.npz"], tmp_path / "my.toml")
    return tomllib.loads(text)


def test_images_get_convolutions_from_a_size_on(tmp_path: Path) -> None:
    assert proposed(tmp_path, shape=(1, 28, 28))["model"]["name"] == "cnn"
    assert proposed(tmp_path, shape=(1, 8, 8))["model"] == {"name": "mlp", "hidden": [64]}
    assert proposed(tmp_path, rows=1999)["model"]["name"] == "logistic"
    assert proposed(tmp_path, rows=2000)["model"]["name"] == "mlp"


def test_owners_are_clients_and_small_ones_are_left_out(tmp_path: Path) -> None:
    owners = {"a": 500, "b": 300, "c": 195, "d": 5}
    found = proposed(tmp_path, owners=owners)
    assert (found["partition"]["scheme"], found["partition"]["minimum"]) == ("natural", 10)
    assert found["rounds"]["fraction"] == 1.0
    small = proposed(tmp_path, rows=300, owners={f"u{number}": 3 for number in range(100)})
    assert (small["partition"]["minimum"], small["rounds"]["fraction"]) == (2, 0.1)
    some = proposed(tmp_path, owners={f"u{number}": 20 for number in range(75)})["rounds"]["fraction"]
    assert cohort_size(75, some, 1) == 10
    with pytest.raises(UserError, match="1 of 3 owners have two rows or more"):
        proposed(tmp_path, owners={"a": 998, "b": 1, "c": 1})


@pytest.mark.parametrize("rows", [400, 420, 569, 609, 2000])
def test_the_server_gets_enough_rows_to_report_on(tmp_path: Path, rows: int) -> None:
    """Half of them report, 30 at least: a comparison ends with a recommendation."""
    owners = {"a": rows // 2, "b": rows - rows // 2}
    for more in ({}, {"owners": owners}):
        partition = proposed(tmp_path, rows=rows, **more)["partition"]
        assert partition["server_report"] == "apart"
        assert int(partition["server_fraction"] * rows) >= 60


def test_a_test_part_is_used(tmp_path: Path) -> None:
    fields = {"held_out": ("part", "")}
    plain = proposed(tmp_path, held_out=200, fields=fields)
    assert plain["partition"]["test"] == "held-out"
    owned = proposed(tmp_path, held_out=200, owners={"a": 500, "b": 500}, owners_held_out=True, fields=fields)
    assert (owned["partition"]["scheme"], owned["partition"]["test"]) == ("given", "held-out")


def test_criteria_follow_what_the_data_offer(tmp_path: Path) -> None:
    assert proposed(tmp_path)["weighing"]["criteria"] == ["VP", "LE", "DS"]
    assert proposed(tmp_path, classes={"0": 1, "1": 1, "2": 1})["weighing"]["criteria"] == ["VP", "LD", "DS"]
    number = {"task": "regression", "classes": {}, "fields": {"task": ("regression", "")}}
    assert proposed(tmp_path, **number, positive=True)["weighing"]["criteria"] == ["VE", "DS"]
    table = {"source": "csv", "fields": {"labels": ("y", "")}}
    assert proposed(tmp_path, **table, empty=0.2)["weighing"]["criteria"] == ["VP", "CR", "DS"]


def test_the_target_lies_above_guessing(tmp_path: Path) -> None:
    assert proposed(tmp_path)["rounds"]["target"] == pytest.approx(0.7 + 0.6 * 0.3)


@pytest.mark.parametrize(
    ("classes", "measure"),
    [
        ({"benign": 800, "malignant": 200}, None),
        ({"benign": 801, "malignant": 199}, "balanced-accuracy"),
        ({"benign": 9000, "malignant": 1000}, "roc-auc"),
        (dict.fromkeys("abcdefghij", 100), None),
        ({**dict.fromkeys("abcdefghi", 1000), "j": 300}, "balanced-accuracy"),
    ],
)
def test_a_rare_class_asks_for_another_measure(tmp_path: Path, classes: dict[str, int], measure: str | None) -> None:
    found = proposed(tmp_path, classes=classes, rows=sum(classes.values()))["rounds"]
    assert found.get("measure") == measure
    assert ("target" in found) == (measure is None)


TEXT = st.text(st.characters(codec="utf-8"))


@given(st.dictionaries(TEXT, TEXT | st.integers(-9, 9) | st.booleans() | st.lists(TEXT)))
def test_tables_are_written_as_toml(value: dict[str, Any]) -> None:
    assert tomllib.loads(f"value = {toml(value)}")["value"] == value
