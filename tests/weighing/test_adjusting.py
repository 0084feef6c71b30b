"""Online adjustment against hand-computed cases and a slow, sequential version of paper 003's Algorithm 1."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.weighing.adjusting import (
    AdjustSettings,
    BanditOrder,
    Budget,
    GreedyOrder,
    OnlineOrder,
    _upper_bound,
    other_orders,
    strategy_of,
)
from steelyard.weighing.priorities import FixedOrder, OrderState

# Three criteria A, B, C as listed: the six orders in lexicographic order.
ABC, ACB, BAC, BCA, CAB, CBA = permutations(range(3))


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
    assert other_orders(CBA) == [ABC, ACB, BAC, BCA, CAB]
    assert len(other_orders((0, 1, 2, 3))) == 23


def test_more_than_four_criteria_are_searched_by_adjacent_swaps():
    assert other_orders((0, 1, 2, 3, 4)) == [(1, 0, 2, 3, 4), (0, 2, 1, 3, 4), (0, 1, 3, 2, 4), (0, 1, 2, 4, 3)]
    assert len(other_orders(tuple(range(9)))) == 8


def test_an_accuracy_that_does_not_fall_costs_nothing_and_a_tie_is_accepted():
    for accuracy in (0.6, 0.7):
        _, decision = play(OnlineOrder(), OrderState(ABC, 0.6), {ABC: accuracy})
        assert (decision.chosen, decision.tests) == (0, 0)
        assert decision.state == OrderState(ABC, accuracy, 0)


def test_the_first_order_that_is_not_below_ends_the_search_even_if_a_later_one_is_better():
    table = {ABC: 0.50, ACB: 0.55, BAC: 0.60, BCA: 0.99, CAB: 0.70, CBA: 0.80}
    tried, decision = play(OnlineOrder(), OrderState(ABC, 0.60, 4), table)
    assert tried == [ABC, ACB, BAC, BCA, CAB, CBA]
    assert (decision.chosen, decision.tests) == (2, 2)
    assert decision.state == OrderState(BAC, 0.60, 6)


def test_the_search_starts_after_the_current_order():
    table = {ABC: 0.7, ACB: 0.1, BAC: 0.1, BCA: 0.1, CAB: 0.2, CBA: 0.3}
    _, decision = play(OnlineOrder(), OrderState(CAB, 0.6), table)
    assert decision.state == OrderState(ABC, 0.7, 2)


def test_when_all_are_below_the_best_of_all_six_wins_and_lowers_the_reference():
    table = {ABC: 0.50, ACB: 0.52, BAC: 0.58, BCA: 0.51, CAB: 0.57, CBA: 0.50}
    _, decision = play(OnlineOrder(), OrderState(ABC, 0.60), table)
    assert decision.tests == 5
    assert decision.state == OrderState(BAC, 0.58, 5)
    first = {**table, ABC: 0.59}
    _, decision = play(OnlineOrder(), OrderState(ABC, 0.60), first)
    assert (decision.chosen, decision.tests) == (0, 5)
    assert decision.state == OrderState(ABC, 0.59, 5)


@given(
    accuracies=st.lists(st.integers(0, 6), min_size=6, max_size=6),
    reference=st.integers(0, 6),
    start=st.integers(0, 5),
)
def test_testing_together_decides_as_the_sequential_algorithm(accuracies, reference, start):
    orders = list(permutations(range(3)))
    table = {order: value / 6 for order, value in zip(orders, accuracies, strict=True)}
    state = OrderState(orders[start], reference / 6)
    order, accuracy, tests = sequential(state, table)
    _, decision = play(OnlineOrder(), state, table)
    assert decision.state == OrderState(order, accuracy, tests)
    assert decision.tests == tests <= math.factorial(3) - 1


def test_greedy_keeps_the_best_order_every_round_also_when_nothing_fell():
    table = {ABC: 0.9, ACB: 0.2, BAC: 0.95, BCA: 0.95, CAB: 0.1, CBA: 0.1}
    _, decision = play(GreedyOrder(), OrderState(ABC, 0.1), table)
    assert decision.tests == 5
    assert decision.state == OrderState(BAC, 0.95, 5)
    tie = dict.fromkeys(table, 0.5)
    assert play(GreedyOrder(), OrderState(BCA, 0.1), tie)[1].state.order == BCA


@settings(max_examples=30)
@given(rounds=st.lists(st.lists(st.integers(0, 20), min_size=6, max_size=6), min_size=1, max_size=40))
def test_the_bandit_spends_at_most_one_test_a_round_and_keeps_the_winner(rounds):
    orders = list(permutations(range(3)))
    state = OrderState(ABC, 0.0)
    for number, accuracies in enumerate(rounds, start=1):
        table = {order: value / 20 for order, value in zip(orders, accuracies, strict=True)}
        tried, decision = play(BanditOrder(), state, table)
        assert len(tried) <= 2
        assert decision.tests == len(tried) - 1
        assert decision.state.reference == max(table[order] for order in tried)
        assert decision.state.testing_rounds <= number
        state = decision.state


def test_the_bandit_tries_each_rival_once_then_comes_back_to_the_best():
    # C>B>A beats all, A>C>B beats the rest; the current order is challenged by each rival in turn.
    table = {ABC: 0.1, ACB: 0.5, BAC: 0.2, BCA: 0.3, CAB: 0.4, CBA: 0.9}
    state, met = OrderState(ABC, 0.0), []
    for _ in range(5):
        tried, decision = play(BanditOrder(), state, table)
        met += tried[1:]
        state = decision.state
    assert met == [ACB, BAC, BCA, CAB, CBA]
    assert state.order == CBA
    # Bounds after 5 duels: A>C>B has won 4 of 5, the others 0 of 1: .8 + √(2 ln 5 / 5) = 1.60 < √(2 ln 5) = 1.79.
    assert play(BanditOrder(), state, table)[0][1] == ABC
    for _ in range(300):
        state = play(BanditOrder(), state, table)[1].state
    assert state.order == CBA


def test_the_bandit_saves_its_tests_once_no_rival_can_hope():
    key = {order: ",".join(map(str, order)) for order in permutations(range(3))}
    duels = {key[order]: 500.0 for order in key} | {key[ABC]: 2500.0}
    wins = {key[ABC]: 2500.0}
    state = OrderState(ABC, 0.5, 2500, {"duels": duels, "wins": wins})
    tried, decision = play(BanditOrder(), state, dict.fromkeys(key, 0.5))
    assert tried == [ABC]
    assert decision.tests == 0


def test_a_budget_cuts_the_search_short_and_then_ends_it():
    table = {ABC: 0.50, ACB: 0.52, BAC: 0.55, BCA: 0.9, CAB: 0.9, CBA: 0.9}
    limited = Budget(OnlineOrder(), 2)
    tried, decision = play(limited, OrderState(ABC, 0.60), table)
    assert tried == [ABC, ACB, BAC]
    assert decision.state == OrderState(BAC, 0.55, 2)
    tried, decision = play(limited, OrderState(BAC, 0.60, 2), table)
    assert tried == [BAC]
    assert decision.state == OrderState(BAC, 0.55, 2)


@given(
    limit=st.integers(0, 12),
    kind=st.sampled_from(["online", "greedy", "bandit"]),
    rounds=st.lists(st.lists(st.integers(0, 9), min_size=6, max_size=6), max_size=12),
)
def test_no_strategy_exceeds_its_budget(limit, kind, rounds):
    orders = list(permutations(range(3)))
    strategy = strategy_of(AdjustSettings(strategy=kind, budget=limit))
    state = OrderState(ABC, 0.0)
    for accuracies in rounds:
        state = play(strategy, state, dict(zip(orders, accuracies, strict=True)))[1].state
    assert state.testing_rounds <= limit


def test_settings_name_the_strategies():
    assert isinstance(strategy_of(None), FixedOrder)
    assert isinstance(strategy_of(AdjustSettings()), OnlineOrder)
    assert strategy_of(AdjustSettings(strategy="greedy", budget=3)) == Budget(GreedyOrder(), 3)
    with pytest.raises(ValueError, match="budget"):
        AdjustSettings(budget=-1)


AB, BA = permutations(range(2))


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


def test_a_budget_hands_everything_on() -> None:
    asked: list[tuple[OrderState, float, int, int]] = []

    class Asking(GreedyOrder):
        def others(self, state: OrderState, accuracy: float, seed: int, round: int):
            asked.append((state, accuracy, seed, round))
            return super().others(state, accuracy, seed, round)

    state = OrderState(AB, 0.5, 3)
    assert Budget(Asking(), 4).others(state, 0.25, 7, 9) == [BA]
    assert Budget(Asking(), 3).others(state, 0.25, 7, 9) == []
    assert Budget(Asking(), 2).others(state, 0.25, 7, 9) == []
    assert asked == [(state, 0.25, 7, 9)] * 3


def test_the_upper_bound_by_hand():
    assert _upper_bound(0.0, 0.0, 5.0) == math.inf
    assert _upper_bound(1.0, 2.0, 1.0) == _upper_bound(1.0, 2.0, 0.5) == 0.5
    assert _upper_bound(1.0, 2.0, 1.5) == pytest.approx(0.5 + math.sqrt(math.log(1.5)))
