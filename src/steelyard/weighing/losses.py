"""Which loss the clients use in a round: the same always, or one that follows how the model does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from steelyard.messages.payloads import ServerTest
from steelyard.messages.updates import LossState

PLAIN_LOSS = LossState()


class LossRule(Protocol):
    """Decides which loss the clients use next; adaptive losses look at the server's test of the new model."""

    @property
    def adapts(self) -> bool:
        """Whether `after` needs the server's test of the new model."""
        ...

    def first(self) -> LossState:
        """Return the loss of the first round."""
        ...

    def after(self, loss: LossState, test: ServerTest) -> LossState:
        """Return the loss of the next round, from how the new model does on the server's test set."""
        ...


@dataclass(frozen=True)
class FixedLoss:
    """The same loss every round; use it for every rule whose loss does not adapt."""

    loss: LossState = PLAIN_LOSS
    adapts: bool = False

    def first(self) -> LossState:
        return self.loss

    def after(self, loss: LossState, test: ServerTest) -> LossState:
        return loss
