"""Reading, filtering and splitting interactions, also into rows on which settings are chosen."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from tests.kit import assert_refused, changed

from steelyard.experiment import running
from steelyard.experiment.loading import build as described
from steelyard.recommend import interactions
from steelyard.recommend.interactions import ascending, build, read
from steelyard.result import Result

FORMS = {
    "ratings.dat": "1::10::5::100\n2::9::3::50\n",
    "u.data": "1\t10\t5\t100\n2\t9\t3\t50\n",
    "amazon.tsv": "user_id\titem_id\trating\tutc\n1\t10\t5\t100\n2\t9\t3\t50\n",
    "other order.csv": "timestamp,rating,movieId,userId\n100,5,10,1\n50,3,9,2\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_table(tmp_path: Path, name: str):
    path = tmp_path / (name + ".gz")
    path.write_bytes(gzip.compress(FORMS[name].encode()))
    data = read(path)
    assert data.users.tolist() == ["1", "2"]
    assert data.items.tolist() == ["9", "10"]  # whole numbers ascend as numbers
    assert (data.user.tolist(), data.item.tolist()) == ([0, 1], [1, 0])
    assert data.rating.tolist() == [5, 3]
    assert data.time is not None
    assert data.time.tolist() == [100, 50]


def test_foursquare_form_has_times_and_categories(tmp_path: Path):
    path = tmp_path / "city.tsv"
    path.write_text(
        "user_id\tvenue_id\ttype\tutc\n"
        "7\tv1\tGym\tTue Apr 03 18:07:30 +0000 2012\n"
        "7\tv2\tBar\tTue Apr 03 18:07:31 +0000 2012\n"
    )
    data = read(path)
    assert data.time is not None
    assert data.time.tolist() == [1333476450, 1333476451]
    assert data.columns["type"].tolist() == ["Gym", "Bar"]
    assert data.rating.tolist() == [1, 1]


def test_headerless_pairs_own_column_names_and_ids_with_leading_zeros(tmp_path: Path):
    def table(text: str, *columns: dict[str, str]):
        (tmp_path / "t.csv").write_text(text)
        data = read(tmp_path / "t.csv", *columns)
        return data.users.tolist(), data.items.tolist(), data.rating.tolist()

    assert table("anna,x\nbob,y\n") == (["anna", "bob"], ["x", "y"], [1, 1])
    own = table("reader,book,stars\nanna,x,4\n", {"user": "reader", "item": "book"})
    assert own == (["anna"], ["x"], [4])
    assert table("user,item\n007,1\n7,1\n")[0] == ["007", "7"]


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("bad.tsv", "1\t2\tx\t5\n", ["line 1", "rating", "'x'", "a number"]),
        ("bad.tsv", "user\titem\ttime\n1\t2\t2012-04-03\n1\t2\tsoon\n", ["line 3", "time", "'soon'"]),
        ("bad.tsv", "user\titem\n1\t\n", ["line 2", "item", "''"]),
        ("bad.tsv", "", ["empty"]),
        ("ml.inter", "user_id:token\titem_id:token\tr:float\n1\t10\t1\n", ["line 1", "name its user"]),
        ("bad.tsv", "1\t2\n1\t2\t3\t4\n", ["same number of fields"]),
        ("bad.tsv.gz", "not gzip", ["cannot be read"]),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, name: str, text: str, parts: list[str]):
    (tmp_path / name).write_text(text)
    assert_refused(lambda: read(tmp_path / name), name, *parts)


def test_ids_ascend_as_text_where_one_of_them_is_no_number():
    assert ascending(["10", "9", "a"]) == ["10", "9", "a"]


def test_duplicates_keep_the_earliest_the_latest_or_the_mean():
    data = build(["a", "a", "a"], ["x", "x", "y"], [1, 5, 2], [20, 10, 30])
    for kept, ratings in (("first", [5, 2]), ("last", [1, 2]), ("mean", [3, 2]), ("keep", [1, 5, 2])):
        assert interactions.single(data, kept).rating.tolist() == ratings


def test_core_repeats_until_both_sides_hold():
    # Item z has one row; without it user c has one row; without her item y has one row; and so on down to a, b on x, w.
    data = build(list("aabbcc"), list("xwxwyz"))
    kept = interactions.core(data, 2, 2)
    assert (kept.users.tolist(), kept.items.tolist(), len(kept)) == (["a", "b"], ["w", "x"], 4)
    note = kept.dropped[-1]
    assert (note.interactions, note.users, note.items) == (2, 1, 2)


def test_temporal_split_takes_the_newest_with_ties_in_file_order():
    data = build(["a"] * 5 + ["b"] * 4, list("vwxyz") + list("vwxy"), time=[5, 4, 3, 5, 1, 1, 2, 3, 4])
    split = interactions.temporal(data, 0.2)
    # a: int(1.0) = 1 of five, the upper of the two rows at time 5; b: int(0.8) = 0.
    assert split.test.items[split.test.item].tolist() == ["v"]
    assert len(split.train) == 8
    assert split.train.users.tolist() == split.test.users.tolist() == ["a", "b"]


def test_newest_leaves_one_out_but_never_all():
    test = interactions.newest(build(["a", "a", "b"], list("xyx"), time=[2, 1, 5]), 1).test
    assert (test.user.tolist(), test.item.tolist()) == ([0], [0])


def test_random_split_does_not_depend_on_other_users():
    both = build(["a"] * 10 + ["b"] * 10, [str(i) for i in range(10)] * 2)
    alone = both.select(both.user == 0)
    whole = interactions.random(both, 0.3, seed=3)
    part = interactions.random(alone, 0.3, seed=3)
    assert len(part.test) == 3
    assert whole.test.item[whole.test.user == 0].tolist() == part.test.item.tolist()


def test_shuffled_split_is_the_published_one():
    data = build(["2"] * 5 + ["1"] * 5, [str(i) for i in range(5)] * 2)
    source = np.random.RandomState(42)
    marks = []
    for _ in "12":
        row = [0, 0, 0, 0, 1]
        source.shuffle(row)
        marks.append(row)
    test = interactions.shuffled(data, 0.2, 42).test
    assert test.item[test.user == 0].tolist() == [marks[0].index(1)]
    assert test.item[test.user == 1].tolist() == [marks[1].index(1)]


def test_impossible_splits_are_refused():
    data = build(["a"], ["x"])
    assert_refused(lambda: interactions.temporal(data), "no time column")
    assert_refused(lambda: interactions.random(data, 1), "split share", "1")


# ---------------------------------------------------------------- a part of the training rows to choose settings on


def validating(description: dict, **interactions):
    return described(changed(description, interactions={"validation": 0.25, **interactions}))


def test_a_validation_run_neither_trains_on_nor_sees_the_test_set(description, tastes, tmp_path):
    description["ranking"] = {"threshold": 3}

    def scores(experiment, name: str) -> list[float]:
        return Result(running.run(experiment, out=tmp_path / name)).history.rounds["accuracy"].dropna().tolist()

    # Whatever the test rows hold, the run is the same: here the two last of each user are no longer liked.
    first = scores(validating(description), "first")
    rows = [line.split("\t") for line in tastes.read_text().splitlines()]
    for row in rows[1:]:
        row[2] = "1" if row[3] in ("1008", "1009") else row[2]
    changed_file = tmp_path / "changed.tsv"
    changed_file.write_text("\n".join("\t".join(row) for row in rows) + "\n")
    again = validating(description, path=str(changed_file))
    assert len(first) == 5  # the first model and four epochs
    assert scores(again, "second") == first


def test_validation_that_leaves_nobody_to_test_is_refused(description):
    experiment = validating(description, validation=0.05)
    assert_refused(experiment.run_data, "no user has a relevant validation item")


def test_the_split_command_writes_the_validation_rows_apart(tastes, tmp_path, command):
    words = ["recommend", "split", tastes]
    done = command(*words, "--out", "cut", "--validation", "0.25")
    assert done.returncode == 0, done.stderr
    assert "train: 144, validation: 48, test: 48 interactions" in done.stdout
    lines = (tmp_path / "cut" / "validation.tsv").read_text().splitlines()
    assert {line.split("\t")[3] for line in lines[1:]} == {"1006", "1007"}


def test_a_folder_of_tables_is_one_table(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("user,item\nben,fargo\n")
    (tmp_path / "a.tsv").write_text("user\titem\nann\theat\nben\theat\n")
    (tmp_path / "README.md").write_text("no table")
    found = read(tmp_path)
    pairs = zip(found.users[found.user].tolist(), found.items[found.item].tolist(), strict=True)
    assert list(pairs) == [("ann", "heat"), ("ben", "heat"), ("ben", "fargo")]
    (tmp_path / "empty").mkdir()
    assert_refused(lambda: read(tmp_path / "empty"), "empty", "no table in this folder", ".tsv")
