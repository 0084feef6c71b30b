"""Metrics by hand, against public implementations, and as properties."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.recommend import metrics as m
from steelyard.recommend.interactions import build
from steelyard.recommend.ranking import Ground, top
from steelyard.recommend.significance import compare


def ground(train, test, users="abc", items="123456", threshold=None, ratings=None) -> Ground:
    """Tables from pairs like "a1"; users and items are single characters."""
    shared = {"all_users": users, "all_items": items}
    left = build([p[0] for p in train], [p[1] for p in train], **shared)
    right = build([p[0] for p in test], [p[1] for p in test], ratings, **shared)
    return Ground.between(left, right, threshold)


def lists(*rows: str, places: int = 4) -> np.ndarray:
    """Lists of items "1".."9" by their numbers 0..8; short ones are filled up with -1."""
    return np.array([[int(c) - 1 for c in row] + [-1] * (places - len(row)) for row in rows])


# Popularity: item 1 four times, 2 twice, 3 and 4 once; 8 in all, 80 % are 6.4, so the short head is 1, 2, 3.
TRAIN = ["a1", "b1", "c1", "d1", "a2", "b2", "c3", "d4"]
TEST = ["a3", "a5", "b4", "c2", "c5", "c6"]


@pytest.fixture
def hand():
    # a sees 3,4,5 (hits 3 and 5), b sees 3,5 (none), c sees 1,2,4 (hit 2), d sees 2,3,5 (has no test item).
    return ground(TRAIN, TEST, users="abcd").view(lists("345", "35", "124", "235"), 3)


def test_accuracy_by_hand(hand):
    assert m.Precision()(hand) == pytest.approx((2 / 3 + 0 + 1 / 3) / 3)
    assert m.Recall()(hand) == pytest.approx((1 + 0 + 1 / 3) / 3)
    precision, recall = 1 / 3, 4 / 9
    assert m.F1()(hand) == pytest.approx(2 * precision * recall / (precision + recall))
    assert m.UserF1()(hand) == pytest.approx((4 / 5 + 0 + 2 / 6) / 3)
    assert m.HitRate()(hand) == pytest.approx(2 / 3)
    second, third = 1 / math.log2(3), 0.5
    a = (1 + third) / (1 + second)
    c = second / (1 + second + third)
    assert m.NDCG()(hand) == pytest.approx((a + 0 + c) / 3)


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
    assert hand.ground.short_head.tolist() == [True, True, True, False, False, False]
    # Tail items per list of a, b, c: {4, 5}, {5}, {4}.
    assert m.ACLT()(hand) == pytest.approx(4 / 3)
    # Relevant: head a3, c2; tail a5, b4, c5, c6. Hits: head 3 and 2, tail 5.
    head, tail = 2 / 2, 1 / 4
    assert m.PopREO()(hand) == pytest.approx(abs(head - tail) / (head + tail))
    # Shown: head 6, tail 5. Room: each has 3 items; training takes a 2, b 2, c 2, d 1 of the head and d 1 of the tail.
    head, tail = 6 / (12 - 7), 5 / (12 - 1)
    assert m.PopRSP()(hand) == pytest.approx(abs(head - tail) / (head + tail))
    rates = np.array([head, tail])
    assert m.PopRSP()(hand) == pytest.approx(rates.std() / rates.mean())


def test_statistical_parity_counts_only_users_who_got_a_list():
    # d gets no list: what she could have been shown is not counted. Shown: head 3, tail 5.
    view = ground(TRAIN, TEST, users="abcd").view(lists("345", "35", "245", ""), 3)
    # Room: three items a group for a, b and c, who trained on two each of the head and on none of the tail.
    head, tail = 3 / (9 - 6), 5 / 9
    assert m.PopRSP()(view) == pytest.approx(abs(head - tail) / (head + tail))


def test_head_border_is_exact_and_ties_go_by_id():
    # 10 interactions; after items 1 and 2 exactly 8 are reached; 3 and 4 tie behind them.
    train = ["a1"] * 5 + ["a2"] * 3 + ["a4", "a3"]
    assert ground(train, ["a5"]).short_head.tolist() == [True, True, False, False, False, False]
    # Items 1..5 tie with two each: the first four by id hold 80 %.
    train = [f"{user}{item}" for item in "54321" for user in "ab"]
    assert ground(train, ["a6"]).short_head.tolist() == [True] * 4 + [False] * 2


def test_bias_disparity_by_hand():
    from dataclasses import replace

    base = ground(["a1", "a2", "b1", "b3"], ["a3"], users="ab", items="1234")
    two = replace(
        base,
        categories=("x", "y"),
        member_item=np.array([0, 1, 2, 3]),
        member_category=np.array([0, 0, 0, 1]),
    )
    bias = m.bias_disparity(two.view(lists("34", "24", places=2), 2))
    # Training: x 4 of 4 with 3 of 4 items; lists: x 2 of 4, y 2 of 4.
    assert bias.source == pytest.approx([4 / 3, 0])
    assert bias.recommended == pytest.approx([0.5 / 0.75, 0.5 / 0.25])
    assert bias.disparity[0] == pytest.approx(-0.5)
    assert math.isnan(bias.disparity[1])


def test_threshold_decides_relevance():
    base = ground(["a1"], ["a2", "a3", "b2"], threshold=3, ratings=[3, 2.5, 1])
    assert base.relevant.tolist() == [1, 0, 0]


def test_undefined_metrics_are_nan():
    empty = ground(["a1"], []).view(lists("", "", ""), 2)
    for metric in (m.Precision(), m.NDCG(), m.Gini(), m.ShannonEntropy(), m.PopREO(), m.PopRSP()):
        assert math.isnan(metric(empty))


def test_most_unequal_and_most_equal_gini():
    base = ground(["a1"], ["a2"], users="ab")
    assert m.Gini()(base.view(lists("1", "1"), 1)) == pytest.approx(0)
    assert m.Gini()(base.view(lists("123456", "123456", places=6), 6)) == pytest.approx(1)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_accuracy_agrees_with_public_implementations(seed, cutoff):
    """nDCG with scikit-learn; P, R, nDCG and hit rate with ir-measures (trec_eval)."""
    ir = pytest.importorskip("ir_measures")
    from sklearn.metrics import ndcg_score

    random = np.random.default_rng(seed)
    users, items = 7, 15
    relevance = random.random((users, items)) < 0.3
    relevance[np.arange(users), random.integers(items, size=users)] = True
    scores = random.permuted(np.tile(np.arange(items, dtype=float), (users, 1)), axis=1)
    ranked = top(scores, np.zeros_like(relevance), items)
    user, item = np.nonzero(relevance)
    base = Ground(users, items, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), user, item)
    view = base.view(ranked, cutoff)
    assert m.NDCG()(view) == pytest.approx(ndcg_score(relevance, scores, k=cutoff))
    judged = [ir.Qrel(str(u), str(i), 1) for u, i in zip(user, item, strict=True)]
    run = [ir.ScoredDoc(str(u), str(i), scores[u, i]) for u in range(users) for i in range(items)]
    wanted = {ir.P @ cutoff: m.Precision(), ir.R @ cutoff: m.Recall(), ir.nDCG @ cutoff: m.NDCG()}
    wanted[ir.Success @ cutoff] = m.HitRate()
    for measure, value in ir.calc_aggregate(list(wanted), judged, run).items():
        assert wanted[measure](view) == pytest.approx(value, abs=1e-9)


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
    assert outcome.difference == pytest.approx(0.15)
    same = compare(first, first)
    assert (same.t_p, same.wilcoxon_p) == (1.0, 1.0)
    constant = compare(np.array([0.5, 0.5, 0.5]), np.zeros(3))
    assert constant.t_p == 0.0
    assert math.isinf(constant.t)
