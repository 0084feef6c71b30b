"""kaHFM: BPR-MF whose latent factors are features of a knowledge graph.

V. W. Anelli et al., *How to Make Latent Factors Interpretable by Feeding Factorization Machines with Knowledge Graphs*,
ISWC 2019. An item's vector begins as the TF-IDF of its features, a user's as the mean over her items; both are then
trained as in BPR-MF, so that a factor keeps the meaning of its feature.
"""

from __future__ import annotations

import numpy as np

from steelyard.recommend.baselines.bpr_mf import BprMf
from steelyard.recommend.baselines.neighbours import matrix
from steelyard.recommend.fpl import Learning
from steelyard.recommend.interactions import Interactions
from steelyard.recommend.knowledge.features import Csr, ItemFeatures
from steelyard.recommend.lists import Scores


def kahfm(train: Interactions, features: ItemFeatures, seed: int = 1, rate: float = 0.05, epochs: int = 30) -> Scores:
    """BPR-MF that begins from what is known of items; use it as the thesis' row kaHFM (Tables 6.1 to 6.3)."""
    model = informed(train, features, seed, rate)
    model.train(epochs)
    return model.scores


def informed(train: Interactions, features: ItemFeatures, seed: int, rate: float) -> BprMf:
    """Return BPR-MF before its first step, with a factor for each feature."""
    model = BprMf(train, seed, Learning(rate, features.features))
    items = tf_idf(features)
    sizes = np.maximum(model.histories.sizes, 1)[:, None]
    model.table = np.hstack([items.toarray(), np.zeros((features.items, 1))]).astype(np.float32)
    model.vectors = (np.asarray((matrix(train) @ items).todense()) / sizes).astype(np.float32)
    return model


def tf_idf(features: ItemFeatures) -> Csr:
    """Return 1/√(features of the item) · ln(items / items with the feature) for each feature of each item."""
    from scipy import sparse  # For speed of start: much of the package needs no SciPy.

    rarity = np.log(features.items / np.maximum(features.per_feature(), 1))
    common = 1.0 / np.sqrt(np.maximum(features.per_item(), 1))
    return (sparse.diags_array(common) @ features.matrix.astype(np.float64) @ sparse.diags_array(rarity)).tocsr()
