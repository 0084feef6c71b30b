"""Baselines: each must beat chance where there is something to learn; FCF is held to its equations."""

import math
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.kit import assert_refused
from tests.recommend.conftest import two_tastes
from tests.recommend.fpl_cases import slow_round
from tests.warm import command_environment

from steelyard.base.randomness import generator
from steelyard.recommend import interactions
from steelyard.recommend.baselines import BASELINES, baseline, recommend
from steelyard.recommend.baselines.factors import BprModel, informed, item_gradient, least_squares, user_vectors
from steelyard.recommend.baselines.neighbours import Vsm, matrix, tf_idf
from steelyard.recommend.baselines.networks import MultiVae, NeuMfNetwork, loss
from steelyard.recommend.compiled import draw_triples, pointwise_pass
from steelyard.recommend.fpl import Learning
from steelyard.recommend.histories import Histories, round_keys, user_keys
from steelyard.recommend.interactions import build, read
from steelyard.recommend.knowledge import features
from steelyard.recommend.knowledge.features import ItemFeatures
from steelyard.recommend.metrics import GroundTruth, Precision, measure


@pytest.fixture(scope="module")
def split():
    rows = two_tastes(users=60, taken=10)
    columns = list(zip(*rows, strict=True))
    return interactions.temporal(build(columns[0], columns[1], columns[2], columns[3]), 0.2)


def known(train) -> ItemFeatures:
    """What is known of the items of two tastes: their half, and a feature that says nothing; others have none."""
    half = [(row, int(item >= "i20")) for row, item in enumerate(train.items.tolist()) if item.startswith("i")]
    pairs = np.array([*half, *((row, 2) for row, _ in half)], dtype=np.int64).reshape(-1, 2)
    return features.build(pairs[:, 0], pairs[:, 1], len(train.items), ["half: first", "half: second", "all"])


def short(kind: str) -> dict[str, int]:
    """Settings with which a learner learns for three epochs: enough for what holds however much it has learned."""
    return {"epochs": 3} if "epochs" in type(baseline(kind)).model_fields else {}


def lists_of(kind: str, train, cutoff: int, seed: int = 1):
    return recommend(baseline(kind, short(kind)), train, cutoff, seed, known(train))


@pytest.fixture(params=sorted(BASELINES))
def kind(request: pytest.FixtureRequest) -> str:
    """Every baseline there is, where its library is at hand."""
    if request.param == "bpr":
        pytest.importorskip("implicit")
    return request.param


class TestEveryBaseline:
    """What every baseline must do, whatever it learns: a new one in the table is held to this by itself."""

    def test_lists_hold_unseen_items_once_with_falling_scores_and_follow_from_the_seed(self, split, kind: str):
        lists, scores = lists_of(kind, split.train, 40)
        assert lists.shape == scores.shape == (60, 40)
        for user in range(60):
            own = set(split.train.item[split.train.user == user].tolist())
            shown = lists[user][lists[user] >= 0].tolist()
            assert len(shown) == len(set(shown)) > 0
            assert not own & set(shown)
            assert (np.diff(scores[user, : len(shown)]) <= 0).all()
        # The threads of implicit's BPR may write the same row in one moment.
        if kind != "bpr":
            again = lists_of(kind, split.train, 40)
            assert np.array_equal(again[0], lists)
            assert np.array_equal(again[1], scores)

    def test_few_rows_are_enough_and_a_user_without_any_gets_a_list(self, kind: str):
        train = build(list("aabbc"), list("xyyzx"), all_users=["cold"], all_items=["w"])
        lists, scores = lists_of(kind, train, 2)
        assert lists.shape == (4, 2)
        assert not np.isnan(scores).any()
        assert (lists[train.users.tolist().index("cold")] >= 0).all()
        # One item is left for each; the rest of the list stays empty. A repeated pair counts once.
        lists, _ = lists_of(kind, build(["a", "a", "b"], ["x", "x", "y"]), 3)
        assert lists.tolist() == [[1, -1, -1], [0, -1, -1]]


LEARNERS = ["user-knn", "item-knn", "bpr-mf", "bpr", "vae", "fcf", "vsm", "kahfm", "mf", "neumf"]


@pytest.mark.parametrize("kind", LEARNERS, indirect=True)
def test_learners_beat_chance(split, kind):
    # Two of the twelve items left of a user's own taste are in her test set; by chance it is two of 32.
    # NeuMF begins near 0 and takes small steps: on 480 rows its default has seen too little.
    own = {"neumf": {"rate": 0.03, "epochs": 8}, "mf": {"rate": 0.1}}.get(kind, {})
    lists, _ = recommend(baseline(kind, own), split.train, 5, features=known(split.train))
    assert Precision()(GroundTruth.of(split).view(lists, 5)) > 0.12


def test_kahfm_learns_with_adam_too(split):
    adam = baseline("kahfm", {"batch": 32, "rate": 0.03, "epochs": 10, "profile": "last"})
    lists, _ = recommend(adam, split.train, 5, features=known(split.train))
    assert Precision()(GroundTruth.of(split).view(lists, 5)) > 0.12


def likeness(similarity: str, first: np.ndarray, second: np.ndarray) -> float | None:
    """Two rows of ratings, 0 where there is none; None where they share nothing. By the book, one pair at a time."""
    both = (first > 0) & (second > 0)
    if not both.any():
        return None
    if similarity == "jaccard":
        return both.sum() / ((first > 0) | (second > 0)).sum()
    if similarity == "euclidean":
        return 1 / (1 + float(np.linalg.norm(first - second)))
    if similarity == "pearson":
        flat = len(set(first[both])) == 1 or len(set(second[both])) == 1
        return 0.0 if flat else float(np.corrcoef(first[both], second[both])[0, 1])
    return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


@pytest.mark.parametrize("divide", ["nothing", "counted", "all"])
@pytest.mark.parametrize("similarity", ["cosine", "pearson", "jaccard", "euclidean"])
@pytest.mark.parametrize("kept", [False, True])
def test_scores_by_ratings_similarity_and_divisor(similarity: str, kept: bool, divide: str):
    random = np.random.default_rng(7)
    given = np.where(random.random((8, 10)) < 0.5, random.integers(1, 6, (8, 10)), 0).astype(float)
    rows, columns = np.nonzero(given)
    train = build(
        [str(u) for u in rows],
        [str(i) for i in columns],
        given[rows, columns].tolist(),
        all_users=map(str, range(8)),
        all_items=map(str, range(10)),
    )
    table = given if kept else (given > 0).astype(float)

    def expected(table: np.ndarray) -> np.ndarray:
        """Users × items of item-kNN; of the turned table, turned back, it is user-kNN."""
        scores = np.zeros_like(table)
        for item, own in enumerate(table.T):
            found = [(o, likeness(similarity, own, column)) for o, column in enumerate(table.T) if o != item]
            near = sorted(((o, w) for o, w in found if w is not None), key=lambda each: (-round(each[1], 9), each[0]))
            for o, w in near[:3]:
                scores[:, item] += w * table[:, o]
            counted = sum(abs(w) * ((table[:, o] > 0) | (divide == "all")) for o, w in near[:3])
            if divide != "nothing":
                scores[:, item] /= np.where(counted > 0, counted, 1)
        return scores

    settings = {"neighbours": 3, "similarity": similarity, "ratings": "kept" if kept else "ones", "divide": divide}
    by_items = baseline("item-knn", settings).scores(train, 1)(np.arange(8))
    by_users = baseline("user-knn", settings).scores(train, 1)(np.arange(8))
    np.testing.assert_allclose(by_items, expected(table), atol=1e-9)
    np.testing.assert_allclose(by_users, expected(table.T).T, atol=1e-9)


def test_svd_solves_its_least_squares():
    random = np.random.default_rng(1)
    taken = matrix(build(list("aabc"), list("0112"), [1.0, 4.0, 2.0, 5.0]), "kept")
    others = random.normal(size=(3, 2))
    found = least_squares(taken, others, 0.3)
    dense = np.asarray(taken.todense())
    for row, values in enumerate(dense):
        theirs = others[values > 0]
        left = theirs.T @ (theirs @ found[row] - values[values > 0]) + 0.3 * len(theirs) * found[row]
        np.testing.assert_allclose(left, 0.0, atol=1e-9)


def test_bpr_mf_takes_the_steps_of_bpr_one_after_the_other():
    rows = two_tastes(users=8, items=12, taken=4)
    train, learning = build([row[0] for row in rows], [row[1] for row in rows]), Learning(0.1, 3)
    model = BprModel(train, 5, learning)
    table, vectors = model.table.astype(np.float64), model.vectors.astype(np.float64)
    histories = Histories.of(train)
    for epoch in (1, 2):
        model.epoch()
        users = generator(5, epoch, "", "bpr-mf turns").integers(8, size=32)
        keys = round_keys(user_keys(5, histories.names, "bpr-mf")[users], 32 * (epoch - 1) + np.arange(32))
        triples = draw_triples(histories, users, keys, 1)
        sent = np.ones((32, 1), dtype=bool)
        table, vectors, _ = slow_round(table, vectors, users, triples, sent, learning, in_turn=True)
    np.testing.assert_allclose(model.table, table, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.vectors, vectors, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("profile", "first"), [("sum", (1 + math.sqrt(0.5)) / 2), ("last", math.sqrt(0.5) / 2)])
def test_kahfm_begins_from_tf_idf_and_what_a_users_items_come_to(profile: str, first: float):
    # Items 0 and 1 have feature a, items 1 and 2 feature b; the user took items 0 and 1, in this order.
    train = build(["u", "u", "v"], ["0", "1", "2"])
    known = features.build(np.array([0, 1, 1, 2]), np.array([0, 0, 1, 1]), 3, ["a", "b"])
    model = informed(train, known, seed=1, rate=0.1, profile=profile)
    half = math.sqrt(0.5)
    np.testing.assert_allclose(model.table, [[1, 0, 0], [half, half, 0], [0, 1, 0]], rtol=1e-6)
    np.testing.assert_allclose(model.vectors, [[first, half / 2], [0, 1]], rtol=1e-6)


def test_mf_takes_steps_of_gradient_descent_one_after_the_other():
    chance = np.random.default_rng(1)
    users, items = chance.integers(3, size=20), chance.integers(4, size=20)
    of_users, of_items, mean = chance.normal(size=(3, 3)), chance.normal(size=(4, 3)), 0.2
    tables = (of_users.astype(np.float32), of_items.astype(np.float32), np.full(1, mean, np.float32))
    order, rate, decay = chance.permutation(20), 0.1, 0.3
    pointwise_pass(users, items, *tables, order, 8, np.array([rate, 1 - rate * decay], np.float32))
    for pair in order:
        user, item = of_users[users[pair]].copy(), of_items[items[pair]].copy()
        error = (pair < 8) - 1 / (1 + math.exp(-(mean + user[-1] + item[-1] + user[:-1] @ item[:-1])))
        of_users[users[pair]] += rate * (error * np.append(item[:-1], 1) - decay * user)
        of_items[items[pair]] += rate * (error * np.append(user[:-1], 1) - decay * item)
        mean += rate * (error - decay * mean)
    for found, expected in zip(tables, (of_users, of_items, [mean]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_neumf_is_the_network_of_its_authors_program():
    torch.manual_seed(1)
    model = NeuMfNetwork(3, 4, 2)
    p, q = model.user.weight[1], model.item.weight[2]
    deep = torch.cat([model.deep_user.weight[1], model.deep_item.weight[2]])
    assert [layer.weight.shape for layer in model.layers[::2]] == [(8, 4), (4, 8), (2, 4)]
    for layer in model.layers[::2]:
        deep = torch.relu(layer.weight @ deep + layer.bias)
    expected = model.out.weight[0] @ torch.cat([p * q, deep]) + model.out.bias[0]
    assert model(torch.tensor([1]), torch.tensor([2])).item() == pytest.approx(expected.item())


def test_multivae_has_the_loss_and_the_shape_of_its_paper():
    logits = torch.tensor([[0.0, math.log(3.0), 0.0]])
    mean, log_variance = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, math.log(4.0)]])
    # π = (1/5, 3/5, 1/5); the user took the first two; KL = ½ (1 + (4 − ln 4 − 1)).
    found = loss(logits, torch.tensor([[1.0, 1.0, 0.0]]), mean, log_variance, 0.2)
    expected = -math.log(1 / 5) - math.log(3 / 5) + 0.2 * 0.5 * (1 + 3 - math.log(4))
    assert found.item() == pytest.approx(expected, rel=1e-6)
    # Liang et al.'s network for MovieLens 20M: 20,108 items, 600 and 200 in its middle.
    assert sum(each.numel() for each in MultiVae(20_108, 600, 200).parameters()) == (
        20_108 * 600 + 600 + 600 * 400 + 400 + 200 * 600 + 600 + 600 * 20_108 + 20_108
    )


def test_fcf_solves_its_equations():
    random = np.random.default_rng(1)
    taken = matrix(build(["a", "a", "b", "c"], ["0", "1", "1", "2"]))
    table, confidence, decay = random.normal(size=(3, 2)), 4.0, 0.7
    vectors = user_vectors(taken, table, confidence, decay)
    dense = np.asarray(taken.todense())
    for user in range(3):
        weights = np.diag(1 + confidence * dense[user])
        expected = np.linalg.solve(table.T @ weights @ table + decay * np.eye(2), table.T @ weights @ dense[user])
        assert vectors[user] == pytest.approx(expected)
    items = torch.tensor(table, requires_grad=True)
    error = torch.tensor(dense) - torch.tensor(vectors) @ items.T
    loss = ((1 + confidence * torch.tensor(dense)) * error**2).sum() + decay * (items**2).sum()
    loss.backward()
    np.testing.assert_allclose(item_gradient(taken, table, vectors, confidence, decay), items.grad.numpy())


def test_unknown_baselines_and_settings_are_named():
    for kind, given, parts in (
        ("user-nn", {}, ["user-nn", "'user-knn'"]),
        ("item-knn", {"neighbors": 3}, ["neighbors", "neighbours"]),
        ("item-knn", {"similarity": "cosin"}, ["similarity", "'cosin'", "'cosine'"]),
        ("popular", {"factors": 3}, ["popular", "factors", "allowed here: none"]),
        ("mf", {"factors": 10_001}, ["factors", "10001", "10000"]),
        ("neumf", {"batch": 0}, ["batch", "0", "1"]),
        ("fcf", {"rate": 0}, ["rate", "0"]),
        ("svd", {"decay": -1}, ["decay", "-1"]),
    ):
        assert_refused(lambda kind=kind, given=given: baseline(kind, given), *parts)


@pytest.mark.slow
def test_only_what_draws_triples_needs_numba():
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from steelyard.recommend.baselines import baseline, recommend\n"
        "from steelyard.recommend.interactions import build\n"
        "for kind in ('random', 'user-knn', 'svd', 'vae', 'mf'):\n"
        "    recommend(baseline(kind), build(list('aab'), list('xyy')), 1)\n"
        "    print(kind, flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=command_environment(), capture_output=True, text=True)
    assert done.stdout.split() == ["random", "user-knn", "svd", "vae"]
    assert re.search(r"UserError: recommend: needs numba.*steelyard\[recommend\]", done.stderr)


# ---------------------------------------------------------------- VSM

PAIRS = np.array([(0, 0), (0, 1), (1, 0), (2, 1), (2, 2), (3, 0), (3, 2)])
"""Four items of three features: war (items 0, 1, 3), drama (0, 2), short (2, 3); a fifth item has none."""
KNOWN = features.build(PAIRS[:, 0], PAIRS[:, 1], 5, ["war", "drama", "short"])


def test_tf_idf_by_hand():
    war, rest = math.log(4 / 3), math.log(4 / 2)
    first, half = math.hypot(war, rest), math.sqrt(0.5)
    expected = [[war / first, rest / first, 0], [1, 0, 0], [0, half, half], [war / first, 0, rest / first], [0, 0, 0]]
    assert tf_idf(KNOWN).toarray() == pytest.approx(np.array(expected))


def test_vsm_is_the_cosine_of_a_user_and_an_item_also_of_one_that_nobody_took():
    train = build(["u", "u", "v"], ["0", "1", "4"], all_items=list("01234"))
    scores = Vsm().scores(train, 1, KNOWN)(np.array([0, 1]))
    items = tf_idf(KNOWN).toarray()
    profile = items[0] + items[1]
    assert scores[0] == pytest.approx(items @ profile / np.linalg.norm(profile))
    # An item without features is like nothing, and makes no profile.
    assert scores[0, 4] == 0
    assert not scores[1].any()
    assert_refused(lambda: recommend(Vsm(), build(["u"], ["1"]), 2), "vsm needs features", "--knowledge")


# ---------------------------------------------------------------- two published cases of most popular lists


def test_facebook_books_most_popular(shared):
    data = interactions.core(read(shared("facebook_books/dataset.tsv.gz")), 5, 5)
    split = interactions.shuffled(data, 0.2, 42)
    assert len(split.train) == 10490
    lists, _ = recommend(baseline("popular"), split.train, 10)
    ten, one = (measure(GroundTruth.of(split).view(lists, cutoff)) for cutoff in (10, 1))
    # Published with four decimals.
    for name, values in {"ndcg": (0.0939, 0.0829), "gini": (0.0127, 0.0007)}.items():
        assert (ten[name], one[name]) == pytest.approx(values, abs=5e-5)
    assert (ten["item_coverage"], one["item_coverage"]) == (16, 4)
    assert (ten["aclt"], ten["pop_reo"], ten["pop_rsp"]) == pytest.approx((0, 1, 1))


def test_amazon_digital_music_most_popular(shared):
    split = interactions.temporal(read(shared("amazon_digital_music/AmazonDigitalMusic.tsv.gz")), 0.2)
    assert (len(split.train), len(split.test)) == (61408, 14524)
    lists, _ = recommend(baseline("popular"), split.train, 10)
    truth = GroundTruth.of(split)
    ten = measure(truth.view(lists, 10))
    # Published with five decimals.
    for name, value in {"precision": 0.00469, "recall": 0.00603, "gini": 0.00023}.items():
        assert ten[name] == pytest.approx(value, abs=5e-6)
    assert (ten["item_coverage"], truth.items) == (24, 41488)
