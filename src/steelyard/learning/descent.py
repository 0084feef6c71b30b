"""What a client does with a gradient: SGD, Adam or Adadelta, one step for a model or for a stack of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from steelyard.learning.settings import TrainingSettings

ADAM_DECAY = (0.9, 0.999)
ADADELTA_DECAY = 0.95
EPSILON = 1e-7
"""The constants of Keras, whose example paper 001 starts from."""

Step = int | torch.Tensor
Corrects = Literal["nothing", "gradient", "step"]
"""What the vector of a client is added to in every step: nothing, its gradient, or the step that it takes."""


@dataclass(frozen=True)
class Descent:
    """A local optimiser as numbers, and the one gate for what an algorithm adds to a client's step.

    SGD: v ← m·v + g + λθ + μ(θ − Θ) + a; θ ← θ − η(v + b). Adam (Kingma and Ba 2015) and Adadelta (Zeiler 2012) take
    the same gradient. μ (`pull`) holds a client near the model it started from; a correction is one vector per client
    that stays the same for the whole round: a of a gradient, or b of a step, which no momentum multiplies. What an
    optimiser remembers begins at 0 in every round on every client.
    """

    rate: float
    momentum: float
    decay: float
    optimiser: str = "sgd"
    pull: float = 0.0
    corrects: Corrects = "nothing"
    scheduled: bool = False
    """Whether the rate changes from round to round, so that nothing that outlasts a round may hold it."""

    @classmethod
    def of(cls, training: TrainingSettings, pull: float = 0.0, corrects: Corrects = "nothing") -> Descent:
        """Return the optimiser of [training], with what an algorithm adds to its steps."""
        return cls(training.learning_rate, training.momentum, training.weight_decay, training.optimiser, pull, corrects)

    @property
    def plain(self) -> bool:
        """Whether a step is θ ← θ − ηg, so that a gradient can be added into θ as it is computed."""
        added = self.momentum or self.decay or self.pull or self.corrected or self.scheduled
        return self.optimiser == "sgd" and not added

    @property
    def form(self) -> Descent:
        """What of it a graph of kernels holds: all of it where a step is plain, else all but the rate."""
        return self if self.plain else replace(self, rate=0.0)

    @property
    def corrected(self) -> bool:
        """Whether each client brings a vector that corrects its gradients or its steps."""
        return self.corrects != "nothing"

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
        correction: torch.Tensor | None = None,
    ) -> None:
        """Take step number `step` (from 0) in place; the gradients are used up.

        `start` is needed with a pull, `correction` where this descent is corrected. `rates` are step sizes per row (0
        for a client that is done) instead of η.
        """
        if self.decay:
            gradients.add_(parameters, alpha=self.decay)
        if self.pull and start is not None:
            gradients.add_(parameters, alpha=self.pull).sub_(start, alpha=self.pull)
        if correction is not None and self.corrects == "gradient":
            gradients.add_(correction)
        self._move(parameters, gradients, memory, step, rates)
        if correction is not None and self.corrects == "step":
            self._go(parameters, correction, rates)

    def _move(
        self,
        parameters: torch.Tensor,
        gradients: torch.Tensor,
        memory: Sequence[torch.Tensor],
        step: Step,
        rates: torch.Tensor | None,
    ) -> None:
        """Take the step along gradients that are whole."""
        self._go(parameters, self._change(gradients, memory, step), rates)

    def _go(self, parameters: torch.Tensor, change: torch.Tensor, rates: torch.Tensor | None) -> None:
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


class StackDescent:
    """A descent with what it keeps for a stack of clients while they train: memory, starting models, corrections.

    Use it for stacks [clients, parameters]; clients that are done drop out from the back. Only `columns` move.
    """

    def __init__(self, descent: Descent, like: torch.Tensor, columns: Sequence[slice] = (slice(None),)) -> None:
        self.descent, self._columns = descent, columns
        self._memory = descent.remember(like)
        self._start = torch.zeros_like(like) if descent.pull else None
        self._correction = torch.zeros_like(like) if descent.corrected else None

    def begin(self, models: torch.Tensor, corrections: torch.Tensor | None) -> None:
        """Start anew from these models; there may be fewer than the stack holds."""
        for part in self._memory:
            part.zero_()
        if self._start is not None:
            self._start[: len(models)] = models
        if self._correction is not None and corrections is not None:
            self._correction[: len(models)] = corrections

    def apply(
        self, models: torch.Tensor, gradients: torch.Tensor, step: Step, rates: torch.Tensor | None = None
    ) -> None:
        """Take a step of the first clients of the stack in place; the gradients are used up."""
        for columns in self._columns:
            here = slice(len(models)), columns
            memory = [part[here] for part in self._memory]
            start = None if self._start is None else self._start[here]
            correction = None if self._correction is None else self._correction[here]
            self.descent.apply(models[here], gradients[here], memory, start, step, rates, correction)


def correction(decay: float, step: Step) -> float | torch.Tensor:
    """Return 1 − decayᵗ of step t = step + 1; in a captured graph the step lies on the device."""
    if isinstance(step, torch.Tensor):
        return (1 - decay ** (step.double() + 1)).float()
    return 1 - decay ** (step + 1)
