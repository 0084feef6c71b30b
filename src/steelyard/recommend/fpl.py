"""FPL, federated pair-wise learning: a ranking model of which each user keeps her own part and her history.

A. Ferrara, *Pursuing Privacy and Personalization in Recommender Systems: The Role of Federated Learning*, Politecnico
di Bari, 2022, chapter 4. The server holds a row (q_i, b_i) per item; each device holds its user's vector p_u and the
items she took. The score of an item is x̂_ui = b_i + q_i·p_u (Eq. 4.1).

A round (§4.3):

1. The server sends all rows to m users.
2. Each user draws T triples (u, i⁺, i⁻): i⁺ from her items, i⁻ from those that she did not take (`sampling`).
3. She visits them one after the other. With x̂ = x̂_ui⁺ − x̂_ui⁻ (Eq. 4.5) and s = σ(−x̂), the derivative of ln σ(x̂) (the
   thesis prints σ(x̂) in Eq. 4.11, a slip), her own vector moves at once, p ← p + α (s (q⁺ − q⁻) − λ p), while the items
   stay as they came; what they should change by is collected with p as it was before the move:
   s (p, 1) − λ⁺ (q⁺, 0) for i⁺ and −s (p, 1) − λ⁻ (q⁻, 0) for i⁻. Biases are not regularised.
4. She sends the change of every negative item, and that of each positive item with probability π (Eq. 4.8): her choice
   of how much of her positive feedback the server may see.
5. The server adds what it gets: Θ ← Θ + α Σ_u Δ_u (Eq. 4.10; `SparseRows.combine`).

How many users and triples make a round is the `Mode`. This file says it all for many users at once; `parallel` and
`sequential` do the same faster for whole populations and for long chains of one-user rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from steelyard.base.randomness import generator, words_at
from steelyard.recommend.histories import Items, Keys, Triples
from steelyard.recommend.interactions import Flags
from steelyard.recommend.sparse import Floats32, SparseRows

LARGEST_MARGIN = np.float32(80)
"""exp of more than about 88 overflows in single precision; σ(−80) is 0 for all that matters."""


EpochKind = Literal["formula", "tables"]
"""How an epoch's rounds are counted: by m · T · rpe = R⁺ (§4.5.2), or as many for the + modes as for the plain ones, R⁺
of one user or R⁺/|U| of all, which is what the communication totals of the thesis' Table 4.4 say."""


@dataclass(frozen=True)
class Mode:
    """One of the four configurations (§4.5.2): how many users compute in a round, and how many triples each visits."""

    one_user: bool
    """One random user per round (s for sequential), or all users (p for parallel)."""
    one_triple: bool
    """One triple per user and round, or R⁺/|U| of them (+)."""

    def one_round_per_epoch(self, counted: EpochKind = "formula") -> bool:
        """Whether all users visit R⁺/|U| triples each in a round, so that one round is an epoch."""
        return not (self.one_user or self.one_triple) and counted == "formula"

    def schedule(self, users: int, interactions: int, counted: EpochKind = "formula") -> Schedule:
        """Return an epoch of R⁺ = `interactions` positives in whole rounds and triples."""
        cohort = 1 if self.one_user else users
        triples = 1 if self.one_triple else max(1, round(interactions / users))
        if counted == "tables":
            return Schedule(cohort, triples, Schedule.over(interactions, cohort, 1).rounds_per_epoch)
        return Schedule.over(interactions, cohort, triples)

    def cost_per_epoch(
        self, users: int, items: int, interactions: int, share: float, counted: EpochKind = "formula"
    ) -> float:
        """Return CCE with T = R⁺/|U| and the rounds per epoch unrounded, as in the thesis' Table 4.4.

        Then rpe · |U⁻| is R⁺/T by the formula, and R⁺ as the tables were made, whether one user comes after the other
        or all at once: sFPL costs what pFPL does.
        """
        triples = 1.0 if self.one_triple else interactions / users
        asked = interactions / (triples if counted == "formula" else 1.0)
        return cost_per_epoch(asked, 1, items, triples, share)


MODES: Mapping[str, Mode] = {
    "sFPL": Mode(one_user=True, one_triple=True),
    "sFPL+": Mode(one_user=True, one_triple=False),
    "pFPL": Mode(one_user=False, one_triple=True),
    "pFPL+": Mode(one_user=False, one_triple=False),
}
"""The thesis' four modes by name."""


@dataclass(frozen=True)
class Schedule:
    """How an epoch is cut into rounds; by the formula it visits about as many triples as there are positives."""

    users: int
    """m = |U⁻|: users per round."""
    triples: int
    """T: triples per user and round."""
    rounds_per_epoch: int

    @classmethod
    def over(cls, interactions: int, users: int, triples: int) -> Schedule:
        """Return the schedule with rpe so that m · T · rpe ≈ R⁺ (§4.5.2), at least 1."""
        return cls(users, triples, max(1, round(interactions / (users * triples))))

    def cost_per_epoch(self, items: int, share: float) -> float:
        """Return CCE of these rounds."""
        return cost_per_epoch(self.rounds_per_epoch, self.users, items, self.triples, share)


def cost_per_epoch(rounds: float, users: float, items: int, triples: float, share: float) -> float:
    """Return CCE = rpe · |U⁻| · (|I| + T (1 + π)), in vectors both ways (§4.6.4); TCC is that times the epochs."""
    return rounds * users * (items + triples * (1 + share))


@dataclass(frozen=True)
class Learning:
    """The numbers of FPL's steps; the weights of the regularisation follow from the learning rate (§4.5.3)."""

    rate: float
    """α, on the device and on the server."""
    factors: int
    user_decay: float | None = None
    """λ of the user's vector; None for α/20."""
    positive_decay: float | None = None
    """λ of positive items; None for α/20."""
    negative_decay: float | None = None
    """λ of negative items; None for α/200."""

    @property
    def decays(self) -> tuple[float, float, float]:
        """λ of user, positive item and negative item."""
        given = (self.user_decay, self.positive_decay, self.negative_decay)
        usual = (self.rate / 20, self.rate / 20, self.rate / 200)
        user, positive, negative = (u if g is None else g for g, u in zip(given, usual, strict=True))
        return user, positive, negative

    def shrinkage(self) -> Floats32:
        """Return what a step multiplies (p, 1) by before it adds to it: 1 − α λ for p, and 1 for the bias's 1."""
        factors = np.full(self.factors + 1, 1.0 - self.rate * self.decays[0], dtype=np.float32)
        factors[-1] = 1.0
        return factors


def initial_table(seed: int, items: int, factors: int, spread: float = 0.1, bias_spread: float = 0.0) -> Floats32:
    """Return the first (q_i, b_i), [items, factors + 1]: factors from N(0, 0.1²), biases 0 or normal too."""
    table = np.zeros((items, factors + 1), dtype=np.float32)
    table[:, :factors] = generator(seed, 0, "", "fpl items").normal(0.0, spread, (items, factors))
    if bias_spread:
        table[:, factors] = generator(seed, 0, "", "fpl biases").normal(0.0, bias_spread, items)
    return table


def initial_vector(seed: int, user: str, factors: int, spread: float = 0.1) -> Floats32:
    """Return a user's first vector from N(0, 0.1²), drawn on her device."""
    return generator(seed, 0, user, "fpl vector").normal(0.0, spread, factors).astype(np.float32)


def descent_weight(margins: Floats32) -> Floats32:
    """Return s = σ(−x̂) = 1 / (1 + exp x̂) of each margin, in single precision: how much a triple still has to teach."""
    weight = np.exp(np.minimum(margins, LARGEST_MARGIN))
    weight += np.float32(1)
    return np.reciprocal(weight, out=weight)


@dataclass(frozen=True, eq=False)
class LocalPass:
    """What a local pass leaves: new private vectors, and the gradient and loss of each triple."""

    vectors: Floats32
    """[users, factors]"""
    gradients: Floats32
    """[users, T, factors + 1]: s (p, 1) of each triple, the gradient for the row of i⁺; that for i⁻ is its negative."""
    losses: Floats32
    """[users, T]: −ln σ(x̂) of each triple when it was visited."""


def local_pass(
    table: Floats32, vectors: Floats32, triples: Triples, learning: Learning, gradients: Floats32 | None = None
) -> LocalPass:
    """Let each user visit her triples in order (step 3 of a round); all users take their t-th triple together.

    A triple with a decoy gives gradients like any other, but does not move the user's vector. `gradients` may be an
    array to write to.
    """
    users, count = triples.positives.shape
    width = table.shape[1]
    if gradients is None:
        gradients = np.empty((users, count, width), dtype=np.float32)
    margins = np.empty((users, count), dtype=np.float32)
    # The user's vector with a 1 for the bias: one product gives the score, and s·(p, 1) the whole row.
    extended = np.ones((users, width), dtype=np.float32)
    extended[:, :-1] = vectors
    step = _Step(users, learning)
    # A learning rate that is too large runs away to infinity; the server refuses that, no warning per step is needed.
    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(count):
            real = None if triples.real is None else triples.real[:, t]
            rows = (triples.positives[:, t], triples.negatives[:, t])
            margins[:, t] = step(table, extended, *rows, real, gradients[:, t])
        losses = np.logaddexp(np.float32(0), -margins, out=margins)
    return LocalPass(extended[:, :-1].copy(), gradients, losses)


class _Step:
    """One triple of each user; its arrays are kept between steps, since allocating costs more than computing."""

    def __init__(self, users: int, learning: Learning) -> None:
        self.rate = np.float32(learning.rate)
        self.shrinkage = learning.shrinkage()
        shape = (users, learning.factors + 1)
        self.liked, self.difference = np.empty(shape, np.float32), np.empty(shape, np.float32)

    def __call__(
        self,
        table: Floats32,
        extended: Floats32,
        positives: Items,
        negatives: Items,
        real: NDArray[np.bool_] | None,
        gradients: Floats32,
    ) -> Floats32:
        """Write the gradients s (p, 1), move `extended` (p, 1) and return the margins x̂."""
        difference = self.difference  # (q⁺ − q⁻, b⁺ − b⁻)
        # Clipping spares a check of every index; they are within the table.
        np.take(table, positives, axis=0, out=self.liked, mode="clip")
        np.take(table, negatives, axis=0, out=difference, mode="clip")
        np.subtract(self.liked, difference, out=difference)
        margin = np.einsum("uf,uf->u", extended, difference)  # x̂
        weight = descent_weight(margin)
        np.multiply(extended, weight[:, None], out=gradients)
        weight *= self.rate
        difference *= weight[:, None]
        difference[:, -1] = 0.0  # the bias is part of the score, not of the user's step
        if real is None:
            extended *= self.shrinkage
            extended += difference
        else:
            extended[real] = extended[real] * self.shrinkage + difference[real]
        return margin


def sent_positives(mask_keys: Keys, shares: NDArray[np.float64], positives: Items) -> Flags:
    """Return which positive changes are sent: each item with its user's probability π (Eq. 4.8; step 4 of a round).

    One draw per user, key and item: an item that stands in several triples of a round is sent or not as a whole. Keys
    of the round give the thesis' fresh draws; keys that do not change give a fixed choice that no number of rounds
    undoes.
    """
    if (shares >= 1).all():
        return np.ones(positives.shape, dtype=np.bool_)
    if (shares <= 0).all():
        return np.zeros(positives.shape, dtype=np.bool_)
    word = words_at(mask_keys[:, None], positives.astype(np.uint64))
    return (word >> np.uint64(11)).astype(np.float64) * (1.0 / (1 << 53)) < shares[:, None]


def changes(table: Floats32, triples: Triples, sent: Flags, gradients: Floats32, learning: Learning) -> SparseRows:
    """Return Δ_u of each user, row by row: every negative, and the positives that π lets through (steps 3 and 4).

    `table` holds the rows as they were at the start of the round; an item has one row per triple it stands in.
    """
    users, count, width = gradients.shape
    _, positive, negative = learning.decays
    values = np.stack([gradients, -gradients], axis=2)
    values[:, :, 0, :-1] -= np.float32(positive) * table[triples.positives][..., :-1]
    values[:, :, 1, :-1] -= np.float32(negative) * table[triples.negatives][..., :-1]
    keep = np.stack([sent, np.ones_like(sent)], axis=2).reshape(-1)
    rows = np.stack([triples.positives, triples.negatives], axis=2).reshape(-1)
    owners = np.repeat(np.arange(users, dtype=np.int32), 2 * count)
    return SparseRows(users, owners[keep], rows[keep], values.reshape(-1, width)[keep], learning.rate)
