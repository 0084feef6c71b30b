"""FPL, federated pair-wise learning (thesis ch. 4): the local pass of many users at once.

Shared is a table with a row (q_i, b_i) per item; private is a vector p_u per user. Score b_i + q_i·p_u (Eq. 4.1). Per
round a user draws T triples and goes through them one by one: her vector moves, the items stay as they were at the
start of the round, and what the items should change is collected and sent (Eq. 4.3 to 4.10).
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
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
        user, positive, negative = (u if g is None else g for g, u in zip(given, usual, strict=True))
        return user, positive, negative


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
    push: Floats32
    """[users, T, factors + 1]: s (p, 1) of each triple, the gradient for the row of i⁺; that for i⁻ is its negative."""
    losses: Floats32
    """[users, T]: −ln σ(x̂) of each triple when it was visited."""


def local_pass(
    table: Floats32, vectors: Floats32, triples: Triples, learning: Learning, push: Floats32 | None = None
) -> Pass:
    """Let each user go through her triples; all users take their t-th step together.

    With x̂ = x_ui⁺ − x_ui⁻ (Eq. 4.5) and s = σ(−x̂), the derivative of ln σ(x̂), a step is
    p ← p + α (s (q⁺ − q⁻) − λ p), and the changes asked for are s (p, 1) − λ⁺ (q⁺, 0) and −s (p, 1) − λ⁻ (q⁻, 0), with
    p as it was before the step. A triple with a decoy asks for the same, but does not move the user's vector. `push`
    may give the room to write s (p, 1) to.
    """
    users, steps = triples.positives.shape
    width = table.shape[1]
    room = np.empty((users, steps, width), dtype=np.float32) if push is None else push
    losses = np.empty((users, steps), dtype=np.float32)
    # The user's vector with a 1 for the bias: then one product gives the score, and s·(p, 1) the whole row.
    person = np.ones((users, width), dtype=np.float32)
    person[:, :-1] = vectors
    scratch = _Scratch(users, width, learning)
    # A learning rate that is too large runs away to infinity; the server refuses that, no warning per step is needed.
    with np.errstate(over="ignore", invalid="ignore"):
        _steps(table, person, triples, scratch, room, losses)
        np.logaddexp(np.float32(0), -losses, out=losses)
    return Pass(person[:, :-1].copy(), room, losses)


def _steps(
    table: Floats32, person: Floats32, triples: Triples, scratch: _Scratch, room: Floats32, losses: Floats32
) -> None:
    """Take all steps; `losses` is filled with the margins."""
    for step in range(triples.positives.shape[1]):
        real = None if triples.real is None else triples.real[:, step]
        losses[:, step] = scratch.step(
            *(table, person, triples.positives[:, step], triples.negatives[:, step], real, room[:, step])
        )


def single_pass(table: Floats32, vector: Floats32, triples: Triples, learning: Learning) -> Pass:
    """The local pass of one user by herself, with as few calls per step as can be; no decoys.

    Use it for long chains of one-user rounds. It equals `local_pass` up to the rounding of the inner product.
    """
    gaps = table[triples.positives[0]] - table[triples.negatives[0]]
    # The bias has its place in the score, but none in the user's step.
    moves = gaps * np.float32(learning.rate)
    moves[:, -1] = 0.0
    person = np.ones(table.shape[1], dtype=np.float32)
    person[:-1] = vector[0]
    keep = _keep(len(person), learning)
    push, margins = np.empty_like(gaps), np.empty(len(gaps), dtype=np.float32)
    for step, (gap, move) in enumerate(zip(gaps, moves, strict=True)):
        margin = float(gap @ person)
        weight = np.float32(1.0 / (1.0 + math.exp(min(margin, 80.0))))
        margins[step] = margin
        np.multiply(person, weight, out=push[step])
        person *= keep
        person += weight * move
    return Pass(person[None, :-1].copy(), push[None], np.logaddexp(np.float32(0), -margins)[None])


def _keep(width: int, learning: Learning) -> Floats32:
    """What a step leaves of the user's vector before it adds to it: 1 − α λ, and the 1 of the bias whole."""
    kept = np.full(width, 1.0 - learning.rate * learning.decays[0], dtype=np.float32)
    kept[-1] = 1.0
    return kept


def blockwise(
    table: Floats32, vectors: Floats32, triples: Triples, learning: Learning, threads: int = 1, block: int = 1024
) -> Pass:
    """Do a local pass in blocks of users, on several threads; the numbers are those of one big block.

    Use it for whole populations: a block's vectors stay in the processor's cache through all its steps.
    """
    users, steps = triples.positives.shape
    if users <= block:
        return local_pass(table, vectors, triples, learning)
    push = np.empty((users, steps, table.shape[1]), dtype=np.float32)

    def part(start: int) -> Pass:
        rows = slice(start, start + block)
        real = None if triples.real is None else triples.real[rows]
        mine = Triples(triples.positives[rows], triples.negatives[rows], real)
        return local_pass(table, vectors[rows], mine, learning, push[rows])

    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(part, range(0, users, block)))
    return Pass(np.concatenate([p.vectors for p in parts]), push, np.concatenate([p.losses for p in parts]))


class _Scratch:
    """Room for one step of a block of users; kept between steps, since allocating costs more than computing."""

    def __init__(self, users: int, width: int, learning: Learning) -> None:
        self.rate = np.float32(learning.rate)
        self.keep = _keep(width, learning)
        self.liked, self.gap = np.empty((users, width), np.float32), np.empty((users, width), np.float32)

    def step(
        self,
        table: Floats32,
        person: Floats32,
        positives: Items,
        negatives: Items,
        real: NDArray[np.bool_] | None,
        push: Floats32,
    ) -> Floats32:
        """Take one triple of each user: write the push, move `person` in place, return the margins x̂."""
        liked, gap = self.liked, self.gap
        np.take(table, positives, axis=0, out=liked, mode="clip")
        np.take(table, negatives, axis=0, out=gap, mode="clip")
        np.subtract(liked, gap, out=gap)
        margin = np.einsum("uf,uf->u", person, gap)  # x̂
        weight = np.exp(np.minimum(margin, np.float32(80)))
        weight += np.float32(1)
        np.reciprocal(weight, out=weight)  # s = σ(−x̂)
        np.multiply(person, weight[:, None], out=push)
        weight *= self.rate
        gap *= weight[:, None]
        gap[:, -1] = 0.0
        if real is None:
            person *= self.keep
            person += gap
        else:
            person[real] = person[real] * self.keep + gap[real]
        return margin
