"""Which priority order a round uses: strategies that look at how the combined model does and may try other orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

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
