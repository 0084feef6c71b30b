"""The server of FPL."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steelyard.errors import UserError
from steelyard.messages import ServerTest
from steelyard.recommend.fpl import initial_table


@dataclass(frozen=True)
class RecommendServer:
    """The server of FPL: it holds the shared table and no data of its own."""

    items: int
    factors: int
    bias_spread: float = 0.0
    """Standard deviation of the first biases."""

    def initial(self, seed: int) -> torch.Tensor:
        table = initial_table(seed, self.items, self.factors, bias_spread=self.bias_spread)
        return torch.from_numpy(table.reshape(-1))

    def test(self, seed: int, models: torch.Tensor) -> ServerTest:
        raise UserError(
            "criterion VP: the server of a recommender has no test set and sees no whole model; allowed: other criteria"
        )
