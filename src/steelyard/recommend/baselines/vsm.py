"""VSM, the vector space model: items as TF-IDF vectors of their features, a user as the sum of her items' vectors.

An item scores by the cosine of the two vectors. No interaction of the item itself is needed, so an item that nobody has
taken yet is ranked like any other.
"""

from __future__ import annotations

import numpy as np

from steelyard.recommend.baselines.neighbours import matrix
from steelyard.recommend.interactions import Codes, Interactions
from steelyard.recommend.knowledge.features import Csr, ItemFeatures
from steelyard.recommend.lists import Scores
from steelyard.recommend.ranking import Floats


def vsm(train: Interactions, features: ItemFeatures, seed: int = 1) -> Scores:
    """Score items by the cosine between their TF-IDF vectors and the user's profile (the thesis' VSM).

    A user without items, or whose items have no features, has no profile: all items score 0.
    """
    from scipy import sparse  # For speed of start: much of the package needs no SciPy.

    items = tf_idf(features)
    profiles = sparse.csr_array(matrix(train)).astype(np.float64) @ items
    lengths = np.sqrt(profiles.multiply(profiles).sum(axis=1))
    by_feature = items.T.tocsr()

    def scores(users: Codes) -> Floats:
        products = np.asarray((profiles[users] @ by_feature).toarray(), dtype=np.float64)
        return products / np.maximum(lengths[users], np.finfo(np.float64).tiny)[:, None]

    return scores


def tf_idf(features: ItemFeatures) -> Csr:
    """Return the items as vectors of length 1: ln(N / n_f) for each feature f of theirs, of N items with features.

    A feature of every item weighs nothing; an item of such features alone, or without any, is the zero vector.
    """
    from scipy import sparse  # For speed of start: much of the package needs no SciPy.

    documents = int((features.per_item() > 0).sum())
    rarity = np.log(np.maximum(documents, 1) / np.maximum(features.per_feature(), 1))
    weighed = features.matrix.astype(np.float64) @ sparse.diags_array(rarity)
    lengths = np.sqrt(weighed.multiply(weighed).sum(axis=1))
    return (sparse.diags_array(1.0 / np.where(lengths > 0, lengths, 1.0)) @ weighed).tocsr()
