"""FLTrust: an update counts as far as it points where the server's own update points, and at the server's length.

    TS_a = max(0, cos(u_a, u_0))        Θ ← Θ + Σ w_a TS_a (‖u_0‖/‖u_a‖) u_a / Σ w_a TS_a

X. Cao, M. Fang, J. Liu, N. Z. Gong: "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping" (NDSS 2021).
u_0 is what the server gets by training on its root data, the rows that it weighs on. The paper's weights are equal.
"""

from __future__ import annotations

import numpy as np

from steelyard.messages import Floats


def fltrust(weights: Floats, lengths: Floats, products: Floats, root_length: float) -> Floats:
    """Return the coefficients from ‖u_a‖, ⟨u_a, u_0⟩ and ‖u_0‖; all 0, which keeps the old model, where none agrees."""
    scale = lengths * root_length
    cosines = np.divide(products, scale, out=np.zeros_like(lengths), where=scale > 0)
    trusted = weights * np.maximum(cosines, 0.0)
    if trusted.sum() <= 0:
        return np.zeros(len(weights))
    trusted /= trusted.sum()
    return np.divide(trusted * root_length, lengths, out=np.zeros_like(lengths), where=lengths > 0)
