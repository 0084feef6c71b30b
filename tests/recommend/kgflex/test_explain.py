"""What made a score, and what a list keeps of a user's features."""

import numpy as np
import pytest
from tests.recommend.fpl_cases import ITEMS
from tests.recommend.kgflex.kgflex_cases import LIMITS, few_known, sets_of
from tests.recommend.kgflex.test_local_pass import start

from steelyard.recommend.kgflex import explain
from steelyard.recommend.kgflex.model import scores
from steelyard.recommend.settings import KgflexSettings


def test_reasons_add_up_to_the_score():
    histories, knowledge = few_known()
    table, views = start(histories, knowledge)
    found = scores(table, views, knowledge, np.arange(histories.users))
    told = 0
    for user in range(histories.users):
        for item in range(ITEMS):
            reasons = explain.reasons(table, views, knowledge, user, item)
            assert sum(each.part for each in reasons) == pytest.approx(float(found[user, item]), abs=1e-5)
            assert {each.feature for each in reasons} <= sets_of(knowledge.items)[item]
            for each in reasons:
                assert each.part == pytest.approx(each.gain * (each.personal + each.common), abs=1e-5)
            sizes = [abs(each.part) for each in reasons]
            assert sizes == sorted(sizes, reverse=True)
            if reasons:
                assert sum(abs(each.share) for each in reasons) == pytest.approx(1)
            told += len(reasons)
    assert told > 20
    assert explain.reasons(table, views, knowledge, 0, ITEMS - 1) == []


@pytest.mark.parametrize("top", [None, 1, 3])
def test_what_is_kept_is_counted_as_with_sets(top: int | None):
    histories, knowledge = few_known()
    selection, of = knowledge.selection, sets_of(knowledge.items)
    lists = np.stack([np.random.default_rng(u).permutation(ITEMS)[:3] for u in range(histories.users)])
    lists[2, 2] = -1
    lists[3] = -1
    found = explain.kept(selection, explain.shown(knowledge, lists), top)
    for user in range(histories.users):
        mine = selection.entries(user)
        gains = dict(zip(selection.features[mine].tolist(), selection.weights[mine].tolist(), strict=True))
        best = sorted(gains, key=lambda feature: (-gains[feature], feature))[:top]
        listed = set().union(*(of[item] for item in lists[user] if item >= 0), set())
        assert found[user] == pytest.approx(len(set(best) & listed) / len(best))
    assert found[3] == 0
    assert 0 < found.mean() < 1


def test_the_features_after_are_those_of_the_lists_taken_as_histories():
    histories, knowledge = few_known()
    own = [histories.own(user) for user in range(histories.users)]
    lists = np.full((histories.users, max(map(len, own))), -1)
    for user, items in enumerate(own):
        lists[user, : len(items)] = items[::-1]
    again = explain.after_lists(knowledge, lists, histories.names, 1, KgflexSettings(limits=LIMITS))
    # Who is shown exactly what she took keeps everything.
    for name in ("starts", "features", "weights"):
        assert np.array_equal(getattr(again, name), getattr(knowledge.selection, name))
    assert explain.informative_again(knowledge, again).all()
    other = explain.after_lists(
        knowledge, (lists[:, :2] + 5) % ITEMS, histories.names, 1, KgflexSettings(limits=LIMITS)
    )
    assert 0 < explain.informative_again(knowledge, other).mean() < 1


def test_a_cloud_sums_gains_over_users():
    _, knowledge = few_known()
    selection = knowledge.selection
    found = explain.cloud(selection)
    assert found.sum() == pytest.approx(float(selection.weights.sum()))
    feature = int(selection.features[0])
    assert found[feature] == pytest.approx(float(selection.weights[selection.features == feature].sum()))
