"""Predictions of a million rows take seconds."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pandas
import pytest
from tests.kit import inside

from steelyard import Experiment

pytestmark = pytest.mark.slow
ROWS = 1_000_000
SECONDS = 10


def test_a_million_rows_of_a_table_take_less_than_ten_seconds_of_a_processor(tmp_path: Path):
    draw = np.random.default_rng(0)
    frame = pandas.DataFrame({f"x{place}": draw.normal(size=ROWS).round(3) for place in range(10)})
    frame["sex"], frame["site"] = draw.choice(["m", "f"], ROWS), draw.choice(["a", "b", "c"], ROWS)
    frame["ill"] = draw.integers(0, 2, ROWS)
    frame[:2000].to_csv(tmp_path / "train.csv", index=False)
    frame.to_csv(tmp_path / "new.csv", index=False)
    data = {"source": "csv", "path": tmp_path / "train.csv", "labels": "ill", "owner": "site"}
    experiment = Experiment(
        data=data,
        partition={"scheme": "natural"},
        model={"name": "mlp"},
        rounds={"count": 1},
        weighing={"criteria": ["DS"]},
    )
    experiment.run(tmp_path / "run", progress=False).model().save(tmp_path / "model")
    begun = time.process_time()
    answer = inside("predict", "model", "new.csv", "--out", "p.csv", folder=tmp_path)
    assert time.process_time() - begun < SECONDS
    assert answer.returncode == 0
    found = pandas.read_csv(tmp_path / "p.csv", dtype={"class": str})
    assert (len(found), found["row"].iloc[-1], set(found["class"])) == (ROWS, ROWS, {"0", "1"})
