"""The spectral check: who stands out along the direction in which the updates differ most is left out.

    s_a = ⟨u_a − ū, v⟩²,   v the first principal direction of the updates;   the n − f least s_a are kept

V. Shejwalkar, A. Houmansadr: "Manipulating the Byzantine" (NDSS 2021), divide-and-conquer (DnC) with one pass over all
parameters, which the Gram matrix holds exactly; the paper samples parameters to save memory. Hostile clients who push
together make that direction theirs.
"""

from __future__ import annotations

import numpy as np

from steelyard.defence.geometry import hostile_count, shares
from steelyard.messages.updates import Floats


def scores(gram: Floats) -> Floats:
    """Return s_a of every client: with H the centring matrix, λ₁ x_a² of the first eigenpair (λ₁, x) of H G H."""
    count = len(gram)
    centring = np.eye(count) - 1.0 / max(count, 1)
    values, vectors = np.linalg.eigh(centring @ gram @ centring)
    return np.maximum(values[-1], 0.0) * np.square(vectors[:, -1])


def spectral(weights: Floats, gram: Floats, share: float) -> Floats:
    """Return the coefficients: the weights of those kept, brought back to a sum of 1; the others get 0."""
    count = len(weights)
    kept = np.sort(np.argsort(scores(gram), kind="stable")[: count - hostile_count(count, share)])
    found = np.zeros(count)
    found[kept] = shares(weights[kept])
    return found
