"""Adam and Adadelta for a stack of clients in one pass over the memory; torch's operators would need ten and more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from steelyard.clients.local.kernels import elementwise as _elementwise
from steelyard.learning.descent import ADADELTA_DECAY, ADAM_DECAY, EPSILON, Descent, Step, correction

elementwise: Any = _elementwise  # what Triton makes of a function has no type
BLOCK = 1024
"""Parameters that one program takes."""


@dataclass(frozen=True)
class KernelDescent(Descent):
    """A local optimiser whose steps with memory are one kernel; use it where Triton is ready."""

    @classmethod
    def like(cls, descent: Descent) -> KernelDescent:
        """Return the same optimiser with its steps in kernels."""
        return cls(**asdict(descent))

    def _move(
        self,
        parameters: torch.Tensor,
        gradients: torch.Tensor,
        memory: Sequence[torch.Tensor],
        step: Step,
        rates: torch.Tensor | None,
    ) -> None:
        if self.optimiser == "sgd" or rates is None:
            super()._move(parameters, gradients, memory, step, rates)
            return
        clients, size = parameters.shape
        grid = (-(-size // BLOCK), clients)
        if self.optimiser == "adadelta":
            elementwise.adadelta[grid](
                parameters, gradients, *memory, rates.contiguous(), size, ADADELTA_DECAY, EPSILON, block=BLOCK
            )
            return
        both = [torch.as_tensor(correction(decay, step), device=parameters.device).view(1) for decay in ADAM_DECAY]
        elementwise.adam[grid](
            parameters, gradients, *memory, rates.contiguous(), torch.cat(both).float(), size, *ADAM_DECAY, EPSILON,
            block=BLOCK,
        )  # fmt: skip
