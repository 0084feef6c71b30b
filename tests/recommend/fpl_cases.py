"""A few users with a few items, on which FPL's fast forms are held to the slow one."""

import numpy as np

from steelyard.recommend.fpl import initial_table, initial_vector, sent_positives
from steelyard.recommend.interactions import build
from steelyard.recommend.sampling import Histories, Triples, draw_triples, round_keys, user_keys

USERS, ITEMS, FACTORS = 9, 14, 4


def few_histories() -> Histories:
    """Every user has about a third of the items, and at least one."""
    random = np.random.default_rng(5)
    pairs = [(u, i) for u in range(USERS) for i in range(ITEMS) if random.random() < 0.3 or i == u]
    return Histories.of(
        build([f"u{u}" for u, _ in pairs], [str(i) for _, i in pairs], all_items=[str(i) for i in range(ITEMS)])
    )


def start(histories: Histories, seed: int = 1, factors: int = FACTORS) -> tuple[np.ndarray, np.ndarray]:
    """A table with biases that are not 0, and the users' first vectors."""
    table = initial_table(seed, histories.catalogue, factors)
    table[:, -1] = np.random.default_rng(seed).normal(size=histories.catalogue)
    return table, np.stack([initial_vector(seed, name, factors) for name in histories.names])


def as_lists(table: np.ndarray) -> tuple[list[list[float]], list[float]]:
    """The table as the slow reference has it: factors by item, biases by item."""
    return table[:, :-1].astype(float).tolist(), table[:, -1].astype(float).tolist()


def draw(
    histories: Histories, users: np.ndarray, count: int, round: int = 3, seed: int = 1, share: float = 1.0
) -> tuple[Triples, np.ndarray]:
    """A round's triples, and which of their positives are sent; the choice of these does not change between rounds."""
    triples = draw_triples(histories, users, round_keys(user_keys(seed, histories.names, "t")[users], round), count)
    sent = sent_positives(user_keys(seed, histories.names, "m")[users], np.full(len(users), share), triples.positives)
    return triples, sent
