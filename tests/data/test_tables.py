"""Tables from CSV and Parquet: columns, labels, owners, empty cells, scaling, and the one line for a broken file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.kit import assert_refused

from steelyard.data import Dataset, DataSettings, PartitionSettings, load, share_out
from steelyard.data.dataset import RawColumns
from steelyard.data.inspect import look, shown
from steelyard.data.tables import read_cells, separator_of
from steelyard.recommend.interactions import read as ratings
from steelyard.recommend.interactions import read_columns

PATIENTS = """hospital,age,sex,bp,ill
north,40,m,120,yes
north,60,f,,no
south,50,f,140,yes
south,70,,160,no
"""
FOLDS = PATIENTS.replace("70,,160", "70,m,160")


def table(folder: Path, text: str, name: str = "t.csv", **fields: object) -> DataSettings:
    (folder / name).write_text(text, encoding="utf-8")
    given = {"labels": "ill", "owner": "hospital", "normalise": "unit", **fields}
    return DataSettings(
        source="csv", path=folder / name, **{key: value for key, value in given.items() if value is not None}
    )


def read(folder: Path, text: str, name: str = "t.csv", **fields: object) -> Dataset:
    return load(table(folder, text, name, **fields))


# what is read -------------------------------------------------------------------------------------------------------


def assert_patients(data: Dataset) -> None:
    # age, bp (its empty cell filled with the mean of 120, 140, 160), then sex = f, sex = m; an empty category is 0, 0
    assert data.features.tolist() == [[40, 120, 0, 1], [60, 140, 1, 0], [50, 140, 1, 0], [70, 160, 0, 0]]
    assert data.labels.tolist() == [1, 0, 1, 0]
    assert data.owners.tolist() == ["north", "north", "south", "south"]
    assert data.marks["complete"].tolist() == pytest.approx([1, 2 / 3, 1, 2 / 3])


def test_numbers_come_first_then_levels(tmp_path: Path):
    data = read(tmp_path, PATIENTS)
    assert_patients(data)
    assert data.notes[0] == "t.csv: 2 of 12 input cells are empty; numbers are filled with their mean"
    # a column that is ignored counts for nothing, a value that means "not recorded" counts as empty
    other = read(tmp_path, PATIENTS, ignore=["sex"], columns={"age": {"missing": [40]}})
    assert other.marks["complete"].tolist() == [0.5, 0.5, 1, 1]


def test_empty_cells_as_zero_dropped_or_refused(tmp_path: Path):
    assert read(tmp_path, PATIENTS, missing="zero").features[1].tolist() == [60, 0, 1, 0]
    dropped = read(tmp_path, PATIENTS.replace("140,yes", "140,no"), missing="drop")
    assert dropped.features.tolist() == [[40, 120, 0, 1], [50, 140, 1, 0]]
    assert dropped.labels.tolist() == [1, 0]


def test_indicators_say_where_a_cell_is_empty(tmp_path: Path):
    data = read(tmp_path, PATIENTS, indicators=["bp", "sex"])
    assert data.features[:, 4:].tolist() == [[0, 0], [1, 0], [0, 0], [0, 1]]


def test_levels_fix_the_columns_whatever_the_file_holds(tmp_path: Path):
    text = "hospital,cp,ill\na,1.0,0\nb,3,1\n"
    data = read(tmp_path, text, levels={"cp": [1, 2, 3, 4]})
    assert data.features.tolist() == [[1, 0, 0, 0], [0, 0, 1, 0]]
    assert read(tmp_path, text, categories=["cp"]).features.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("cells", "fields", "labels", "classes"),
    [
        (["b", "a", "c"], {}, [1, 0, 2], 3),
        (["0", "3", "1"], {"positive_above": 0}, [0, 1, 1], 2),
        (["0.5", "-2", "1e3"], {"task": "regression"}, [0.5, -2, 1000], 0),
    ],
)
def test_labels_are_words_numbers_thresholds_or_a_target(tmp_path: Path, cells, fields, labels, classes):
    lines = [f"a,{number},{cell}" for number, cell in enumerate(cells)]
    data = read(tmp_path, "\n".join(["hospital,x,ill", *lines]), **fields)
    assert data.labels.tolist() == labels
    assert data.classes == classes


def test_an_owner_may_be_called_na(tmp_path: Path):
    data = read(tmp_path, "hospital,x,ill\nNA,1,0\nnull,NA,1\n")
    assert data.owners.tolist() == ["NA", "null"]
    assert data.marks["complete"].tolist() == [1, 0]
    assert parquet(tmp_path, patients(hospital=["NA", "NA", "s", "s"])).owners.tolist() == ["NA", "NA", "s", "s"]
    # whole numbers sort as numbers, also where they are written as 3.0
    assert read(tmp_path, "hospital,x,ill\n3.0,1,0\n12,2,1\n").owners.tolist() == ["hospital-003", "hospital-012"]


def test_a_test_part_is_a_column(tmp_path: Path):
    text = "hospital,x,part,ill\na,1,train,0\na,2,test,1\nb,3,train,1\nb,4,test,0\n"
    folds = text.replace("train", "1").replace("test,1", "2,1").replace("test", "3.0")
    for content, fields in ((text, {}), (text, {"held_out_is": ["test"]}), (folds, {"held_out_is": ["2", "3"]})):
        data = read(tmp_path, content, held_out="part", **fields)
        assert data.held_out.tolist() == [False, True, False, True]
        assert (data.shape, data.notes) == ((1,), ())


def test_several_labels_of_a_row_are_columns_of_yes_and_no(tmp_path: Path):
    text = "hospital,x,ill,sick\na,1,yes,0\na,2,no,1\nb,3,true,1\n"
    data = read(tmp_path, text, task="multi-label", further_labels=["sick"])
    assert (data.kind, data.labels.tolist(), data.shape) == ("multi-label", [[1, 0], [0, 1], [1, 1]], (1,))
    assert data.notes == ("t.csv: labels of rows: ill in 2, sick in 2",)
    settings = table(tmp_path, text.replace("b,3,true,1", "b,3,true,2"), task="multi-label", further_labels=["sick"])
    assert_refused(lambda: load(settings), "column 'sick' (data.further_labels.0) holds '2' in row 3; allowed: true, 1")


def test_a_mark_comes_from_a_column(tmp_path: Path):
    data = read(tmp_path, "hospital,x,seen,ill\na,1,0,0\na,2,3,1\n", marks={"fresh": "seen", "old": "not seen"})
    assert data.marks["fresh"].tolist() == [0, 1]
    assert data.marks["old"].tolist() == [1, 0]


# how files are written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "hospital;x;ill\na;1,5;0\nb;-2;1\n",
        "hospital\tx\till\na\t1.5\t0\nb\t-2\t1\n",
        "hospital|x|ill\na|1.5|0\nb|-2|1\n",
        "\ufeffhospital,x,ill\na,1.5,0\nb,-2,1\n",
        'hospital, x ,ill\r\n"a", 1.5,0\r\nb, -2,1\r\n\r\n',
        "hospital,x,ill\na,1.5,0\nb,-2,1",
    ],
    ids=["semicolon and decimal comma", "tab", "bar", "BOM", "spaces and CRLF", "no last line end"],
)
def test_delimiters_and_decimal_signs_are_found_out(tmp_path: Path, text: str):
    data = read(tmp_path, text)
    assert data.features.tolist() == [[1.5], [-2.0]]
    assert data.owners.tolist() == ["a", "b"]


def test_a_large_file_is_read_whole(tmp_path: Path):
    rows = 20_000
    text = "hospital,x,ill\n" + "".join(f"h{number % 3},{number},{number % 2}\n" for number in range(rows))
    data = read(tmp_path, text)
    assert data.features[:, 0].tolist() == list(range(rows))
    # the fault lies far behind the part that is looked at first
    settings = table(tmp_path, text.replace(",19998,", ",1 9998,"))
    assert_refused(lambda: load(settings), "column 'x' holds '1 9998' in row 19999; expected a number")


# Parquet --------------------------------------------------------------------------------------------------------------


def parquet(folder: Path, frame: pandas.DataFrame, **fields: object) -> Dataset:
    pytest.importorskip("pyarrow")
    frame.to_parquet(folder / "t.parquet")
    given = {"labels": "ill", "owner": "hospital", "normalise": "unit", **fields}
    return load(DataSettings.model_validate({"source": "csv", "path": folder / "t.parquet", **given}))


def patients(**columns: object) -> pandas.DataFrame:
    return pandas.DataFrame(
        {"hospital": ["n", "n", "s", "s"], "ill": [0, 1, 1, 0], "age": [1.0, 2.0, 3.0, 4.0], **columns}
    )


@pytest.mark.parametrize(
    ("cells", "columns"),
    [
        # words that mean "empty" are empty as in a CSV file; moments and durations count days
        (["x", "?", "NA", "y"], [[1, 0], [0, 0], [0, 0], [0, 1]]),
        (pandas.to_timedelta([12, 24, None, 36], unit="h"), [[0.5], [1], [1], [1.5]]),
        (pandas.to_datetime([24, 60, None, 24], unit="h"), [[1], [2.5], [1.5], [1]]),
    ],
)
def test_kinds_of_parquet_columns(tmp_path: Path, cells: object, columns: list[list[float]]):
    data = parquet(tmp_path, patients(z=cells))
    assert data.features[:, 1:].numpy() == pytest.approx(np.array(columns))


# filling and scaling ------------------------------------------------------------------------------------------------

TWO = "hospital,x,ill\n" + "".join(
    f"{owner},{value},{number % 2}\n"
    for owner, values in (("a", [1, 3, 5, 7, 9]), ("b", [100, "", 300, 500, 700]))
    for number, value in enumerate(values)
)


VALUES = np.array([1, 3, 5, 7, 9, 100, np.nan, 300, 500, 700])


PARTS = [
    {"scheme": "natural", "test_fraction": 0.4},
    {"scheme": "iid", "clients": 2, "test": "held-out", "server": "held-out"},
]


@pytest.mark.parametrize("fields", PARTS)
@pytest.mark.parametrize("normalise", ["client", "standard"])
def test_rows_are_scaled_by_training_rows_alone(tmp_path: Path, normalise: str, fields: dict[str, Any]):
    """Each client's by its own, or all by those of all; float32 keeps 1e-7 of values up to about 2."""
    header, *lines = TWO.splitlines()
    parted = [f"{header},part", *(f"{line},{'test' if row in (4, 9) else 'train'}" for row, line in enumerate(lines))]
    data = read(tmp_path, "\n".join(parted), normalise=normalise, held_out="part")
    population = share_out(data, PartitionSettings(**fields), 3)
    everyone = np.concatenate([client.train for client in population.clients])
    for client in population.clients:
        train = VALUES[client.train if normalise == "client" else everyone]
        mean, deviation = np.nanmean(train), np.nanstd(train) or 1
        rows = np.concatenate([client.train, client.test])
        expected = (np.where(np.isnan(VALUES[rows]), mean, VALUES[rows]) - mean) / deviation
        assert population.dataset.features[rows, 0].numpy() == pytest.approx(expected, abs=1e-5)


def test_the_servers_rows_go_by_the_hospital_they_came_from(tmp_path: Path):
    data = read(tmp_path, TWO, normalise="client")
    settings = PartitionSettings(
        scheme="natural", server="fraction", server_fraction=0.4, server_balance="owners", server_report="apart"
    )
    population = share_out(data, settings, 0)
    for rows in (population.server, population.report):
        assert sorted(data.owners[rows].tolist()) == ["a", "b"]
    for row in np.union1d(population.server, population.report):
        train = VALUES[population.by_name[str(data.owners[row])].train]
        value = np.nanmean(train) if np.isnan(VALUES[row]) else VALUES[row]
        expected = (value - np.nanmean(train)) / (np.nanstd(train) or 1)
        assert float(population.dataset.features[row, 0]) == pytest.approx(expected, abs=1e-4)


def test_clients_that_share_rows_cannot_have_scales_of_their_own(tmp_path: Path):
    table_of_counts = {"scheme": "table", "table": [[4, 3], [4, 2]], "overlap": True, "test": "none"}
    data = read(tmp_path, TWO, normalise="client")
    settings = PartitionSettings(**table_of_counts)
    line = "data.normalise: got 'client', but client-000 and client-001 share rows"
    assert_refused(lambda: share_out(data, settings, 0), line)


@given(
    st.lists(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=2, max_size=2), min_size=1, max_size=8),
    st.sampled_from(["mean", "zero"]),
    st.sampled_from(["unit", "standard"]),
)
def test_what_is_filled_is_finite_and_what_is_there_keeps_its_order(cells, missing, normalise):
    numbers = np.array([[np.nan if cell is None else cell for cell in row] for row in cells], dtype=np.float64)
    raw = RawColumns(numbers, np.zeros((len(cells), 0), dtype=np.float32), normalise, missing)
    rows = np.arange(len(cells))
    out = raw.scale(rows).apply(numbers)
    assert np.isfinite(out).all()
    for column in range(2):
        there = ~np.isnan(numbers[:, column])
        order = np.argsort(numbers[there, column], kind="stable")
        assert (np.diff(out[there, column][order]) >= 0).all()


def test_the_servers_rows_can_be_balanced_over_classes(tmp_path: Path):
    text = "hospital,x,ill\n" + "".join(f"a,{number},{int(number < 5)}\n" for number in range(40))
    data = read(tmp_path, text)
    settings = PartitionSettings(
        scheme="iid", clients=2, server="fraction", server_fraction=0.2, server_balance="classes"
    )
    assert np.bincount(data.labels.numpy()[share_out(data, settings, 5).server]).tolist() == [4, 4]
    ownerless = read(tmp_path, text, owner=None, ignore=["hospital"])
    settings = settings.model_copy(update={"server_balance": "owners"})
    assert_refused(lambda: share_out(ownerless, settings, 5), "partition.server_balance: got 'owners', but t.csv has")


# the table that comes with the package ------------------------------------------------------------------------------


def test_the_hospitals_are_included():
    settings = DataSettings(
        source="csv", path="included/heart_disease.csv", labels="target", owner="hospital", positive_above=0,
        ignore=["flamby"], columns={"chol": {"missing": [0]}, "trestbps": {"missing": [0]}},
    )  # fmt: skip
    data = load(settings)
    assert np.unique(data.owners, return_counts=True)[1].tolist() == [303, 294, 123, 200]
    # 164 healthy of 303 in Cleveland; six of its 303 × 13 cells are empty
    assert int((data.labels.numpy()[:303] == 0).sum()) == 164
    assert data.marks["complete"][:303].mean() == pytest.approx(1 - 6 / (303 * 13))


def test_the_split_of_flamby_is_a_given_one():
    settings = DataSettings(
        source="csv", path="included/heart_disease.csv", labels="target", owner="hospital", positive_above=0,
        held_out="flamby", ignore=["slope", "ca", "thal"], missing="drop",
    )  # fmt: skip
    clients = share_out(load(settings), PartitionSettings(scheme="given", test="held-out"), 0).clients
    assert [(len(rows.train), len(rows.test)) for rows in clients] == [(199, 104), (172, 89), (30, 16), (85, 45)]


# several tables -------------------------------------------------------------------------------------------------------


def sheets(path: Path | None, **fields: Any) -> Any:
    document: dict[str, Any] = {"source": "csv", "path": path, "labels": "ill", **fields}
    return load(DataSettings(**document))


def site(rows: int = 12, seed: int = 0) -> pandas.DataFrame:
    chance = np.random.default_rng(seed)
    numbers = chance.normal(size=(rows, 2)).round(2)
    return pandas.DataFrame({"age": numbers[:, 0], "dose": numbers[:, 1], "ill": np.arange(rows) % 2})


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    folder = tmp_path / "sites"
    folder.mkdir()
    site(12, 1).to_csv(folder / "north.csv", index=False)
    # other order, other signs, a column less and a column more
    south = site(8, 2)[["ill", "age"]].assign(weight=70.5)
    south.to_csv(folder / "south.csv", index=False, sep=";", decimal=",")
    (folder / "README.md").write_text("about these data")
    return folder


def test_each_file_of_a_folder_is_one_owner_and_columns_go_by_their_names(sites: Path) -> None:
    dataset = sheets(sites)
    assert dataset.owners.tolist() == ["north"] * 12 + ["south"] * 8
    assert dataset.raw.numbers.shape == (20, 3)
    fields = look("csv", [sites], "ill").fields
    # too few rows of each to scale by its own
    assert (fields["owner"][0], fields["normalise"][0]) == ("file", "standard")
    age, dose, weight = dataset.raw.numbers.T
    assert age.tolist() == [*site(12, 1)["age"], *site(8, 2)["age"]]
    assert np.isnan(dose[12:]).all()
    assert np.isnan(weight[:12]).all()
    assert dataset.notes[:3] == (
        "sites: 2 tables joined by the names of their columns",
        "columns that are not in every table, empty there: 'dose' (not in south), 'weight' (not in north)",
        "sites: no tables, left out: README.md",
    )


def test_a_pattern_and_a_list_of_files_give_the_same(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sheets(sites)
    listed = sheets(None, files=[sites / "north.csv", sites / "south.csv"])
    assert np.array_equal(listed.raw.numbers, whole.raw.numbers, equal_nan=True)
    assert listed.name == "north.csv south.csv"
    monkeypatch.chdir(sites.parent)
    assert sheets(Path("sites/so*.csv")).owners.tolist() == ["south"] * 8
    site(2).to_csv(sites / "west.csv", index=False)
    three = [sites / f"{name}.csv" for name in ("west", "north", "south")]
    assert sheets(None, files=three).name == "west.csv north.csv ..."


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for name in ("north", "south"):
        (tmp_path / name).mkdir()
        site(6).to_csv(tmp_path / name / "data.csv.gz", index=False)
    assert set(sheets(tmp_path / "*" / "data.csv.gz").owners.tolist()) == {"north-data", "south-data"}
    assert set(sheets(tmp_path / "north").owners.tolist()) == {"data"}
    twice = [tmp_path / "north" / "data.csv.gz"] * 2
    assert_refused(lambda: sheets(None, files=twice), "two tables would be client '", "allowed: each file once")


def test_each_sheet_of_a_workbook_is_one_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What pandas reads with openpyxl, which is not everywhere: all sheets by name.
    found = {"north": site(6), "south": site(4), "notes": pandas.DataFrame()}
    monkeypatch.setattr(pandas, "read_excel", lambda path, sheet_name: found if sheet_name is None else None)
    books = [tmp_path / f"{name}.xlsx" for name in ("book", "more")]
    for book in books:
        book.write_bytes(b"")
    assert sheets(books[0], owner="file").owners.tolist() == ["north"] * 6 + ["south"] * 4
    both = sheets(None, files=books).owners.tolist()
    assert list(dict.fromkeys(both)) == ["book-north", "book-south", "more-north", "more-south"]
    line = "data.owner: got nothing, and"
    assert_refused(lambda: sheets(books[0]), line, "book.xlsx is 2 tables; allowed: 'file'")
    found.clear()
    assert_refused(lambda: sheets(books[0]), "book.xlsx: holds no rows")


@pytest.mark.parametrize(
    ("package", "name", "install"),
    [("pyreadstat", "t.sav", "pyreadstat"), ("pyarrow", "t.parquet", "'steelyard[parquet]'")],
)
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str, install: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(b"")
    assert_refused(lambda: sheets(tmp_path / name), f"needs {package}, which is not", f"`pip install {install}`")


def with_times(rows: int = 60) -> pandas.DataFrame:
    chance = np.random.default_rng(4)
    return (
        site(rows)
        .drop(columns="ill")
        .assign(time=chance.integers(1, 300, rows), death_event=chance.integers(0, 2, rows))
    )


def test_a_time_and_an_event_are_recognised(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    with_times().to_csv(path, index=False)
    # Nothing said, or the time: both are learnt.
    for label in (None, "time"):
        seen = look("csv", [path], label)
        assert [seen.fields[name][0] for name in ("labels", "task", "event")] == ["time", "survival", "death_event"]
        assert "ignore" not in seen.fields
    # The event alone, as a class: said, with the way to learn both.
    seen = look("csv", [path], "death_event")
    assert "data.task = 'survival' with labels = 'time' and event = 'death_event'" in seen.hints[0]
    assert seen.fields["ignore"][0] == ["time"]
    assert "gives the answer away" in seen.fields["ignore"][1]
    answer = "the input 'time' gives the answer away: name it in data.ignore"
    assert answer in " ".join(sheets(path, labels="death_event").notes)
    assert answer not in " ".join(sheets(path, labels="death_event", ignore=["time"]).notes)


def test_a_look_at_a_table_says_what_columns_are_and_which_fields_read_them(tmp_path: Path) -> None:
    rows = 60
    frame = pandas.DataFrame(
        {
            "row": np.arange(rows),
            "hospital": np.array(["a", "b"])[np.arange(rows) % 2],
            "sex": ["f", "m", None] * 20,
            "age": np.arange(rows) ** 2 % 61.5,
            "stage": np.arange(rows) % 3,
            "target": np.arange(rows) * 1.5,
        }
    )
    frame.loc[:5, "age"] = None
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.assign(part=["train", "Test", "train"] * 20).to_csv(tmp_path / "p.csv", index=False)
    words = pandas.DataFrame({"word": [f"w{row}" for row in range(rows)], "kind": ["a", "b"] * 30})
    words.to_csv(tmp_path / "u.csv", index=False)
    seen = look("csv", [tmp_path / "t.csv"])
    assert seen.fields["labels"][0] == "target"
    assert (seen.fields["task"][0], seen.fields["ignore"][0], seen.owners) == ("regression", ["row"], None)
    assert "label 'target': a number, from 0 to 88.5, mean 44.25, deviation 25.9772" in seen.account
    assert "inputs: 2 of numbers, 2 of categories: hospital (2 values), sex (2 values)" in seen.account
    assert "empty cells: 10.8%, most in sex 33%, age 10%" in seen.account
    assert seen.empty == pytest.approx((20 + 6) / (4 * rows))
    assert seen.hints[0] == "if these few whole numbers are codes, name them in data.categories: stage"
    assert seen.hints[1] == "whose row is it? perhaps --owner hospital"
    owned = look("csv", [tmp_path / "t.csv"], None, "hospital")
    assert (owned.owners, owned.fields["normalise"][0]) == ({"a": 30, "b": 30}, "client")
    assert "owners, by 'hospital': 2, of 30 to 30 rows: a 30, b 30" in owned.account
    assert (shown("x" * 40), shown("x" * 41)) == ("x" * 40, "x" * 37 + "...")
    parted = look("csv", [tmp_path / "p.csv"], None, "hospital")
    assert (parted.fields["held_out"][0], parted.held_out, parted.owners_held_out) == ("part", 20, True)
    assert (parted.fields["ignore"], parted.shape) == (owned.fields["ignore"], owned.shape)
    assert_refused(lambda: look("csv", [tmp_path / "t.csv"], None, "hospitol"), "--owner: found no column 'hospitol'")
    for form, name, label, owner, told in (
        ("csv", "t.csv", "hospital", "hospital", "--owner: got 'hospital', which is the label too"),
        ("csv", "t.csv", "targit", None, "--label: found no column 'targit' in"),
        ("csv", "none.csv", None, None, "--csv: found no '"),
        ("parquet", "t.csv", None, None, "--parquet: got '"),
        ("csv", "u.csv", None, None, "--label: got nothing, and"),
        ("csv", "u.csv", "word", None, "--label: column 'word' is text with 60 different values in 60 rows"),
        ("csv", "u.csv", "kind", None, "has no column that may be an input (left out: word (text with 60 differ"),
    ):
        assert_refused(lambda f=form, n=name, a=label, o=owner: look(f, [tmp_path / n], a, o), told)


def test_numbers_words_and_names_are_told_apart(tmp_path: Path) -> None:
    numbers = np.arange(60) ** 2 % 61.5
    columns: dict[str, list[Any]] = {
        "half": [*numbers[:30], *["low", "high"] * 15],
        "codes": [*numbers[:30] // 9, *"abcdef" * 5],
        "most": [*numbers[:29] // 9, *["low", "high"] * 15, "low"],
        "name": [f"patient {number}" for number in range(60)],
        "none": [None] * 60,
        "one": [7] * 60,
        "part": ["train", "test", None] * 20,
        "huge": [*numbers[:54], *(f"1e{power}" for power in range(300, 306))],
        "visit_id": numbers.cumsum() // 1,
    }
    pandas.DataFrame({**columns, "y": np.arange(60) % 2}).to_csv(tmp_path / "t.csv", index=False)
    fields = {name: value for name, (value, _) in look("csv", [tmp_path / "t.csv"]).fields.items()}
    # as many words as numbers are not recorded if they are few, else codes; more words are codes
    assert fields["columns"] == {"half": {"missing": ["high", "low"]}}
    assert (fields["categories"], fields["indicators"]) == (["codes", "most"], ["half"])
    assert fields["ignore"] == ["name", "none", "one", "part", "huge", "visit_id"]


def test_times_have_a_minus_where_the_event_had_not_come(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x,days,died\n1,5,yes\n2,2.5,No\n3,7,1\n4,7,false\n")
    data = sheets(path, labels="days", task="survival", event="died")
    assert data.labels.tolist() == [5.0, -2.5, 7.0, -7.0]
    assert (data.classes, data.task, data.notes) == (0, "survival", ("t.csv: the event came in 2 of 4 rows",))
    assert repr(data) == "Dataset('t.csv': 4 samples of 1, times to an event)"


def test_an_infinite_number_makes_no_categories(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    table = site(40).astype(object)
    table.loc[7, "dose"] = "1e300"
    table.to_csv(path, index=False)
    assert_refused(lambda: sheets(path), "column 'dose' holds '", "' in row 8; expected finite numbers (or ")
    fields = {name: entry[0] for name, entry in look("csv", [path], "ill").fields.items()}
    assert np.isnan(sheets(path, **fields).raw.numbers).sum() == 1


# cells ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "name", "expected"),
    [
        ("1::2::3", "a.dat", "::"),
        ("a\tb,c", "a.tsv", "\t"),
        ("id,genre|genre|genre", "a.csv", ","),
        ("a;b,c;d", "a.txt", ";"),
        ("alone", "a.csv", None),
        ('"age, in years, now";weight', "a.csv", ";"),
        ('"a::b",c', "a.txt", ","),
    ],
)
def test_the_sign_between_cells(first: str, name: str, expected: str | None) -> None:
    assert separator_of(first, Path(name)) == expected


CELL = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Z")), min_size=1)


@example([['"a', "b", "c"], ["d", "e", "f"]])
@given(st.lists(st.lists(CELL, min_size=3, max_size=3), min_size=1, max_size=6))
def test_cells_come_back_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]]) -> None:
    path = tmp_path_factory.mktemp("cells") / "cells.tsv"
    path.write_text("".join("\t".join(row) + "\n" for row in rows) + "\n", encoding="utf-8")
    assert read_cells(path, "cells", "\t").to_numpy().tolist() == rows


def test_quotes_and_latin_letters_of_item_tables(tmp_path: Path) -> None:
    path = tmp_path / "items.csv"
    for mark in ";,":
        path.write_bytes(f'item{mark}title\n1{mark}"Amélie{mark} a film"\n'.encode("latin-1"))
        assert read_columns(path, {"title": "title"}) == {"title": [f"Amélie{mark} a film"]}
    (tmp_path / "items.dat").write_text("1::a\tb::c\n")
    assert read_cells(tmp_path / "items.dat", "items").to_numpy().tolist() == [["1", "a b", "c"]]
    # The last column is not the one before the first.
    assert_refused(lambda: read_columns(path, {"title": 0}), "no column '0' for title; allowed: a number from 1 to 2")


# what is refused ------------------------------------------------------------------------------------------------------

SURVIVAL = {"labels": "days", "owner": None, "task": "survival", "event": "died"}
NAMES = "hospital,name,ill\n" + "".join(f"a,patient {number},{number % 2}\n" for number in range(101))


@pytest.mark.parametrize(
    ("text", "fields", "told"),
    [
        ("\n\n", {}, "is empty; expected a line of column names"),
        ("a\0b,c\n", {}, "is not a text file"),
        ("63,1,2.3\n67,1,4\n", {}, "the first line holds numbers such as '63', not column names"),
        ("hospital,x,x,ill\na,1,2,0\n", {}, "names column 'x' 2 times"),
        ("hospital,x,ill\na,1,0\nb,2\n", {}, "row 2 has 2 cells; expected 3"),
        (PATIENTS, {"categories": ["ill"]}, "data.categories: got 'ill', which is data.labels and no input"),
        (PATIENTS, {"indicators": ["age"], "ignore": ["age"]}, "data.indicators: got 'age', which is data.ignore"),
        (PATIENTS, {"ignore": ["age", "sex", "bp"]}, "no column is left as an input"),
        (PATIENTS.replace("50,f", "5o,f"), {}, "column 'age' holds '5o' in row 3; expected a number"),
        (PATIENTS.replace("south,50", ",50"), {}, "column 'hospital' (data.owner) is empty in row 3"),
        (PATIENTS.replace("140,yes", "140,"), {}, "column 'ill' (data.labels) is empty in row 3"),
        (PATIENTS.replace("yes", "1").replace("no", "0.5"), {}, "holds '0.5' in row 2; expected whole numbers"),
        ("hospital,x,ill\na,1,0\na,2,1e39\n", {}, "holds '1e+39' in row 2; expected finite numbers"),
        ('hospital,x,ill\na,"1,5",0\nb,2,1\n', {}, "holds '1,5' in row 1; expected a number"),
        ("hospital;x;z;ill\na;1,5;2.5;0\nb;2;3.5;1\n", {}, "column 'x' holds '1,5' in row 1; expected a number"),
        (PATIENTS, {"task": "regression"}, "holds 'yes' in row 1; expected a number"),
        (PATIENTS, {"levels": {"sex": ["f"]}}, "column 'sex' holds 'm' in row 1; allowed by data.levels: f"),
        (PATIENTS, {"held_out": "sex", "ignore": []}, "holds 'm' in row 1; allowed: true, 1, test"),
        (PATIENTS, {"held_out": "sex", "ignore": [], "held_out_is": ["m"]}, "(data.held_out) is empty in row 4"),
        (FOLDS, {"held_out": "sex", "ignore": [], "held_out_is": ["3"]}, "'sex' has no '3'; allowed: some of f"),
        (FOLDS, {"held_out": "sex", "ignore": [], "held_out_is": ["f", "m"]}, "nothing is left to train on"),
        (NAMES, {}, "is text with 101 different values; expected at most 100 for a category"),
        ("x,days,died\n1,5,1\n2,0,0\n", SURVIVAL, "column 'days' (data.labels) holds '0' in"),
        (
            "x,days,died\n1,5,1\n2,4,maybe\n",
            SURVIVAL,
            "column 'died' (data.event) holds 'maybe' in row 2; allowed: true",
        ),
        ("hospital,x,ill\na,1,0,5\nb,2,1,5\n", {}, "row 1 has 4 cells; expected 3"),
        ("hospital,x,ill\n", {}, "holds column names and no rows"),
        ("hospital\na\n", {}, "the first line 'hospital' has one column only"),
        ("hospital,,ill\na,1,0\n", {}, "column 2 has no name"),
        ("hospital,x,ill\na,,0\nb,,1\n", {}, "column 'x' is empty in all rows"),
        ("hospital,x,ill\na,1,0\nb,2,0\n", {}, "column 'ill' (data.labels) holds '0' in every row"),
        (PATIENTS, {"missing": "refuse"}, "column 'bp' is empty in row 2, and data.missing is 'refuse'"),
        (PATIENTS.replace("120", "").replace("140", ""), {"missing": "drop"}, "every row has an empty cell"),
        (PATIENTS, {"owner": "ill"}, "data.owner: got 'ill', which is data.labels too"),
        ("x,days,died\n1,5,0\n2,4,0\n", SURVIVAL, "column 'died' (data.event) says of no row that the event came"),
    ],
)
def test_what_cannot_be_a_table_is_named_in_one_line(tmp_path: Path, text: str, fields: dict[str, Any], told: str):
    settings = table(tmp_path, text, **fields)
    assert_refused(lambda: load(settings), told)


def test_a_column_of_names_is_a_category_where_that_is_asked_for(tmp_path: Path):
    assert read(tmp_path, NAMES, categories=["name"]).shape == (101,)
    assert read(tmp_path, NAMES.rpartition("a,")[0]).shape == (100,)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("t.csv", "hospital,x,ill\nZürich,1,0\n".encode("latin-1"), "is not UTF-8 text"),
        ("t.parquet", b"PAR1 and no more", "cannot be read as a table"),
    ],
)
def test_other_bytes_are_refused(tmp_path: Path, name: str, content: bytes, told: str):
    (tmp_path / name).write_bytes(content)
    assert_refused(lambda: sheets(tmp_path / name), told)


def test_paths_and_folders_without_a_table_are_refused(sites: Path):
    table = site(8, 2).astype(object)
    table.loc[4, "age"] = "old"
    table.to_csv(sites / "south.csv", index=False)
    assert_refused(lambda: sheets(sites), "column 'age' holds 'old' in row 5 of south.csv; expected a number")
    site(8, 2).drop(columns="ill").to_csv(sites / "south.csv", index=False)
    assert_refused(lambda: sheets(sites), "data.labels: found no column 'ill' in the table 'south'")
    assert_refused(lambda: sheets(sites / "*.tsv"), "data.path: found no '", "*.tsv'")
    (sites / "empty").mkdir()
    assert_refused(lambda: sheets(sites / "empty"), f"data.path: the folder '{sites / 'empty'}' holds no table")
    assert_refused(lambda: sheets(Path("included/hart_disease.csv")), "did you mean 'included/heart_disease.csv'")


def test_cells_that_are_lists_are_refused_or_ignored(tmp_path: Path):
    cells = [[1, 2]] * 4
    assert_refused(lambda: parquet(tmp_path, patients(z=cells)), "column 'z' holds lists or tables")
    assert parquet(tmp_path, patients(z=cells), ignore=["z"]).features.tolist() == [[1], [2], [3], [4]]


def test_lines_of_other_lengths_and_empty_ones_are_named(tmp_path: Path):
    path = tmp_path / "bad.tsv"
    path.write_text("user\titem\n1\t2\n1\t2\t3\n")
    assert_refused(lambda: ratings(path), "bad.tsv: cannot be read as a table (Expected 2 fields in line 3, saw 3)")
    path.write_text("user\titem\n1\t2\n\n1\t3\n")
    assert_refused(lambda: ratings(path), "bad.tsv: line 3: user is ''")


# what `[data.columns]` says of cells ----------------------------------------------------------------------------------

SITES = """hospital,age,crp,ill
north,40,<5,Yes
north,60,twelve,no
south,500,140,
south,700,1600,1
south,700,1600,1
"""


def test_cells_are_read_as_the_columns_say_they_are_meant(tmp_path: Path) -> None:
    columns: dict[str, Any] = {
        "age": {"factor": {"south": 0.1}, "unit": "years"},
        "crp": {"limits": True, "missing": ["twelve"], "range": [0, 1000]},
        "ill": {"synonyms": {"yes": ["Yes", 1]}},
    }
    data = read(tmp_path, SITES, columns=columns, unlabelled="drop", duplicates="drop")
    # age, crp (its two empty cells filled with the mean of 5 and 140), whether crp is beyond its limit
    assert data.features.tolist() == [[40, 5, 1], [60, 5, 0], [70, 5, 0]]
    assert data.labels.tolist() == [1, 0, 1]
    turned = read(tmp_path, SITES, columns=columns, unlabelled="drop", duplicates="drop", positive="no")
    assert (turned.labels.tolist(), turned.described.target.names) == ([0, 1, 0], ["yes", "no"])
    notes = ["'crp' is beyond a limit of detection in 1 row", "'crp' is outside 0 to 1000 in 2 rows"]
    notes += ["1 row without a label left out", "1 row left out, there before"]
    assert [note for note in notes if not any(note in line for line in data.notes)] == []


def test_whether_a_label_is_beyond_its_limit_is_no_input(tmp_path: Path) -> None:
    text = "hospital,age,ill\na,40,<5\na,50,7\nb,60,8\n"
    assert read(tmp_path, text, columns={"ill": {"limits": True}}, task="regression").shape == (1,)


def test_a_column_that_is_declared_a_category_or_a_number_is_one(tmp_path: Path) -> None:
    text = "hospital,stage,ill\na,1,0\na,2,1\nb,3,0\nb,3,1\n"
    assert read(tmp_path, text, columns={"stage": {"type": "category"}}).shape == (3,)
    mixed = text.replace("3", "late").replace("2", "mid")
    assert read(tmp_path, mixed).shape == (3,)
    assert_refused(lambda: read(tmp_path, mixed, columns={"stage": {"type": "number"}}), "'mid' in row 2")


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"aeg": {"factor": 2}}, "data.columns: found no column 'aeg' in"),
        ({"age": {"factor": {"souht": 2}}}, "data.columns: found no site 'souht' (did you mean 'south'?)"),
        ({"age": {"factor": "two"}}, "columns.age.factor: got 'two'"),
        ({"age": {"range": [9, 1]}}, "range: got [9.0, 1.0]; allowed: the least number, then the largest"),
    ],
)
def test_columns_that_cannot_be_meant_are_refused(columns: Any, told: str, tmp_path: Path) -> None:
    assert_refused(lambda: read(tmp_path, SITES, columns=columns, unlabelled="drop"), told)
