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
from steelyard.recommend.fpl import SPREAD
from steelyard.recommend.histories import Floats32, Histories, starts_of, stretches
from steelyard.recommend.interactions import Codes, Flags, places_in
from steelyard.recommend.kgflex.selection import KgflexSettings, Selection, select
from steelyard.recommend.knowledge.features import Csr, ItemFeatures
from steelyard.recommend.metrics import Floats


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What a score needs beside the model: the items' features, and the users' with their weights."""

    items: ItemFeatures
    selection: Selection

    @cached_property
    def by_feature(self) -> Csr:
        """[features, items]: which items have each feature."""
        return self.items.matrix.astype(np.float32).T.tocsr()


def initial_features(seed: int, features: int, factors: int, bias_spread: float = 0.0) -> Floats32:
    """Return the first (g_f, b_f), [features, factors + 1]: vectors from N(0, 0.1²), biases 0 or spread as asked."""
    table = np.zeros((features, factors + 1), dtype=np.float32)
    source = generator(seed, 0, "", "kgflex features")
    table[:, :factors] = source.normal(0.0, SPREAD, (features, factors))
    if bias_spread:
        table[:, factors] = source.normal(0.0, bias_spread, features)
    return table


def initial_views(seed: int, names: Sequence[str], selection: Selection, factors: int) -> Floats32:
    """Return the users' first p^u_f, [entries, factors], from N(0, 0.1²), each drawn on her device."""
    sizes = selection.sizes.tolist()
    drawn = [
        generator(seed, 0, name, "kgflex views").normal(0.0, SPREAD, (size, factors)).astype(np.float32)
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
        entries = (found, selection.features[own], starts_of(sizes))
        weights = sparse.csr_array(entries, shape=(len(users), knowledge.items.features))
        return np.asarray((weights @ knowledge.by_feature).toarray(), dtype=np.float32)


# Why an item is in a user's list, and whether her list keeps what drives her choices (thesis §6.6.4).


@dataclass(frozen=True)
class Reason:
    """One feature of a score: r̂_ui is the sum of all reasons' parts."""

    feature: int
    gain: float
    """k_uf: how much the feature tells the user's items from others."""
    personal: float
    """p^u_f · g_f: what the feature means to her."""
    common: float
    """b_f: what it means to everybody."""
    part: float
    """k_uf (p^u_f · g_f + b_f)"""
    share: float
    """The part over the sum of all parts' sizes: negative where the feature speaks against the item."""


def reasons(table: Floats32, views: Floats32, knowledge: Knowledge, user: int, item: int) -> list[Reason]:
    """Return the features that made r̂_ui, those that say most first; empty where user and item share none."""
    selection = knowledge.selection
    mine = selection.entries(user)
    met = np.flatnonzero(np.isin(selection.features[mine], knowledge.items.of(item))) + mine.start
    parts = feature_weights(table, views, selection, met).astype(np.float64)
    rows = table[selection.features[met]].astype(np.float64)
    personal = np.einsum("ef,ef->e", views[met].astype(np.float64), rows[:, :-1])
    whole = float(np.abs(parts).sum()) or 1.0
    order = np.argsort(-np.abs(parts), kind="stable")
    return [
        Reason(
            feature=int(selection.features[met[at]]),
            gain=float(selection.weights[met[at]]),
            personal=float(personal[at]),
            common=float(rows[at, -1]),
            part=float(parts[at]),
            share=float(parts[at]) / whole,
        )
        for at in order.tolist()
    ]


def ranks(selection: Selection) -> Codes:
    """Return the rank of each entry among its user's, the most informative feature first, from 0."""
    order = np.lexsort((-selection.weights, selection.owners))
    found = np.empty(len(order), dtype=np.int64)
    found[order] = places_in(selection.sizes)
    return found


def shown(knowledge: Knowledge, lists: Codes) -> Flags:
    """Return for each entry of the selection whether an item of its user's list has the feature."""
    return _among(
        knowledge.selection, _listed(lists, knowledge.items.items) @ knowledge.items.matrix.astype(np.float32)
    )


def informative_again(knowledge: Knowledge, after: Selection) -> Flags:
    """Return for each entry of the selection whether its user's list, taken as her items, would select it too."""
    return _among(knowledge.selection, after.matrix())


def after_lists(
    knowledge: Knowledge, lists: Codes, names: Sequence[str], seed: int, settings: KgflexSettings
) -> Selection:
    """Return the features that would be selected if each user's list were her items: the cloud after recommendation."""
    listed = _listed(lists, knowledge.items.items).tocsr()
    listed.sort_indices()
    histories = Histories(
        names=tuple(names),
        catalogue=knowledge.items.items,
        starts=listed.indptr.astype(np.int64),
        items=listed.indices.astype(np.int32),
        fakes=np.zeros(len(lists), dtype=np.int64),
    )
    return select(histories, knowledge.items, seed, settings.limits, settings.others, settings.criterion)


def kept(selection: Selection, flags: Flags, top: int | None = None) -> Floats:
    """Return for each user the share of her `top` most informative features that are flagged; nan where she has none.

    Use it with `shown` or `informative_again`; the thesis' Table 6.2 has the quartiles over users.
    """
    counted = np.ones(len(flags), dtype=np.bool_) if top is None else ranks(selection) < top
    whole = np.bincount(selection.owners[counted], minlength=selection.users)
    part = np.bincount(selection.owners[counted & flags], minlength=selection.users)
    return np.where(whole > 0, part / np.maximum(whole, 1), np.nan)


def cloud(selection: Selection) -> Floats:
    """Return the prominence of each feature: its information gain summed over all users (Figure 6.4)."""
    return np.bincount(selection.features, selection.weights, selection.total).astype(np.float64)


def _listed(lists: Codes, items: int) -> Csr:
    """Return [users, items] with a one for each item of a list."""
    from scipy import sparse  # For speed of start.

    row, rank = np.nonzero(lists >= 0)
    ones = np.ones(len(row), dtype=np.float32)
    return sparse.coo_array((ones, (row, lists[row, rank])), shape=(len(lists), items)).tocsr()


def _among(selection: Selection, marks: Csr) -> Flags:
    """Return for each entry of the selection whether `marks` has something at its user and feature."""
    width = selection.total
    row = np.repeat(np.arange(marks.shape[0], dtype=np.int64), np.diff(marks.indptr))
    keys = np.sort(row * width + marks.indices)
    wanted = selection.owners * width + selection.features
    index = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
    return keys[index] == wanted if len(keys) else np.zeros(len(wanted), dtype=np.bool_)
