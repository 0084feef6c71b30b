"""Client momentum: each client sends the running mean of its updates (Karimireddy, He, Jaggi 2021, Algorithm 2).

    client: m_a ← β m_a + (1 − β)(θ_a − Θ), the first time θ_a − Θ;  it sends Θ + m_a
    server: as FedAvg, under any rule and defence

The paper shows that without history no rule withstands attacks that hide in each round's noise: an honest client's mean
over rounds has a variance (1 − β)/(1 + β) times as large, a hostile push does not cancel. The paper's step is one
gradient; here it is a whole local training, so β is less than its 0.9: an update of ten rounds ago was made for
another model. The mean begins with the first update, as in the paper (m_1 = g_1).
https://proceedings.mlr.press/v139/karimireddy21a.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import Algorithm, LocalTraining, Vectors

if TYPE_CHECKING:
    import torch

MOMENTUM = "momentum"


@algorithm("client-momentum")
class ClientMomentum(Algorithm):
    """Clients send a mean of their updates over rounds; use it with a robust rule, where all take part often."""

    keeps: ClassVar[tuple[str, ...]] = (MOMENTUM,)
    replaces: ClassVar[bool] = True

    beta: float = Field(default=0.5, ge=0, lt=1)
    """β: how much of the mean stays; 0.9 in the paper, where a step is one gradient."""

    def sent(self, local: LocalTraining) -> tuple[torch.Tensor, Vectors]:
        update, before = local.models - local.start, local.kept[MOMENTUM]
        first = ~before.any(dim=1, keepdim=True)
        momentum = update.where(first, self.beta * before + (1.0 - self.beta) * update)
        return local.start + momentum, {MOMENTUM: momentum}
