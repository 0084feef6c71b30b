"""New items: none of their interactions is trained on, and features tell whose they are."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.cold_start import Kgflex, judged, popular_features
from benchmarks.cold_start_data import Case, Draw, draw
from tests.recommend.conftest import two_tastes

from steelyard.recommend.baselines.plain import random
from steelyard.recommend.baselines.vsm import vsm
from steelyard.recommend.interactions import build
from steelyard.recommend.knowledge import features


@pytest.fixture(scope="module")
def case() -> Case:
    return Case((), 0, {}, triples=4)


@pytest.fixture(scope="module")
def drawn(case: Case) -> Draw:
    columns = list(zip(*two_tastes(users=60, items=100, taken=20), strict=True))
    data = build(columns[0], columns[1], columns[2])
    # Each item is of a half, and one of four colours that say nothing.
    half = [(row, int(item >= "i50")) for row, item in enumerate(data.items.tolist())]
    pairs = np.array([*half, *((row, 2 + row % 4) for row, _ in half)])
    return draw(data, features.build(pairs[:, 0], pairs[:, 1], len(data.items), list("abcdef")), case, 1)


def test_new_items_have_no_training_row_and_are_all_of_the_test(drawn: Draw) -> None:
    assert len(drawn.new) == 20
    assert not np.isin(drawn.train.item, drawn.new).any()
    assert sorted([*drawn.new.tolist(), *drawn.old.tolist()]) == list(range(100))
    assert drawn.truth.items == 20
    assert len(drawn.truth.test_user) + len(drawn.train) == 1200


def test_what_reads_features_finds_whose_they_are(case: Case, drawn: Draw) -> None:
    chance = judged(drawn, random(drawn.train))["ndcg"]
    known = judged(drawn, vsm(drawn.train, drawn.features))["ndcg"]
    model = Kgflex(drawn, case, 100, 1)
    model.train_to(10)
    learned = judged(drawn, model.scores)["ndcg"]
    assert known > chance + 0.1
    assert learned > chance + 0.1


def test_popularity_of_features_is_that_of_old_items() -> None:
    train = build(["u", "v", "w"], ["0", "0", "1"], all_items=list("0123"))
    pairs = np.array([(0, 0), (1, 1), (2, 0), (3, 1), (3, 0)])
    known = features.build(pairs[:, 0], pairs[:, 1], 4, ["a", "b"])
    drawn = Draw(train, np.array([2, 3]), None, known)  # type: ignore[arg-type]
    # Feature a: item 0 with two rows; feature b: item 1 with one. Item 3 has both.
    assert popular_features(drawn)(np.array([0])).tolist() == [[2.0, 1.0, 2.0, 1.5]]
