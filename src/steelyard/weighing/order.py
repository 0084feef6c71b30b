"""Online adjustment of the priority order (paper 003, Algorithm 1), and three relatives that the paper does not have.

All strategies see the accuracies of orders that were combined from the **same** local models; trying an order costs a
test on all clients (a *testing round*), never new training.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, Literal, Protocol

from pydantic import Field

from steelyard.base.settings import Section

Order = tuple[int, ...]


@dataclass(frozen=True)
class OrderState:
    """What a strategy carries from round to round; part of the checkpoint."""

    order: Order
    """The order that the next round starts with."""
    reference: float
    """The accuracy that the next round is held against."""
    testing_rounds: int = 0
    """Extra tests so far, beyond one a round."""
    memory: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Whatever else a strategy must remember, as plain JSON values."""


@dataclass(frozen=True)
class Decision:
    """What a strategy decided after it saw the accuracies of the orders that it tried."""

    chosen: int
    """Position of the order to keep among the orders tried; 0 is the one the round started with."""
    tests: int
    """How many testing rounds this decision cost."""
    state: OrderState


class OrderStrategy(Protocol):
    """Chooses priority orders online; one object serves a whole run and holds no state of its own."""

    def others(self, state: OrderState, accuracy: float, seed: int, round: int) -> Sequence[Order]:
        """Return the orders to test in addition to the current one, given its accuracy this round."""
        ...

    def decide(self, state: OrderState, tried: Sequence[Order], accuracies: Sequence[float]) -> Decision:
        """Choose among the orders tried (the current one first) and return the state for the next round."""
        ...


class FixedOrder:
    """Keep the order that the rule was given; use it for every rule without online adjustment."""

    def others(self, state: OrderState, accuracy: float, seed: int, round: int) -> Sequence[Order]:
        return ()

    def decide(self, state: OrderState, tried: Sequence[Order], accuracies: Sequence[float]) -> Decision:
        return Decision(0, 0, replace(state, reference=accuracies[0]))


ALL_ORDERS_UP_TO = 4
"""With more criteria than this, m! orders are too many: the neighbours of the current order are tried instead."""


class AdjustSettings(Section):
    """[weighing.adjust]: the priority order is not fixed but found while the federation learns."""

    strategy: Literal["online", "greedy", "bandit"] = "online"
    """online: when the accuracy falls, try other orders until one is not below the last round's (paper 003); greedy:
    test all orders every round and keep the best; bandit: at most one challenger a round, the likeliest to win."""
    budget: int | None = Field(default=None, ge=0)
    """At most this many testing rounds in a whole run; then the order stays as it is. Default: no limit."""
    report: Literal["same", "apart"] = "same"
    """same: the tests of all clients choose the order, and report too (paper 003); apart: those of about
    half of the clients choose, drawn by name, and the rows of the others are left to report."""


def strategy_of(settings: AdjustSettings | None) -> OrderStrategy:
    """Return the strategy that the settings name; without settings the order stays fixed."""
    if settings is None:
        return FixedOrder()
    chosen: OrderStrategy = {"online": OnlineOrder(), "greedy": GreedyOrder(), "bandit": BanditOrder()}[
        settings.strategy
    ]
    return chosen if settings.budget is None else Budget(chosen, settings.budget)


def chooses(client: str) -> bool:
    """Return whether a client's tests choose with report = apart; use it to report on the others alone.

    The name alone decides, so that a client stays on its side in every round, rule and seed, whoever comes and goes.
    """
    return bool(hashlib.blake2b(client.encode(), digest_size=1).digest()[0] & 1)


def other_orders(current: Order) -> list[Order]:
    """Return the orders to try beside the current one, in the order of trying.

    Up to four criteria: all m! − 1 others, in lexicographic order of the criteria as listed, starting after the current
    one and wrapping around. More: the m − 1 neighbours, one swap of two adjacent criteria away, from the front.
    """
    count = len(current)
    if count > ALL_ORDERS_UP_TO:
        return [(*current[:at], current[at + 1], current[at], *current[at + 2 :]) for at in range(count - 1)]
    ordered = list(permutations(range(count)))
    position = ordered.index(current)
    return ordered[position + 1 :] + ordered[:position]


def _best(accuracies: Sequence[float]) -> int:
    """Position of the highest accuracy; of equal ones the first, so that a tie never changes the order."""
    return max(range(len(accuracies)), key=lambda index: (accuracies[index], -index))


def _keep(state: OrderState, tried: Sequence[Order], accuracies: Sequence[float], chosen: int, tests: int) -> Decision:
    after = replace(
        state, order=tried[chosen], reference=accuracies[chosen], testing_rounds=state.testing_rounds + tests
    )
    return Decision(chosen, tests, after)


@dataclass(frozen=True)
class OnlineOrder:
    """Paper 003, Algorithm 1: keep the order until the accuracy falls, then try others until one is not below.

    A tie is accepted. When every order is below, the best of all, the first one included, is taken and its lower
    accuracy becomes the reference. The candidates are tested together, but a testing round is counted only for
    those up to the one that ends the search, as the sequential algorithm would spend them.
    """

    def others(self, state: OrderState, accuracy: float, seed: int, round: int) -> Sequence[Order]:
        return other_orders(state.order) if accuracy < state.reference else ()

    def decide(self, state: OrderState, tried: Sequence[Order], accuracies: Sequence[float]) -> Decision:
        for index, accuracy in enumerate(accuracies):
            if not accuracy < state.reference:
                return _keep(state, tried, accuracies, index, tests=index)
        return _keep(state, tried, accuracies, _best(accuracies), tests=len(tried) - 1)


@dataclass(frozen=True)
class GreedyOrder:
    """Test every order in every round and keep the best: the most that re-ordering gives, for m! − 1 tests a round."""

    def others(self, state: OrderState, accuracy: float, seed: int, round: int) -> Sequence[Order]:
        return other_orders(state.order)

    def decide(self, state: OrderState, tried: Sequence[Order], accuracies: Sequence[float]) -> Decision:
        return _keep(state, tried, accuracies, _best(accuracies), tests=len(tried) - 1)


@dataclass(frozen=True)
class BanditOrder:
    """A duel a round: the current order against the challenger with the highest upper bound on its share of wins.

    A win counts 1, a tie ½. The bound is UCB1's: share + √(2 ln t / n) after n duels of t in all; orders that never
    fought come first. The winner (the current order on a tie) is kept. When no bound reaches ½, even an optimist
    expects to lose, and the round spends no test. Use it when tests are expensive.
    """

    def others(self, state: OrderState, accuracy: float, seed: int, round: int) -> Sequence[Order]:
        duels = _counts(state.memory, "duels")
        wins = _counts(state.memory, "wins")
        total = sum(duels.values()) / 2
        rivals = other_orders(state.order)
        bounds = [_upper_bound(wins.get(_key(order), 0.0), duels.get(_key(order), 0.0), total) for order in rivals]
        if not rivals or bounds[best := _best(bounds)] < 0.5:
            return ()
        return [rivals[best]]

    def decide(self, state: OrderState, tried: Sequence[Order], accuracies: Sequence[float]) -> Decision:
        if len(tried) == 1:
            return _keep(state, tried, accuracies, 0, tests=0)
        duels, wins = _counts(state.memory, "duels"), _counts(state.memory, "wins")
        ours, theirs = accuracies[0], accuracies[1]
        won = 0.5 if ours == theirs else float(ours > theirs)
        for order, gained in ((tried[0], won), (tried[1], 1.0 - won)):
            duels[_key(order)] = duels.get(_key(order), 0.0) + 1.0
            wins[_key(order)] = wins.get(_key(order), 0.0) + gained
        remembered = replace(state, memory={**state.memory, "duels": duels, "wins": wins})
        return _keep(remembered, tried, accuracies, _best(accuracies), tests=1)


@dataclass(frozen=True)
class Budget:
    """Another strategy with at most `limit` testing rounds in a whole run; use it to bound what adjusting may cost."""

    strategy: OrderStrategy
    limit: int

    def others(self, state: OrderState, accuracy: float, seed: int, round: int) -> Sequence[Order]:
        left = max(0, self.limit - state.testing_rounds)
        return self.strategy.others(state, accuracy, seed, round)[:left]

    def decide(self, state: OrderState, tried: Sequence[Order], accuracies: Sequence[float]) -> Decision:
        return self.strategy.decide(state, tried, accuracies)


def _key(order: Order) -> str:
    return ",".join(map(str, order))


def _counts(memory: Mapping[str, Any], name: str) -> dict[str, float]:
    return dict(memory.get(name, {}))


def _upper_bound(wins: float, duels: float, total: float) -> float:
    return math.inf if duels == 0 else wins / duels + math.sqrt(2 * math.log(max(total, 1.0)) / duels)
