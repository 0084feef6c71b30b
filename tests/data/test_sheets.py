"""Tables as people keep them: folders, patterns and several files become one table, joined by the names of columns."""

from __future__ import annotations

import builtins
import io
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from steelyard.data import load
from steelyard.data.looking import look
from steelyard.data.settings import DataSettings
from steelyard.data.sheets import read_tables
from steelyard.errors import UserError


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


def read(path: Path | None, **fields: Any) -> Any:
    document: dict[str, Any] = {"source": "csv", "path": path, "labels": "ill", **fields}
    return load(DataSettings(**document))


def test_each_file_of_a_folder_is_one_owner_and_columns_go_by_their_names(sites: Path) -> None:
    dataset = read(sites)
    assert dataset.owners.tolist() == ["north"] * 12 + ["south"] * 8
    assert dataset.raw.numbers.shape == (20, 3)
    age, dose, weight = dataset.raw.numbers.T
    assert age[:12].tolist() == site(12, 1)["age"].tolist()
    assert age[12:].tolist() == site(8, 2)["age"].tolist()
    assert np.isnan(dose[12:]).all()
    assert np.isnan(weight[:12]).all()
    assert dataset.notes[:3] == (
        "sites: 2 tables joined by the names of their columns",
        "columns that are not in every table, empty there: 'dose' (not in south), 'weight' (not in north)",
        "sites: no tables, left out: README.md",
    )


def test_a_pattern_and_a_list_of_files_give_the_same(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read(sites)
    for other in (
        read(sites / "*.csv"),
        read(None, files=[sites / "north.csv", sites / "south.csv"]),
    ):
        assert other.owners.tolist() == whole.owners.tolist()
        assert np.array_equal(other.raw.numbers, whole.raw.numbers, equal_nan=True)
    monkeypatch.chdir(sites.parent)
    assert read(Path("sites/so*.csv")).owners.tolist() == ["south"] * 8


def test_another_column_may_say_whose_row_it_is(sites: Path) -> None:
    for name, people in (("north", ["a", "b"] * 6), ("south", ["b", "c"] * 4)):
        site(len(people)).assign(doctor=people).to_csv(sites / f"{name}.csv", index=False)
    assert set(read(sites, owner="doctor").owners.tolist()) == {"a", "b", "c"}


def test_spellings_that_differ_in_capitals_are_pointed_out(sites: Path) -> None:
    site(4).rename(columns={"age": "Age"}).to_csv(sites / "west.csv", index=False)
    assert "'Age' (only in west, is it 'age'?)" in " ".join(read(sites).notes)


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for name in ("north", "south"):
        (tmp_path / name).mkdir()
        site(6).to_csv(tmp_path / name / "data.csv", index=False)
    assert set(read(tmp_path / "*" / "data.csv").owners.tolist()) == {"north-data", "south-data"}
    with pytest.raises(UserError, match=r"two tables would be client '.*data'; allowed: each file once"):
        read(None, files=[tmp_path / "north" / "data.csv"] * 2)


def test_a_mistake_names_the_file_and_its_own_row(sites: Path) -> None:
    table = site(8, 2).astype(object)
    table.loc[4, "age"] = "old"
    table.to_csv(sites / "south.csv", index=False)
    with pytest.raises(UserError, match=r"column 'age' holds 'old' in row 5 of south\.csv; expected a number"):
        read(sites)
    site(8, 2).drop(columns="ill").to_csv(sites / "south.csv", index=False)
    with pytest.raises(
        UserError, match=r"^data\.labels: found no column 'ill' in the table 'south'; allowed: a column"
    ):
        read(sites)


def test_what_is_no_folder_of_tables_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"^data\.path: the folder '.*empty' holds no table \(\.csv, "):
        read(tmp_path / "empty")
    with pytest.raises(UserError, match=r"^data\.path: found no '.*\*\.csv'"):
        read(tmp_path / "*.csv")
    with pytest.raises(UserError, match=r"files: got some together with path; allowed: one of the two"):
        read(tmp_path / "a.csv", files=[tmp_path / "b.csv"])


def test_a_wide_table_is_read(tmp_path: Path) -> None:
    columns = [f"expression_of_gene_{number}" for number in range(4000)]
    wide = pandas.DataFrame(np.ones((12, 4000)).cumsum(axis=0), columns=columns).assign(ill=[0, 1] * 6)
    wide.to_csv(tmp_path / "wide.csv", index=False)
    assert read(tmp_path / "wide.csv").shape == (4000,)


def test_stata_gives_what_csv_gives(tmp_path: Path) -> None:
    table = site(12, 3).assign(sex=pandas.Categorical(["f", "m", None] * 4))
    table.to_csv(tmp_path / "t.csv", index=False)
    table.to_stata(tmp_path / "t.dta", write_index=False)
    plain, stata = read(tmp_path / "t.csv"), read(tmp_path / "t.dta")
    assert plain.features.numpy() == pytest.approx(stata.features.numpy())


def test_each_sheet_of_a_workbook_is_one_owner(tmp_path: Path) -> None:
    pytest.importorskip("openpyxl")
    with pandas.ExcelWriter(tmp_path / "book.xlsx") as book:
        for name in ("north", "south"):
            site(6).to_excel(book, sheet_name=name, index=False)
        pandas.DataFrame().to_excel(book, sheet_name="notes")
    assert read(tmp_path / "book.xlsx", owner="file").owners.tolist() == ["north"] * 6 + ["south"] * 6
    with pytest.raises(UserError, match=r"^data\.owner: got nothing, and .*book\.xlsx is 2 tables; allowed: 'file'"):
        read(tmp_path / "book.xlsx")


@pytest.mark.parametrize(("name", "package"), [("t.xlsx", "openpyxl"), ("t.sav", "pyreadstat"), ("t.xls", "xlrd")])
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = builtins.__import__

    def without(module: str, *rest: Any, **more: Any) -> Any:
        if module.split(".")[0] == package:
            raise ImportError(module)
        return known(module, *rest, **more)

    for module in [module for module in sys.modules if module.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", without)
    # the first bytes by which pandas knows a workbook
    book = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" if name == "t.xls" else _zip_with("xl/workbook.xml")
    (tmp_path / name).write_bytes(book)
    with pytest.raises(UserError, match=rf"needs {package}, which is not installed; allowed: `pip install {package}`"):
        read(tmp_path / name)


def _zip_with(name: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(name, "")
    return content.getvalue()


def test_a_damaged_workbook_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "t.xlsx").write_bytes(b"no workbook")
    with pytest.raises(UserError, match=r"t\.xlsx: cannot be read as a table \(.*\); expected a whole table"):
        read(tmp_path / "t.xlsx")


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
        assert not any("event" in hint for hint in seen.hints)
    # The event alone, as a class: said, with the way to learn both.
    line = (
        "'time' and 'death_event' look like the time to an event; data.task = 'survival' with labels = 'time' and "
        "event = 'death_event' learns both"
    )
    seen = look("csv", [path], "death_event")
    assert seen.hints[0].startswith(line)
    assert seen.fields["ignore"][0] == ["time"]
    notes = " ".join(read(path, labels="death_event").notes)
    assert line in notes
    assert "the input 'time' gives the answer away: name it in data.ignore" in notes
    assert "gives the answer" not in " ".join(read(path, labels="death_event", ignore=["time"]).notes)


def test_times_have_a_minus_where_the_event_had_not_come(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x,days,died\n1,5,yes\n2,2.5,No\n3,7,1\n4,7,false\n")
    data = read(path, labels="days", task="survival", event="died")
    assert data.labels.tolist() == [5.0, -2.5, 7.0, -7.0]
    assert (data.classes, data.task, data.features.shape) == (0, "survival", (4, 1))
    assert data.notes == ("t.csv: the event came in 2 of 4 rows",)
    assert repr(data) == "Dataset('t.csv': 4 samples of 1, times to an event)"


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ("1,5,1\n2,0,0\n", r"column 'days' \(data.labels\) holds 0 in .*; expected a time above 0$"),
        ("1,-5,1\n2,3,0\n", r"holds -5 in .*; expected a time above 0$"),
        ("1,5,1\n2,soon,0\n", r"holds 'soon' in .*; expected a number$"),
        ("1,5,1\n2,4,2\n", r"column 'died' \(data.event\) holds '2' in .*; allowed: true, 1, yes, false, 0, no$"),
        ("1,5,0\n2,4,0\n", r"column 'died' \(data.event\) says of no row that the event came$"),
    ],
)
def test_times_that_cannot_be_are_named(tmp_path: Path, rows: str, line: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"x,days,died\n{rows}")
    with pytest.raises(UserError, match=line):
        read(path, labels="days", task="survival", event="died")


@pytest.mark.parametrize("given", [{"task": "survival"}, {"event": "died"}, {"task": "regression", "event": "died"}])
def test_survival_needs_both_columns(tmp_path: Path, given: dict[str, str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x,days,died\n1,5,1\n2,3,0\n")
    with pytest.raises(UserError, match=r"event: got .*; allowed: the column that says whether the event came"):
        read(path, labels="days", **given)


def test_a_time_alone_is_a_column_like_any(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    site(40).assign(time=np.arange(40) % 7).to_csv(path, index=False)
    assert not any("event" in note for note in read(path).notes)


@pytest.mark.parametrize("value", ["inf", "-inf", "1e300"])
def test_an_infinite_number_makes_no_categories(tmp_path: Path, value: str) -> None:
    path = tmp_path / "t.csv"
    table = site(40).astype(object)
    table.loc[7, "dose"] = value
    table.to_csv(path, index=False)
    with pytest.raises(
        UserError, match=r"column 'dose' holds '-?(inf|1e\+300)' in row 8; expected finite numbers \(or "
    ):
        read(path)
    seen = look("csv", [path], "ill")
    assert list(seen.fields["na_values"][0]) == ["dose"]
    assert "categories" not in seen.fields
    fields = {name: entry[0] for name, entry in seen.fields.items()}
    assert np.isnan(read(path, **fields).raw.numbers).sum() == 1
    # most of a column
    table.loc[:30, "dose"] = value
    table.to_csv(path, index=False)
    with pytest.raises(UserError, match=r"column 'dose' holds .* in row 1; expected finite numbers"):
        read(path)


def test_a_table_of_one_file_may_be_named_by_it(sites: Path) -> None:
    table = read_tables([sites / "north.csv"], "file", {})
    assert set(table.frame["file"]) == {"north"}
    assert read_tables([sites / "north.csv"], None, {}).names == ["age", "dose", "ill"]
