"""MK: model divergence as the authors of papers 000 and 003 compute it, layer by layer and without biases.

    MK_a = 1 / √(1/L · Σ_l ‖W_l − W_al‖₂ + 1),   W_l the kernel of layer l of L

`MNIST/Server.py` of github.com/sisinflab/ClientAware-FL, beside V. W. Anelli, Y. Deldjoo, T. Di Noia, A. Ferrara:
"Prioritized Multi-Criteria Federated Learning" (2020). The paper's own measure, MD, takes one norm over all parameters.
"""

from __future__ import annotations

import numpy as np

from steelyard.base.errors import UserError
from steelyard.messages.updates import Floats
from steelyard.weighing.criteria import CohortView, server_criterion


@server_criterion(
    "MK",
    description="divergence of kernels: 1/sqrt(mean of the layers' kernels' distances + 1), without biases",
    needs_layers=True,
    of_one=True,
    maximum=1.0,
)
def kernel_divergence(view: CohortView) -> Floats:
    """1 / √(mean_l ‖W_l − W_al‖₂ + 1); use it to compare with the authors' code, which gives more even weights."""
    norms = view.kernel_norms
    if not norms.shape[1]:
        raise UserError("criterion MK: the network has no kernels; allowed: a network with weights of two axes or more")
    return 1.0 / np.sqrt(norms.mean(axis=1) + 1.0)
