"""FlexLoRA: low-rank adapters are weighed as the matrices that they stand for (Bai et al. 2024).

    ΔW = Σ wᵢBᵢAᵢ ≈ BA,   the best of rank r (Eckart and Young)

LoRA adds BA to a frozen matrix. Σ wᵢBᵢ times Σ wᵢAᵢ is not Σ wᵢBᵢAᵢ, so averages of the factors are another adapter.
ΔW itself is never formed: with [w₁B₁ … wₙBₙ] = QR and [A₁ … Aₙ]ᵀ = PS the singular values of ΔW are those of the small
RSᵀ. What is no factor is averaged. Clients may have fewer ranks than the server: they get its first ones, which carry
most. https://arxiv.org/abs/2402.11505
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveInt

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import FACTORS, Algorithm, ServerStep, Vectors

if TYPE_CHECKING:
    import torch

ERROR = "product_error"
"""Under this name the server keeps what was lost: by cutting ΔW to its rank, and what averaged factors would lose."""


@algorithm("flexlora")
class FlexLora(Algorithm):
    """Adapters weighed in product space; use it wherever clients train LoRA, above all with unequal ranks."""

    sees: ClassVar[Literal["sum", "models"]] = "models"
    factored: ClassVar[bool] = True

    ranks: dict[str, PositiveInt] = Field(default_factory=dict)
    """How many ranks a client trains, client = number; default all that the model has."""

    def rank_of(self, client: str) -> int | None:
        return self.ranks.get(client)

    def step(self, server: ServerStep) -> tuple[torch.Tensor, Vectors]:
        assert server.models is not None
        models, average, new = server.models, server.average.to(server.models.device), server.average.clone()
        weights = models[:0].double().new_tensor(server.weights)
        whole = lost = wrong = weights.new_zeros(())
        for row in server.tensors[FACTORS].tolist():
            low, high, thin, _, _ = row
            a, b = _factors(models, row)
            product = best_product(a, b, weights, thin)
            new[low : low + product.a.numel()] = product.a.reshape(-1).to(new)
            new[high : high + product.b.numel()] = product.b.reshape(-1).to(new)
            whole, lost = whole + product.whole, lost + product.lost
            wrong = wrong + product.apart(*_factors(average[None], row))
        scale = whole.clamp_min(1e-300)
        errors = new.new_tensor([float((part / scale).sqrt()) for part in (lost, wrong)])
        return new, {FACTORS: server.tensors[FACTORS], ERROR: errors}

    def figures(self, tensors: Vectors) -> Mapping[str, float]:
        """Say what was lost of ΔW, relative to its size, and what averaging A and B would have lost."""
        if ERROR not in tensors:
            return {}
        lost, wrong = tensors[ERROR].tolist()
        return {ERROR: lost, "factor_error": wrong}


class Product:
    """Σ wᵢBᵢAᵢ as its best factors of a rank, and the squares of what it is and of what they lack."""

    def __init__(self, left: torch.Tensor, values: torch.Tensor, right: torch.Tensor, rank: int) -> None:
        # Directions without weight keep a row of A: with both factors 0 they could never be trained again.
        live = values > values[:1] * 1e-12
        roots = values.where(live, 1.0).sqrt()
        self._left, self._values, self._right = left, values, right
        self.a = _padded(roots[:, None] * right, rank)
        self.b = _padded((left * (roots * live)).mT, rank).mT
        self.whole = values.square().sum()
        self.lost = values[rank:].square().sum()

    def apart(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return ‖ΔW − ba‖² for other factors, [1, rank, inputs] and [1, outputs, rank]."""
        inner = ((self._left.mT @ b[0]) * (self._values[:, None] * (self._right @ a[0].mT))).sum()
        own = ((b[0].mT @ b[0]) * (a[0] @ a[0].mT)).sum()
        return (self.whole - 2 * inner + own).clamp_min(0)


def best_product(a: torch.Tensor, b: torch.Tensor, weights: torch.Tensor, rank: int) -> Product:
    """Return the best product of a rank for Σ wᵢBᵢAᵢ; A is [clients, r, inputs], B [clients, outputs, r]."""
    import torch  # For speed of start.

    clients, thin, inputs = a.shape
    tall = (weights[:, None, None] * b).permute(1, 0, 2).reshape(-1, clients * thin)
    left, upper = torch.linalg.qr(tall)
    right, lower = torch.linalg.qr(a.reshape(clients * thin, inputs).mT)
    u, values, v = torch.linalg.svd(upper @ lower.mT, full_matrices=False)
    return Product(left @ u, values, v @ right.mT, rank)


def _factors(models: torch.Tensor, row: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [models, rank, inputs] and B [models, outputs, rank] of one adapter."""
    low, high, rank, inputs, outputs = row
    a, b = models[:, low : low + rank * inputs], models[:, high : high + outputs * rank]
    return a.reshape(-1, rank, inputs).double(), b.reshape(-1, outputs, rank).double()


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The first rows of a matrix, with zeros where it has fewer."""
    found = rows.new_zeros((count, rows.shape[1]))
    found[: len(rows)] = rows[:count]
    return found


def cut_to_ranks(models: torch.Tensor, factors: torch.Tensor, ranks: list[int | None]) -> None:
    """Leave each model the first ranks of its adapters, in place; the others are 0, and stay so while it trains."""
    for model, rank in zip(models, ranks, strict=True):
        if rank is not None:
            for low, high, whole, inputs, outputs in factors.tolist():
                model[low : low + whole * inputs].view(whole, inputs)[rank:] = 0
                model[high : high + outputs * whole].view(outputs, whole)[:, rank:] = 0
