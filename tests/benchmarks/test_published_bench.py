"""Others' tables: every cell can be described, and each table runs to its end in its smallest form."""

from __future__ import annotations

import json
import runpy
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from benchmarks.published.__main__ import How, described, summary
from benchmarks.published.cells import SIZES, TABLES
from benchmarks.published.flower_split import (
    dirichlet_table,
    label_table,
    of_later_code,
    of_the_table,
    pairs_table,
)
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
    how = How(tmp_path, {"device": "cpu", "engine": "loop"}, rounds=1, every=50, tiny=True)
    cells = list(TABLES[table](ALL, 1, (0.01,)))
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        experiment = described(cell, how)
        assert experiment.rounds.count == 1
        assert len(experiment.rules()) == len(cell.rules)


def test_the_summary_has_the_best_and_the_last_round_and_the_gain_over_fedavg() -> None:
    curves = {"fedavg": [[0.6], [0.61], [0.62]], "fedscs": [[0.65], [0.7, 0.66], [0.67]], "scaffold": [[None, None]]}
    line = {"cell": "2026", "table": "2026", "curves": curves, "rounds": 2}
    found = summary([line | {"rounds": 1, "curves": {name: [[0.1]] for name in curves}}, line])
    assert "| 2026 | `fedscs` | 3 | 2 | 67.33 ± 2.52 | 66.00 ± 1.00 | +5.00 ± 0.00 |" in found
    assert "| 2026 | `scaffold` | 0 | 2 | – | – |" in found, "a seed that exploded at once has no figure"
    assert "63" in summary([{"table": "D", "method": "FedAvg", "accuracy": {"va": [0.63, 0.63]}}])


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
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("benchmarks.published", run_name="__main__")
    lines = [json.loads(line) for line in (tmp_path / f"{table}-0-of-1.jsonl").read_text().splitlines()]
    assert [line.get("failed", "") for line in lines] == [""] * len(list(TABLES[table](["cifar10"], 1, (0.01,))))
    assert all(line["finished"] and line["rounds"] == 1 for line in lines)
    assert all(line["cell"] in summary(lines) for line in lines)
