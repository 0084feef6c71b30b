"""Which features drive a user's choices: information gain over her items and as many others (thesis §6.4.2).

Each device looks at D_u, the user's items and as many others drawn at random, and asks of every feature of her items
how much it tells the two apart: k_uf = IG(D_u, f), Eqs. 6.4 to 6.9. Features that tell something (k_uf > 0) are kept,
at most the best hundred of each number of hops; they are F_u, and k_uf weighs them in her score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from steelyard.base.randomness import stream_keys, words_at
from steelyard.base.settings import Section
from steelyard.messages.payloads import blocks
from steelyard.recommend.fpl import USER_CAPABILITIES
from steelyard.recommend.histories import Floats32, Histories, Items, starts_of
from steelyard.recommend.interactions import Codes, places_in
from steelyard.recommend.knowledge.features import Csr, ItemFeatures
from steelyard.recommend.metrics import Floats

Criterion = Literal["information", "ratio", "gini"]
Limit = Annotated[int, Field(ge=0, le=1_000_000)]
_CELLS = 1 << 23
"""Cells of users × items or features that are looked at together."""


class KgflexSettings(Section):
    """[kgflex]: score items by the features that a user and an item share; [knowledge] says where features come from.

    With it, `fpl.factors` is the length of a feature's vectors, and the rest of [fpl] is the protocol that trains them.
    """

    limits: tuple[Limit, ...] = Field(default=(100, 100), min_length=1, max_length=4)
    """How many features of one hop a user keeps at most, of two hops, and so on: those with the most information."""

    @field_validator("limits")
    @classmethod
    def _keeps_some(cls, limits: tuple[int, ...]) -> tuple[int, ...]:
        if not any(limits):
            raise PydanticCustomError("plain", "at least one number above 0, or no feature is kept")
        return limits

    others: float = Field(default=1.0, gt=0, le=1000)
    """Items of others per item of hers that gains are measured on: 1 in the thesis; more make small gains surer."""
    criterion: Criterion = "information"
    """How k_uf says what a feature tells: information gain (the thesis'), the same over the feature's own entropy
    (C4.5's gain ratio, which favours rare ones), or the fall of Gini's impurity (the authors' later branch)."""
    own_rate: float | None = Field(default=None, gt=0)
    """Step of users' own vectors, which no server sums over users; default: fpl.learning_rate, as in the thesis."""
    views: Literal["on", "off"] = "on"
    """off: an ablation without private views, p^u_f = 0; scores are then made of gains and shared biases alone."""
    biases: Literal["on", "off"] = "on"
    """off: an ablation without shared biases, b_f = 0; scores are then made of gains and private views alone."""
    batch: int | None = Field(default=None, ge=1, le=1_000_000)
    """Train centrally, in batches of so many triples with all data in one place; default: the rounds of FPL."""


KGFLEX_CAPABILITIES = replace(USER_CAPABILITIES, name="KGFlex", expertise=True)
"""Users of KGFlex also know how many features tell their items from others."""


@dataclass(frozen=True, eq=False)
class Selection:
    """F_u and k_uf of some users: user u has the entries starts[u] .. starts[u + 1], features ascending."""

    starts: Codes
    features: Items
    weights: Floats32
    """k_uf of each entry."""
    total: int
    """Number of features there are, selected by anyone or not."""

    @property
    def users(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def sizes(self) -> Codes:
        """|F_u| of each user."""
        return np.diff(self.starts)

    @cached_property
    def owners(self) -> Codes:
        """The user of each entry."""
        return np.repeat(np.arange(self.users), self.sizes)

    def entries(self, user: int) -> slice:
        """Return where a user's entries lie."""
        return slice(int(self.starts[user]), int(self.starts[user + 1]))

    def matrix(self) -> Csr:
        """Return k_uf as [users, features]."""
        from scipy import sparse  # For speed of start.

        return sparse.csr_array((self.weights, self.features, self.starts), shape=(self.users, self.total))


def information_gain(positives: Any, negatives: Any, liked: Any, others: Any) -> Floats:
    """Return IG(D, f) of features that `positives` of the `liked` and `negatives` of the `others` items have (Eq. 6.7).

    With as many others as liked the entropy of D is 1, as in the thesis; a user with more than half of all items has
    fewer others, and then it is less. A feature that is as frequent in both tells nothing: exactly 0.
    """
    p, n, all_p, all_n = (np.asarray(each, dtype=np.float64) for each in (positives, negatives, liked, others))
    whole = np.maximum(all_p + all_n, 1)
    present, absent = p + n, all_p + all_n - p - n
    gain = _entropy(all_p, all_p + all_n)
    gain = gain - present / whole * _entropy(p, present) - absent / whole * _entropy(all_p - p, absent)
    return np.where(np.isclose(p * all_n, n * all_p, rtol=1e-12, atol=0), 0.0, np.maximum(gain, 0.0))


def feature_gain(criterion: Criterion, positives: Any, negatives: Any, liked: Any, others: Any) -> Floats:
    """Return what each feature tells by a criterion; 0 where it is as frequent in both, whatever the criterion."""
    gain = information_gain(positives, negatives, liked, others)
    if criterion == "information":
        return gain
    p, n, all_p, all_n = (np.asarray(each, dtype=np.float64) for each in (positives, negatives, liked, others))
    whole, present = np.maximum(all_p + all_n, 1), p + n
    if criterion == "ratio":
        return gain / np.where(gain > 0, _entropy(present, whole), 1.0)
    absent = whole - present
    left = present * _impurity(p, present) + absent * _impurity(all_p - p, absent)
    return np.where(gain > 0, np.maximum(_impurity(all_p, whole) - left / whole, 0.0), 0.0)


def _impurity(part: Floats, whole: Floats) -> Floats:
    """Return Gini's impurity of two classes, 2·p·(1 − p), of which one has `part` of the `whole`."""
    share = part / np.maximum(whole, 1)
    return 2.0 * share * (1.0 - share)


def _entropy(part: Floats, whole: Floats) -> Floats:
    """Return the entropy of two classes in bits, of which one has `part` of the `whole`; 0 where there is nothing."""
    share = part / np.maximum(whole, 1)
    first = -share * np.log2(np.where(share > 0, share, 1))
    second = -(1 - share) * np.log2(np.where(share < 1, 1 - share, 1))
    return np.where(whole > 0, first + second, 0.0)


def draw_others(histories: Histories, users: Codes, keys: NDArray[np.uint64], ratio: float = 1.0) -> NDArray[np.bool_]:
    """Return [users, items]: as many items that each user does not have as she has, times `ratio`, drawn evenly.

    The draw is a pure function of the user's key: her others are the items with the lowest words.
    """
    items = np.arange(histories.catalogue, dtype=np.uint64)
    words = words_at(keys[users][:, None], items)
    seen = histories.seen(users)
    words[seen] = np.iinfo(np.uint64).max
    counts = others_drawn(histories, ratio)[users]
    order = np.sort(words, axis=1)
    border = np.take_along_axis(order, np.maximum(counts - 1, 0)[:, None], axis=1)
    return (words <= border) & (counts > 0)[:, None] & ~seen


def others_drawn(histories: Histories, ratio: float = 1.0) -> Codes:
    """Return how many others each user draws: her items times `ratio`, or all that are left where those are fewer."""
    return np.minimum(np.rint(histories.sizes * ratio).astype(np.int64), histories.catalogue - histories.sizes)


def select(
    histories: Histories,
    features: ItemFeatures,
    seed: int,
    limits: Sequence[int] = (100, 100),
    ratio: float = 1.0,
    criterion: Criterion = "information",
) -> Selection:
    """Return F_u and k_uf of all users; `limits` are the most features of one hop, of two, and so on.

    Features of more hops than there are limits are left out. Where more others are drawn than she has items, they weigh
    as much as these together; where fewer are, each of them counts as one.
    """
    keys = stream_keys(seed, 0, histories.names, "kgflex others")
    parts = [
        _select(histories, features, np.arange(block.start, block.stop), keys, limits, ratio, criterion)
        for block in blocks(histories.users, max(histories.catalogue, features.features), _CELLS)
    ]
    counts = np.concatenate([each[0] for each in parts]) if parts else np.zeros(0, dtype=np.int64)
    return Selection(
        starts=starts_of(counts),
        features=np.concatenate([each[1] for each in parts]).astype(np.int32),
        weights=np.concatenate([each[2] for each in parts]).astype(np.float32),
        total=features.features,
    )


def _select(
    histories: Histories,
    features: ItemFeatures,
    users: Codes,
    keys: NDArray[np.uint64],
    limits: Sequence[int],
    ratio: float,
    criterion: Criterion,
) -> tuple[Codes, Codes, Floats]:
    """Return the number of features, the features and their weights of a block of users."""
    from scipy import sparse  # For speed of start.

    others = draw_others(histories, users, keys, ratio)
    drawn = others.sum(axis=1)
    marks = features.matrix.astype(np.float32)
    hers = (sparse.csr_array(histories.seen(users).astype(np.float32)) @ marks).tocoo()
    theirs = (sparse.csr_array(others.astype(np.float32)) @ marks).toarray()
    row, feature = hers.coords
    liked = histories.sizes[users].astype(np.float64)
    # A larger sample of others is no more evidence; whole numbers stay whole where they are as many.
    scale = np.where(drawn > liked, liked / np.maximum(drawn, 1), 1.0)
    negatives = theirs[row, feature] * scale[row]
    gains = feature_gain(criterion, hers.data, negatives, liked[row], (drawn * scale)[row])
    table = np.zeros((len(users), features.features))
    table[row, feature] = gains
    row, feature = np.nonzero(_candidates(table, features.hops, limits))
    return _best(row, feature, table[row, feature], features.hops[feature], limits, len(users))


def _candidates(gains: Floats, hops: NDArray[np.int8], limits: Sequence[int]) -> NDArray[np.bool_]:
    """Return which cells of [users, features] reach the border of the limits; ties at the border are all in."""
    found = np.zeros(gains.shape, dtype=np.bool_)
    for hop, limit in enumerate(limits, 1):
        columns = np.flatnonzero(hops == hop)
        if not limit or not len(columns):
            continue
        part = gains[:, columns]
        border = np.zeros(len(part))
        if limit < len(columns):
            border = np.partition(part, len(columns) - limit, axis=1)[:, len(columns) - limit]
        found[:, columns] = (part > 0) & (part >= border[:, None])
    return found


def _best(
    row: Codes, feature: Codes, gains: Floats, hop: NDArray[np.int8], limits: Sequence[int], users: int
) -> tuple[Codes, Codes, Floats]:
    """Return the best of each user's candidates of each number of hops, ties by ascending feature, and their counts."""
    order = np.lexsort((feature, -gains, hop, row))
    group = row[order] * (len(limits) + 1) + hop[order]
    fresh = np.flatnonzero(np.diff(group, prepend=-1))
    rank = places_in(np.diff(np.append(fresh, len(group))))
    best = order[rank < np.asarray(limits)[hop[order] - 1]]
    best = best[np.lexsort((feature[best], row[best]))]
    return np.bincount(row[best], minlength=users), feature[best], gains[best]


BEYOND_CHANCE = 10.828
"""χ² with one degree of freedom is above this once in a thousand."""


def expertise(selection: Selection, histories: Histories, ratio: float = 1.0) -> Floats:
    """Return for each user the number of her features whose gain is beyond chance; her own device measures it.

    Chapter 6 extends chapter 5's expertise in a category to expertise about a feature: a large k_uf says that the user
    has something to say about f. With few items, large gains are chance, though. 2 ln 2 |D_u| k_uf is the
    likelihood-ratio statistic of the table of D_u by f, which for a feature that means nothing to her follows χ² with
    one degree of freedom; so features count whose statistic one such feature in a thousand would reach.
    Use it as criterion EX. `ratio` is that of the selection; with its usual limits a user has at most 200.
    """
    # Others weigh at most as much as her own items, however many were drawn; where fewer were, D_u is smaller.
    samples = histories.sizes + np.minimum(others_drawn(histories, ratio), histories.sizes)
    sure = 2 * np.log(2) * samples[selection.owners] * selection.weights > BEYOND_CHANCE
    return np.bincount(selection.owners[sure], minlength=selection.users).astype(np.float64)
