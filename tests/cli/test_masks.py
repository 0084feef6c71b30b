"""Images with masks, and tables with several labels, from files to a result, with the real command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
from PIL import Image
from tests.conftest import CommandLine


def write_scans(folder: Path) -> None:
    """Three hospitals; a bright rectangle on a dark image is what the mask marks."""
    chance = np.random.default_rng(1)
    for name in ("north", "south", "west"):
        for kind in ("images", "masks"):
            (folder / name / kind).mkdir(parents=True)
        for row in range(40):
            mask = np.zeros((16, 16), dtype=np.uint8)
            top, left = chance.integers(0, 9, 2)
            mask[top : top + 7, left : left + 7] = 255
            image = np.clip(40 + mask * 0.6 + chance.normal(0, 15, mask.shape), 0, 255).astype(np.uint8)
            Image.fromarray(image).save(folder / name / "images" / f"{row}.png")
            Image.fromarray(mask).save(folder / name / "masks" / f"{row}.png")


def test_folders_of_pairs_become_a_federation_that_draws_masks(tmp_path: Path, steelyard: CommandLine) -> None:
    write_scans(tmp_path / "scans")
    made = steelyard("new", "mine.toml", "--images", "scans")
    assert made.returncode == 0, made.stderr
    text = (tmp_path / "mine.toml").read_text()
    assert 'task = "segmentation"' in text
    assert 'name = "unet"' in text
    done = steelyard("run", "mine.toml", "--set", "rounds.count=3", "--out", "run", "--format", "json")
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)["rules"][0]
    # All background gives 0; half of each rectangle, nothing else, 0.67.
    assert first["accuracy"] > 0.7
    on = first["worst_tenth_on"]
    assert on["low"] <= first["worst_tenth"] <= on["high"]
    shown = steelyard("table", "run", "--full").stdout
    assert "mean Dice" in shown
    assert "more is better" in shown


def test_columns_of_labels_become_a_federation_that_finds_them(tmp_path: Path, steelyard: CommandLine) -> None:
    chance = np.random.default_rng(2)
    x, y = chance.normal(size=(2, 400))
    labels = {"fever": np.where(x > 0, "yes", "no"), "cough": (y > 0.5).astype(int), "rash": (x + y > 1).astype(int)}
    table = pandas.DataFrame({"x": x, "y": y, **labels, "clinic": np.arange(400) % 4})
    table.to_csv(tmp_path / "t.csv", index=False)
    (tmp_path / "mine.toml").write_text(
        """kind = "learning"
[data]
source = "csv"
path = "t.csv"
task = "multi-label"
labels = "fever"
further_labels = ["cough", "rash"]
owner = "clinic"
[partition]
scheme = "natural"
server = "fraction"
[training]
learning_rate = 0.5
epochs = 5
[rounds]
count = 6
[weighing]
criteria = ["VL"]
"""
    )
    done = steelyard("run", "mine.toml", "--out", "run", "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["measure"] == "macro F1"
    assert found["rules"][0]["accuracy"] > 0.8


def test_what_masks_and_labels_do_not_have_is_refused_in_one_line(
    tmp_path: Path,
    refused,  # type: ignore[no-untyped-def]
) -> None:
    base = 'kind = "learning"\n[data]\nsource = "digit-masks"\n[partition]\nclients = 4\nserver = "fraction"\n'
    (tmp_path / "mine.toml").write_text(base)
    line = refused("run", "mine.toml", "--set", 'weighing.criteria=["LE"]')
    assert "measures classes, and data.source = 'digit-masks' has masks" in line
    assert "training.loss: got 'cross-entropy' for data with masks" in refused(
        "run", "mine.toml", "--set", "training.loss=cross-entropy"
    )
    adapting = refused("run", "mine.toml", "--set", "weighing.loss.adapt=class-f1")
    assert "allowed: no [weighing.loss] with this task" in adapting
    assert "partition.scheme: got 'shard'" in refused("run", "mine.toml", "--set", "partition.scheme=shard")
