"""The users of FPL as clients of the loop: what each sends, what is counted of it, what a node keeps of some."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.clients.contract import ClientsContract, Make
from tests.recommend.fpl_cases import FACTORS, ITEMS, USERS, few_users

from steelyard.base.randomness import generator
from steelyard.messages.updates import Task
from steelyard.recommend.clients import LocalRound, RecommendClients, RecommendServer, Traffic
from steelyard.recommend.fpl import Learning
from steelyard.recommend.histories import Histories, Users
from steelyard.recommend.interactions import Interactions, build
from steelyard.recommend.metrics import GroundTruth
from steelyard.recommend.sparse import PairRows

UP, DOWN = 4 + 4 * (FACTORS + 1), 4 * (FACTORS + 1)
"""Bytes of a row: up with the item's number, down without."""
NAMES = tuple(f"u{user}" for user in range(USERS))
SEED = 5


def clients(local_round: LocalRound, share: float = 0.5) -> RecommendClients:
    return RecommendClients(few_users(share), Learning(0.1, FACTORS), local_round)


def task(round: int = 1, names: tuple[str, ...] = NAMES, federation: str = "EQ") -> Task:
    return Task(federation, SEED, round, names, RecommendServer(ITEMS, FACTORS).initial(SEED))


def test_in_parallel_each_user_pays_for_her_own_distinct_rows():
    made = clients(LocalRound(triples=6))
    cohort = NAMES[2:7]
    updates = made.train([task(names=cohort)])[0]
    payload = updates.payload
    assert isinstance(payload, PairRows)
    triples = payload.triples
    rows = [
        len(set(triples.positives[user][payload.sent[user]].tolist())) + len(set(triples.negatives[user].tolist()))
        for user in range(len(cohort))
    ]
    assert len(set(rows)) > 1
    assert updates.bytes_sent is not None
    assert updates.bytes_sent.tolist() == [UP * count for count in rows]
    # The whole table goes to each of the five.
    assert made.traffic("EQ") == Traffic(5 * ITEMS, sum(rows), 5 * ITEMS * DOWN, sum(rows) * UP)
    assert made.traffic("another rule") == Traffic()


def test_an_item_is_sent_as_a_whole_or_triple_by_triple():
    """Thirty triples of few items: drawn by triple, one item is sent in some of its triples and not in others."""
    for mask, mixed in (("round", False), ("triple", True)):
        made = clients(LocalRound(triples=30, mask=mask), 0.5)
        payload = made.train([task()])[0].payload
        assert isinstance(payload, PairRows)
        pairs = list(zip(payload.triples.positives[0].tolist(), payload.sent[0].tolist(), strict=True))
        answers = {item: {sent for other, sent in pairs if other == item} for item, _ in pairs}
        assert any(len(found) == 2 for found in answers.values()) is mixed
        assert 0.3 < payload.sent.mean() < 0.7


@pytest.mark.parametrize(("share", "rows"), [(0.0, 1), (1.0, 2)])
def test_in_sequence_each_user_pays_for_the_rounds_in_which_she_was_drawn(share: float, rows: int):
    """With one triple a round, a user sends the negative's row, and the positive's where π is 1."""
    made = clients(LocalRound(triples=1, sequential=20), share)
    cohort = NAMES[:5]
    updates = made.train([task(round=3, names=cohort)])[0]
    drawn = Counter(generator(SEED, 3, "", "fpl turns").integers(len(cohort), size=20).tolist())
    assert len(set(drawn.values())) > 1
    # All scores start near 0 and biases move by 0.1 at most a round: a triple costs ln 2, give or take 0.2; a user's
    # loss is the mean over the rounds in which she was drawn, not their sum.
    assert updates.losses == pytest.approx([np.log(2) if drawn[user] else 0.0 for user in range(5)], abs=0.2)
    assert updates.bytes_sent is not None
    assert updates.bytes_sent.tolist() == [rows * UP * drawn[user] for user in range(len(cohort))]
    assert made.traffic("EQ") == Traffic(20 * ITEMS, 20 * rows, 20 * ITEMS * DOWN, 20 * rows * UP)


class TestParallelUsers(ClientsContract):
    """Users who do their rounds side by side keep the contract of all clients."""

    @pytest.fixture
    def make(self) -> Make:
        return lambda: clients(LocalRound(triples=4))

    @pytest.fixture
    def start(self) -> torch.Tensor:
        return RecommendServer(ITEMS, FACTORS).initial(SEED)


class TestSequentialUsers(TestParallelUsers):
    """So do those who come one after the other, but for one promise: each begins with what the one before her left."""

    test_a_client_does_not_depend_on_its_cohort = None

    @pytest.fixture
    def make(self) -> Make:
        return lambda: clients(LocalRound(triples=2, sequential=12))


def test_a_user_with_nothing_to_learn_from_fails_with_a_reason():
    """One user has no training item, one has every item and so no negative, one is a stranger."""
    items, starts = np.append(np.arange(ITEMS), [3, 5]).astype(np.int32), np.array([0, 0, ITEMS, ITEMS + 2])
    histories = Histories(("empty", "full", "usual"), ITEMS, starts, items, np.zeros(3, dtype=np.int64))
    users = few_users(1.0)
    three = replace(users, histories=histories, truth=replace(users.truth, users=3), shares=np.ones(3))
    made = RecommendClients(three, Learning(0.1, FACTORS), LocalRound(triples=3))
    updates = made.train([task(names=("empty", "full", "nobody", "usual"))])[0]
    assert updates.clients == ("usual",)
    assert {failure.client: failure.reason for failure in updates.failures} == {
        "empty": "no training items",
        "full": "has every item: none is left as a negative",
        "nobody": "not registered",
    }


# ---------------------------------------------------------------- what a node keeps of some of the users

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
    for names, rows, items, liked in (
        (["ben"], [0, 0, 0], [1, 2, 3], [1, 0, 1]),
        (["ada", "cleo"], [0, 0, 1], [0, 1, 0], [1, 0, 0]),
    ):
        truth = users.keep(names).truth
        assert (truth.train_user.tolist(), truth.train_item.tolist()) == (rows, items)
        assert truth.liked is not None
        assert truth.liked.tolist() == liked


def test_everything_else_of_the_others_is_gone_and_items_keep_their_numbers(users: Users):
    kept = users.keep(["cleo", "ben"])
    histories = kept.histories
    assert histories.names == ("ben", "cleo")
    assert (histories.catalogue, histories.starts.tolist()) == (4, [0, 3, 4])
    assert histories.items.tolist() == [1, 2, 3, 0]
    assert (kept.truth.users, kept.truth.items) == (2, 4)
    assert (kept.truth.test_user.tolist(), kept.truth.test_item.tolist()) == ([1, 1], [1, 3])
    assert kept.shares.tolist() == [0.2, 0.3]
    assert kept.kinds.tolist() == [10, 20, 30, 0]
    assert set(kept.facts) == {"ben", "cleo"}


def test_decoys_go_with_their_user(users: Users):
    claimed = Users(users.histories.with_decoys(1.0, seed=1), users.truth, users.shares, np.arange(8))
    kept = claimed.keep(["cleo"]).histories
    whole = claimed.histories
    assert kept.fakes.tolist() == [1]
    assert kept.items.tolist() == whole.items[whole.starts[2] : whole.starts[3]].tolist()
    assert kept.own(0).tolist() == [0]
