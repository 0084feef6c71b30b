"""FPL, federated pair-wise learning (thesis ch. 4): the local pass of many users at once.

Shared is a table with a row (q_i, b_i) per item; private is a vector p_u per user. Score b_i + q_i·p_u (Eq. 4.1). Per round
a user draws T triples and goes through them one by one: her vector moves, the items stay as they were at the start of the
round, and what the items should change is collected and sent (Eq. 4.3 to 4.10).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steelyard.randomness import generator
from steelyard.recommend.sampling import Items, Triples

Floats32 = NDArray[np.float32]


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
        return tuple(u if g is None else g for g, u in zip(given, usual, strict=True))  # type: ignore[return-value]


def first_table(seed: int, items: int, factors: int, spread: float = 0.1) -> Floats32:
    """Return the first (q_i, b_i), [items, factors + 1]: factors from N(0, 0.1²), biases 0."""
    table = np.zeros((items, factors + 1), dtype=np.float32)
    table[:, :factors] = generator(seed, 0, "", "fpl items").normal(0.0, spread, (items, factors))
    return table


def first_vector(seed: int, user: str, factors: int, spread: float = 0.1) -> Floats32:
    """Return a user's first vector from N(0, 0.1²), drawn on her device."""
    return generator(seed, 0, user, "fpl vector").normal(0.0, spread, factors).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Pass:
    """What a local pass leaves: new private vectors, and per triple the changes asked of the two items."""

    vectors: Floats32
    """[users, factors]"""
    positive: Floats32
    """[users, T, factors + 1]: gradient minus decay for the row of i⁺."""
    negative: Floats32
    """[users, T, factors + 1]: the same for i⁻."""
    losses: Floats32
    """[users, T]: −ln σ(x̂) of each triple when it was visited."""


def local_pass(table: Floats32, vectors: Floats32, triples: Triples, learning: Learning) -> Pass:
    """Let each user go through her triples; all users take their t-th step together.

    With x̂ = x_ui⁺ − x_ui⁻ (Eq. 4.5) and s = σ(−x̂), the derivative of ln σ(x̂), a step is
    p ← p + α (s (q⁺ − q⁻) − λ p), and the rows asked for are s (p, 1) − λ⁺ (q⁺, 0) and −s (p, 1) − λ⁻ (q⁻, 0), with p as it
    was before the step. A triple with a decoy asks for the same, but does not move the user's vector.
    """
    users, steps = triples.positives.shape
    width = table.shape[1]
    positive = np.empty((users, steps, width), dtype=np.float32)
    negative = np.empty((users, steps, width), dtype=np.float32)
    losses = np.empty((users, steps), dtype=np.float32)
    # The user's vector with a 1 for the bias: then one product gives the score, and s·(p, 1) the whole row.
    person = np.ones((users, width), dtype=np.float32)
    person[:, :-1] = vectors
    scratch = _Scratch(users, width, learning)
    for step in range(steps):
        real = None if triples.real is None else triples.real[:, step]
        scratch.step(
            *(table, person, triples.positives[:, step], triples.negatives[:, step], real),
            *(positive[:, step], negative[:, step], losses[:, step]),
        )
    return Pass(person[:, :-1].copy(), positive, negative, losses)


class _Scratch:
    """Room for one step of a block of users; kept between steps, since allocating costs more than computing."""

    def __init__(self, users: int, width: int, learning: Learning) -> None:
        user, positive, negative = learning.decays
        self.rate = np.float32(learning.rate)
        keep = np.full(width, 1.0 - learning.rate * user, dtype=np.float32)
        keep[-1] = 1.0
        self.keep = keep
        self.positive_decay = _without_bias(positive, width)
        self.negative_decay = _without_bias(negative, width)
        self.liked, self.other, self.gap, self.change = (np.empty((users, width), np.float32) for _ in range(4))

    def step(
        self,
        table: Floats32,
        person: Floats32,
        positives: Items,
        negatives: Items,
        real: NDArray[np.bool_] | None,
        positive: Floats32,
        negative: Floats32,
        losses: Floats32,
    ) -> None:
        """Take one triple of each user; writes the rows asked for and moves `person` in place."""
        liked, other, gap, change = self.liked, self.other, self.gap, self.change
        np.take(table, positives, axis=0, out=liked, mode="clip")
        np.take(table, negatives, axis=0, out=other, mode="clip")
        np.subtract(liked, other, out=gap)
        margin = np.einsum("uf,uf->u", person, gap)  # x̂
        weight = 1.0 / (1.0 + np.exp(np.minimum(margin, 80.0)))  # s = σ(−x̂)
        np.logaddexp(np.float32(0), -margin, out=losses)
        np.multiply(person, weight[:, None], out=change)
        np.multiply(liked, self.positive_decay, out=liked)
        np.subtract(change, liked, out=positive)
        np.multiply(other, self.negative_decay, out=other)
        np.add(change, other, out=other)
        np.negative(other, out=negative)
        weight *= self.rate
        gap *= weight[:, None]
        gap[:, -1] = 0.0
        if real is None:
            person *= self.keep
            person += gap
        else:
            person[real] = person[real] * self.keep + gap[real]


def _without_bias(decay: float, width: int) -> Floats32:
    """The decay of each column; the bias, in the last one, has none."""
    columns = np.full(width, decay, dtype=np.float32)
    columns[-1] = 0.0
    return columns
