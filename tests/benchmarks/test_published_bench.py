"""Others' tables: every cell can be described, and each table runs to its end in its smallest form."""

from __future__ import annotations

import argparse
import json
import runpy
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.published import page as published_page
from benchmarks.published.__main__ import described
from benchmarks.published.cells import TABLES
from benchmarks.published.flower_split import (
    dirichlet_table,
    label_table,
    of_later_code,
    of_the_table,
    pairs_table,
)
from benchmarks.published.page import page, read
from benchmarks.published.protocols import SIZES
from tests.benchmarks.test_started import data_folder

ALL = ("mnist", "fashion-mnist", "cifar10")


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """How skewed 300 splits are takes seconds, and no test asks."""
    monkeypatch.setattr(published_page, "DRAWS", 2)


def pictures(path: Path) -> None:
    """Write 1,000 training and 200 test images of noise, as CIFAR-10 is stored there."""
    chance = np.random.default_rng(0)
    path.parent.mkdir(parents=True)
    test = np.arange(1200) >= 1000
    np.savez(path, x=chance.integers(0, 256, (1200, 32, 32, 3), dtype=np.uint8), y=np.arange(1200) % 10, test=test)


@pytest.mark.parametrize("table", TABLES)
def test_every_cell_is_an_experiment(table: str, tmp_path: Path) -> None:
    pictures(tmp_path / "cifar10-50" / "cifar10.npz")
    options = argparse.Namespace(rounds=1, updates=1, every=50, work=tmp_path, chunk=0, tiny=True)
    vars(options).update(device="cpu", engine="loop", precision="float32")
    cells = list(TABLES[table](ALL, 1, (0.01,)))
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        experiment = described(cell, options)
        assert experiment.rounds.count == 1
        assert len(experiment.rules()) == len(cell.rules)


def made(
    cell: str, curves: Mapping[str, Sequence[Sequence[float | None]]], rounds: int = 2, *, finished: bool = True
) -> dict[str, Any]:
    """A line as a part writes it, of two rounds."""
    table, data, split = cell.split("/")
    split = split.replace("-", " ")
    facts = {"table": table, "data": data, "split": split, "finished": finished, "device": "cuda", "seconds": 60.0}
    return {"cell": cell, **facts, "rounds": rounds, "curves": curves}


def test_the_page_tells_what_was_run_and_what_it_says() -> None:
    noisy = {"fedavg": [[0.6], [0.61], [0.62]], "fedscs": [[0.65], [0.7, 0.66], [0.6701]]}
    shown = page(
        [
            made("A/mnist/Dirichlet-0.5", {"fednova": [[None, 0.97, 0.9895], [None, 0.99, 0.985]]}),
            made("2026/cifar10/FedSCS,-noise-at-one", noisy),
            made("B/cifar10/all-take-part", {"scaffold": [[None, 0.7, 0.8]], "scaffold-inside": [[None, None]]}),
        ]
    )
    assert "| mnist, Dirichlet 0.5, FedNova | 98.03 ± 0.06 | 98.97 ± 0.04 | +0.94 | 0.30 | " in shown
    assert "| 0 met, 1 missed, 59 not run | 1 of 60 cells |" in shown
    assert "| 2 | `fedscs` | 68.88 ± 0.72 | 3 | 66.00 ± " in shown, "the last round, as there"
    assert "| +5.00 ± 0.01 | 4.4e-07 | better |" in shown
    assert "| scaffold-inside | 1 | 2 | – | – |" in shown, "a seed that exploded at once has no figure"


def test_the_splits_are_those_of_flowers_table_and_of_its_later_code() -> None:
    """How many clients hold each label, as the functions of commits d86024f and fdef7af return it."""
    for chance, held in (
        (of_the_table, [2, 3, 3, 3, 4, 4, 4, 4, 1, 2]),
        (of_later_code, [3, 3, 2, 2, 3, 3, 4, 4, 3, 3]),
    ):
        table = np.array(label_table(SIZES["mnist"], 10, 3, chance()))
        assert (table > 0).sum(axis=0).tolist() == held
        assert tuple(table.sum(axis=0)) == SIZES["mnist"]
    sizes = [sum(line) for line in dirichlet_table(SIZES["cifar10"], 10, 0.5, of_the_table())]
    assert sizes == [5579, 5044, 2923, 3442, 6320, 4119, 7417, 4127, 3943, 7086]


def test_the_pairs_of_labels_are_those_of_pfllibs_code() -> None:
    """As its `separate_data` of the kind "pat" returns them after `numpy.random.seed(1)`."""
    table = pairs_table((7000,) * 10, 20, np.random.RandomState(1))
    assert [line[:2] for line in table[:4]] == [[1236, 1080], [410, 890], [1271, 1022], [4083, 4008]]
    assert [sum(line) for line in table[16:]] == [1913, 1683, 3116, 7288]


@pytest.fixture
def kept_handler() -> Iterator[None]:
    """A part hears SIGTERM in its own way; the tests after it must not."""
    before = signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings():
        yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("kept_handler")
@pytest.mark.parametrize("table", [pytest.param(table, marks=[pytest.mark.slow] * (table != "A")) for table in TABLES])
def test_a_table_starts_and_ends(table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (data_folder() / "mnist").is_dir():
        pytest.skip(f"mnist is not in {data_folder()}")
    # Of the same form, and that is all that a try of table C needs.
    (tmp_path / "fashion-mnist").symlink_to((data_folder() / "mnist").resolve())
    monkeypatch.setenv("STEELYARD_DATA", str(tmp_path))
    pictures(tmp_path / "work" / "cifar10-50" / "cifar10.npz")
    words = f"published {tmp_path} --work {tmp_path / 'work'} --table {table} --data cifar10 --tiny"
    monkeypatch.setattr(sys, "argv", words.split())
    runpy.run_module("benchmarks.published", run_name="__main__")
    lines = [json.loads(line) for line in (tmp_path / f"{table}-0-of-1.jsonl").read_text().splitlines()]
    assert [line.get("failed", "") for line in lines] == [""] * len(list(TABLES[table](["cifar10"], 1, (0.01,))))
    assert all(line["finished"] and line["rounds"] == 1 for line in lines)
    assert page(read([tmp_path / f"{table}-0-of-1.jsonl"])) != page([])
