"""Tables from CSV and Parquet: columns, labels, owners, empty cells, scaling, and the one line for a broken file."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.data import Dataset, DataSettings, PartitionSettings, check_together, load, share_out
from steelyard.data.dataset import RawColumns
from steelyard.data.scaling import fill_and_scale
from steelyard.errors import UserError

PATIENTS = """hospital,age,sex,bp,ill
north,40,m,120,yes
north,60,f,,no
south,50,f,140,yes
south,70,,160,no
"""


def table(folder: Path, text: str, name: str = "t.csv", **fields: object) -> DataSettings:
    (folder / name).write_text(text, encoding="utf-8")
    given = {"labels": "ill", "owner": "hospital", "normalise": "unit", **fields}
    return DataSettings(
        source="csv", path=folder / name, **{key: value for key, value in given.items() if value is not None}
    )


def read(folder: Path, text: str, name: str = "t.csv", **fields: object) -> Dataset:
    return load(table(folder, text, name, **fields))


def refused(folder: Path, text: str, **fields: object) -> str:
    settings = table(folder, text, **fields)
    with pytest.raises(UserError) as caught:
        load(settings)
    line = str(caught.value)
    assert "\n" not in line
    return line


# what is read -------------------------------------------------------------------------------------------------------


def test_numbers_come_first_then_levels(tmp_path: Path):
    data = read(tmp_path, PATIENTS)
    # age, bp (its empty cell filled with the mean of 120, 140, 160), then sex = f, sex = m; an empty category is 0, 0
    assert data.features.tolist() == [[40, 120, 0, 1], [60, 140, 1, 0], [50, 140, 1, 0], [70, 160, 0, 0]]
    assert data.features.dtype == torch.float32
    assert data.labels.tolist() == [1, 0, 1, 0]
    assert data.classes == 2
    assert data.owners.tolist() == ["north", "north", "south", "south"]
    assert data.name == "t.csv"
    assert data.notes == (
        "t.csv: 2 of 12 input cells are empty; numbers are filled with their mean",
        "t.csv: classes of 'ill': 0 = no, 1 = yes",
    )


def test_the_mark_complete_is_the_share_of_filled_inputs(tmp_path: Path):
    data = read(tmp_path, PATIENTS)
    assert data.marks["complete"].tolist() == pytest.approx([1, 2 / 3, 1, 2 / 3])
    # a column that is ignored counts for nothing, a value that means "not recorded" counts as empty
    other = read(tmp_path, PATIENTS, ignore=["sex"], na_values={"age": [40]})
    assert other.marks["complete"].tolist() == [0.5, 0.5, 1, 1]
    assert other.features[:, 0].tolist() == [60, 60, 50, 70]


def test_empty_cells_as_zero_dropped_or_refused(tmp_path: Path):
    assert read(tmp_path, PATIENTS, missing="zero").features[1].tolist() == [60, 0, 1, 0]
    dropped = read(tmp_path, PATIENTS.replace("140,yes", "140,no"), missing="drop")
    assert dropped.features.tolist() == [[40, 120, 0, 1], [50, 140, 1, 0]]
    assert dropped.labels.tolist() == [1, 0]
    assert dropped.notes[0] == "t.csv: 2 of 12 input cells are empty; 2 of 4 rows left out"


def test_indicators_say_where_a_cell_is_empty(tmp_path: Path):
    data = read(tmp_path, PATIENTS, indicators=["bp", "sex"])
    assert data.features[:, 4:].tolist() == [[0, 0], [1, 0], [0, 0], [0, 1]]


def test_levels_fix_the_columns_whatever_the_file_holds(tmp_path: Path):
    text = "hospital,cp,ill\na,1.0,0\nb,3,1\n"
    data = read(tmp_path, text, levels={"cp": [1, 2, 3, 4]})
    assert data.features.tolist() == [[1, 0, 0, 0], [0, 0, 1, 0]]
    found = read(tmp_path, text, categories=["cp"])
    assert found.features.tolist() == [[1, 0], [0, 1]]
    line = refused(tmp_path, text, levels={"cp": [1, 2]})
    assert line.endswith("column 'cp' holds '3' in row 2; allowed by data.levels: 1, 2")


def test_levels_of_numbers_are_in_the_order_of_numbers(tmp_path: Path):
    data = read(tmp_path, "hospital,cp,ill\na,10,0\nb,9,1\n", categories=["cp"])
    assert data.features.tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("cells", "fields", "labels", "classes"),
    [
        (["0", "1", "0"], {}, [0, 1, 0], 2),
        (["-1", "1", "-1"], {}, [0, 1, 0], 2),
        (["b", "a", "c"], {}, [1, 0, 2], 3),
        (["10", "9", "10"], {}, [1, 0, 1], 2),
        (["0", "3", "1"], {"positive_above": 0}, [0, 1, 1], 2),
        (["0.5", "0.7", "0.6"], {"positive_above": 0.6}, [0, 1, 0], 2),
        (["0", "2", "0"], {"classes": 4}, [0, 2, 0], 4),
        (["0.5", "-2", "1e3"], {"task": "regression"}, [0.5, -2, 1000], 0),
        (["true", "false", "true"], {}, [1, 0, 1], 2),
    ],
)
def test_labels_are_words_numbers_thresholds_or_a_target(tmp_path: Path, cells, fields, labels, classes):
    lines = [f"a,{number},{cell}" for number, cell in enumerate(cells)]
    data = read(tmp_path, "\n".join(["hospital,x,ill", *lines]), **fields)
    assert data.labels.tolist() == labels
    assert data.classes == classes


def test_numbered_owners_are_named_after_their_column(tmp_path: Path):
    data = read(tmp_path, "ward,x,ill\n7,1,0\n12,2,1\n", owner="ward")
    assert data.owners.tolist() == ["ward-007", "ward-012"]


def test_an_owner_may_be_called_na(tmp_path: Path):
    data = read(tmp_path, "hospital,x,ill\nNA,1,0\nnull,NA,1\n")
    assert data.owners.tolist() == ["NA", "null"]
    assert data.marks["complete"].tolist() == [1, 0]


def test_a_test_part_is_a_column(tmp_path: Path):
    text = "hospital,x,part,ill\na,1,train,0\na,2,test,1\nb,3,train,1\nb,4,test,0\n"
    data = read(tmp_path, text, held_out="part")
    assert data.held_out.tolist() == [False, True, False, True]
    assert data.shape == (1,)
    settings = PartitionSettings(scheme="given", test="held-out", minimum=1)
    assert [(client.train.tolist(), client.test.tolist()) for client in share_out(data, settings, 0).clients] == [
        ([0], [1]),
        ([2], [3]),
    ]
    assert "holds 'late' in row 2; allowed: true, 1, test" in refused(
        tmp_path, text.replace("2,test", "2,late"), held_out="part"
    )


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
    assert data.labels.tolist() == [0, 1]
    assert data.owners.tolist() == ["a", "b"]


def test_a_packed_file_is_read(tmp_path: Path):
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(PATIENTS.encode()))
    data = load(DataSettings(source="csv", path=tmp_path / "t.csv.gz", labels="ill", owner="hospital"))
    assert len(data) == 4


def test_a_large_file_is_read_whole(tmp_path: Path):
    rows = 20_000
    text = "hospital,x,ill\n" + "".join(f"h{number % 3},{number},{number % 2}\n" for number in range(rows))
    data = read(tmp_path, text)
    assert len(data) == rows
    assert data.features[:, 0].tolist() == list(range(rows))
    # the fault lies far behind the part that is looked at first
    line = refused(tmp_path, text.replace(",19998,", ",1 9998,"))
    assert "column 'x' holds '1 9998' in row 19999; expected a number" in line


def test_parquet_without_pyarrow_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def lacking(path: Path) -> None:
        raise ImportError("Unable to find a usable engine")

    monkeypatch.setattr(pandas, "read_parquet", lacking)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"needs pyarrow, which is not installed; allowed: `pip install 'steelyard\["):
        load(DataSettings(source="csv", path=tmp_path / "t.parquet", labels="ill"))


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


def test_parquet_gives_what_csv_gives(tmp_path: Path):
    data = parquet(tmp_path, pandas.read_csv(table(tmp_path, PATIENTS).path))
    same = read(tmp_path, PATIENTS)
    assert torch.equal(data.features, same.features)
    assert torch.equal(data.labels, same.labels)
    assert data.owners.tolist() == same.owners.tolist()
    assert data.marks["complete"].tolist() == same.marks["complete"].tolist()


@pytest.mark.parametrize(
    ("cells", "columns"),
    [
        (pandas.Categorical(["b", "a", "b", None]), [[0, 1], [1, 0], [0, 1], [0, 0]]),
        (pandas.array([1, None, 3, 2], dtype="Int64"), [[1], [2], [3], [2]]),
        (pandas.array([True, None, False, False], dtype="boolean"), [[1], [1 / 3], [0], [0]]),
        # words that mean "empty" are empty as in a CSV file; moments and durations count days
        (["x", "?", "NA", "y"], [[1, 0], [0, 0], [0, 0], [0, 1]]),
        (["1.5", "2.5", "null", "2"], [[1.5], [2.5], [2], [2]]),
        (pandas.to_datetime(["1970-01-02", None, "1970-01-03", "1970-01-07"]), [[1], [3], [2], [6]]),
        (pandas.to_datetime(["1970-01-02", None, "1970-01-03", None]).tz_localize("UTC"), [[1], [1.5], [2], [1.5]]),
        (pandas.to_timedelta([12, 24, None, 36], unit="h"), [[0.5], [1], [1], [1.5]]),
    ],
)
def test_kinds_of_parquet_columns(tmp_path: Path, cells: object, columns: list[list[float]]):
    data = parquet(tmp_path, patients(z=cells))
    assert data.features[:, 1:].numpy() == pytest.approx(np.array(columns))


@pytest.mark.parametrize("cells", [[[1, 2]] * 4, [{"a": 1}] * 4])
def test_cells_that_are_lists_are_refused_or_ignored(tmp_path: Path, cells: list[object]):
    with pytest.raises(UserError, match="column 'z' holds lists or tables; expected one value in each cell"):
        parquet(tmp_path, patients(z=cells))
    assert parquet(tmp_path, patients(z=cells), ignore=["z"]).features.tolist() == [[1], [2], [3], [4]]


def test_a_broken_parquet_file_is_one_line(tmp_path: Path):
    pytest.importorskip("pyarrow")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match="cannot be read as a table") as caught:
        load(DataSettings(source="csv", path=tmp_path / "t.parquet", labels="ill"))
    assert "\n" not in str(caught.value)


def test_a_word_for_not_recorded_in_a_column_of_numbers(tmp_path: Path):
    text = "hospital,age,ill\nn,40,1\nn,unknown,0\ns,50,1\ns,60,0\n"
    assert "column 'age' holds 'unknown' in row 2" in refused(tmp_path, text)
    assert read(tmp_path, text, na_values={"age": ["unknown"]}).features[:, 0].tolist() == [40, 50, 50, 60]


# what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("", {}, "is empty; expected a line of column names"),
        ("\n\n", {}, "is empty"),
        ("hospital,x,ill\n", {}, "holds column names and no rows"),
        ("a\0b,c\n", {}, "is not a text file"),
        ("hospital\na\n", {}, "has one column only; expected names with comma, semicolon, tab, bar between them"),
        ("63,1,2.3\n67,1,4\n", {}, "the first line holds numbers such as '63', not column names"),
        ("hospital,x,x,ill\na,1,2,0\n", {}, "names column 'x' 2 times"),
        ("hospital,,ill\na,1,0\n", {}, "column 2 has no name"),
        ("hospital,x,ill\na,1,0\nb,2\n", {}, "row 2 has 2 cells; expected 3"),
        ("hospital,x,ill\na,1,0\nb,1,5,1\n", {}, "row 2 has 4 cells; expected 3"),
        (PATIENTS, {"labels": "il"}, "data.labels: found no column 'il' in"),
        (PATIENTS, {"labels": "il"}, "(did you mean 'ill'?); allowed: hospital, age, sex, bp, ill"),
        (PATIENTS, {"owner": "hospitol"}, "data.owner: found no column 'hospitol'"),
        (PATIENTS, {"ignore": ["agee"]}, "data.ignore: found no column 'agee'"),
        (PATIENTS, {"owner": "ill"}, "data.owner: got 'ill', which is data.labels too"),
        (PATIENTS, {"categories": ["ill"]}, "data.categories: got 'ill', which is data.labels and no input"),
        (PATIENTS, {"ignore": ["bp"], "indicators": ["bp"]}, "data.indicators: got 'bp', which is data.ignore"),
        (PATIENTS, {"ignore": ["age", "sex", "bp"]}, "no column is left as an input"),
        (PATIENTS, {"missing": "refuse"}, "column 'bp' is empty in row 2, and data.missing is 'refuse'"),
        (PATIENTS.replace("50,f", "5o,f"), {}, "column 'age' holds '5o' in row 3; expected a number"),
        (PATIENTS.replace("50,f", "inf,f"), {}, "column 'age' holds 'inf' in row 3"),
        (PATIENTS.replace("50,f", "1e300,f"), {}, "column 'age' holds '1e+300' in row 3"),
        (PATIENTS, {"categories": ["age"]}, "column 'sex' holds 'm' in row 1; expected a number"),
        (PATIENTS.replace("south,50", ",50"), {}, "column 'hospital' (data.owner) is empty in row 3"),
        (PATIENTS.replace("140,yes", "140,"), {}, "column 'ill' (data.labels) is empty in row 3"),
        (PATIENTS.replace("yes", "no"), {}, "holds 'no' in every row; expected two classes or more"),
        (PATIENTS, {"task": "regression"}, "holds 'yes' in row 1; expected a number"),
        (PATIENTS, {"positive_above": 1}, "holds 'yes' in row 1; expected a number"),
        (PATIENTS, {"labels": "bp", "missing": "drop"}, "(data.labels) is empty in row 2"),
        ("hospital,x,ill\na,1,0.5\nb,2,1\n", {}, "holds 0.5; expected whole numbers or words for classes"),
        ("hospital,x,y,ill\na,1,,0\nb,2,,1\n", {}, "column 'y' is empty in all rows"),
        ("hospital,x,ill\na,,0\nb,,1\n", {"categories": ["x"]}, "column 'x' is empty in all rows"),
        ("hospital,x,y,ill\na,1,,0\nb,,2,1\n", {"missing": "drop"}, "every row has an empty cell"),
        ("hospital;x;ill\na;1,5;0\nb;1.5;1\n", {}, "column 'x' holds '1,5' in row 1; expected a number with a decimal"),
    ],
)
def test_what_cannot_be_a_table_is_named_in_one_line(tmp_path: Path, text: str, fields, message: str):
    assert message in refused(tmp_path, text, **fields)


def test_a_column_of_names_is_no_category(tmp_path: Path):
    text = "hospital,name,ill\n" + "".join(f"a,patient {number},{number % 2}\n" for number in range(101))
    assert "is text with 101 different values; expected at most 100 for a category" in refused(tmp_path, text)
    assert read(tmp_path, text, categories=["name"]).shape == (101,)


def test_other_bytes_and_other_paths_are_refused(tmp_path: Path):
    settings = table(tmp_path, PATIENTS)
    settings.path.write_bytes("hospital,x,ill\nZürich,1,0\n".encode("latin-1"))
    with pytest.raises(UserError, match="is not UTF-8 text"):
        load(settings)
    for path, message in (
        (tmp_path / "none.csv", "found no"),
        (Path("included/hart_disease.csv"), "did you mean 'included/heart_disease.csv'"),
    ):
        with pytest.raises(UserError, match=message):
            load(settings.model_copy(update={"path": path}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": "y"}, "path: got nothing; allowed with source 'csv': a table or a folder"),
        ({"path": "x"}, "labels: got nothing; allowed with source 'csv': the name of the column to predict"),
        (
            {"path": "x", "labels": "y", "task": "regression", "positive_above": 1},
            "positive_above: got 1.0 with task 'regression'",
        ),
        ({"source": "digits", "ignore": ["x"]}, "ignore: got ('x',) with source 'digits'; allowed with: csv"),
        ({"source": "digits", "normalise": "client"}, "normalise: got 'client' with source 'digits'"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_reading(fields, message):
    with pytest.raises(UserError) as caught:
        DataSettings(**{"source": "csv", **fields})
    assert message in str(caught.value)


def test_a_table_without_owner_has_no_natural_clients():
    data = DataSettings(source="csv", path="x.csv", labels="y")
    assert data.normalise == "client"
    with pytest.raises(UserError, match="does not know whose rows they are"):
        check_together(data, PartitionSettings(scheme="natural"))


# filling and scaling ------------------------------------------------------------------------------------------------

TWO = "hospital,x,ill\n" + "".join(
    f"{owner},{value},{number % 2}\n"
    for owner, values in (("a", [1, 3, 5, 7, 9]), ("b", [100, "", 300, 500, 700]))
    for number, value in enumerate(values)
)


def test_each_client_is_scaled_by_its_own_training_rows(tmp_path: Path):
    data = read(tmp_path, TWO, normalise="client")
    settings = PartitionSettings(scheme="natural", test_fraction=0.4)
    population = share_out(data, settings, 3)
    values = np.array([1, 3, 5, 7, 9, 100, np.nan, 300, 500, 700])
    for client in population.clients:
        train = values[client.train]
        mean, deviation = np.nanmean(train), np.nanstd(train)
        for rows in (client.train, client.test):
            expected = (np.where(np.isnan(values[rows]), mean, values[rows]) - mean) / deviation
            assert population.dataset.features[rows, 0].numpy() == pytest.approx(expected, abs=1e-5)
    assert population.dataset.raw is None


def test_one_scale_for_all_comes_from_all_training_rows(tmp_path: Path):
    data = read(tmp_path, TWO, normalise="standard")
    population = share_out(data, PartitionSettings(scheme="natural", test_fraction=0.4), 3)
    values = np.array([1, 3, 5, 7, 9, 100, np.nan, 300, 500, 700])
    train = values[np.concatenate([client.train for client in population.clients])]
    mean, deviation = np.nanmean(train), np.nanstd(train)
    expected = (np.where(np.isnan(values), mean, values) - mean) / deviation
    assert population.dataset.features[:, 0].numpy() == pytest.approx(expected, abs=1e-5)


def test_the_servers_rows_go_by_the_hospital_they_came_from(tmp_path: Path):
    data = read(tmp_path, TWO, normalise="client")
    settings = PartitionSettings(
        scheme="natural", server="fraction", server_fraction=0.4, server_balance="owners", server_report="apart"
    )
    population = share_out(data, settings, 0)
    for rows in (population.server, population.report):
        assert sorted(data.owners[rows].tolist()) == ["a", "b"]
    values = np.array([1, 3, 5, 7, 9, 100, np.nan, 300, 500, 700])
    for row in np.union1d(population.server, population.report):
        train = values[population.by_name[str(data.owners[row])].train]
        value = np.nanmean(train) if np.isnan(values[row]) else values[row]
        expected = (value - np.nanmean(train)) / (np.nanstd(train) or 1)
        assert float(population.dataset.features[row, 0]) == pytest.approx(expected, abs=1e-4)


def test_without_owners_the_servers_rows_go_by_themselves(tmp_path: Path):
    data = read(tmp_path, TWO, owner=None, ignore=["hospital"], normalise="client")
    settings = PartitionSettings(scheme="iid", clients=2, server="fraction", server_fraction=0.4)
    population = share_out(data, settings, 0)
    values = population.dataset.features[population.server, 0].numpy()
    assert values.mean() == pytest.approx(0, abs=1e-6)


def test_clients_that_share_rows_cannot_have_scales_of_their_own(tmp_path: Path):
    table_of_counts = {"scheme": "table", "table": [[4, 3], [4, 2]], "overlap": True, "test": "none"}
    data = read(tmp_path, TWO, normalise="client")
    with pytest.raises(UserError, match=r"data\.normalise: got 'client', but client-000 and client-001 share rows"):
        share_out(data, PartitionSettings(**table_of_counts), 0)
    share_out(read(tmp_path, TWO, normalise="standard"), PartitionSettings(**table_of_counts), 0)


def test_a_share_of_the_table_keeps_its_columns_together(tmp_path: Path):
    data = read(tmp_path, TWO, normalise="client", share=0.5)
    assert len(data) == 5
    population = share_out(data, PartitionSettings(scheme="natural"), 0)
    assert float(population.dataset.features[population.clients[0].train].mean()) == pytest.approx(0, abs=1e-6)


@given(
    st.lists(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=2, max_size=2), min_size=1, max_size=8),
    st.sampled_from(["mean", "zero"]),
    st.sampled_from(["unit", "standard"]),
)
def test_what_is_filled_is_finite_and_what_is_there_keeps_its_order(cells, missing, normalise):
    numbers = np.array([[np.nan if cell is None else cell for cell in row] for row in cells], dtype=np.float64)
    raw = RawColumns(numbers, np.zeros((len(cells), 0), dtype=np.float32), normalise, missing)
    rows = np.arange(len(cells))
    out = fill_and_scale(raw, rows, rows)
    assert np.isfinite(out).all()
    for column in range(2):
        there = ~np.isnan(numbers[:, column])
        order = np.argsort(numbers[there, column], kind="stable")
        assert (np.diff(out[there, column][order]) >= 0).all()
    if missing == "mean" and normalise == "standard":
        assert np.allclose(out[np.isnan(numbers)], 0)


# the server's rows --------------------------------------------------------------------------------------------------


def test_the_servers_rows_can_be_balanced_over_classes(tmp_path: Path):
    text = "hospital,x,ill\n" + "".join(f"a,{number},{int(number < 5)}\n" for number in range(40))
    data = read(tmp_path, text)
    settings = PartitionSettings(
        scheme="iid", clients=2, server="fraction", server_fraction=0.2, server_balance="classes"
    )
    assert np.bincount(data.labels.numpy()[share_out(data, settings, 5).server]).tolist() == [4, 4]
    with pytest.raises(UserError, match=r"partition\.server_balance: got 'owners', but t\.csv has none"):
        share_out(
            read(tmp_path, text, owner=None, ignore=["hospital"]),
            settings.model_copy(update={"server_balance": "owners"}),
            5,
        )


# the table that comes with the package ------------------------------------------------------------------------------


def test_the_hospitals_are_included():
    settings = DataSettings(
        source="csv", path="included/heart_disease.csv", labels="target", owner="hospital", positive_above=0,
        ignore=["flamby"], na_values={"chol": [0], "trestbps": [0]},
    )  # fmt: skip
    data = load(settings)
    assert (len(data), data.shape, data.classes) == (920, (13,), 2)
    names, counts = np.unique(data.owners, return_counts=True)
    assert dict(zip(names.tolist(), counts.tolist(), strict=True)) == {
        "cleveland": 303, "hungarian": 294, "switzerland": 123, "va": 200,
    }  # fmt: skip
    # 164 healthy of 303 in Cleveland; six of its 303 × 13 cells are empty
    cleveland = data.owners == "cleveland"
    assert int((data.labels.numpy()[cleveland] == 0).sum()) == 164
    assert data.marks["complete"][cleveland].mean() == pytest.approx(1 - 6 / (303 * 13))
    # Switzerland has no cholesterol at all
    assert np.isnan(data.raw.numbers[data.owners == "switzerland", 4]).all()


def test_the_split_of_flamby_is_a_given_one():
    settings = DataSettings(
        source="csv", path="included/heart_disease.csv", labels="target", owner="hospital", positive_above=0,
        held_out="flamby", ignore=["slope", "ca", "thal"], missing="drop",
    )  # fmt: skip
    clients = share_out(load(settings), PartitionSettings(scheme="given", test="held-out"), 0).clients
    assert [(len(rows.train), len(rows.test)) for rows in clients] == [(199, 104), (172, 89), (30, 16), (85, 45)]
