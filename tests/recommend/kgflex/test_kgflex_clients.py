"""The users of KGFlex as clients of the loop."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.clients.contract import ClientsContract, Make
from tests.recommend.fpl_cases import USERS, few_users
from tests.recommend.kgflex.kgflex_cases import FACTORS, FEATURES, LIMITS, few_features, local_update, of_user, sets_of

from steelyard.base.randomness import generator
from steelyard.messages.updates import Task
from steelyard.recommend.clients import LocalRound
from steelyard.recommend.compiled import draw_triples, sent_positives
from steelyard.recommend.fpl import Learning
from steelyard.recommend.histories import round_keys, user_keys
from steelyard.recommend.kgflex.clients import KgflexClients, KgflexParts, KgflexServer
from steelyard.recommend.kgflex.selection import KgflexSettings

NAMES = tuple(f"u{user}" for user in range(USERS))
SEED, RATE = 5, 0.3


def clients(local_round: LocalRound, share: float = 0.5, **more: Any) -> KgflexClients:
    parts = KgflexParts(few_features(), KgflexSettings(limits=LIMITS, **more))
    return KgflexClients(few_users(share), Learning(RATE, FACTORS), local_round, parts, cutoff=3)


def first_model() -> torch.Tensor:
    """The server's first rows, with biases that are not 0, so that lists are not decided by tiny products alone."""
    start = KgflexServer(FEATURES, FACTORS).initial(SEED).reshape(FEATURES, -1).clone()
    start[:, -1] = torch.from_numpy(np.random.default_rng(1).normal(size=FEATURES))
    return start.reshape(-1)


def task(round: int = 1, names: tuple[str, ...] = NAMES, federation: str = "EQ") -> Task:
    return Task(federation, SEED, round, names, first_model())


def slow_turn(made: KgflexClients, user: int, round: int, count: int, table, p):
    """One user's round by the slow reference, on the triples that her device draws; moves her views `p`."""
    histories, of, knowledge = made.users.histories, sets_of(made.parts.features), made.knowledge(SEED)
    mine = np.array([user])
    keys, masks = (round_keys(user_keys(SEED, histories.names, what)[mine], round) for what in ("triples", "mask"))
    triples = draw_triples(histories, mine, keys, count)
    sent = sent_positives(masks, made.users.shares[mine], triples.positives)[0].tolist()
    pairs = [(of[i], of[j]) for i, j in zip(triples.positives[0], triples.negatives[0], strict=True)]
    k, views = of_user(knowledge, p, user)
    after, changes, _ = local_update(k, views, table, pairs, RATE, sent, [True] * count, Learning(RATE, 1).decays)
    p[knowledge.selection.entries(user)] = [after[f] for f in k]
    return changes


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_round_is_that_of_the_equations(in_turn: bool):
    """All users on one table; or fifteen one after the other, each on what the one before left."""
    made = clients(LocalRound(triples=2, sequential=15) if in_turn else LocalRound(triples=6))
    p = made.views("EQ", SEED).astype(np.float64)
    (updates,) = made.train([task(round=3)])
    users, rounds = np.arange(USERS), [3] * USERS
    if in_turn:
        users, rounds = generator(SEED, 3, "", "fpl turns").integers(USERS, size=15), range(31, 46)
    table = first_model().numpy().astype(np.float64).reshape(FEATURES, -1)
    expected = table.copy()
    for user, round in zip(users.tolist(), rounds, strict=True):
        told = slow_turn(made, user, round, 2 if in_turn else 6, expected if in_turn else table, p)
        for feature, change in told.items():
            expected[feature] += RATE * np.array(change)
    found = updates.payload.combine(first_model(), np.full(USERS, 1 / USERS)).numpy().reshape(FEATURES, -1)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    np.testing.assert_allclose(made.views("EQ", SEED), p, atol=2e-5)


@pytest.mark.parametrize("central", [False, True])
def test_ablations_leave_views_or_biases_as_they_began(central: bool):
    for without in ("views", "biases"):
        options: dict[str, Any] = {without: "off", "batch": 4 if central else None}
        made = clients(LocalRound(triples=6, sequential=0 if central else None), **options)
        before = made.views("EQ", SEED).copy()
        (updates,) = made.train([task()])
        moved = updates.payload.combine(first_model(), np.full(USERS, 1 / USERS)) - first_model()
        moved = moved.reshape(FEATURES, -1).abs().sum(0)
        if without == "views":
            assert not before.any()
            assert not made.views("EQ", SEED).any()
            assert moved[-1] > 0
        else:
            assert (made.views("EQ", SEED) != before).any()
            assert (moved[-1] == 0, bool(moved[:-1].sum() > 0)) == (True, True)


def test_a_view_that_ran_away_is_not_kept():
    made = clients(LocalRound(triples=2))
    wild = torch.full_like(first_model(), 3e38)
    (updates,) = made.train([Task("EQ", SEED, 1, NAMES, wild)])
    assert not updates.payload.finite().all()
    assert np.isfinite(made.views("EQ", SEED)).all()


def test_the_features_are_part_of_the_fingerprint():
    made, other = clients(LocalRound(triples=2)), clients(LocalRound(triples=2))
    assert made.fingerprint(1) == other.fingerprint(1)
    other.parts = KgflexParts(few_features(seed=4), other.parts.settings)
    assert {key for key, value in made.fingerprint(1).items() if value != other.fingerprint(1)[key]} == {"features"}


class TestKgflexUsers(ClientsContract):
    """Users of KGFlex keep the contract of all clients."""

    @pytest.fixture
    def make(self) -> Make:
        return lambda: clients(LocalRound(triples=4))

    @pytest.fixture
    def start(self) -> torch.Tensor:
        return first_model()
