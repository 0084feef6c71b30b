"""What a node keeps of some of the users."""

import numpy as np
import pytest

from steelyard.recommend.interactions import Interactions, build
from steelyard.recommend.metrics import bias_disparity
from steelyard.recommend.ranking import GroundTruth
from steelyard.recommend.sampling import Histories
from steelyard.recommend.users import Users

# Ratings of 4 and 5 are likes. Users and items ascend by name; ben has no test row, cleo has two.
TRAIN = [("ada", "w", 5), ("ada", "x", 2), ("ben", "x", 4), ("ben", "y", 1), ("ben", "z", 5), ("cleo", "w", 1)]
TEST = [("ada", "y", 4), ("cleo", "x", 5), ("cleo", "z", 4)]


def table(rows: list[tuple[str, str, int]]) -> Interactions:
    columns = [list(column) for column in zip(*rows, strict=True)]
    return build(columns[0], columns[1], columns[2], all_users=["ada", "ben", "cleo"], all_items=list("wxyz"))


@pytest.fixture
def users() -> Users:
    train = table(TRAIN)
    truth = GroundTruth.between(train, table(TEST), threshold=4)
    histories = Histories.of(train)
    facts = {name: {"age": float(age)} for name, age in (("ada", 30), ("ben", 40), ("cleo", 50))}
    return Users(histories, truth, np.array([0.1, 0.2, 0.3]), histories.items.astype(np.int64) * 10, facts)


def test_likes_stay_with_the_rows_they_belong_to(users: Users):
    assert users.truth.liked is not None
    assert users.truth.liked.tolist() == [True, False, True, False, True, False]
    ben = users.keep(["ben"]).truth
    assert (ben.train_user.tolist(), ben.train_item.tolist()) == ([0, 0, 0], [1, 2, 3])
    assert ben.liked is not None
    assert ben.liked.tolist() == [True, False, True]
    others = users.keep(["ada", "cleo"]).truth
    assert (others.train_user.tolist(), others.train_item.tolist()) == ([0, 0, 1], [0, 1, 0])
    assert others.liked is not None
    assert others.liked.tolist() == [True, False, False]


def test_bias_of_the_kept_users_counts_their_own_likes(users: Users):
    """ben likes x and z; with categories {w, x} and {y, z}, each holds half of his likes and half of the items."""
    pairs = [("w", "first"), ("x", "first"), ("y", "second"), ("z", "second")]
    ben = users.keep(["ben"]).truth.with_categories(list("wxyz"), pairs)
    assert bias_disparity(ben.view(np.array([[0]]), 1)).source == pytest.approx([1, 1])


def test_everything_else_of_the_others_is_gone_and_items_keep_their_numbers(users: Users):
    kept = users.keep(["cleo", "ben"])
    histories = kept.histories
    assert histories.names == ("ben", "cleo")
    assert (histories.catalogue, histories.starts.tolist()) == (4, [0, 3, 4])
    assert histories.items.tolist() == [1, 2, 3, 0]
    assert histories.fakes.tolist() == [0, 0]
    assert (kept.truth.users, kept.truth.items) == (2, 4)
    assert (kept.truth.test_user.tolist(), kept.truth.test_item.tolist()) == ([1, 1], [1, 3])
    assert kept.shares.tolist() == [0.2, 0.3]
    assert kept.kinds.tolist() == [10, 20, 30, 0]
    assert set(kept.facts) == {"ben", "cleo"}


def test_all_training_rows_are_likes_where_no_threshold_is_set(users: Users):
    plain = Users(users.histories, GroundTruth.between(table(TRAIN), table(TEST)), users.shares, users.kinds)
    assert plain.keep(["ada"]).truth.liked is None


def test_decoys_go_with_their_user(users: Users):
    claimed = Users(users.histories.with_decoys(1.0, seed=1), users.truth, users.shares, np.arange(8))
    kept = claimed.keep(["cleo"]).histories
    whole = claimed.histories
    assert kept.fakes.tolist() == [1]
    assert kept.items.tolist() == whole.items[whole.starts[2] : whole.starts[3]].tolist()
    assert kept.own(0).tolist() == [0]
