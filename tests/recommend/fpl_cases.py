"""FPL one user and one triple at a time, in plain Python: slow, readable, and what the fast forms are held to.

Beside it a few users with a few items, on which they are.
"""

import math
from collections import defaultdict

import numpy as np

from steelyard.base.randomness import words_at
from steelyard.recommend.compiled import draw_triples, sent_positives
from steelyard.recommend.fpl import Learning, initial_table, initial_vector
from steelyard.recommend.histories import Histories, Triples, Users, round_keys, user_keys
from steelyard.recommend.interactions import build
from steelyard.recommend.metrics import GroundTruth

USERS, ITEMS, FACTORS = 9, 14, 4


def few_histories() -> Histories:
    """Every user has about a third of the items, and at least one."""
    random = np.random.default_rng(5)
    pairs = [(u, i) for u in range(USERS) for i in range(ITEMS) if random.random() < 0.3 or i == u]
    return Histories.of(
        build([f"u{u}" for u, _ in pairs], [str(i) for _, i in pairs], all_items=[str(i) for i in range(ITEMS)])
    )


def few_users(share: float) -> Users:
    """The same with something to test: each is tested on one item that she does not have."""
    histories = few_histories()
    unseen = [next(i for i in range(ITEMS) if i not in histories.own(u)) for u in range(USERS)]
    users = [f"u{user}" for user in range(USERS)]
    names = {"all_users": users, "all_items": [str(i) for i in range(ITEMS)]}
    train = build(np.repeat(users, histories.sizes).tolist(), [str(i) for i in histories.items], **names)
    truth = GroundTruth.between(train, build(users, [str(i) for i in unseen], **names))
    return Users(histories, truth, np.full(USERS, share), histories.items.astype(np.int64))


def start(histories: Histories, seed: int = 1, factors: int = FACTORS) -> tuple[np.ndarray, np.ndarray]:
    """A table with biases that are not 0, and the users' first vectors."""
    table = initial_table(seed, histories.catalogue, factors)
    table[:, -1] = np.random.default_rng(seed).normal(size=histories.catalogue)
    return table, np.stack([initial_vector(seed, name, factors) for name in histories.names])


def draw(
    histories: Histories, users: np.ndarray, count: int, round: int = 3, seed: int = 1, share: float = 1.0
) -> tuple[Triples, np.ndarray]:
    """A round's triples, and which of their positives are sent; the choice of these does not change between rounds."""
    triples = draw_triples(histories, users, round_keys(user_keys(seed, histories.names, "t")[users], round), count)
    sent = sent_positives(user_keys(seed, histories.names, "m")[users], np.full(len(users), share), triples.positives)
    return triples, sent


def slow_draw(histories: Histories, user: int, key: np.uint64, count: int) -> list[tuple[int, int, bool]]:
    """A user's triples, and whether the positive is no decoy: 32 tries for a negative, then one of those left."""
    first, last = int(histories.starts[user]), int(histories.starts[user + 1])
    hers, own = histories.items[first:last].tolist(), set(histories.own(user).tolist())
    left = sorted(set(range(histories.catalogue)) - set(hers))
    drawn = []
    for step in range(count):
        tries = [word(key, step + (attempt << 32)) for attempt in range(33)]
        liked = (tries[0] >> 32) * len(hers) >> 32
        others = [(each & 0xFFFFFFFF) * histories.catalogue >> 32 for each in tries[:32]]
        last_resort = left[(tries[32] & 0xFFFFFFFF) * len(left) >> 32]
        drawn.append((hers[liked], next((i for i in others if i in left), last_resort), liked < len(own)))
    return drawn


def word(key: np.uint64, position: int) -> int:
    return int(words_at(np.array([key]), np.array([position], dtype=np.uint64))[0])


def slow_round(table, vectors, users, triples, sent, learning: Learning, *, in_turn: bool = False):
    """Users one after the other on one table, or in turn each on what the one before left.

    Returns the new table, all vectors, and of each user what she changed, by item, and her losses.
    """
    first, own, told = (table[:, :-1].astype(float).tolist(), table[:, -1].astype(float).tolist()), vectors.tolist(), []
    q, b = ([list(row) for row in first[0]], list(first[1]))
    for row, user in enumerate(users):
        passed = dict(zip(triples.positives[row].tolist(), sent[row].tolist(), strict=True))
        pairs = list(zip(triples.positives[row].tolist(), triples.negatives[row].tolist(), strict=True))
        seen = (q, b) if in_turn else first
        own[user], changes, losses = local_update(*seen, own[user], pairs, learning, passed.__getitem__)
        for item, change in changes.items():  # the server's step, Eq. 4.10: Θ += α Σ_u Δ_u
            q[item] = [old + learning.rate * new for old, new in zip(q[item], change[:-1], strict=True)]
            b[item] += learning.rate * change[-1]
        told.append((changes, losses))
    return np.column_stack([q, b]), np.array(own), told


def local_update(q, b, p, triples, learning, sent):
    """One user's pass (Eq. 4.3 to 4.9): returns her new vector, the changes she sends, by item, and her losses.

    `q` and `b` are lists by item and stay as they are; `sent(item)` says whether a positive's change is sent.
    """
    p, losses = list(p), []
    changes = defaultdict(lambda: [0.0] * (len(p) + 1))
    alpha = learning.rate
    user_decay, positive_decay, negative_decay = learning.decays
    for liked, other in triples:
        margin = (b[liked] + dot(q[liked], p)) - (b[other] + dot(q[other], p))
        weight = 1 / (1 + math.exp(margin))
        losses.append(-math.log(1 - weight))  # −ln σ of the margin, as the triple was visited
        for h in range(len(p)):
            if sent(liked):
                changes[liked][h] += weight * p[h] - positive_decay * q[liked][h]
            changes[other][h] += -weight * p[h] - negative_decay * q[other][h]
        if sent(liked):
            changes[liked][-1] += weight
        changes[other][-1] += -weight
        p = [p[h] + alpha * (weight * (q[liked][h] - q[other][h]) - user_decay * p[h]) for h in range(len(p))]
    return p, dict(changes), losses


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))
