"""Reading, filtering and splitting interactions."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from steelyard.errors import UserError
from steelyard.recommend import filters, splits
from steelyard.recommend.interactions import ascending, build
from steelyard.recommend.reading import read

FORMS = {
    "ratings.dat": "1::10::5::100\n2::9::3::50\n",
    "u.data": "1\t10\t5\t100\n2\t9\t3\t50\n",
    "ml.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n1\t10\t5\t100\n2\t9\t3\t50\n",
    "amazon.tsv": "user_id\titem_id\trating\tutc\n1\t10\t5\t100\n2\t9\t3\t50\n",
    "other order.csv": "timestamp,rating,movieId,userId\n100,5,10,1\n50,3,9,2\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_table(tmp_path: Path, name: str):
    for path, raw in (
        (tmp_path / name, FORMS[name].encode()),
        (tmp_path / (name + ".gz"), gzip.compress(FORMS[name].encode())),
    ):
        path.write_bytes(raw)
        data = read(path)
        assert data.users.tolist() == ["1", "2"]
        assert data.items.tolist() == ["9", "10"]  # whole numbers ascend as numbers
        assert data.user.tolist() == [0, 1]
        assert data.item.tolist() == [1, 0]
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


def test_headerless_pairs_and_own_column_names(tmp_path: Path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("anna\tx\nbob\ty\n")
    assert read(pairs).rating.tolist() == [1, 1]
    own = tmp_path / "own.csv"
    own.write_text("reader,book,stars\nanna,x,4\n")
    data = read(own, {"user": "reader", "item": "book"})
    assert (data.users.tolist(), data.items.tolist(), data.rating.tolist()) == (["anna"], ["x"], [4])


def test_ids_keep_their_leading_zeros(tmp_path: Path):
    path = tmp_path / "zeros.tsv"
    path.write_text("user\titem\n007\t1\n7\t1\n")
    assert read(path).users.tolist() == ["007", "7"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\t2\tx\t5\n", "line 1: rating is 'x'; allowed: a number"),
        ("user\titem\trating\n1\t2\t3\n1\t3\tnan\n", "line 3: rating is 'nan'"),
        ("user\titem\ttime\n1\t2\t2012-04-03\n1\t2\tsoon\n", "line 3: time is 'soon'"),
        ("user\titem\n1\t\n", "line 2: item is ''"),
        ("", "empty"),
        ("1\t2\n1\t2\t3\t4\n", "same number of fields"),
        ("abc\n", "allowed separators"),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, text: str, message: str):
    path = tmp_path / "bad.tsv"
    path.write_text(text)
    with pytest.raises(UserError, match=r"bad\.tsv") as error:
        read(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_and_broken_gzip(tmp_path: Path):
    with pytest.raises(UserError, match="no such file"):
        read(tmp_path / "none.tsv")
    (tmp_path / "broken.tsv.gz").write_bytes(b"not gzip")
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "broken.tsv.gz")


def test_ascending_mixes_of_numbers_and_text():
    assert ascending(["10", "9", "2"]) == ["2", "9", "10"]
    assert ascending(["10", "9", "a"]) == ["10", "9", "a"]


def test_duplicates_keep_the_earliest_the_latest_or_the_mean():
    data = build(["a", "a", "a"], ["x", "x", "y"], [1, 5, 2], [20, 10, 30])
    first = filters.single(data, "first")
    assert (first.rating.tolist(), first.time.tolist()) == ([5, 2], [10, 30])
    assert filters.single(data, "last").rating.tolist() == [1, 2]
    assert filters.single(data, "mean").rating.tolist() == [3, 2]
    assert len(filters.single(data, "keep")) == 3
    assert str(first.dropped[0]) == "repeated pairs (kept: first): dropped 1 interactions, 0 users, 0 items"


def test_core_repeats_until_both_sides_hold():
    # Item z has one row; without it user c has one row; without her item y has one row; and so on down to a, b on x, w.
    data = build(list("aabbcc"), list("xwxwyz"))
    kept = filters.core(data, 2, 2)
    assert (kept.users.tolist(), kept.items.tolist(), len(kept)) == (["a", "b"], ["w", "x"], 4)
    note = kept.dropped[-1]
    assert (note.interactions, note.users, note.items) == (2, 1, 2)
    assert filters.core(data, 0, 0) is data


def test_threshold_reports_what_it_drops():
    kept = filters.at_least(build(["a", "b"], ["x", "y"], [4, 2]), 3)
    assert kept.users.tolist() == ["a"]
    assert "rating below 3: dropped 1 interactions, 1 users, 1 items" in kept.report()[0]


def test_temporal_split_takes_the_newest_with_ties_in_file_order():
    data = build(["a"] * 5 + ["b"] * 4, list("vwxyz") + list("vwxy"), time=[5, 4, 3, 5, 1, 1, 2, 3, 4])
    split = splits.temporal(data, 0.2)
    # a: int(1.0) = 1 of five, the upper of the two rows at time 5; b: int(0.8) = 0.
    assert split.test.items[split.test.item].tolist() == ["v"]
    assert len(split.train) == 8
    assert split.train.users.tolist() == split.test.users.tolist() == ["a", "b"]


def test_newest_leaves_one_out_but_never_all():
    data = build(["a", "a", "b"], list("xyx"), time=[2, 1, 5])
    split = splits.newest(data, 1)
    assert split.test.items[split.test.item].tolist() == ["x"]
    assert split.test.user.tolist() == [0]


def test_random_split_does_not_depend_on_other_users():
    both = build(["a"] * 10 + ["b"] * 10, [str(i) for i in range(10)] * 2)
    alone = both.select(both.user == 0)
    whole = splits.random(both, 0.3, seed=3)
    part = splits.random(alone, 0.3, seed=3)
    assert len(part.test) == 3
    assert whole.test.item[whole.test.user == 0].tolist() == part.test.item.tolist()
    assert splits.random(alone, 0.3, seed=4).test.item.tolist() != part.test.item.tolist()


def test_shuffled_split_is_the_published_one():
    data = build(["2"] * 5 + ["1"] * 5, [str(i) for i in range(5)] * 2)
    source = np.random.RandomState(42)
    marks = []
    for _ in "12":
        row = [0, 0, 0, 0, 1]
        source.shuffle(row)
        marks.append(row)
    test = splits.shuffled(data, 0.2, 42).test
    assert test.item[test.user == 0].tolist() == [marks[0].index(1)]
    assert test.item[test.user == 1].tolist() == [marks[1].index(1)]


def test_impossible_splits_are_refused():
    data = build(["a"], ["x"])
    with pytest.raises(UserError, match="no time column"):
        splits.temporal(data)
    with pytest.raises(UserError, match="split share: got 1"):
        splits.random(data, 1)
