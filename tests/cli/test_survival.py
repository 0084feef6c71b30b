"""Times to an event from a table to a result, with the real command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
from tests.conftest import CommandLine


def write_patients(path: Path, rows: int = 600) -> None:
    """Patients of four hospitals: the older and less treated, the sooner their event, if they are not lost first."""
    chance = np.random.default_rng(1)
    x, y = chance.normal(size=(2, rows))
    until, lost = chance.exponential(np.exp(y - x)), chance.exponential(2.0, rows)
    table = {"age": x, "dose": y, "time": np.minimum(until, lost), "died": (until <= lost).astype(int)}
    pandas.DataFrame({"hospital": np.arange(rows) % 4, **table}).to_csv(path, index=False)


def test_a_table_with_times_becomes_a_federation_that_orders_patients(tmp_path: Path, steelyard: CommandLine) -> None:
    write_patients(tmp_path / "patients.csv")
    made = steelyard("new", "mine.toml", "--csv", "patients.csv", "--owner", "hospital")
    assert made.returncode == 0, made.stderr
    assert 'task = "survival"' in (tmp_path / "mine.toml").read_text()
    done = steelyard("run", "mine.toml", "--set", "rounds.count=6", "--out", "run", "--format", "json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    first = summary["rules"][0]
    # Ordering by age - dose, as the times were drawn, gives 0.79 on all rows; coin tosses 0.5.
    assert first["accuracy"] > 0.72
    assert 0.6 < first["server"]["c_index"] <= 1
    shown = steelyard("table", "run")
    assert "C-index" in shown.stdout
    assert "VC" in (tmp_path / "mine.toml").read_text()


def test_what_needs_classes_is_refused_in_one_line(
    tmp_path: Path, steelyard: CommandLine, refused: Callable[..., str]
) -> None:
    write_patients(tmp_path / "patients.csv", 80)
    assert steelyard("new", "mine.toml", "--csv", "patients.csv", "--owner", "hospital").returncode == 0
    line = refused("run", "mine.toml", "--set", 'weighing.criteria=["LE"]', "--set", "weighing.priority=LE")
    assert "measures classes, and data.source = 'csv' has times to an event" in line
    line = refused("run", "mine.toml", "--set", "training.loss=squared-error")
    assert "training.loss: got 'squared-error' for data with times to an event; allowed: auto, cox" in line
