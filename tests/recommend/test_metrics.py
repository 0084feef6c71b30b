"""Metrics by hand, against public implementations, and as properties."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.recommend import metrics as m
from steelyard.recommend.evaluate import compare
from steelyard.recommend.interactions import Split, build
from steelyard.recommend.metrics import GroundTruth, memberships, top


def truth(train, test, users="abc", items="123456", threshold=None, ratings=None) -> GroundTruth:
    """Tables from pairs like "a1"; users and items are single characters."""
    shared = {"all_users": users, "all_items": items}
    left = build([p[0] for p in train], [p[1] for p in train], **shared)
    right = build([p[0] for p in test], [p[1] for p in test], ratings, **shared)
    return GroundTruth.between(left, right, threshold)


def lists(*rows: str, places: int = 4) -> np.ndarray:
    """Lists of items "1".."9" by their numbers 0..8; short ones are filled up with -1."""
    return np.array([[int(c) - 1 for c in row] + [-1] * (places - len(row)) for row in rows])


# Popularity: item 1 four times, 2 twice, 3 and 4 once; 8 in all, 80 % are 6.4, so the short head is 1, 2, 3.
TRAIN = ["a1", "b1", "c1", "d1", "a2", "b2", "c3", "d4"]
TEST = ["a3", "a5", "b4", "c2", "c5", "c6"]


@pytest.fixture
def hand():
    # a sees 3,4,5 (hits 3 and 5), b sees 3,5 (none), c sees 1,2,4 (hit 2), d sees 2,3,5 (has no test item).
    return truth(TRAIN, TEST, users="abcd").view(lists("345", "35", "124", "235"), 3)


def test_accuracy_by_hand(hand):
    precision, recall = 1 / 3, 4 / 9
    second, third = 1 / math.log2(3), 0.5
    for metric, per_user in (
        (m.Precision(), [2 / 3, 0, 1 / 3, 0]),
        (m.Recall(), [1, 0, 1 / 3, 0]),
        (m.UserF1(), [4 / 5, 0, 2 / 6, 0]),
        (m.HitRate(), [1, 0, 1, 0]),
        (m.NDCG(), [(1 + third) / (1 + second), 0, second / (1 + second + third), 0]),
    ):
        # d has no relevant item: she has a value, and no part in the mean.
        assert metric.per_user(hand).tolist() == pytest.approx(per_user)
        assert metric(hand) == pytest.approx(sum(per_user) / 3)
    assert m.F1()(hand) == pytest.approx(2 * precision * recall / (precision + recall))
    assert hand.judged.tolist() == [True, True, True, False]
    assert m.HitRate().per_user(hand).dtype == np.float64


def test_beyond_accuracy_by_hand(hand):
    # Shown: 1 once, 2 twice, 3 three times, 4 twice, 5 three times, 6 never; 11 places.
    assert m.ItemCoverage()(hand) == 5
    assert m.ItemCoverageShare()(hand) == pytest.approx(5 / 6)
    ascending = [0, 1, 2, 2, 3, 3]
    index = sum((2 * i - 7) * count for i, count in enumerate(ascending, 1)) / (5 * 11)
    assert m.Gini()(hand) == pytest.approx(1 - index)
    shares = [1 / 11, 2 / 11, 2 / 11, 3 / 11, 3 / 11]
    assert m.ShannonEntropy()(hand) == pytest.approx(-sum(p * math.log(p) for p in shares))
    assert m.ShannonEntropy(2)(hand) == pytest.approx(-sum(p * math.log2(p) for p in shares))


def test_popularity_bias_by_hand(hand):
    assert hand.truth.short_head.tolist() == [True, True, True, False, False, False]
    # Tail items per list of a, b, c: {4, 5}, {5}, {4}.
    assert m.ACLT()(hand) == pytest.approx(4 / 3)
    # Relevant: head a3, c2; tail a5, b4, c5, c6. Hits: head 3 and 2, tail 5.
    head, tail = 2 / 2, 1 / 4
    assert m.PopREO()(hand) == pytest.approx(abs(head - tail) / (head + tail))
    # Shown: head 6, tail 5. Room: each has 3 items; training takes a 2, b 2, c 2, d 1 of the head and d 1 of the tail.
    head, tail = 6 / (12 - 7), 5 / (12 - 1)
    assert m.PopRSP()(hand) == pytest.approx(abs(head - tail) / (head + tail))


def test_statistical_parity_counts_only_users_who_got_a_list():
    # d gets no list: what she could have been shown is not counted. Shown: head 3, tail 5.
    view = truth(TRAIN, TEST, users="abcd").view(lists("345", "35", "245", ""), 3)
    # Room: three items a group for a, b and c, who trained on two each of the head and on none of the tail.
    head, tail = 3 / (9 - 6), 5 / 9
    assert m.PopRSP()(view) == pytest.approx(abs(head - tail) / (head + tail))


def test_head_border_is_exact_and_ties_go_by_id():
    # 10 interactions; after items 1 and 2 exactly 8 are reached; 3 and 4 tie behind them.
    train = ["a1"] * 5 + ["a2"] * 3 + ["a4", "a3"]
    assert truth(train, ["a5"]).short_head.tolist() == [True, True, False, False, False, False]
    # Items 1..5 tie with two each: the first four by id hold 80 %.
    train = [f"{user}{item}" for item in "54321" for user in "ab"]
    assert truth(train, ["a6"]).short_head.tolist() == [True] * 4 + [False] * 2


def test_threshold_decides_relevance():
    base = truth(["a1"], ["a2", "a3", "b2"], threshold=3, ratings=[3, 2.5, 1])
    assert base.relevant.tolist() == [1, 0, 0]


def test_undefined_metrics_are_nan():
    empty = truth(["a1"], []).view(lists("", "", ""), 2)
    for metric in (m.Precision(), m.NDCG(), m.Gini(), m.ShannonEntropy(), m.PopREO(), m.PopRSP()):
        assert math.isnan(metric(empty))


def test_accuracy_agrees_with_a_public_implementation(hand):
    """ir-measures, which asks trec_eval."""
    ir = pytest.importorskip("ir_measures")
    judged = [ir.Qrel(user, item, 1) for user, item in TEST]
    run = [
        ir.ScoredDoc("abcd"[u], str(i + 1), -place) for u, row in enumerate(hand.lists) for place, i in enumerate(row)
    ]
    wanted = {ir.P @ 3: m.Precision(), ir.R @ 3: m.Recall(), ir.nDCG @ 3: m.NDCG(), ir.Success @ 3: m.HitRate()}
    for measure, value in ir.calc_aggregate(list(wanted), judged, run).items():
        assert wanted[measure](hand) == pytest.approx(value, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 9))
def test_top_equals_a_full_sort_with_ties_by_number(seed, cutoff):
    random = np.random.default_rng(seed)
    scores = random.integers(0, 4, size=(5, 8)).astype(float)
    seen = random.random((5, 8)) < 0.4
    for row in range(5):
        order = sorted((i for i in range(8) if not seen[row, i]), key=lambda i: (-scores[row, i], i))
        wanted = (order + [-1] * cutoff)[:cutoff]
        assert top(scores, seen, cutoff)[row].tolist() == wanted


def test_paired_tests_agree_with_scipy_and_handle_equal_systems():
    from scipy import stats

    first, second = np.array([0.1, 0.5, 0.9, 0.4, 0.2]), np.array([0.2, 0.4, 0.5, 0.1, 0.15])
    outcome = compare(first, second)
    assert outcome.t_p == pytest.approx(stats.ttest_rel(first, second).pvalue)
    assert outcome.wilcoxon_p == pytest.approx(stats.wilcoxon(first, second).pvalue)
    same = compare(first, first)
    assert (same.t_p, same.wilcoxon_p) == (1.0, 1.0)


# ---------------------------------------------------------------- at the edges


def test_lists_shorter_than_k_count_at_k():
    base = truth(["c6"], ["a1", "a2", "b3"])
    view = base.view(lists("1", "45", "6"), 4)
    assert view.cutoff == 4
    assert m.Precision().per_user(view).tolist() == pytest.approx([0.25, 0, 0])
    # At most k hits are possible, and no more than there are relevant items.
    assert m.NDCG()(view) == pytest.approx(1 / (1 + 1 / math.log2(3)) / 2)
    narrow = base.view(lists("12", "45", "6", places=2), 1)
    assert narrow.lists.shape == (3, 1)
    assert m.NDCG()(narrow) == pytest.approx(0.5)
    # Fewer places than k.
    few = base.view(lists("12", "31", "45", places=2), 5)
    assert (m.NDCG()(few), m.Recall()(few)) == pytest.approx((1.0, 1.0))
    assert m.Precision()(few) == pytest.approx((2 / 5 + 1 / 5) / 2)


def test_no_hit_at_all_is_zero_not_undefined_and_f1_of_equals_is_the_same():
    view = truth(["c6"], ["a1"]).view(lists("2", "3", "4"), 1)
    assert m.F1()(view) == m.UserF1()(view) == m.HitRate()(view) == 0.0
    view = truth(["c6"], ["a1", "b1"]).view(lists("1", "2", "3"), 1)
    assert m.Precision()(view) == m.Recall()(view) == m.F1()(view) == 0.5


def test_one_item_shown_to_all_has_no_entropy():
    base = truth(["a1"], ["a2"], users="ab")
    found = m.ShannonEntropy()(base.view(lists("1", "1"), 1))
    assert found == 0.0
    assert math.copysign(1, found) == 1.0
    two = m.ShannonEntropy(2)(base.view(lists("1", "2"), 1))
    assert two == pytest.approx(1.0)


def test_a_catalogue_of_one_item_has_no_gini_and_of_none_no_coverage():
    assert math.isnan(m.Gini()(truth(["a1"], ["a1"], users="a", items="1").view(lists("1"), 1)))
    with np.errstate(all="raise"):
        assert math.isnan(m.Gini()(truth(["a1"], ["a1"], users="a", items="12").view(lists(""), 1)))
    assert m.Gini()(truth(["a1"], ["a1"], users="a", items="12").view(lists("1"), 1)) == pytest.approx(0)
    none = np.zeros(0, dtype=np.int64)
    nothing = GroundTruth(1, 0, none, none, none, none).view(lists(""), 1)
    assert math.isnan(m.ItemCoverageShare()(nothing))
    assert m.ItemCoverage()(nothing) == 0
    assert isinstance(m.ItemCoverage()(nothing), int)


@pytest.mark.parametrize(
    ("metric", "train", "test", "shown", "expected"),
    [
        # The head is item 1, the tail 2 to 6; nobody's relevant item is in the head.
        (m.PopREO(), "a1 b1 c1", "a2 b3", "123", math.nan),
        # Relevant ones in both, none of them hit: both recalls are 0.
        (m.PopREO(), "a1 b1", "c1 b3", "444", math.nan),
        # As much of both as is relevant: even.
        (m.PopREO(), "a1 b1", "c1 b3", "431", 0.0),
        # Only relevant ones in the head: nothing to hold it against.
        (m.PopREO(), "a1 b1", "c1", "441", math.nan),
        # One relevant in the tail, hit, and none of one in the head: as uneven as can be.
        (m.PopREO(), "a1 b1", "c1 b3", "434", 1.0),
        # Everyone trained on the whole head: nothing of it could be shown.
        (m.PopRSP(), "a1 b1 c1", "a2", "222", math.nan),
        # One who did not, and one of two possible head items: 1/1 against 2/15.
        (m.PopRSP(), "a1 b1", "a2", "231", (1 - 2 / 15) / (1 + 2 / 15)),
    ],
)
def test_parity_needs_both_groups_and_something_in_them(metric, train, test, shown, expected):
    view = truth(train.split(), test.split()).view(lists(*shown), 1)
    assert metric(view) == pytest.approx(expected, nan_ok=True)


def test_every_metric_is_measured_once_by_its_name(hand):
    measured = m.measure(hand)
    assert list(measured) == [
        *("precision", "recall", "f1", "f1_per_user", "hit_rate", "ndcg", "item_coverage", "item_coverage_share"),
        *("gini", "shannon_entropy", "aclt", "pop_reo", "pop_rsp"),
    ]
    assert measured["recall"] == m.Recall()(hand)
    assert measured["pop_rsp"] == m.PopRSP()(hand)


def test_repeated_training_rows_count_once_for_parity_and_each_for_popularity():
    base = truth(["a1", "a1", "a1", "a2", "b1"], ["a3"], users="ab", items="123")
    assert base.popularity.tolist() == [4, 1, 0]
    assert base.short_head.tolist() == [True, False, False]
    assert base.distinct_train(base.short_head).tolist() == [1, 1]
    assert base.distinct_train(~base.short_head).tolist() == [1, 0]


def test_without_training_there_is_no_head():
    base = truth([], ["a1"])
    assert base.short_head.tolist() == [False] * 6
    assert base.distinct_train(~base.short_head).tolist() == [0, 0, 0]


def test_categories_by_name():
    base = truth(["a1", "a2", "b1"], ["a3"], users="ab", items="123")
    pairs = [("1", "x"), ("2", "x"), ("2", "y"), ("9", "y"), ("2", "x"), ("9", "z")]
    found = base.with_categories(list("123"), pairs)
    # Item 9 is not in the catalogue; its category stays, without items.
    assert found.categories == ("x", "y", "z")
    members = sorted(zip(found.member_item.tolist(), found.member_category.tolist(), strict=True))
    assert members == [(0, 0), (1, 0), (1, 1)]
    assert found.relevant.tolist() == base.relevant.tolist()
    bias = m.bias_disparity(found.view(lists("3", "2", places=1), 1))
    # Taken: x 3 of 3, y 1 of 3, z none; x has 2 of 3 items, y 1 of 3, z none. Shown: item 3 and item 2.
    assert bias.source[:2] == pytest.approx([1 / (2 / 3), (1 / 3) / (1 / 3)])
    assert bias.recommended[:2] == pytest.approx([0.5 / (2 / 3), 0.5 / (1 / 3)])
    assert bias.disparity[:2] == pytest.approx([-0.5, 0.5])
    assert math.isnan(bias.disparity[2])
    assert bias.categories == ("x", "y", "z")


def test_bias_counts_only_what_was_liked():
    shared = {"all_users": "ab", "all_items": "12"}
    train = build(list("aabb"), list("1212"), [5.0, 1.0, 3.0, 2.0], **shared)
    base = GroundTruth.between(train, build(["a"], ["1"], [3.0], **shared), threshold=3.0)
    assert base.liked is not None
    assert base.liked.tolist() == [True, False, True, False]
    base = base.with_categories(list("12"), [("1", "x"), ("2", "y")])
    bias = m.bias_disparity(base.view(lists("2", "2", places=1), 1))
    assert bias.source == pytest.approx([2, 0])
    assert bias.recommended == pytest.approx([0, 2])
    # Nothing shown at all: no preference, and no division by 0.
    assert m.bias_disparity(base.view(lists("", "", places=1), 1)).recommended == pytest.approx([0, 0])


def test_a_split_is_judged_by_its_two_tables():
    shared = {"all_users": "ab", "all_items": "123"}
    train = build(list("ab"), list("12"), **shared)
    test = build(list("abb"), list("233"), [4.0, 2.0, 5.0], **shared)
    split = Split(train, test)
    every = GroundTruth.of(split)
    assert (every.users, every.items) == (2, 3)
    assert every.liked is None
    # A pair that comes twice is one relevant item.
    assert (every.test_user.tolist(), every.test_item.tolist()) == ([0, 1], [1, 2])
    assert (every.train_user.tolist(), every.train_item.tolist()) == ([0, 1], [0, 1])
    assert GroundTruth.of(split, 4.5).relevant.tolist() == [0, 1]


def test_a_cell_may_join_several_categories():
    assert memberships(["1", "2"], ["x | y", "|z|"]) == [("1", "x"), ("1", "y"), ("2", "z")]
    assert memberships([3], [4]) == [("3", "4")]  # type: ignore[list-item]
    with pytest.raises(ValueError, match="shorter"):
        memberships(["1", "2"], ["x"])


def test_hits_belong_to_the_user_who_took_the_item():
    view = truth(["a6"], ["b1", "c3"]).view(lists("13", "13", "13", places=2), 2)
    assert view.hits.tolist() == [[False, False], [True, False], [False, True]]
    assert view.times_shown.tolist() == [3, 0, 3, 0, 0, 0]
    # A place without an item is no hit, also where its number would point at the user before.
    last = truth(["c1"], ["a6", "b2"]).view(lists("6", "", "", places=1), 1)
    assert last.hits.tolist() == [[True], [False], [False]]


def test_the_best_items_of_few_and_one_without_a_number_for_a_score():
    seen = np.array([[False, True, False], [False, False, False]])
    found = top(np.array([[0.1, 0.9, 0.5], [np.nan, 0.2, 0.3]]), seen, 4)
    assert found.tolist() == [[2, 0, -1, -1], [2, 1, -1, -1]]
    empty = top(np.zeros((2, 0)), np.zeros((2, 0), dtype=bool), 2)
    assert (found.dtype, empty.dtype, empty.tolist()) == (np.int64, np.int64, [[-1, -1], [-1, -1]])
    assert top(np.zeros((0, 3)), np.zeros((0, 3), dtype=bool), 2).shape == (0, 2)
