"""The robust rules, each as its paper has it, with weights.

Most only stretch, drop and add updates u_a: they take the Gram matrix of the updates and give coefficients c of the new
model Θ + Σ c_a u_a. The last two look at each parameter by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from steelyard.defence.geometry import distances, distances_to, hostile_count, lengths, shares
from steelyard.messages.updates import Floats

HALF = 1e-9
"""So near to one half of the weight counts as one half: sums of weights round."""


# ---------------------------------------------------------------- adaptive norm clipping
#
# Adaptive norm clipping: no update counts longer than a radius that follows the cohort.
#
#     Θ ← Θ + Σ w_a · min(1, r/‖u_a‖) · u_a        r = the q-quantile of ‖u_a‖ over the cohort
#
# Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan: "Can You Really Backdoor Federated Learning?" (2019) clips to a fixed
# radius; G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy: "Differentially Private Learning with Adaptive Clipping"
# (NeurIPS 2021) lets the radius follow a quantile of the lengths. Here the server sees the lengths, so it takes the
# quantile itself; it is not weighted, since a client that claims a large weight must not move the radius.


def radius_of(lengths: Floats, quantile: float = 0.5, smooth: float = 0.0, before: float | None = None) -> float:
    """Return this round's radius: r = q^(1−s) · r_before^s, with q the quantile of the lengths."""
    found = float(np.quantile(lengths, quantile)) if len(lengths) else 0.0
    if before is None or not smooth or found <= 0 or before <= 0:
        return found
    return float(found ** (1.0 - smooth) * before**smooth)


def factors(lengths: Floats, radius: float) -> Floats:
    """Return min(1, r/‖u_a‖) of every client; an update of length 0 stays."""
    return np.minimum(1.0, np.divide(radius, lengths, out=np.ones_like(lengths), where=lengths > 0))


def clipped(weights: Floats, lengths: Floats, radius: float) -> Floats:
    """Return the coefficients of the updates: the weights, each times how much of its update is left."""
    return weights * factors(lengths, radius)


# ---------------------------------------------------------------- centred clipping
#
# Centred clipping: updates are clipped around a centre, which moves to their mean, and again.
#
#     v ← v + Σ w_a · min(1, τ/‖u_a − v‖) · (u_a − v)        from v = 0, L steps
#
# S. P. Karimireddy, L. He, M. Jaggi: "Learning from History for Byzantine Robust Optimization" (ICML 2021). Their
# centre starts from the last aggregate of momenta; an update here is a difference to the last global model, so v = 0,
# that model, is where history left off. τ is given, or a quantile of the distances to the centre in each step.


def centred_clip(weights: Floats, gram: Floats, radius: Callable[[Floats], float], steps: int = 3) -> Floats:
    """Return the coefficients c of the centre v = Σ c_a u_a after some steps; `radius` maps distances to τ."""
    centre = np.zeros(len(weights))
    for _ in range(steps):
        away = distances_to(gram, centre)
        taken = weights * factors(away, radius(away))
        # v + Σ t_a (u_a − v) = (1 − Σ t_a) v + Σ t_a u_a.
        centre = (1.0 - taken.sum()) * centre + taken
    return centre


# ---------------------------------------------------------------- multi-Krum
#
# Multi-Krum: only the clients whose updates lie nearest to those of the others are combined.
#
# P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer: "Machine Learning with Adversaries: Byzantine Tolerant
# Gradient Descent" (NeurIPS 2017). With f hostile of n, a score is the mean squared distance to the n − f − 1 nearest,
# the number of honest clients beside itself (the paper takes one fewer); the n − f best scores are kept, with their
# weights.


def chosen(gram: Floats, hostile: int) -> np.ndarray:
    """Return the positions of the n − f clients with the best scores, ascending; of equal ones the earlier."""
    count = len(gram)
    nearest = np.sort(np.square(distances(gram)), axis=1)[:, 1 : count - hostile]
    scores = nearest.mean(axis=1) if nearest.shape[1] else np.zeros(count)
    return np.sort(np.argsort(scores, kind="stable")[: count - hostile])


def multi_krum(weights: Floats, gram: Floats, share: float) -> Floats:
    """Return the coefficients: the weights of those chosen, brought back to a sum of 1; the others get 0."""
    kept = chosen(gram, hostile_count(len(gram), share))
    found = np.zeros(len(weights))
    found[kept] = shares(weights[kept])
    return found


# ---------------------------------------------------------------- the geometric median
#
# The geometric median of the updates: the point with the least weighted sum of distances, by Weiszfeld's steps.
#
#     β_a = w_a / max(ν, ‖u_a − z‖)        z ← Σ β_a u_a / Σ β_a        from the clipped mean
#
# K. Pillutla, S. M. Kakade, Z. Harchaoui: "Robust Aggregation for Federated Learning" (IEEE TSP 2022), the smoothed
# Weiszfeld algorithm. Half of the weight can be hostile, and a hostile update pulls no harder for being long. The start
# is the mean of updates clipped to their median length: not 0, since a free rider's update is 0 and from a point where
# an update lies the steps hardly move away; and not the mean, which a huge update takes too far to come back in a few
# steps.


def geometric_median(weights: Floats, gram: Floats, steps: int = 8, least_distance: float = 1e-6) -> Floats:
    """Return the coefficients of the geometric median after some steps."""
    sizes = lengths(gram)
    point = clipped(shares(weights), sizes, radius_of(sizes))
    for _ in range(steps):
        point = shares(weights / np.maximum(distances_to(gram, point), least_distance))
    return point


# ---------------------------------------------------------------- FLTrust
#
# FLTrust: an update counts as far as it points where the server's own update points, and at the server's length.
#
#     TS_a = max(0, cos(u_a, u_0))        Θ ← Θ + Σ w_a TS_a (‖u_0‖/‖u_a‖) u_a / Σ w_a TS_a
#
# X. Cao, M. Fang, J. Liu, N. Z. Gong: "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping" (NDSS
# 2021). u_0 is what the server gets by training on its root data, the rows that it weighs on. The paper's weights are
# equal.


def fltrust(weights: Floats, lengths: Floats, products: Floats, root_length: float) -> Floats:
    """Return the coefficients from ‖u_a‖, ⟨u_a, u_0⟩ and ‖u_0‖; all 0, which keeps the old model, where none agrees."""
    scale = lengths * root_length
    cosines = np.divide(products, scale, out=np.zeros_like(lengths), where=scale > 0)
    trusted = weights * np.maximum(cosines, 0.0)
    if trusted.sum() <= 0:
        return np.zeros(len(weights))
    trusted /= trusted.sum()
    return np.divide(trusted * root_length, lengths, out=np.zeros_like(lengths), where=lengths > 0)


# ---------------------------------------------------------------- nearest-neighbour mixing
#
# Nearest-neighbour mixing: every update becomes the mean of its n − f nearest ones, before a robust rule looks at it.
#
# Y. Allouah, S. Farhadkhani, R. Guerraoui, N. Gupta, R. Pinot, J. Stephan: "Fixing by Mixing: A Recipe for Optimal
# Byzantine ML under Heterogeneity" (AISTATS 2023). Honest clients with different data then look alike, hostile ones far
# away are drawn in or left out.


def mixing(gram: Floats, share: float) -> Floats:
    """Return the matrix M whose row a averages the n − f updates nearest to u_a, itself included: y = M u."""
    count = len(gram)
    kept = count - hostile_count(count, share)
    away = distances(gram)
    np.fill_diagonal(away, -1.0)  # itself first, also beside others that lie at the same point
    nearest = np.argsort(away, axis=1, kind="stable")[:, :kept]
    mixed = np.zeros((count, count))
    np.put_along_axis(mixed, nearest, 1.0 / max(kept, 1), axis=1)
    return mixed


# ---------------------------------------------------------------- coordinate-wise median and trimmed mean
#
# Coordinate-wise median and trimmed mean, with weights: each parameter by itself, sorted over the clients.
#
# D. Yin, Y. Chen, K. Ramchandran, P. Bartlett: "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
# Rates" (ICML 2018). With weights, a client counts as much as its weight on the way from 0 to 1 along the sorted
# values: the median is the value at one half, the trimmed mean the mean of what lies between β and 1 − β. Equal weights
# give the paper's rules, β = f/n the mean without the f least and the f greatest.


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
