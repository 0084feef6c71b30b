"""What every network offers whose training step is derived by hand, for a stack of clients at a time.

A step computes outputs, the gradient at the outputs and, layer by layer from the last to the first, the product that
changes the weights; nothing is kept that plain SGD does not need. What autograd would give is the test of each.
"""

from __future__ import annotations

from typing import Protocol

import torch

from steelyard.clients.local.device_data.schedule import CurrentStep
from steelyard.clients.local.steps.gradients import OutputGradient
from steelyard.clients.local.steps.writers import Views, Writer

SHARES = tuple(sixteenths / 16 for sixteenths in range(16, 0, -1))
"""Sizes of the stack for which graphs are captured, as shares of the whole, each when it is first needed. A stack of
unequal clients (benchmark B) does 2 % more work than it must; with ¾, ½, ¼ and ⅛ alone it was 10 %."""


class StackedSteps(Protocol):
    """A network whose step is written out by hand for stacked clients."""

    size: int
    """How many numbers a model has in the order that the step wants."""
    draws: bool
    """Whether the network draws while it trains, so that a step must be given the clients' streams."""
    first_is_shared: bool
    """Whether a step that is given `shared` leaves the stacked parameters unread."""

    def native(self, flat: torch.Tensor) -> torch.Tensor:
        """Return stacked models [clients, parameters] in the order of numbers that the step wants."""
        ...

    def restore(self, native: torch.Tensor) -> torch.Tensor:
        """Return stacked models in the order of the module again."""
        ...

    def views(self, native: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the named tensors in the native order."""
        ...

    def step(
        self, parameters: Views, current: CurrentStep, gradient: OutputGradient, write: Writer, shared: Views | None
    ) -> torch.Tensor:
        """Do one step and return each sample's loss.

        `shared` is one model that all clients still hold (first step): its forward is one plain product.
        """
        ...

    def sample_floats(self, samples: int) -> int:
        """Return about how many numbers one of a client's `samples` needs while a step runs; it sizes the stacks."""
        ...
