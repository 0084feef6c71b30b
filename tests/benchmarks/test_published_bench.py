"""Others' tables: every cell can be described, and each table runs to its end in its smallest form."""

from __future__ import annotations

import argparse
import json
import runpy
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
        rounds=1,
        updates=1,
        every=50,
        work=tmp_path,
        device="cpu",
        engine="loop",
        precision="float32",
        chunk=0,
        tiny=True,
    )
    cells = list(TABLES[table](ALL, 1, (0.01,)))
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        experiment = described(cell, options)
        assert experiment.rounds.count == 1
        assert len(experiment.rules()) == len(cell.rules)


def made(cell: str, curves: dict[str, list[list[float | None]]], rounds: int = 2) -> dict[str, Any]:
    """A line as a part writes it, of two rounds."""
    table, data, split = {
        "A-mnist-Dirichlet-05": ("A", "mnist", "Dirichlet 0.5"),
        "A-normalised-cifar10-Dirichlet-05-drawn": ("A-normalised", "cifar10", "Dirichlet 0.5 drawn"),
        "2026-cifar10-clean": ("2026", "cifar10", "clean"),
        "B-cifar10-all-take-part": ("B", "cifar10", "all take part"),
    }[cell]
    facts = {"table": table, "data": data, "split": split, "finished": True, "device": "cuda"}
    return {"cell": cell, **facts, "rounds": rounds, "curves": curves}


def test_the_page_tells_what_was_run_and_what_it_says() -> None:
    shown = page(
        [
            made("A-mnist-Dirichlet-05", {"fednova": [[None, 0.97, 0.9895], [None, 0.99, 0.985]]}),
            made("A-normalised-cifar10-Dirichlet-05-drawn", {"fedavg": [[None, 0.5, 0.68]]}, 50),
            made("2026-cifar10-clean", {"fedavg": [[0.6], [0.61], [0.62]], "fedscs": [[0.65], [0.66], [0.6701]]}),
            made("B-cifar10-all-take-part", {"scaffold": [[None, 0.7, 0.8]], "scaffold-inside": [[None, None]]}),
        ]
    )
    assert "98.03 ± 0.06; **98.97 ± 0.04**, missed" in shown
    assert "that, or of another FedNova: the best round only rises, and after 2 rounds it is 98.95, 99.00" in shown
    assert "| normalised | not run | 68.00 after 50 |" in shown
    assert "| `fedscs` | 3 | 66.00 ± " in shown
    assert "| +5.00 ± 0.01 | 4.4e-07 | better |" in shown
    assert "| scaffold | 1 | 2 | 80.00 | 80.00 |" in shown
    assert "| scaffold-inside | 1 | 2 | – | – |" in shown, "a seed that exploded at once has no figure"


@pytest.fixture
def kept_handler() -> Iterator[None]:
    """A part hears SIGTERM in its own way; the tests after it must not."""
    before = signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings():
        yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.usefixtures("kept_handler")
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
    assert page(read([tmp_path / f"{table}-0-of-1.jsonl"])) != page([])
