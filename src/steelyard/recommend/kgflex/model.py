"""KGFlex: a score from the features that a user and an item share, trained by the protocol of FPL.

A. Ferrara, *Pursuing Privacy and Personalization in Recommender Systems: The Role of Federated Learning*, Politecnico
di Bari, 2022, chapter 6. The server holds a row (g_f, b_f) per feature; each device holds F_u and k_uf (`selection`)
and a vector p^u_f for each feature of F_u: the user's own view of it. The score of an item is

    r̂_ui = Σ_{f ∈ F_u ∩ F_i} k_uf (p^u_f · g_f + b_f)                                                       (Eq. 6.12)

A round is one of FPL (`recommend.fpl`) with features in place of items. For a triple (u, i⁺, i⁻) let c_f be 1 for
features of i⁺ alone, −1 for those of i⁻ alone and 0 for what both have, which cancels. With x̂ = r̂_ui⁺ − r̂_ui⁻ and
s = σ(−x̂) her own vectors move at once, p_f ← p_f + α (s c_f k_uf g_f − λ p_f) for c_f ≠ 0, while the shared rows stay
as they came; their change s c_f k_uf (p_f, 1) − λ^± (g_f, 0) is collected with p_f as it was before (Eqs. 6.13, 6.14).
With probability 1 − π the positive item's part is not sent: then c_f is −1 for all features of i⁻ and 0 for all others.

Since g_f stands still within a round, p_f only ever moves along g_f: p_f = a p_f⁰ + e g_f with two numbers a and e.
So a pass needs no vectors at all. It goes through the triples with one number p_f · g_f per feature, and vectors are
made once at its end; a triple costs what the two items share with the user, whatever the length of the vectors
(`local_pass`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from steelyard.base.randomness import generator
from steelyard.recommend.interactions import Codes
from steelyard.recommend.kgflex.selection import Selection
from steelyard.recommend.knowledge.features import Csr, ItemFeatures
from steelyard.recommend.sampling import stretches
from steelyard.recommend.sparse import Floats32


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What a score needs beside the model: the items' features, and the users' with their weights."""

    items: ItemFeatures
    selection: Selection

    @cached_property
    def by_feature(self) -> Csr:
        """[features, items]: which items have each feature."""
        return self.items.matrix.astype(np.float32).T.tocsr()


def initial_features(seed: int, features: int, factors: int, spread: float = 0.1, bias_spread: float = 0.0) -> Floats32:
    """Return the first (g_f, b_f), [features, factors + 1]: vectors from N(0, 0.1²), biases 0 or spread as asked."""
    table = np.zeros((features, factors + 1), dtype=np.float32)
    source = generator(seed, 0, "", "kgflex features")
    table[:, :factors] = source.normal(0.0, spread, (features, factors))
    if bias_spread:
        table[:, factors] = source.normal(0.0, bias_spread, features)
    return table


def initial_views(seed: int, names: Sequence[str], selection: Selection, factors: int, spread: float = 0.1) -> Floats32:
    """Return the users' first p^u_f, [entries, factors], from N(0, 0.1²), each drawn on her device."""
    sizes = selection.sizes.tolist()
    drawn = [
        generator(seed, 0, name, "kgflex views").normal(0.0, spread, (size, factors)).astype(np.float32)
        for name, size in zip(names, sizes, strict=True)
    ]
    return np.concatenate(drawn) if drawn else np.zeros((0, factors), dtype=np.float32)


def feature_weights(table: Floats32, views: Floats32, selection: Selection, entries: slice | Codes) -> Floats32:
    """Return k_uf (p^u_f · g_f + b_f) of entries of the selection: what each feature adds to an item that has it."""
    rows = table[selection.features[entries]]
    return selection.weights[entries] * (np.einsum("ef,ef->e", views[entries], rows[:, :-1]) + rows[:, -1])


def scores(table: Floats32, views: Floats32, knowledge: Knowledge, users: Codes) -> Floats32:
    """Return r̂_ui of all items for these users: one product of sparse matrices."""
    from scipy import sparse  # For speed of start.

    selection = knowledge.selection
    sizes = selection.sizes[users]
    own = stretches(selection.starts[users], sizes)
    with np.errstate(over="ignore", invalid="ignore"):
        found = feature_weights(table, views, selection, own)
        entries = (found, selection.features[own], np.concatenate([[0], np.cumsum(sizes)]))
        weights = sparse.csr_array(entries, shape=(len(users), knowledge.items.features))
        return np.asarray((weights @ knowledge.by_feature).toarray(), dtype=np.float32)
