"""Baselines that compare: user-kNN and item-kNN (thesis §2.2.1), VSM; and the two that know nobody.

In kNN ratings count as ones or as they are; the sum over neighbours is divided by nothing, by the weights of those that
count (Eq. 2.2, 2.3), or by the weights of all k neighbours, as the authors' framework does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from steelyard.base.randomness import stream_keys, uniforms
from steelyard.recommend.baselines import Baseline, Count
from steelyard.recommend.histories import starts_of
from steelyard.recommend.interactions import Codes, Interactions
from steelyard.recommend.knowledge.features import Csr, ItemFeatures
from steelyard.recommend.metrics import Floats, Scores

Similarity = Literal["cosine", "pearson", "jaccard", "euclidean"]
Ratings = Literal["ones", "kept"]
Divide = Literal["nothing", "counted", "all"]
Profile = Literal["sum", "last"]
"""What a user's TF-IDF profile is of: all of her items, or, as the authors' program has it, of each feature the last of
her items that has it."""

_BLOCK = 512
"""Rows whose similarities to all others are held at a time."""


def matrix(train: Interactions, ratings: Ratings = "ones") -> Any:
    """Return the training interactions as a sparse matrix, users × items; a pair's ratings count as their mean."""
    # For speed of start: much of the package needs no SciPy.
    from scipy import sparse

    shape = (len(train.users), len(train.items))
    ones: Any = sparse.csr_matrix((np.ones(len(train), np.float32), (train.user, train.item)), shape=shape)
    if ratings == "ones":
        ones.data[:] = 1.0
        return ones
    sums: Any = sparse.csr_matrix((train.rating.astype(np.float64), (train.user, train.item)), shape=shape)
    sums.data /= ones.data
    return sums


def nearest(taken: Any, count: int, similarity: Similarity = "cosine") -> Any:
    """Return a sparse matrix whose row i holds the similarities of row i with its `count` nearest other rows.

    Equal ones go by ascending number; rows that share nothing are no neighbours.
    """
    from scipy import sparse  # For speed of start, as above.

    rows: Any = sparse.csr_array(taken, dtype=np.float64)
    alike = _SIMILARITIES[similarity](rows)
    columns: list[Codes] = []
    values: list[Floats] = []
    for begin in range(0, rows.shape[0], _BLOCK):
        block = alike(begin, min(begin + _BLOCK, rows.shape[0]))
        block.sort_indices()
        for row in range(block.shape[0]):
            entries = slice(block.indptr[row], block.indptr[row + 1])
            index = np.asarray(block.indices[entries], dtype=np.int64)
            others = np.flatnonzero(index != begin + row)  # nobody is her own neighbour
            found = np.asarray(block.data[entries])[others]
            best = np.argsort(-found, kind="stable")[:count]
            columns.append(index[others][best])
            values.append(found[best])
    ends = starts_of([len(each) for each in columns])
    joined = (np.concatenate([np.zeros(0), *values]), np.concatenate([np.zeros(0, np.int64), *columns]), ends)
    return sparse.csr_array(joined, shape=(rows.shape[0], rows.shape[0]))


_Block = Callable[[int, int], Any]
"""Gives the similarities of rows `begin` to `end` with all rows that share something with them."""


def _cosine(rows: Any) -> _Block:
    return _from_products(rows, lambda dot, own, other: dot / np.sqrt(own * other))


def _jaccard(rows: Any) -> _Block:
    """Those who share over those who have either: ratings do not count."""
    return _from_products(_ones(rows), lambda dot, own, other: dot / (own + other - dot))


def _euclidean(rows: Any) -> _Block:
    """1 / (1 + d): 1 for equal rows."""
    return _from_products(rows, lambda dot, own, other: 1 / (1 + np.sqrt(np.maximum(own + other - 2 * dot, 0.0))))


def _pearson(rows: Any) -> _Block:
    """The correlation over what both rated; 0 where that is one rating, or the same all over."""
    shifted = rows.copy()
    # Correlations do not change, and no sum is 0: all products below have their entries in the same places.
    shifted.data += 1.0 - min(shifted.data.min(initial=1.0), 1.0)
    ones, squares = _ones(shifted), shifted.multiply(shifted).tocsr()

    def block(begin: int, end: int) -> Any:
        part = slice(begin, end)
        count, dot, own, other, own_squares, other_squares = (
            _sorted(one[part] @ two.T.tocsr())
            for one, two in (
                *((ones, ones), (shifted, shifted), (shifted, ones), (ones, shifted)),
                *((squares, ones), (ones, squares)),
            )
        )
        covered = dot.data - own.data * other.data / count.data
        spread = (own_squares.data - own.data**2 / count.data) * (other_squares.data - other.data**2 / count.data)
        # What is left of equal ratings by rounding is no spread.
        known = spread > 1e-9 * own_squares.data * other_squares.data
        count.data = np.where(known, covered / np.sqrt(np.where(known, spread, 1.0)), 0.0)
        return count

    return block


def _from_products(rows: Any, similarity: Callable[[Floats, Floats, Floats], Floats]) -> _Block:
    sizes = np.asarray(rows.multiply(rows).sum(axis=1), dtype=np.float64).reshape(-1)
    others = rows.T.tocsr()

    def block(begin: int, end: int) -> Any:
        found = _sorted(rows[begin:end] @ others)
        own = np.repeat(sizes[begin:end], np.diff(found.indptr))
        # Counts are whole, so equal cosines of ones are equal to the last bit and ties are real.
        found.data = similarity(found.data, own, sizes[found.indices])
        return found

    return block


def _ones(rows: Any) -> Any:
    found = rows.copy()
    found.data = np.ones_like(found.data)
    return found


def _sorted(found: Any) -> Any:
    found.sort_indices()
    return found


_SIMILARITIES: dict[Similarity, Callable[[Any], _Block]] = {
    "cosine": _cosine,
    "pearson": _pearson,
    "jaccard": _jaccard,
    "euclidean": _euclidean,
}


class _Knn(Baseline):
    neighbours: Count = 50
    similarity: Similarity = "cosine"
    ratings: Ratings = "ones"
    divide: Divide = "nothing"

    def _divided(self, sums: Floats, weights: Floats) -> Floats:
        return sums if self.divide == "nothing" else sums / np.where(weights > 0, weights, 1.0)


class ItemKnn(_Knn, named="item-knn"):
    """Item-kNN: an item scores by its likeness to those of its own k nearest items that the user took (Eq. 2.3).

    With one kind of feedback, r = 1, the quotient of Eq. 2.3 is 1 for every item, so it ranks by the numerator.
    `divide="all"` is the authors' framework: it divides by the likeness to all k neighbours, taken or not.
    """

    def scores(self, train: Interactions, seed: int, features: ItemFeatures | None = None) -> Scores:
        taken, ones = matrix(train, self.ratings), matrix(train)
        alike = nearest(taken.T.tocsr(), self.neighbours, self.similarity).T.tocsr()

        def scores(users: Codes) -> Floats:
            weights = abs(alike).sum(axis=0)[None, :] if self.divide == "all" else _dense(ones[users] @ abs(alike))
            return self._divided(_dense(taken[users] @ alike), weights)

        return scores


class UserKnn(_Knn, named="user-knn"):
    """User-kNN: an item scores by the likeness of those of the user's k nearest who took it (Eq. 2.2's numerator)."""

    def scores(self, train: Interactions, seed: int, features: ItemFeatures | None = None) -> Scores:
        taken, ones = matrix(train, self.ratings), matrix(train)
        alike = nearest(taken, self.neighbours, self.similarity)

        def scores(users: Codes) -> Floats:
            near = alike[users]
            weights = abs(near).sum(axis=1)[:, None] if self.divide == "all" else _dense(abs(near) @ ones)
            return self._divided(_dense(near @ taken), weights)

        return scores


def _dense(found: Any) -> Floats:
    return np.asarray(found.todense(), dtype=np.float64)


class Random(Baseline, named="random"):
    """Score items by chance, each user from her own stream; the floor that anything learnt must leave behind."""

    def scores(self, train: Interactions, seed: int, features: ItemFeatures | None = None) -> Scores:
        keys = stream_keys(seed, 0, train.users.tolist(), "random baseline")
        return lambda users: uniforms(keys[users], len(train.items))


class Popular(Baseline, named="popular"):
    """Score items by their number of training interactions, the same for everyone."""

    def scores(self, train: Interactions, seed: int, features: ItemFeatures | None = None) -> Scores:
        popularity = train.per_item().astype(np.float64)
        return lambda users: np.broadcast_to(popularity, (len(users), len(popularity)))


# VSM, the vector space model: items as TF-IDF vectors of their features, a user as the sum of her items' vectors. An
# item scores by the cosine of the two. No interaction of the item itself is needed, so an item that nobody has taken
# yet is ranked like any other.


class Vsm(Baseline, named="vsm"):
    """Score items by the cosine between their TF-IDF vectors and the user's profile (the thesis' VSM).

    A user without items, or whose items have no features, has no profile: all items score 0.
    """

    of_features = True
    profile: Profile = "sum"

    def scores(self, train: Interactions, seed: int, features: ItemFeatures | None = None) -> Scores:
        items = tf_idf(self.needed(features))
        of_users = profiles(train, items, self.profile)
        lengths = np.sqrt(of_users.multiply(of_users).sum(axis=1))
        by_feature = items.T.tocsr()

        def scores(users: Codes) -> Floats:
            products = np.asarray((of_users[users] @ by_feature).toarray(), dtype=np.float64)
            return products / np.maximum(lengths[users], np.finfo(np.float64).tiny)[:, None]

        return scores


def profiles(train: Interactions, items: Csr, how: Profile) -> Csr:
    """Return what the items of each user add up to; "last": of the items with a feature the last one alone counts."""
    from scipy import sparse  # For speed of start: much of the package needs no SciPy.

    if how == "sum":
        return (sparse.csr_array(matrix(train)).astype(np.float64) @ items).tocsr()
    taken = items[train.item].tocoo()  # a row for each interaction, in the order of the file
    cells = train.user[taken.row] * items.shape[1] + taken.col
    newest = len(cells) - 1 - np.unique(cells[::-1], return_index=True)[1]
    found = (taken.data[newest], (train.user[taken.row[newest]], taken.col[newest]))
    return sparse.coo_array(found, shape=(len(train.users), items.shape[1])).tocsr()


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
