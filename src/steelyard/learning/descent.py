"""What a client does with a gradient: SGD, Adam or Adadelta, one step for a model or for a stack of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from steelyard.learning.settings import TrainingSettings

ADAM_DECAY = (0.9, 0.999)
ADADELTA_DECAY = 0.95
EPSILON = 1e-7
"""The constants of Keras, whose example paper 001 starts from."""

Step = int | torch.Tensor


@dataclass(frozen=True)
class Descent:
    """A local optimiser as numbers; every engine takes its steps through it, the plain loop too.

    SGD: v ← m·v + g + λθ + μ(θ − Θ); θ ← θ − ηv. Adam (Kingma and Ba 2015) and Adadelta (Zeiler 2012) take the same
    gradient g + λθ + μ(θ − Θ). What an optimiser remembers begins at 0 in every round on every client: nothing but
    the model travels, as in FedAvg.
    """

    rate: float
    momentum: float
    decay: float
    proximal: float
    optimiser: str = "sgd"

    @classmethod
    def of(cls, training: TrainingSettings) -> Descent:
        return cls(
            training.learning_rate, training.momentum, training.weight_decay, training.proximal, training.optimiser
        )

    @property
    def plain(self) -> bool:
        """Whether a step is θ ← θ − ηg, so that a gradient can be added into θ as it is computed."""
        return self.optimiser == "sgd" and not (self.momentum or self.decay or self.proximal)

    @property
    def memories(self) -> int:
        """How many numbers the optimiser remembers for each parameter."""
        return int(bool(self.momentum)) if self.optimiser == "sgd" else 2

    def remember(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Return fresh memory for parameters of this shape."""
        return [torch.zeros_like(like) for _ in range(self.memories)]

    def apply(
        self,
        parameters: torch.Tensor,
        gradients: torch.Tensor,
        memory: Sequence[torch.Tensor],
        start: torch.Tensor | None,
        step: Step,
        rates: torch.Tensor | None = None,
    ) -> None:
        """Take step number `step` (from 0) in place; the gradients are used up.

        `rates` are step sizes per row (0 for a client that is done) instead of η.
        """
        if self.decay:
            gradients.add_(parameters, alpha=self.decay)
        if self.proximal and start is not None:
            gradients.add_(parameters, alpha=self.proximal).sub_(start, alpha=self.proximal)
        self._move(parameters, gradients, memory, step, rates)

    def _move(
        self,
        parameters: torch.Tensor,
        gradients: torch.Tensor,
        memory: Sequence[torch.Tensor],
        step: Step,
        rates: torch.Tensor | None,
    ) -> None:
        """Take the step along gradients that are whole."""
        change = self._change(gradients, memory, step)
        if rates is None:
            parameters.sub_(change, alpha=self.rate)
        else:
            parameters.addcmul_(change, rates[:, None], value=-1)

    def _change(self, gradients: torch.Tensor, memory: Sequence[torch.Tensor], step: Step) -> torch.Tensor:
        if self.optimiser == "adam":
            mean, square = memory
            mean.mul_(ADAM_DECAY[0]).add_(gradients, alpha=1 - ADAM_DECAY[0])
            square.mul_(ADAM_DECAY[1]).addcmul_(gradients, gradients, value=1 - ADAM_DECAY[1])
            first, second = (correction(decay, step) for decay in ADAM_DECAY)
            root = torch.div(square, second, out=gradients).sqrt_().add_(EPSILON).mul_(first)
            return torch.div(mean, root, out=gradients)
        if self.optimiser == "adadelta":
            square, moved = memory
            square.mul_(ADADELTA_DECAY).addcmul_(gradients, gradients, value=1 - ADADELTA_DECAY)
            gradients.mul_((moved + EPSILON).div_(square + EPSILON).sqrt_())
            moved.mul_(ADADELTA_DECAY).addcmul_(gradients, gradients, value=1 - ADADELTA_DECAY)
            return gradients
        return memory[0].mul_(self.momentum).add_(gradients) if memory else gradients


def correction(decay: float, step: Step) -> float | torch.Tensor:
    """Return 1 − decayᵗ of step t = step + 1; in a captured graph the step lies on the device."""
    if isinstance(step, torch.Tensor):
        return (1 - decay ** (step.double() + 1)).float()
    return 1 - decay ** (step + 1)
