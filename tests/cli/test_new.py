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

from steelyard.data.sheets import INCLUDED

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
            *("data.csv: 450 rows, 9 columns", "label 'diagnosis': 2 classes: ", "owners, by 'hospital': 3, of "),
            *("inputs: 3 of numbers, 1 of categories: sex (2 values)", "most in pressure "),
            *("patient_id (numbers the rows)", "unit (the same in all rows)"),
            *("notes (text with 450 different values)", "name them in data.categories: stage"),
        ],
        0.8,
    ),
    "parquet": (write_parquet, ["data.parquet: 450 rows", "perhaps --owner patient_id"], 0.7),
    "regression": (write_regression, ["label 'target': a number, from 25 to 346"], -70.0),
    "images": (write_images, ["pictures: 300 images, 8×8, grey", "classes by folder: 4: "], 0.8),
    "npz": (write_npz, ["arrays images, target, writer", "450 rows: images of 1×8×8", "owners: 15, of 30 to 30"], 0.7),
    "idx": (write_idx, ["600 rows: images of 1×8×8", "labels: 10 classes", "test part: 100 rows"], 0.6),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_runs_and_learns(form: str, tmp_path: Path, command: CommandLine) -> None:
    write, words, least = FORMS[form]
    folder = tmp_path / "study"
    folder.mkdir()
    written = command("new", "study/my first.toml", *write(folder))
    assert written.returncode == 0, written.stderr
    assert [word for word in words if word not in written.stdout] == []
    assert written.stdout.splitlines()[-1] == "next: steelyard run 'study/my first.toml'"
    text = (folder / "my first.toml").read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) < 1000
    assert not tomllib.loads(text)["data"]["path"].startswith(("/", ".."))
    ran = command("run", "study/my first.toml", "--format", "json")
    assert ran.returncode == 0, ran.stderr
    for rule in json.loads(ran.stdout)["rules"]:
        assert rule["accuracy"] > least, rule["rule"]


def test_neither_a_file_nor_the_data_are_written_over(tmp_path: Path, command: CommandLine, refused: Refused) -> None:
    arguments = comparison_csv(tmp_path)
    (tmp_path / "my.toml").write_text("kept")
    assert "new: 'my.toml' is there already; allowed: another name, or --force" in refused("new", "my.toml", *arguments)
    assert (tmp_path / "my.toml").read_text() == "kept"
    assert command("new", "my.toml", "--force", *arguments).returncode == 0
    assert tomllib.loads((tmp_path / "my.toml").read_text())["data"]["owner"] == "hospital"
    before = (tmp_path / "data.csv").read_bytes()
    assert "is the data itself" in refused("new", "./data.csv", "--force", *arguments)
    assert (tmp_path / "data.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("my.toml", "got 0 sources of data"),
        ("my.toml --csv data.csv --npz x.npz", "got 2 sources of data"),
        ("my.toml other.csv", "got 'other.csv' beside the file to write"),
        ("data.csv", "'data.csv' is the file to write; allowed: `steelyard new my.toml --csv data.csv`"),
        ("no/my.toml --csv data.csv", "found no folder"),
        ("my.toml --csv nowhere.csv", "--csv: found no 'nowhere.csv'"),
        ("my.toml --csv data.csv --label ill", "--label: found no column 'ill' in data.csv"),
        ("my.toml --csv data.csv --owner clinic", "--owner: found no column 'clinic'"),
        ("my.toml --csv data.csv --label notes", "is text with 450 different values in 450 rows"),
        ("my.toml --csv data.csv --owner unit", "column 'unit' names one owner only"),
        ("my.toml --csv data.csv --owner notes", "0 of 450 owners have two rows or more"),
        ("my.toml --csv data.csv --owner diagnosis", "which is the label too"),
        ("my.toml --csv sites --label ill", "--label: found no column 'ill' in the table 'north'"),
        ("my.toml --csv sites --label file", "--label: found no column 'file' in"),
        ("my.toml --csv sites", "; allowed: one of age, dead"),
        ("my.toml --csv counted.csv", "has no column that may be an input (left out: row (numbers the rows))"),
        ("my.toml --csv short.csv", "the data have 2 rows to train on; allowed: at least 10"),
        ("my.toml --parquet data.csv", "--parquet: got 'data.csv'; expected a .parquet file"),
        ("my.toml --images .", "holds no image"),
        ("my.toml --idx . --label y", "--label: got 'y' with --idx"),
        ("my.toml --idx idx", "holds no train-images-idx3-ubyte or train-images-idx3-ubyte.gz"),
        ("my.toml --npz x.npz --label yy", "--label: found no array 'yy' in x.npz (did you mean 'y'?)"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: str, told: str, tmp_path: Path, refused: Refused) -> None:
    comparison_csv(tmp_path)
    np.savez(tmp_path / "x.npz", x=np.zeros((60, 3)), y=np.arange(60) % 2)
    (tmp_path / "counted.csv").write_text("row,y\n" + "".join(f"{row},{row % 2}\n" for row in range(60)))
    (tmp_path / "short.csv").write_text("a,y\n1,0\n5,1\n")
    for folder in ("sites", "idx"):
        (tmp_path / folder).mkdir()
    for name in ("north", "south"):
        (tmp_path / "sites" / f"{name}.csv").write_text("age,dead\n60,1\n50,0\n")
    (tmp_path / "idx" / "emnist-letters-train-images-idx3-ubyte").write_bytes(idx(np.zeros((1, 2, 2))))
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

HOSPITALS = ["cleveland", "hungarian", "switzerland", "va"]
FEW = ("--set", "rounds.count=2", "--set", "compute.engine=stacked", "--format", "json")
MASKS = 'kind = "learning"\n[data]\nsource = "digit-masks"\n[partition]\nclients = 4\nserver = "fraction"\n'


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """The four hospitals as each would send its file: other orders of columns, other signs, one column less."""
    folder = tmp_path / "sites"
    folder.mkdir()
    whole = pandas.read_csv(INCLUDED / "heart_disease.csv")
    for name, rows in whole.groupby("hospital"):
        own = rows.drop(columns=["hospital", "flamby"], errors="ignore")
        if name == "va":
            own = own.drop(columns="thal")[sorted(own.columns.drop("thal"))]
        own.to_csv(folder / f"{name}.csv", index=False, sep=";" if name == "hungarian" else ",")
    return folder


def clients_of(command: CommandLine, file: str) -> list[str]:
    done = command("run", file, "--out", "run", *FEW)
    assert done.returncode == 0, done.stderr
    return sorted({row["client"] for row in json.loads(done.stdout)["rules"][0]["heaviest_clients"]})


@pytest.mark.parametrize(
    ("words", "path", "owners"),
    [
        (("--csv", "sites"), "sites", HOSPITALS),
        (("--csv", "sites/*.csv"), "sites/*.csv", HOSPITALS),
        # a shell writes a pattern out: the other files are no options
        (("--csv", "sites/hungarian.csv", "sites/va.csv"), None, ["hungarian", "va"]),
    ],
)
def test_files_of_hospitals_are_a_federation(
    command: CommandLine, sites: Path, tmp_path: Path, words: tuple[str, ...], path: str | None, owners: list[str]
) -> None:
    done = command("new", "my.toml", *words)
    assert done.returncode == 0, done.stderr
    assert f"{len(owners)} tables joined by the names of their columns" in done.stdout
    assert done.stdout.count("'thal' (not in va)") == 1
    written = tomllib.loads((tmp_path / "my.toml").read_text())
    assert (written["data"].get("path"), written["data"]["owner"]) == (path, "file")
    assert written["data"].get("files", []) == ([] if path else ["sites/hungarian.csv", "sites/va.csv"])
    assert written["partition"]["scheme"] == "natural"
    assert clients_of(command, "my.toml") == owners


def test_a_table_without_a_model_gets_one_that_fits(command: CommandLine, sites: Path, tmp_path: Path) -> None:
    (tmp_path / "bare.toml").write_text(
        'name = "bare"\n[data]\nsource = "csv"\npath = "sites"\nlabels = "target"\n[partition]\nscheme = "natural"\n'
    )
    assert clients_of(command, "bare.toml") == HOSPITALS
    whole = tomllib.loads((tmp_path / "run" / "experiment.toml").read_text())
    assert (whole["model"]["name"], whole["data"]["owner"]) == ("auto", "file")


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


def test_folders_of_pairs_become_a_federation_that_draws_masks(tmp_path: Path, command: CommandLine) -> None:
    write_scans(tmp_path / "scans")
    made = command("new", "mine.toml", "--images", "scans")
    assert made.returncode == 0, made.stderr
    text = (tmp_path / "mine.toml").read_text()
    assert 'task = "segmentation"' in text
    assert 'name = "unet"' in text
    done = command("run", "mine.toml", "--set", "rounds.count=3", "--out", "run", "--format", "json")
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)["rules"][0]
    # All background gives 0; half of each rectangle, nothing else, 0.67.
    assert first["accuracy"] > 0.7
    on = first["worst_tenth_on"]
    assert on["low"] <= first["worst_tenth"] <= on["high"]
    shown = command("table", "run", "--full").stdout
    assert "mean Dice" in shown
    assert "more is better" in shown


def test_columns_of_labels_become_a_federation_that_finds_them(tmp_path: Path, command: CommandLine) -> None:
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
    done = command("run", "mine.toml", "--out", "run", "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["measure"] == "macro F1"
    assert found["rules"][0]["accuracy"] > 0.8


def write_patients(path: Path, rows: int = 600) -> None:
    """Patients of four hospitals: the older and less treated, the sooner their event, if they are not lost first."""
    chance = np.random.default_rng(1)
    x, y = chance.normal(size=(2, rows))
    until, lost = chance.exponential(np.exp(y - x)), chance.exponential(2.0, rows)
    table = {"age": x, "dose": y, "time": np.minimum(until, lost), "died": (until <= lost).astype(int)}
    pandas.DataFrame({"hospital": np.arange(rows) % 4, **table}).to_csv(path, index=False)


def test_a_table_with_times_becomes_a_federation_that_orders_patients(tmp_path: Path, command: CommandLine) -> None:
    write_patients(tmp_path / "patients.csv")
    made = command("new", "mine.toml", "--csv", "patients.csv", "--owner", "hospital")
    assert made.returncode == 0, made.stderr
    assert 'task = "survival"' in (tmp_path / "mine.toml").read_text()
    done = command("run", "mine.toml", "--set", "rounds.count=6", "--out", "run", "--format", "json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    first = summary["rules"][0]
    # Ordering by age - dose, as the times were drawn, gives 0.79 on all rows; coin tosses 0.5.
    assert first["accuracy"] > 0.72
    assert 0.6 < first["server"]["c_index"] <= 1
    shown = command("table", "run")
    assert "C-index" in shown.stdout
    assert "VC" in (tmp_path / "mine.toml").read_text()


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ('weighing.criteria=["LE"]', "measures classes, and data.source = 'digit-masks' has masks"),
        ("training.loss=cross-entropy", "training.loss: got 'cross-entropy' for data with masks"),
        ("weighing.loss.adapt=class-f1", "allowed: no [weighing.loss] with this task"),
        ("partition.scheme=shard", "partition.scheme: got 'shard'"),
    ],
)
def test_what_masks_do_not_have_is_refused(tmp_path: Path, refused: Refused, setting: str, told: str) -> None:
    (tmp_path / "mine.toml").write_text(MASKS)
    assert told in refused("run", "mine.toml", "--set", setting)


def test_what_times_to_an_event_do_not_have_is_refused(tmp_path: Path, command: CommandLine, refused: Refused) -> None:
    write_patients(tmp_path / "patients.csv", 80)
    assert command("new", "mine.toml", "--csv", "patients.csv", "--owner", "hospital").returncode == 0
    line = refused("run", "mine.toml", "--set", 'weighing.criteria=["LE"]', "--set", "weighing.priority=LE")
    assert "measures classes, and data.source = 'csv' has times to an event" in line
    line = refused("run", "mine.toml", "--set", "training.loss=squared-error")
    assert "training.loss: got 'squared-error' for data with times to an event; allowed: auto, cox" in line
