"""Gradient inversion: what a server can read of a client's samples from its update.

*Analytic*: in a dense layer with a bias, the gradient of a row of weights is the gradient of its bias times the layer's
input: x = ∂L/∂W_j / ∂L/∂b_j. One sample, one step, and the input is read off exactly, whatever follows the layer (L. T.
Phong, Y. Aono, T. Hayashi, L. Wang, S. Moriai: "Privacy-Preserving Deep Learning via Additively Homomorphic
Encryption", IEEE TIFS 2018). With several samples it is a mixture of them.

*By optimisation*: look for samples whose gradient points where the update points (L. Zhu, Z. Liu, S. Han: "Deep Leakage
from Gradients", NeurIPS 2019; cosine distance after J. Geiping et al. 2020, labels known). Use it for several samples,
or for layers without a bias.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call


def gradient(model: nn.Module, rows: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradient of the mean cross entropy at a model, layer by layer: what one full-batch step reveals."""
    loss = nn.functional.cross_entropy(model(rows), labels)
    return [part.detach() for part in torch.autograd.grad(loss, list(model.parameters()))]


def read_off(weights: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    """Return the input of a dense layer as its gradients [outputs, inputs] and [outputs] tell it.

    Of all outputs the one whose bias moved most counts: noise disturbs it least.
    """
    row = int(biases.abs().argmax())
    bias = biases[row]
    return weights[row] / torch.where(bias == 0, torch.ones_like(bias), bias)


def search(
    model: nn.Module,
    gradient: list[torch.Tensor],
    shape: tuple[int, ...],
    labels: torch.Tensor,
    steps: int = 300,
    seed: int = 0,
) -> torch.Tensor:
    """Return rows [samples, *shape] whose gradient points where the one that was sent points, within 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand((len(labels), *shape), generator=generator).requires_grad_()
    optimiser = torch.optim.Adam([rows], lr=0.05)
    target = torch.cat([part.reshape(-1) for part in gradient])
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    for _ in range(steps):
        optimiser.zero_grad()
        outputs = functional_call(model, parameters, (rows,))
        loss = nn.functional.cross_entropy(outputs, labels)
        found = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        mine = torch.cat([part.reshape(-1) for part in found])
        distance = 1.0 - nn.functional.cosine_similarity(mine, target, dim=0)
        smooth = 1e-3 * (rows[..., 1:] - rows[..., :-1]).abs().mean()
        (distance + smooth).backward()
        optimiser.step()
        with torch.no_grad():
            rows.clamp_(0.0, 1.0)
    return rows.detach()


def likeness(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return the best correlation of each true row with any found one: 1 for a sample that was read, 0 for none."""

    def centred(rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(len(rows), -1)
        flat = flat - flat.mean(dim=1, keepdim=True)
        return flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-12)

    return (centred(true) @ centred(found).T).max(dim=1).values
