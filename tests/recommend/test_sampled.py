"""Test items among sampled negatives, held to a version written out user by user."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import UserError
from steelyard.experiment import running
from steelyard.experiment.loading import build as described
from steelyard.randomness import stream_keys, words
from steelyard.recommend.interactions import build
from steelyard.recommend.judging import Judge
from steelyard.recommend.ranking import GroundTruth
from steelyard.recommend.sampled import Sampled, draw_negatives, per_user, ranks
from steelyard.recommend.sampling import Histories
from steelyard.recommend.users import Users
from steelyard.report.recommender import open_run
from steelyard.result import Result


def ground_of(train: list[tuple[str, int]], test: list[tuple[str, int]], users: list[str], items: int) -> GroundTruth:
    names = {"all_users": users, "all_items": [str(i) for i in range(items)]}
    sides = [build([u for u, _ in side], [str(i) for _, i in side], **names) for side in (train, test)]
    return GroundTruth.between(*sides)


def by_hand(truth: GroundTruth, names: list[str], sampled: Sampled, scores: np.ndarray, cutoff: int) -> dict[str, list]:
    """The protocol in plain Python: one user, one test item, one negative at a time."""
    found = {"hit_rate": [], "ndcg": []}
    for user, name in enumerate(names):
        tests = truth.test_item[truth.test_user == user].tolist()
        taken = set(truth.train_item[truth.train_user == user].tolist()) | set(tests)
        drawn = words(stream_keys(sampled.seed, 0, [name], "sampled negatives")[0], truth.items).tolist()
        negatives = sorted((i for i in range(truth.items) if i not in taken), key=lambda i: drawn[i])[: sampled.count]
        hits, gains = [], []
        for item in tests:
            order = sorted([item, *negatives], key=lambda i: (-scores[user, i], i))
            rank = order.index(item)
            hits.append(float(rank < cutoff))
            gains.append(1 / math.log2(rank + 2) if rank < cutoff else 0.0)
        found["hit_rate"].append(sum(hits) / len(hits) if hits else 0.0)
        found["ndcg"].append(sum(gains) / len(gains) if gains else 0.0)
    return found


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 4))
def test_it_is_the_protocol_done_by_hand(seed: int, count: int, cutoff: int):
    random = np.random.default_rng(seed)
    items, names = int(random.integers(2, 15)), [f"u{i}" for i in range(5)]
    train, test = [], []
    for name in names:
        mine = random.permutation(items)[: random.integers(1, items + 1)].tolist()
        held = int(random.integers(0, min(2, len(mine)) + 1))
        test += [(name, i) for i in mine[:held]]
        train += [(name, i) for i in mine[held:]]
    truth = ground_of(train, test, names, items)
    scores = random.integers(0, 4, (5, items)).astype(np.float64)  # few values: ties are common
    sampled = Sampled(count, seed)
    negatives = draw_negatives(truth, names, sampled)
    found = per_user(truth, ranks(truth, negatives, lambda users: scores[users]), cutoff)
    expected = by_hand(truth, names, sampled, scores, cutoff)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name])


def test_a_users_negatives_do_not_depend_on_who_else_there_is():
    train, test = [("anna", 0), ("bob", 1)], [("anna", 2), ("bob", 3)]
    both = draw_negatives(ground_of(train, test, [], 50), ["anna", "bob"], Sampled(10, 1))
    alone = draw_negatives(ground_of(train[1:], test[1:], [], 50), ["bob"], Sampled(10, 1))
    assert both[1].tolist() == alone[0].tolist()
    assert both[0].tolist() != both[1].tolist()
    assert not {0, 2} & set(both[0].tolist())
    assert len(set(both[0].tolist())) == 10


def test_a_test_item_without_a_number_for_a_score_comes_last():
    truth = ground_of([("anna", 0)], [("anna", 1)], [], 4)
    negatives = draw_negatives(truth, ["anna"], Sampled(99, 1))
    assert sorted(negatives[0].tolist()) == [-1] * 97 + [2, 3]
    assert ranks(truth, negatives, lambda users: np.array([[0.0, np.nan, 1.0, 2.0]])).tolist() == [2]


def test_the_loop_names_it_as_what_it_is(description, tmp_path: Path):
    description["interactions"]["split"] = "newest"
    description["ranking"] = {"protocol": "sampled", "negatives": 12, "cutoff": 3}
    experiment = described(description)
    assert experiment.score_name == "ndcg@3 among 12 sampled negatives"
    result = Result(running.run(experiment, out=tmp_path / "run"))
    last = result.history.rounds["accuracy"].dropna().iloc[-1]
    finished = open_run(tmp_path / "run")
    report = finished.report([3])
    assert report["sampled"]["ndcg@3"] == pytest.approx(last)
    assert report["sampled"]["ndcg@3"] > report["metrics"]["3"]["ndcg"] > 0
    # The same users and scores by hand.
    truth, names = finished.run_data.users.truth, list(finished.run_data.histories.names)
    scores = finished.clients.scores(finished.federation, 3, finished.model, np.arange(24))
    expected = by_hand(truth, names, Sampled(12, 42), scores, 3)
    assert report["sampled"]["hit_rate@3"] == pytest.approx(np.mean(expected["hit_rate"]))


def test_every_item_beside_the_test_item_gives_the_full_ranking():
    random = np.random.default_rng(4)
    train = [(f"u{u}", int(i)) for u in range(6) for i in random.permutation(20)[:5]]
    test = [(f"u{u}", next(i for i in range(20) if (f"u{u}", i) not in train)) for u in range(6)]
    names = {"all_items": [str(i) for i in range(20)]}
    data = build([u for u, _ in train], [str(i) for _, i in train], **names)
    truth = ground_of(train, test, [], 20)
    users = Users(Histories.of(data), truth, np.ones(6), np.zeros(30, dtype=np.int64))
    scores = random.normal(size=(6, 20))
    full = Judge(users, 5).measure(lambda asked: scores[asked])
    among_all = Judge(users, 5, sampled=Sampled(20)).measure(lambda asked: scores[asked])
    assert among_all["ndcg"].tolist() == pytest.approx(full["ndcg"].tolist())
    assert among_all["hit_rate"].tolist() == full["hit_rate"].tolist()


def test_scores_that_the_protocol_does_not_have_are_refused(description):
    description["ranking"] = {"protocol": "sampled", "score": "recall"}
    with pytest.raises(UserError, match=r"^experiment: ranking\.score: got 'recall'.*ndcg, hit_rate"):
        described(description)
