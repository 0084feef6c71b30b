"""The two published cases: most popular on Facebook Books and on Amazon Digital Music."""

from pathlib import Path

import pytest

from steelyard.recommend import filters, splits
from steelyard.recommend.baselines import recommend
from steelyard.recommend.metrics import measure
from steelyard.recommend.ranking import GroundTruth
from steelyard.recommend.reading import read

DATA = Path(__file__).parents[2] / ".." / "shared" / "data"


def shared(name: str) -> Path:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"data file {name} is not here")
    return path


def test_facebook_books_most_popular():
    data = filters.core(read(shared("facebook_books/dataset.tsv.gz")), 5, 5)
    assert (len(data.users), len(data.items), len(data)) == (1363, 782, 13788)
    split = splits.shuffled(data, 0.2, 42)
    assert len(split.train) == 10490
    lists, _ = recommend("popular", split.train, 10)
    truth = GroundTruth.of(split)
    ten, one = measure(truth.view(lists, 10)), measure(truth.view(lists, 1))
    # Published with four decimals.
    assert ten["ndcg"] == pytest.approx(0.0939, abs=5e-5)
    assert one["ndcg"] == pytest.approx(0.0829, abs=5e-5)
    assert (ten["item_coverage"], one["item_coverage"]) == (16, 4)
    # Published with four decimals.
    assert ten["gini"] == pytest.approx(0.0127, abs=5e-5)
    assert one["gini"] == pytest.approx(0.0007, abs=5e-5)
    assert (ten["aclt"], ten["pop_reo"], ten["pop_rsp"]) == (0, 1, 1)


def test_amazon_digital_music_most_popular():
    data = read(shared("amazon_digital_music/AmazonDigitalMusic.tsv.gz"))
    split = splits.temporal(data, 0.2)
    assert (len(split.train), len(split.test)) == (61408, 14524)
    lists, _ = recommend("popular", split.train, 10)
    ten = measure(GroundTruth.of(split).view(lists, 10))
    # Published with five decimals.
    assert ten["precision"] == pytest.approx(0.00469, abs=5e-6)
    assert ten["recall"] == pytest.approx(0.00603, abs=5e-6)
    assert ten["item_coverage"] == 24
    # Published with five decimals.
    assert ten["gini"] == pytest.approx(0.00023, abs=5e-6)
    assert GroundTruth.of(split).items == 41488
