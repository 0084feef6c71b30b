"""RD: how far an update points where the server's own update points, as a criterion for any rule, cap and defence.

    RD_a = max(0, cos(u_a, u_0)),   u_a = Θ_a − Θ,   u_0 what the server learns this round from rows of its own

X. Cao, M. Fang, J. Liu, N. Z. Gong: "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping" (NDSS 2021),
eq. (2), the trust score. There it is the whole weight, and every update gets the length of u_0. As a criterion it
multiplies with others, caps limit it, and the robust rule after it says how long an update may be.
"""

from __future__ import annotations

import numpy as np

from steelyard.messages.updates import Floats
from steelyard.weighing.criteria import CohortView, server_criterion


@server_criterion(
    "RD",
    description="root direction: cosine of the client's update with what the server's own rows teach, at least 0",
    needs_training=True,
    of_one=True,
    maximum=1.0,
)
def root_direction(view: CohortView) -> Floats:
    """max(0, cos(Θ_a − Θ, u_0)); 0 for an update of length 0, and for all where the server has nothing to learn."""
    products, length = view.root
    scale = view.divergence * length
    return np.clip(np.divide(products, scale, out=np.zeros_like(products), where=scale > 0), 0.0, 1.0)
