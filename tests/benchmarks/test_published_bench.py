"""Others' tables: every cell can be described, and each table runs to its end in its smallest form."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.published.__main__ import described
from benchmarks.published.cells import TABLES
from benchmarks.published.page import page, read
from tests.benchmarks.test_started import data_folder

ALL = ("mnist", "fashion-mnist", "cifar10")


def pictures(path: Path) -> None:
    """Write 1,000 training and 200 test images of noise, as CIFAR-10 is stored there."""
    chance = np.random.default_rng(0)
    path.parent.mkdir(parents=True)
    test = np.arange(1200) >= 1000
    np.savez(path, x=chance.integers(0, 256, (1200, 32, 32, 3), dtype=np.uint8), y=np.arange(1200) % 10, test=test)


@pytest.mark.parametrize("table", TABLES)
def test_every_cell_is_an_experiment(table: str, tmp_path: Path) -> None:
    pictures(tmp_path / "cifar10-50" / "cifar10.npz")
    options = argparse.Namespace(
        rounds=1, updates=1, every=50, work=tmp_path, device="cpu", engine="loop", precision="float32", chunk=0
    )
    cells = list(TABLES[table](ALL, 1, (0.01,)))
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        experiment = described(cell, options)
        assert experiment.rounds.count == 1
        assert len(experiment.rules()) == len(cell.rules)


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_a_table_starts_and_ends(table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (data_folder() / "mnist").is_dir():
        pytest.skip(f"mnist is not in {data_folder()}")
    data = tmp_path / "data"
    data.mkdir()
    # Of the same form, and that is all that a try of table C needs.
    (data / "fashion-mnist").symlink_to((data_folder() / "mnist").resolve())
    monkeypatch.setenv("STEELYARD_DATA", str(data))
    pictures(tmp_path / "work" / "cifar10-50" / "cifar10.npz")
    words = f"published {tmp_path} --work {tmp_path / 'work'} --table {table} --data cifar10 --tiny"
    monkeypatch.setattr(sys, "argv", words.split())
    runpy.run_module("benchmarks.published", run_name="__main__")
    lines = [json.loads(line) for line in (tmp_path / f"{table}-0-of-1.jsonl").read_text().splitlines()]
    assert [line.get("failed", "") for line in lines] == [""] * len(list(TABLES[table](["cifar10"], 1, (0.01,))))
    assert all(line["finished"] and line["rounds"] == 1 for line in lines)
    assert all(0 <= value <= 1 for line in lines for seeds in line["curves"].values() for value in seeds[0] if value)
    shown = page(read([tmp_path / f"{table}-0-of-1.jsonl"]))
    assert lines[0]["cell"] in shown or table == "A"
