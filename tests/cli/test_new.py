"""`steelyard new`: what it writes runs as it is and learns something, for every form of data."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from sklearn.datasets import load_diabetes, load_digits
from tests.conftest import CommandLine
from typer.testing import CliRunner

from steelyard.cli.main import app

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


def comparison_csv(folder: Path) -> list[str | Path]:
    patients().to_csv(folder / "data.csv", index=False)
    return ["--csv", folder / "data.csv", "--label", "diagnosis", "--owner", "hospital"]


def write_parquet(folder: Path) -> list[str | Path]:
    pytest.importorskip("pyarrow")
    patients().drop(columns="age").to_parquet(folder / "data.parquet")
    return ["--parquet", folder / "data.parquet"]


def write_plain_csv(folder: Path) -> list[str | Path]:
    digits: Any = load_digits()
    frame = pandas.DataFrame(digits.data[:800]).add_prefix("pixel_").assign(digit=digits.target[:800])
    frame.to_csv(folder / "data.csv", index=False, sep=";")
    return ["--csv", folder / "data.csv", "--label", "digit"]


def write_regression(folder: Path) -> list[str | Path]:
    diabetes: Any = load_diabetes(as_frame=True)
    diabetes.frame.to_csv(folder / "data.csv", index=False)
    return ["--csv", folder / "data.csv"]


def write_images(folder: Path) -> list[str | Path]:
    image = pytest.importorskip("PIL.Image")
    digits: Any = load_digits()
    for row in np.flatnonzero(digits.target < 4)[:300].tolist():
        path = folder / "pictures" / f"digit {digits.target[row]}" / f"{row:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray((digits.images[row] * 15).astype(np.uint8)).save(path)
    return ["--images", folder / "pictures"]


def write_npz(folder: Path) -> list[str | Path]:
    digits: Any = load_digits()
    rows = slice(0, 450)
    writers = np.arange(450) % 15
    np.savez(folder / "data.npz", images=digits.images[rows], target=digits.target[rows], writer=writers)
    return ["--npz", folder / "data.npz"]


def idx(values: Any) -> bytes:
    array = np.asarray(values, dtype=np.uint8)
    sizes = b"".join(int(size).to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def test_idx_files_by_other_names_are_told_the_way(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "emnist-letters-train-images-idx3-ubyte").write_bytes(idx(np.zeros((1, 2, 2))))
    line = refused("new", "my.toml", "--idx", tmp_path)
    assert "--idx: " in line
    assert "holds no train-images-idx3-ubyte or train-images-idx3-ubyte.gz" in line
    assert line.endswith("save their arrays with numpy.savez and use --npz")


def write_idx(folder: Path) -> list[str | Path]:
    digits: Any = load_digits()
    inner = folder / "mnist"
    inner.mkdir()
    for part, rows in (("train", slice(0, 500)), ("t10k", slice(500, 600))):
        (inner / f"{part}-images-idx3-ubyte").write_bytes(idx(digits.images[rows] * 15))
        (inner / f"{part}-labels-idx1-ubyte").write_bytes(idx(digits.target[rows]))
    return ["--idx", inner]


# How to write the data, words of the account, and the least accuracy; a regression is held against guessing the mean,
# whose error is the target's deviation of 77.
FORMS: dict[str, tuple[Callable[[Path], list[str | Path]], list[str], float]] = {
    "csv-owners": (
        comparison_csv,
        [
            "data.csv: 450 rows, 9 columns",
            "label 'diagnosis': 2 classes: ",
            "inputs: 3 of numbers, 1 of categories: sex (2 values)",
            "owners, by 'hospital': 3, of ",
            "most in pressure ",
            "patient_id (numbers the rows)",
            "unit (the same in all rows)",
            "notes (text with 450 different values)",
            "name them in data.categories: stage",
        ],
        0.8,
    ),
    "parquet": (write_parquet, ["data.parquet: 450 rows", "perhaps --owner patient_id"], 0.7),
    "csv-plain": (write_plain_csv, ["800 rows, 65 columns", "label 'digit': 10 classes", "the same in all rows"], 0.7),
    "regression": (write_regression, ["label 'target': a number, from 25 to 346"], -70.0),
    "images": (write_images, ["pictures: 300 images, 8×8, grey", "classes by folder: 4: "], 0.8),
    "npz": (write_npz, ["arrays images, target, writer", "450 rows: images of 1×8×8", "owners: 15, of 30 to 30"], 0.7),
    "idx": (write_idx, ["600 rows: images of 1×8×8", "labels: 10 classes", "test part: 100 rows"], 0.6),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_runs_and_learns(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, words, least = FORMS[form]
    folder = tmp_path / "study"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    call = CliRunner()
    written = call.invoke(app, ["new", "study/my first.toml", *map(str, write(folder))], catch_exceptions=False)
    assert written.exit_code == 0
    for word in words:
        assert word in written.stdout
    assert written.stdout.splitlines()[-1] == "next: steelyard run 'study/my first.toml'"
    text = (folder / "my first.toml").read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) < 1000
    assert not tomllib.loads(text)["data"]["path"].startswith(("/", ".."))
    ran = call.invoke(app, ["run", "study/my first.toml", "--format", "json"], catch_exceptions=False)
    assert ran.exit_code == 0
    for rule in json.loads(ran.stdout)["rules"]:
        assert rule["accuracy"] > least, rule["rule"]


def test_a_file_is_not_written_over(tmp_path: Path, steelyard: CommandLine) -> None:
    arguments = comparison_csv(tmp_path)
    (tmp_path / "my.toml").write_text("kept")
    refused = steelyard("new", "my.toml", *arguments)
    assert refused.returncode == 2
    assert refused.stderr == (
        "steelyard: new: 'my.toml' is there already; allowed: another name, or --force to write over it\n"
    )
    assert (tmp_path / "my.toml").read_text() == "kept"
    assert steelyard("new", "my.toml", "--force", *arguments).returncode == 0
    assert tomllib.loads((tmp_path / "my.toml").read_text())["data"]["owner"] == "hospital"


def test_the_data_are_not_written_over(tmp_path: Path, steelyard: CommandLine) -> None:
    arguments = comparison_csv(tmp_path)
    before = (tmp_path / "data.csv").read_bytes()
    refused = steelyard("new", "./data.csv", "--force", *arguments)
    assert refused.returncode == 2
    assert "is the data itself; allowed: another name" in refused.stderr
    assert (tmp_path / "data.csv").read_bytes() == before


def test_classes_of_arrays_are_named_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("x.npz", x=np.random.default_rng(1).normal(size=(60, 3)), y=np.array(["cat", "dog"] * 30))
    shown = CliRunner().invoke(app, ["new", "my.toml", "--npz", "x.npz"], catch_exceptions=False).stdout
    assert "0 = cat, 1 = dog" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "got 0 sources of data; allowed: one of --csv, --parquet, --images, --npz, --idx"),
        (["--csv", "data.csv", "--npz", "x.npz"], "got 2 sources of data"),
        (["--csv", "nowhere.csv"], "--csv: found no 'nowhere.csv'"),
        (["--csv", "data.csv", "--label", "ill"], "--label: found no column 'ill' in data.csv"),
        (["--csv", "data.csv", "--owner", "clinic"], "--owner: found no column 'clinic'"),
        (["--csv", "data.csv", "--label", "notes"], "is text with 450 different values in 450 rows; expected classes"),
        (["--csv", "data.csv", "--owner", "unit"], "column 'unit' names one owner only; expected two or more"),
        (["--csv", "data.csv", "--owner", "notes"], "0 of 450 owners have two rows or more"),
        (["--csv", "data.csv", "--owner", "diagnosis"], "which is the label too"),
        (["--parquet", "data.csv"], "--parquet: got 'data.csv'; expected a .parquet file"),
        (["--images", "."], "holds no image"),
        (["--idx", ".", "--label", "y"], "--label: got 'y' with --idx"),
        (["--npz", "x.npz", "--label", "yy"], "--label: found no array 'yy' in x.npz (did you mean 'y'?); allowed: y"),
        (["--csv", "counted.csv"], "has no column that may be an input (left out: row (numbers the rows))"),
        (["--csv", "short.csv"], "the data have 2 rows to train on; allowed: at least 10"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from steelyard.errors import UserError

    comparison_csv(tmp_path)
    np.savez(tmp_path / "x.npz", x=np.zeros((60, 3)), y=np.arange(60) % 2)
    (tmp_path / "counted.csv").write_text("row,y\n" + "".join(f"{row},{row % 2}\n" for row in range(60)))
    (tmp_path / "short.csv").write_text("a,y\n1,0\n5,1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, ["new", "my.toml", *arguments], catch_exceptions=False)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "my.toml").exists()


def test_data_in_the_place_of_the_file_to_write_are_told_where_they_go(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "mine.csv").write_text("a,y\n1,0\n")
    assert "'mine.csv' is the file to write; allowed: `steelyard new my.toml --csv mine.csv`" in refused(
        "new", "mine.csv"
    )


def test_absurd_names_of_columns_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pandas.DataFrame(
        {'a"b\\': np.arange(60.0) ** 2, "line\nbreak": ["x", "y"] * 30, "[/b]\x1b[31m": ["c"] * 60}
    )
    frame["target"] = [0, 1, 1] * 20
    frame.to_csv(tmp_path / "odd.csv", index=False)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["new", "my.toml", "--csv", "odd.csv"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    assert tomllib.loads((tmp_path / "my.toml").read_text())["data"]["ignore"] == ["[/b]\x1b[31m"]
