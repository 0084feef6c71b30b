"""From data to a result: what `steelyard new` writes runs as it is and learns something, for every form of data."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from PIL import Image
from sklearn.datasets import load_diabetes, load_digits
from tests.conftest import CommandLine

Refused = Callable[..., str]


def patients(rows: int = 450) -> pandas.DataFrame:
    """A table with all that a table can have: owners, words, empty cells, identifiers, notes, a constant."""
    chance = np.random.default_rng(1)
    ill = chance.integers(0, 2, rows)
    frame = pandas.DataFrame(
        {
            "patient_id": 5000 + 3 * np.arange(rows),
            "hospital": np.array(["north", "south", "east"])[chance.choice(3, rows, p=[0.5, 0.3, 0.2])],
            "age": chance.normal(50, 10, rows).round() + 12 * ill,
            "pressure": chance.normal(120, 15, rows).round(1) + 25 * ill,
            "sex": chance.choice(["f", "m"], rows),
            "stage": chance.integers(1, 4, rows),
            "unit": "mmHg",
            "notes": [f"seen on day {row}" for row in range(rows)],
            "diagnosis": np.where(ill == 1, "ill", "well"),
        }
    )
    frame["age"] = frame["age"].astype(object)
    frame.loc[:3, "age"] = "unknown"
    frame.loc[chance.random(rows) < 0.1, "pressure"] = None
    return frame


def comparison_csv(folder: Path, rows: int = 450) -> list[str | Path]:
    patients(rows).to_csv(folder / "data.csv", index=False)
    return ["--csv", folder / "data.csv", "--label", "diagnosis", "--owner", "hospital"]


def write_images(folder: Path) -> list[str | Path]:
    digits: Any = load_digits()
    for row in np.flatnonzero(digits.target < 4)[:300].tolist():
        path = folder / "pictures" / f"digit {digits.target[row]}" / f"{row:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[row] * 15).astype(np.uint8)).save(path)
    return ["--images", folder / "pictures"]


# How to write the data, words of the account, and the least accuracy; a regression is held against guessing the mean,
# whose error is the target's deviation of 77.


def test_what_is_written_for_a_table_runs_and_learns(tmp_path: Path, command: CommandLine) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    written = command("new", "study/my first.toml", *comparison_csv(folder, 900))
    assert written.returncode == 0, written.stderr
    words = ("unit (the same in all rows)", "notes (text with 900 different values)", "most in pressure ")
    assert [word for word in words if word not in written.stdout] == []
    assert written.stdout.splitlines()[-1] == "next: steelyard run 'study/my first.toml'"
    assert not tomllib.loads((folder / "my first.toml").read_text())["data"]["path"].startswith(("/", ".."))
    assert min(accuracies(command, "study/my first.toml")) > 0.8


def accuracies(command: CommandLine, file: str) -> list[float]:
    done = command("run", file, "--format", "json")
    assert done.returncode == 0, done.stderr
    return [rule["figures"]["final"]["mean"] for rule in json.loads(done.stdout)["rules"]]


def test_what_is_written_for_images_and_a_number_to_predict_runs_and_learns(
    tmp_path: Path, command: CommandLine
) -> None:
    diabetes: Any = load_diabetes(as_frame=True)
    diabetes.frame.to_csv(tmp_path / "d.csv", index=False)
    # A regression is held against guessing the mean, whose error is the target's deviation of 77.
    for words, least in ((write_images(tmp_path), 0.8), (["--csv", "d.csv"], -70.0)):
        assert command("new", "mine.toml", "--force", *words).returncode == 0
        assert min(accuracies(command, "mine.toml")) > least, words


def test_neither_a_file_nor_the_data_are_written_over(tmp_path: Path, command: CommandLine, refused: Refused) -> None:
    arguments = comparison_csv(tmp_path)
    (tmp_path / "my.toml").write_text("kept")
    assert "new: 'my.toml' is there already; allowed: another name, or --force" in refused("new", "my.toml", *arguments)
    assert (tmp_path / "my.toml").read_text() == "kept"
    assert command("new", "my.toml", "--force", *arguments).returncode == 0
    assert "is the data itself" in refused("new", "./data.csv", "--force", *arguments)
    assert len(pandas.read_csv(tmp_path / "data.csv")) == 450


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("my.toml", "got 0 sources of data"),
        ("data.csv", "'data.csv' is the file to write; allowed: `steelyard new my.toml --csv data.csv`"),
        ("no/my.toml --csv data.csv", "found no folder"),
        ("my.toml --csv nowhere.csv", "--csv: found no 'nowhere.csv'"),
        ("my.toml --csv data.csv --label notes", "is text with 450 different values in 450 rows"),
        ("my.toml --csv data.csv --owner unit", "column 'unit' names one owner only"),
        ("my.toml --csv data.csv --owner notes", "0 of 450 owners have two rows or more"),
        ("my.toml --csv sites", "; allowed: one of age, dead"),
        ("my.toml --csv counted.csv", "has no column that may be an input (left out: row (numbers the rows))"),
        ("my.toml --csv short.csv", "the data have 2 rows to train on; allowed: at least 10"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: str, told: str, tmp_path: Path, refused: Refused) -> None:
    comparison_csv(tmp_path)
    (tmp_path / "counted.csv").write_text("row,y\n" + "".join(f"{row},{row % 2}\n" for row in range(60)))
    (tmp_path / "short.csv").write_text("a,y\n1,0\n5,1\n")
    (tmp_path / "sites").mkdir()
    for name in ("north", "south"):
        (tmp_path / "sites" / f"{name}.csv").write_text("age,dead\n60,1\n50,0\n")
    assert told in refused("new", *words.split())
    assert not (tmp_path / "my.toml").exists()


def test_absurd_names_of_columns_and_classes_do_no_harm(tmp_path: Path, command: CommandLine) -> None:
    frame = pandas.DataFrame(
        {'a"b\\': np.arange(60.0) ** 2, "line\nbreak": ["x", "y"] * 30, "[/b]\x1b[31m": ["c"] * 60}
    )
    frame["target"] = ["cat", "dog", "dog"] * 20
    frame.to_csv(tmp_path / "odd.csv", index=False)
    done = command("new", "my.toml", "--csv", "odd.csv")
    assert done.returncode == 0
    assert "cat" in done.stdout
    assert "\x1b" not in done.stdout
    assert tomllib.loads((tmp_path / "my.toml").read_text())["data"]["ignore"] == ["[/b]\x1b[31m"]


# a table for each hospital --------------------------------------------------------------------------------------------


# masks, several labels, times to an event -----------------------------------------------------------------------------


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


@pytest.mark.slow
def test_folders_of_pairs_become_a_federation_that_draws_masks(tmp_path: Path, command: CommandLine) -> None:
    write_scans(tmp_path / "scans")
    made = command("new", "mine.toml", "--images", "scans")
    assert made.returncode == 0, made.stderr
    done = command("run", "mine.toml", "--set", "rounds.count=3", "--out", "run", "--format", "json")
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)["rules"][0]
    # All background gives 0; half of each rectangle, nothing else, 0.67.
    assert first["figures"]["final"]["mean"] > 0.7
