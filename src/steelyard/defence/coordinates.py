"""Coordinate-wise median and trimmed mean, with weights: each parameter by itself, sorted over the clients.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett: "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates"
(ICML 2018). With weights, a client counts as much as its weight on the way from 0 to 1 along the sorted values: the
median is the value at one half, the trimmed mean the mean of what lies between β and 1 − β. Equal weights give the
paper's rules, β = f/n the mean without the f least and the f greatest.
"""

from __future__ import annotations

import torch

HALF = 1e-9
"""So near to one half counts as one half: sums of weights round."""


def median(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted median of values [clients, parameters]; where half the weight ends between two, their mean.

    `weights` [clients] are float64 and sum to 1.
    """
    ordered, order = values.sort(dim=0)
    reached = weights[order].cumsum(dim=0)
    low = (reached < 0.5 - HALF).sum(dim=0).clamp_(max=len(values) - 1)
    high = (reached <= 0.5 + HALF).sum(dim=0).clamp_(max=len(values) - 1)
    # A client without weight between the two is no neighbour of the middle.
    return (ordered.gather(0, low[None])[0] + ordered.gather(0, high[None])[0]) / 2


def trimmed_mean(values: torch.Tensor, weights: torch.Tensor, share: float) -> torch.Tensor:
    """Return the mean of what is left of values [clients, parameters] without this share of the weight at each end."""
    ordered, order = values.sort(dim=0)
    mine = weights[order]
    ends = mine.cumsum(dim=0)
    begins = ends - mine
    left = (ends.clamp(max=1.0 - share) - begins.clamp(min=share)).clamp_(min=0.0)
    return ((left * ordered.to(torch.float64)).sum(dim=0) / left.sum(dim=0)).to(values.dtype)
