"""A user's expertise: how many features tell her items from others for more than chance would.

Chapter 6 extends chapter 5's expertise in a category to expertise about a concept, the feature: a large k_uf says that
the user has something to say about f. With few items, large gains are chance, though. 2 ln 2 |D_u| k_uf is the
likelihood-ratio statistic of the table of D_u by f, which for a feature that means nothing to her follows χ² with one
degree of freedom; so features count whose statistic is beyond what one such feature in a thousand would reach.
"""

from __future__ import annotations

import numpy as np

from steelyard.recommend.kgflex.selection import Selection, others_drawn
from steelyard.recommend.ranking import Floats
from steelyard.recommend.sampling import Histories

BEYOND_CHANCE = 10.828
"""χ² with one degree of freedom is above this once in a thousand."""


def expertise(selection: Selection, histories: Histories, ratio: float = 1.0) -> Floats:
    """Return for each user the number of her features whose gain is beyond chance; her own device measures it.

    Use it as criterion EX. `ratio` is that of the selection; with its usual limits a user has at most 200.
    """
    # Others weigh at most as much as her own items, however many were drawn; where fewer were, D_u is smaller.
    samples = histories.sizes + np.minimum(others_drawn(histories, ratio), histories.sizes)
    sure = 2 * np.log(2) * samples[selection.owners] * selection.weights > BEYOND_CHANCE
    return np.bincount(selection.owners[sure], minlength=selection.users).astype(np.float64)
