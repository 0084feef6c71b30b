"""What a federation carries from round to round survives a checkpoint; a search goes on as if never stopped."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.messages import LossState
from steelyard.rounds.state import RoundState
from steelyard.runs.checkpoint import pack, unpack
from steelyard.weighing.adjusting import AdjustSettings, strategy_of
from steelyard.weighing.priorities import Decision, FixedOrder, OrderState

ORDERS = list(permutations(range(3)))
numbers = st.floats(allow_nan=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | st.text(),
    lambda more: st.lists(more, max_size=3) | st.dictionaries(st.text(), more, max_size=3),
    max_leaves=6,
)
memories = st.dictionaries(st.text(), plain, max_size=3)
order_states = st.builds(
    OrderState, st.permutations(range(4)).map(tuple), numbers, st.integers(0, 10**9), memory=memories
)
loss_states = st.builds(
    LossState,
    st.text(),
    st.none() | st.lists(numbers, max_size=4).map(tuple),
    st.none() | numbers,
    st.none() | numbers,
)
states = st.builds(
    RoundState, st.integers(0, 10**6), st.just(torch.ones(2)), loss_states, order_states, st.booleans(), memory=memories
)


@given(st.dictionaries(st.text(), states, max_size=3))
def test_nothing_of_a_state_is_dropped_or_changed(before: dict[str, RoundState]) -> None:
    tensors, text = pack(before, {"own": torch.zeros(1)})
    after, kept = unpack(tensors, text)
    assert list(after) == list(before)
    for name, state in before.items():
        found = after[name]
        assert (found.round, found.loss, found.orders) == (state.round, state.loss, state.orders)
        assert (found.finished, found.memory) == (state.finished, state.memory)
        assert found.parameters is state.parameters
    assert list(kept) == ["own"]


def resumed(state: OrderState) -> OrderState:
    document = json.loads(json.dumps(asdict(state)))
    return OrderState(**{**document, "order": tuple(document["order"])})


@given(
    kind=st.sampled_from(["online", "greedy", "bandit"]),
    budget=st.none() | st.integers(0, 9),
    rounds=st.lists(st.lists(st.integers(0, 5), min_size=6, max_size=6), min_size=1, max_size=15),
    stop=st.integers(0, 14),
)
def test_a_search_that_was_stopped_goes_on_as_one_that_was_not(kind, budget, rounds, stop) -> None:
    strategy = strategy_of(AdjustSettings(strategy=kind, budget=budget))

    def play(state: OrderState, accuracies: list[int]) -> Decision:
        table = dict(zip(ORDERS, accuracies, strict=True))
        tried = [state.order, *strategy.others(state, table[state.order], 0, 1)]
        return strategy.decide(state, tried, [table[order] for order in tried])

    straight = stopped = OrderState(ORDERS[0], 0.0)
    spent = 0
    for number, accuracies in enumerate(rounds):
        if number == stop:
            stopped = resumed(stopped)
        one, two = play(straight, accuracies), play(stopped, accuracies)
        assert one == two
        spent += one.tests
        straight, stopped = one.state, two.state
        assert straight.testing_rounds == spent


def test_a_fixed_order_follows_the_accuracy_and_keeps_the_rest() -> None:
    before = OrderState((1, 0), 0.5, 7, {"duels": {"1,0": 2.0}})
    assert FixedOrder().others(before, 0.1, 0, 1) == ()
    decision = FixedOrder().decide(before, [(1, 0)], [0.25])
    assert decision == Decision(0, 0, OrderState((1, 0), 0.25, 7, {"duels": {"1,0": 2.0}}))


@pytest.mark.parametrize("kind", ["online", "greedy", "bandit"])
def test_testing_rounds_add_up_on_those_before(kind: str) -> None:
    strategy = strategy_of(AdjustSettings(strategy=kind))
    before = OrderState((0, 1), 0.9, 5)
    others = list(strategy.others(before, 0.1, 0, 1))
    decision = strategy.decide(before, [(0, 1), *others], [0.1, 0.2])
    assert (decision.tests, decision.state.testing_rounds, decision.state.order) == (1, 6, (1, 0))
