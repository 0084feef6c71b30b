"""Online adjustment by hand, against a slow version of paper 003's Algorithm 1, and gone on with after a stop."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.weighing.order import (
    AdjustSettings,
    BanditOrder,
    Budget,
    Decision,
    FixedOrder,
    GreedyOrder,
    OnlineOrder,
    OrderState,
    chooses,
    other_orders,
    strategy_of,
)

# Three criteria A, B, C as listed: the six orders in lexicographic order.
ORDERS = ABC, ACB, BAC, BCA, CAB, CBA = tuple(permutations(range(3)))
AB, BA = permutations(range(2))


def play(strategy, state, table):
    """One round: `table` gives the accuracy of each order on this round's local models."""
    others = list(strategy.others(state, table[state.order], seed=0, round=1))
    tried = [state.order, *others]
    return tried, strategy.decide(state, tried, [table[order] for order in tried])


def sequential(state, table):
    """Algorithm 1, lines 8-29, straight from the paper with SPEC §4's choices: returns (order, accuracy, tests)."""
    order, accuracy, tests = state.order, table[state.order], 0
    seen = [(accuracy, order)]
    everything = sorted(table)
    following = everything[everything.index(order) + 1 :] + everything[: everything.index(order)]
    while accuracy < state.reference:
        if following:
            order = following.pop(0)
            accuracy = table[order]
            tests += 1
            seen.append((accuracy, order))
        else:
            accuracy = max(found for found, _ in seen)
            order = next(order for found, order in seen if found == accuracy)
            break
    return order, accuracy, tests


def test_orders_come_lexicographically_after_the_current_one_and_wrap_around():
    assert other_orders(ABC) == [ACB, BAC, BCA, CAB, CBA]
    assert other_orders(BCA) == [CAB, CBA, ABC, ACB, BAC]
    # More than four criteria are searched by adjacent swaps.
    assert other_orders((0, 1, 2, 3, 4)) == [(1, 0, 2, 3, 4), (0, 2, 1, 3, 4), (0, 1, 3, 2, 4), (0, 1, 2, 4, 3)]


@given(
    accuracies=st.lists(st.integers(0, 6), min_size=6, max_size=6),
    reference=st.integers(0, 6),
    start=st.integers(0, 5),
)
def test_testing_together_decides_as_the_sequential_algorithm(accuracies, reference, start):
    table = {order: value / 6 for order, value in zip(ORDERS, accuracies, strict=True)}
    state = OrderState(ORDERS[start], reference / 6)
    order, accuracy, tests = sequential(state, table)
    tried, decision = play(OnlineOrder(), state, table)
    assert tried[decision.chosen] == order
    assert decision.state == OrderState(order, accuracy, tests)
    assert decision.tests == tests <= math.factorial(3) - 1


def test_greedy_keeps_the_best_order_every_round_also_when_nothing_fell():
    table = {ABC: 0.9, ACB: 0.2, BAC: 0.95, BCA: 0.95, CAB: 0.1, CBA: 0.1}
    _, decision = play(GreedyOrder(), OrderState(ABC, 0.1), table)
    assert decision.tests == 5
    assert decision.state == OrderState(BAC, 0.95, 5)
    tie = dict.fromkeys(table, 0.5)
    assert play(GreedyOrder(), OrderState(BCA, 0.1), tie)[1].state.order == BCA


def test_the_bandit_writes_down_every_duel() -> None:
    state = OrderState(AB, 0.0)
    # A>B wins, loses, then ties with the new order B>A; the winner is kept, on a tie the current one.
    expected = [
        (AB, {"0,1": 1.0, "1,0": 1.0}, {"0,1": 1.0, "1,0": 0.0}),
        (BA, {"0,1": 2.0, "1,0": 2.0}, {"0,1": 1.0, "1,0": 1.0}),
        (BA, {"0,1": 3.0, "1,0": 3.0}, {"0,1": 1.5, "1,0": 1.5}),
    ]
    for (ours, theirs), (order, duels, wins) in zip([(0.7, 0.6), (0.6, 0.7), (0.5, 0.5)], expected, strict=True):
        rival = BA if state.order == AB else AB
        state = BanditOrder().decide(state, [state.order, rival], [ours, theirs]).state
        assert state.order == order
        assert state.memory == {"duels": duels, "wins": wins}


def test_the_bandit_challenges_the_order_with_the_highest_bound() -> None:
    # After 10 duels in all: A>C>B has 3 wins of 4, .75 + √(2 ln 10 / 4) = 1.823; B>A>C none of 2,
    # √(2 ln 10 / 2) = 1.517; C>B>A 1 of 2, .5 + 1.517 = 2.017, the highest.
    duels = {"0,1,2": 5.0, "0,2,1": 4.0, "1,0,2": 2.0, "1,2,0": 4.0, "2,0,1": 3.0, "2,1,0": 2.0}
    wins = {"0,1,2": 4.0, "0,2,1": 3.0, "1,0,2": 0.0, "1,2,0": 1.0, "2,0,1": 1.0, "2,1,0": 1.0}
    assert sum(duels.values()) == 2 * 10
    state = OrderState(ABC, 0.5, 10, {"duels": duels, "wins": wins})
    assert BanditOrder().others(state, 0.5, 0, 1) == [CBA]
    # One win more for A>C>B in as many duels: 1 + 1.073 = 2.073 is above 2.017.
    state = OrderState(ABC, 0.5, 10, {"duels": duels, "wins": {**wins, "0,2,1": 4.0}})
    assert BanditOrder().others(state, 0.5, 0, 1) == [ACB]


@pytest.mark.parametrize("challenged", [False, True])
def test_the_bandit_rests_when_no_bound_reaches_a_half(challenged: bool) -> None:
    # After 100 duels the bound is share + √(2 ln 100 / 100) = share + .3035: it reaches ½ at .1965 of 100 wins.
    wins = 100 * (0.5 - math.sqrt(2 * math.log(100) / 100)) + (1e-9 if challenged else -1e-9)
    memory = {"duels": {"0,1": 100.0, "1,0": 100.0}, "wins": {"0,1": 100 - wins, "1,0": wins}}
    assert BanditOrder().others(OrderState(AB, 0.5, 100, memory), 0.5, 0, 1) == ([BA] if challenged else ())


def test_a_budget_cuts_the_search_short_and_then_ends_it():
    table = {ABC: 0.50, ACB: 0.52, BAC: 0.55, BCA: 0.9, CAB: 0.9, CBA: 0.9}
    limited = Budget(OnlineOrder(), 2)
    tried, decision = play(limited, OrderState(ABC, 0.60), table)
    assert tried == [ABC, ACB, BAC]
    assert decision.state == OrderState(BAC, 0.55, 2)
    tried, decision = play(limited, OrderState(BAC, 0.60, 2), table)
    assert tried == [BAC]
    assert decision.state == OrderState(BAC, 0.55, 2)


def test_after_one_duel_the_loser_is_no_rival_and_a_tie_asks_for_none() -> None:
    # √(2 ln 1 / 1) is 0: what lost once has a bound of 0.
    memory = {"duels": {"0,1": 1.0, "1,0": 1.0}, "wins": {"0,1": 1.0, "1,0": 0.0}}
    assert BanditOrder().others(OrderState(AB, 0.5, 1, memory), 0.5, 0, 2) == ()
    assert OnlineOrder().others(OrderState(ABC, 0.5), 0.5, 0, 1) == ()


def test_about_half_of_the_clients_choose_and_always_the_same() -> None:
    names = [f"client-{number}" for number in range(400)]
    sides = [chooses(name) for name in names]
    assert 150 < sum(sides) < 250
    assert sides == [chooses(name) for name in names]


@settings(max_examples=50)
@given(
    limit=st.integers(0, 12),
    kind=st.sampled_from(["online", "greedy", "bandit"]),
    rounds=st.lists(st.lists(st.integers(0, 9), min_size=6, max_size=6), max_size=12),
)
def test_no_strategy_exceeds_its_budget_and_the_bandit_spends_one_test_a_round(limit, kind, rounds):
    strategy = strategy_of(AdjustSettings(strategy=kind, budget=limit))
    free = strategy_of(AdjustSettings(strategy=kind))
    state = bandit = OrderState(ABC, 0.0)
    for accuracies in rounds:
        table = dict(zip(ORDERS, accuracies, strict=True))
        state = play(strategy, state, table)[1].state
        tried, decision = play(free, bandit, table)
        assert decision.state.testing_rounds == bandit.testing_rounds + decision.tests
        bandit = decision.state
        assert decision.tests == len(tried) - 1 <= 1 or kind != "bandit"
        assert bandit.reference == max(table[order] for order in tried) or kind == "online"
    assert state.testing_rounds <= limit


def test_a_fixed_order_follows_the_accuracy_and_keeps_the_rest() -> None:
    before = OrderState((1, 0), 0.5, 7, {"duels": {"1,0": 2.0}})
    assert FixedOrder().others(before, 0.1, 0, 1) == ()
    decision = FixedOrder().decide(before, [(1, 0)], [0.25])
    assert decision == Decision(0, 0, OrderState((1, 0), 0.25, 7, {"duels": {"1,0": 2.0}}))
