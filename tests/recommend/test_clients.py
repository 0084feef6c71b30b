"""The users of FPL as clients of the loop: what each of them sends, and what is counted of it."""

from collections import Counter

import numpy as np
import pytest
import torch
from tests.clients.contract import ClientsContract, Make
from tests.recommend.fpl_cases import FACTORS, ITEMS, USERS, few_histories

from steelyard.messages import Task
from steelyard.randomness import generator
from steelyard.recommend.clients import LocalRound, RecommendClients
from steelyard.recommend.communication import Traffic
from steelyard.recommend.fpl import Learning
from steelyard.recommend.interactions import build
from steelyard.recommend.parallel import PairRows
from steelyard.recommend.ranking import GroundTruth
from steelyard.recommend.server import RecommendServer
from steelyard.recommend.users import Users

UP, DOWN = 4 + 4 * (FACTORS + 1), 4 * (FACTORS + 1)
"""Bytes of a row: up with the item's number, down without."""
NAMES = tuple(f"u{user}" for user in range(USERS))
SEED = 5


def clients(local_round: LocalRound, share: float = 0.5) -> RecommendClients:
    histories = few_histories()
    # Each user is tested on one item that she does not have.
    unseen = [next(i for i in range(ITEMS) if i not in histories.own(u)) for u in range(USERS)]
    names = {"all_users": NAMES, "all_items": [str(i) for i in range(ITEMS)]}
    owners = np.repeat(np.arange(USERS), histories.sizes)
    train = build([f"u{u}" for u in owners], [str(i) for i in histories.items], **names)
    test = build(list(NAMES), [str(i) for i in unseen], **names)
    users = Users(histories, GroundTruth.between(train, test), np.full(USERS, share), histories.items.astype(np.int64))
    return RecommendClients(users, Learning(0.1, FACTORS), local_round)


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
    more = made.train([task(round=2, names=cohort)])[0]
    assert more.bytes_sent is not None
    total = sum(rows) * UP + int(more.bytes_sent.sum())
    assert made.traffic("EQ").numbers()[2:] == (10 * ITEMS * DOWN, total)
    assert made.traffic("another rule") == Traffic()


@pytest.mark.parametrize(("share", "rows"), [(0.0, 1), (1.0, 2)])
def test_in_sequence_each_user_pays_for_the_rounds_in_which_she_was_drawn(share: float, rows: int):
    """With one triple a round, a user sends the negative's row, and the positive's where π is 1."""
    made = clients(LocalRound(triples=1, sequential=20), share)
    cohort = NAMES[:5]
    before = {name: made._own("EQ", SEED)[made.index_of[name]].copy() for name in NAMES}
    updates = made.train([task(round=3, names=cohort)])[0]
    drawn = Counter(generator(SEED, 3, "", "fpl turns").integers(len(cohort), size=20).tolist())
    assert len(set(drawn.values())) > 1
    assert updates.clients == cohort
    assert updates.bytes_sent is not None
    assert updates.bytes_sent.tolist() == [rows * UP * drawn[user] for user in range(len(cohort))]
    assert made.traffic("EQ") == Traffic(20 * ITEMS, 20 * rows, 20 * ITEMS * DOWN, 20 * rows * UP)
    moved = [name for name in NAMES if not np.array_equal(before[name], made._own("EQ", SEED)[made.index_of[name]])]
    assert moved == [cohort[user] for user in sorted(drawn)]


def test_in_sequence_losses_are_means_over_a_users_own_rounds():
    """A user who was drawn twice has one mean loss, not a sum; one who was not drawn has 0."""
    made = clients(LocalRound(triples=1, sequential=9), share=1.0)
    updates = made.train([task()])[0]
    drawn = Counter(generator(SEED, 1, "", "fpl turns").integers(USERS, size=9).tolist())
    assert max(drawn.values()) > 1
    assert len(drawn) < USERS
    for user in range(USERS):
        # All scores start near 0 and biases move by 0.1 at most a round: a triple costs ln 2, give or take 0.2.
        assert updates.losses[user] == pytest.approx(np.log(2) if drawn[user] else 0.0, abs=0.2)


def test_what_is_kept_goes_into_a_snapshot_and_comes_back():
    made = clients(LocalRound(triples=3))
    made.train([task(), task(federation="DS")])
    other = clients(LocalRound(triples=3))
    other.train([task(federation="forgotten")])
    other.restore(made.snapshot())
    assert other.snapshot().keys() == made.snapshot().keys()
    assert all(torch.equal(made.snapshot()[key], value) for key, value in other.snapshot().items())
    assert other.traffic("EQ") == made.traffic("EQ")
    first, again = made.train([task(round=2)])[0], other.train([task(round=2)])[0]
    assert isinstance(first.payload, PairRows)
    assert isinstance(again.payload, PairRows)
    assert np.array_equal(first.payload.gradients, again.payload.gradients)


class TestParallelUsers(ClientsContract):
    """Users who do their rounds side by side keep the contract of all clients."""

    @pytest.fixture
    def make(self) -> Make:
        return lambda: clients(LocalRound(triples=4))

    @pytest.fixture
    def start(self) -> torch.Tensor:
        return RecommendServer(ITEMS, FACTORS).initial(SEED)


class TestUsersWithDecoys(TestParallelUsers):
    """So do those who claim items that are not theirs and choose once for all what they send."""

    @pytest.fixture
    def make(self) -> Make:
        return lambda: clients(LocalRound(triples=4, mask="persistent", decoys=0.5))


class TestSequentialUsers(TestParallelUsers):
    """So do those who come one after the other, but for one promise that cannot hold for them."""

    @pytest.fixture
    def make(self) -> Make:
        return lambda: clients(LocalRound(triples=2, sequential=12))

    def test_a_client_does_not_depend_on_its_cohort(self, make: Make, start: torch.Tensor) -> None:
        """Each user begins with what the one before her left, so the cohort matters; the change is that of all."""
        (together,) = make().train([self.task(make(), start)])
        (alone,) = make().train([Task("f", self.seed, 1, together.clients[-1:], start)])
        assert not torch.equal(together.payload.combine(start, np.ones(1)), alone.payload.combine(start, np.ones(1)))
