"""Centred clipping: updates are clipped around a centre, which moves to their mean, and again.

    v ← v + Σ w_a · min(1, τ/‖u_a − v‖) · (u_a − v)        from v = 0, L steps

S. P. Karimireddy, L. He, M. Jaggi: "Learning from History for Byzantine Robust Optimization" (ICML 2021). Their centre
starts from the last aggregate of momenta; an update here is a difference to the last global model, so v = 0, that
model, is where history left off. τ is given, or a quantile of the distances to the centre in each step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from steelyard.defence.clipping import factors
from steelyard.defence.geometry import distances_to
from steelyard.messages import Floats


def centred_clip(weights: Floats, gram: Floats, radius: Callable[[Floats], float], steps: int = 3) -> Floats:
    """Return the coefficients c of the centre v = Σ c_a u_a after some steps; `radius` maps distances to τ."""
    centre = np.zeros(len(weights))
    for _ in range(steps):
        away = distances_to(gram, centre)
        taken = weights * factors(away, radius(away))
        # v + Σ t_a (u_a − v) = (1 − Σ t_a) v + Σ t_a u_a.
        centre = (1.0 - taken.sum()) * centre + taken
    return centre
