"""The server's own rows: a class that NVFlare makes anew where the job runs."""

from __future__ import annotations

import numpy as np
import torch

from steelyard.nvflare import ServerRows


class OneArray(torch.nn.Module):
    """Softmax regression with weights and biases in the one array that NVFlare's numpy recipe has."""

    def __init__(self) -> None:
        super().__init__()
        self.numpy_key = torch.nn.Parameter(torch.zeros(10, 65, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.numpy_key[:, :64].T + self.numpy_key[:, 64]


class CleanRows(ServerRows):
    """Rows that the server trusts, from a file that it has."""

    def __init__(self, parts: str) -> None:
        self.parts = parts
        with np.load(parts) as found:
            super().__init__(OneArray(), found["server_x"], found["server_y"])
