"""Client-level central differential privacy: clip every update to C, sum with bounded weights, add noise once.

    Θ ← Θ + Σ_a w_a · clip_C(u_a) + N(0, (z·C·w_max)² I)        w_a ≤ w_max

One client moves the sum by at most C·w_max, whatever its data are (H. B. McMahan, D. Ramage, K. Talwar, L. Zhang:
"Learning Differentially Private Recurrent Language Models", ICLR 2018, with weights of a rule in place of theirs). That
holds as long as no client's weight depends on another client; docs/algorithms/privacy.md has the argument. Each
client's part is cut to the noise's lattice towards 0, which never makes it longer, so the bound is exact and no
trailing bit shows it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from steelyard.messages.payloads import Floats, spans
from steelyard.privacy.source import Source, lattice_step, normals

SLACK = 1e-9
"""Updates are clipped to C less this share: norms of millions of numbers round, and the bound must hold."""


def clip_factors(lengths: Floats, clip: float) -> Floats:
    """Return by how much each update is shortened: min(1, C/‖u‖), a little less so that rounding cannot exceed C.

    Nothing shortens an update without a length (NaN, infinite): its factor is 0, and whoever calls leaves it out.
    """
    lengths = np.where(np.isfinite(lengths), lengths, np.inf)
    return clip / np.maximum(lengths, clip) * (1.0 - SLACK)


def lengths_of(models: torch.Tensor, parameters: torch.Tensor) -> Floats:
    """Return ‖Θ_a − Θ‖₂ of each model [clients, parameters] in double precision, some parameters at a time."""
    squares = models.new_zeros(len(models), dtype=torch.float64)
    for _, changes in _changes(models, parameters):
        squares += changes.square().sum(dim=1)
    return squares.sqrt().cpu().numpy()


def bounded_sum(models: torch.Tensor, parameters: torch.Tensor, coefficients: Floats, fine: float) -> torch.Tensor:
    """Return Σ c_a (Θ_a − Θ) as whole multiples of the lattice's step, each client's part cut towards 0: [parameters].

    In double precision, in which whole numbers are exact: the order of the clients changes nothing.
    """
    total = models.new_zeros(models.shape[1], dtype=torch.float64)
    scale = torch.from_numpy(coefficients / fine)[:, None].to(total)
    for here, changes in _changes(models, parameters):
        total[here] = (changes * scale).trunc().sum(dim=0)
    return total


def noisy_sum(
    models: torch.Tensor,
    parameters: torch.Tensor,
    weights: Floats,
    clip: float,
    deviation: float,
    source: Source,
    frozen: tuple[tuple[int, int], ...] = (),
) -> torch.Tensor:
    """Return Θ + Σ w_a clip_C(Θ_a − Θ) + noise of that standard deviation; what is frozen stays as it is.

    With no client at all it is Θ and noise: whether anybody was there must not show. An update that holds NaN or an
    infinite number is left out: no clipping bounds it, and where it holds them is a fact of the data without noise.
    """
    fine = lattice_step(deviation)
    coefficients = weights * clip_factors(lengths_of(models, parameters), clip)
    if not coefficients.all():
        models, coefficients = models[torch.from_numpy(coefficients > 0)], coefficients[coefficients > 0]
    steps = bounded_sum(models, parameters, coefficients, fine)
    noise = np.rint(normals(source, len(steps)) * (deviation / fine))
    steps += torch.from_numpy(noise).to(steps)
    for begin, end in frozen:
        steps[begin:end] = 0.0
    moved = parameters.to(steps) + steps * fine
    return moved.to(parameters.dtype)


def _changes(models: torch.Tensor, parameters: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield Θ_a − Θ of all models in double precision, some parameters at a time, and which these are."""
    for here in spans(models.shape[1], len(models), models.device.type):
        yield here, models[:, here].double() - parameters[here].to(models.device).double()
