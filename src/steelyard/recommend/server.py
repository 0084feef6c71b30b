"""The server of a recommender."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steelyard.base.errors import UserError
from steelyard.messages.payloads import ServerTest
from steelyard.recommend.fpl import initial_table
from steelyard.recommend.sparse import Floats32


@dataclass(frozen=True)
class RecommendServer:
    """The server of FPL: it holds the shared table and no data of its own; derive from it for other tables."""

    rows: int
    factors: int
    bias_spread: float = 0.0
    """Standard deviation of the first biases."""

    def initial(self, seed: int) -> torch.Tensor:
        return torch.from_numpy(self._first(seed).reshape(-1))

    def _first(self, seed: int) -> Floats32:
        return initial_table(seed, self.rows, self.factors, bias_spread=self.bias_spread)

    def test(self, seed: int, models: torch.Tensor) -> ServerTest:
        raise UserError(
            "criterion VP: the server of a recommender has no test set and sees no whole model; allowed: other criteria"
        )
