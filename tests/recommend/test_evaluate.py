"""Scoring lists from files, and test items among sampled negatives, held to a version written out user by user."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit import changed

from steelyard.base.randomness import stream_keys, words
from steelyard.experiment import running
from steelyard.experiment.loading import build as described
from steelyard.recommend.evaluate import Sampled, draw_negatives, load, per_user, ranks
from steelyard.recommend.metrics import GroundTruth
from steelyard.report.recommender import open_run
from steelyard.result import Result

FILES = {
    "train": "user\titem\trating\na\t1\t5\nb\t1\t4\nb\t2\t4\n",
    "test": "a\t2\t4\na\t3\t2\nb\t3\t5\nc\t1\t1\n",
    "recommendations": "user\titem\tscore\na\t3\t0.1\na\t2\t0.9\nb\t4\t2\nb\t3\t1\n",
}


@pytest.fixture
def judged(tmp_path: Path, command):
    """Run `steelyard recommend evaluate` on the files above, some of them written anew; returns its answer."""

    def call(*more: str, **files: str):
        for name, text in {**FILES, **files}.items():
            (tmp_path / f"{name}.tsv").write_text(text)
        named = [word for name in {**FILES, **files} for word in (f"--{name}", f"{name}.tsv")]
        done = command("recommend", "evaluate", *named, *more, "--format", "json")
        return json.loads(done.stdout) if done.returncode == 0 else done

    return call


def test_json_is_keyed_by_cutoff_then_metric(judged):
    document = judged("--cutoff", "2,1")
    assert list(document) == ["2", "1"]
    # a: 2 (relevant), 3 (relevant); b: 4, 3 (relevant); c has no list and counts as 0.
    assert document["2"]["precision"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert [document["2"][name] for name in ("users", "catalogue", "item_coverage")] == [3, 4, 3]
    # Relevant from 3 on: a2, b3; c has none and leaves the mean.
    poor = judged("--cutoff", "2", "--threshold", "3")["2"]
    assert (poor["users"], poor["precision"]) == pytest.approx((2, 0.5))
    wide = judged(catalogue="item\n" + "\n".join("123456") + "\n")
    assert wide["10"]["item_coverage_share"] == pytest.approx(3 / 6)


def test_categories_and_a_second_system(judged):
    kinds = "item\tcategory\n1\tx\n2\tx|y\n3\ty\n4\ty\n"
    block = judged("--cutoff", "1", categories=kinds, against="a\t4\t1\nb\t3\t1\n")["1"]
    # Lists: 2 and 4, so x holds 1 of 2 places and y both; training: x 3 of 3, y 1 of 3; sizes 2/4 and 3/4.
    assert block["bias_source"] == pytest.approx({"x": 2.0, "y": (1 / 3) / 0.75})
    assert block["bias_recommended"] == pytest.approx({"x": 1.0, "y": 1 / 0.75})
    assert block["bias_disparity"] == pytest.approx({"x": -0.5, "y": 2.0})
    assert block["against"]["precision"]["difference"] == pytest.approx(0)
    assert 0 < block["against"]["precision"]["t_test_p"] <= 1


def test_undefined_is_null(judged):
    assert judged(recommendations="zoe\t1\t1\n")["10"]["pop_reo"] is None


def test_order_is_by_score_ties_keep_the_file_and_repeated_or_known_items_are_noted(judged, tmp_path: Path):
    judged(recommendations="a\t3\t1\na\t2\t1\na\t2\t3\na\t4\t1\na\t1\t2\n")
    case = load(*(tmp_path / f"{name}.tsv" for name in FILES), cutoff=10)
    assert case.lists[0, :5].tolist() == [1, 0, 2, 3, -1]
    assert any("own training set" in note for note in case.notes)


# ---------------------------------------------------------------- sampled negatives


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
            rank = sorted([item, *negatives], key=lambda i: (-scores[user, i], i)).index(item)
            hits.append(float(rank < cutoff))
            gains.append(1 / math.log2(rank + 2) if rank < cutoff else 0.0)
        found["hit_rate"].append(sum(hits) / len(hits) if hits else 0.0)
        found["ndcg"].append(sum(gains) / len(gains) if gains else 0.0)
    return found


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 4))
def test_it_is_the_protocol_done_by_hand(seed: int, count: int, cutoff: int):
    random = np.random.default_rng(seed)
    items, names = int(random.integers(2, 15)), [f"u{i}" for i in range(5)]
    kinds = random.choice(["", "train", "test"], (5, items), p=[0.5, 0.4, 0.1])
    truth = GroundTruth(5, items, *np.nonzero(kinds == "train"), *np.nonzero(kinds == "test"))
    scores = random.integers(0, 4, (5, items)).astype(np.float64)  # few values: ties are common
    sampled = Sampled(count, seed)
    negatives = draw_negatives(truth, names, sampled)
    found = per_user(truth, ranks(truth, negatives, lambda users: scores[users]), cutoff)
    for name, values in by_hand(truth, names, sampled, scores, cutoff).items():
        np.testing.assert_allclose(found[name], values)


def test_a_test_item_without_a_number_for_a_score_comes_last():
    zero = np.array([0])
    truth = GroundTruth(1, 4, zero, zero, zero, np.array([1]))
    negatives = draw_negatives(truth, ["anna"], Sampled(99, 1))
    assert sorted(negatives[0].tolist()) == [-1] * 97 + [2, 3]
    assert ranks(truth, negatives, lambda users: np.array([[0.0, np.nan, 1.0, 2.0]])).tolist() == [2]


def test_the_loop_names_it_as_what_it_is(description, tmp_path: Path):
    ranking = {"protocol": "sampled", "negatives": 12, "cutoff": 3}
    experiment = described(changed(description, interactions={"split": "newest"}, ranking=ranking))
    result = Result(running.run(experiment, out=tmp_path / "run"))
    report = open_run(tmp_path / "run").report([3])
    assert report["sampled"]["ndcg@3"] == pytest.approx(result.history.rounds["accuracy"].dropna().iloc[-1])
    assert report["sampled"]["ndcg@3"] > report["metrics"]["3"]["ndcg"] > 0
