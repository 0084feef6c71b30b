"""`steelyard new` for hospitals as they are: one file for each, in a folder, a pattern, or one after the other."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest
from tests.conftest import CommandLine

from steelyard.data.sheets import INCLUDED

HOSPITALS = ["cleveland", "hungarian", "switzerland", "va"]
FEW = ["--set", "rounds.count=2", "--set", "compute.engine=stacked", "--format", "json"]


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


def clients_of(steelyard: CommandLine, file: Path, folder: Path, *more: str) -> list[str]:
    done = steelyard("run", file, "--out", folder, *FEW, *more)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "finished"
    done = steelyard("export", folder, "--out", folder.parent / f"{folder.name}-csv")
    assert done.returncode == 0, done.stderr
    tables = sorted((folder.parent / f"{folder.name}-csv").rglob("*clients*.csv"))
    return sorted(set(pandas.read_csv(tables[0])["client"]))


def test_a_folder_of_files_is_a_federation_of_hospitals(steelyard: CommandLine, sites: Path, tmp_path: Path) -> None:
    done = steelyard("new", "my.toml", "--csv", "sites")
    assert done.returncode == 0, done.stderr
    assert "sites: 4 tables joined by the names of their columns" in done.stdout
    assert done.stdout.count("'thal' (not in va)") == 1
    assert "owners, by 'file': 4, of 123 to 303 rows: cleveland 303" in done.stdout
    written = tomllib.loads((tmp_path / "my.toml").read_text())
    assert (written["data"]["path"], written["data"]["owner"]) == ("sites", "file")
    assert written["partition"]["scheme"] == "natural"
    assert clients_of(steelyard, tmp_path / "my.toml", tmp_path / "run") == HOSPITALS


def test_a_pattern_means_the_same(steelyard: CommandLine, sites: Path, tmp_path: Path) -> None:
    done = steelyard("new", "my.toml", "--csv", "sites/*.csv")
    assert done.returncode == 0, done.stderr
    assert tomllib.loads((tmp_path / "my.toml").read_text())["data"]["path"] == "sites/*.csv"
    assert clients_of(steelyard, tmp_path / "my.toml", tmp_path / "run") == HOSPITALS


@pytest.mark.parametrize("again", [["--csv", "sites/va.csv"], ["sites/va.csv"]], ids=["option again", "by a shell"])
def test_no_file_is_lost_where_several_are_named(
    steelyard: CommandLine, sites: Path, tmp_path: Path, again: list[str]
) -> None:
    done = steelyard("new", "my.toml", "--csv", "sites/hungarian.csv", *again)
    assert done.returncode == 0, done.stderr
    written = tomllib.loads((tmp_path / "my.toml").read_text())
    assert written["data"]["files"] == ["sites/hungarian.csv", "sites/va.csv"]
    assert clients_of(steelyard, tmp_path / "my.toml", tmp_path / "run") == ["hungarian", "va"]


def test_what_stands_beside_the_file_to_write_is_refused(refused: Callable[..., str], sites: Path) -> None:
    line = refused("new", "my.toml", "other.csv")
    assert "new: got 'other.csv' beside the file to write; allowed: one file to write" in line
    line = refused("new", "my.toml", "--csv", "sites", "--label", "ill")
    assert "--label: found no column 'ill' in the table 'cleveland'" in line


def test_which_file_a_row_is_from_is_no_column_to_predict(refused: Callable[..., str], tmp_path: Path) -> None:
    for name in ("north", "south"):
        (tmp_path / "sites").mkdir(exist_ok=True)
        (tmp_path / "sites" / f"{name}.csv").write_text("age,dead\n60,1\n50,0\n")
    assert "--label: found no column 'file' in" in refused("new", "my.toml", "--csv", "sites", "--label", "file")
    line = refused("new", "my.toml", "--csv", "sites")
    assert "--label: got nothing, and sites has no columns called target, " in line
    assert line.rstrip().endswith("; allowed: one of age, dead")


def test_a_table_without_a_model_gets_one_that_fits(steelyard: CommandLine, sites: Path, tmp_path: Path) -> None:
    (tmp_path / "bare.toml").write_text(
        'name = "bare"\n[data]\nsource = "csv"\npath = "sites"\nlabels = "target"\n[partition]\nscheme = "natural"\n'
    )
    assert clients_of(steelyard, tmp_path / "bare.toml", tmp_path / "run") == HOSPITALS
    whole = tomllib.loads((tmp_path / "run" / "experiment.toml").read_text())
    assert (whole["model"]["name"], whole["data"]["owner"]) == ("auto", "file")
