"""FPL's loops compiled by numba (the extra `recommend`), for epochs of millions of triples.

Each function does what the one of its name in `sampling`, `fpl`, `parallel` or `sequential` does. What is drawn or
counted is equal to the last bit; sums of floats agree up to rounding, and are the same on every call. numba compiles a
loop when it is first called, for the table's float32; tests call the loops with float64 too, where they meet the slow
reference.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from steelyard.recommend.fpl import LARGEST_MARGIN, Learning, LocalPass
from steelyard.recommend.interactions import Codes, Flags
from steelyard.recommend.sampling import TRIES, Histories, Items, Keys, Triples
from steelyard.recommend.sparse import Floats32

_GOLDEN, _MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BITS_27, _BITS_30, _BITS_31, _HALF = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)
_LOW, _ONE, _FRACTION = np.uint64(0xFFFFFFFF), np.uint64(1), np.uint64(11)
_PIECE = 40_000
"""Triples that are one piece of work for a thread; pieces do not change the result."""


def _loop(function: Any) -> Any:
    """Compile a function when it is first called; keep it beside the package's own compiled files, where that can be.

    Compiling takes some ten seconds, loading what was kept one or two. What is kept is a pickle, as trusted as the .pyc
    beside it: whoever can write there can change the package (docs/reference/security.md).

    `nogil` lets pieces run on several threads. `reassoc` lets a sum over factors use the processor's vectors; its order
    is fixed when it is compiled.
    """
    made = njit(nogil=True, fastmath={"reassoc", "contract"}, error_model="numpy")(function)
    with suppress(RuntimeError):  # no folder can be written: each process compiles for itself
        made.enable_caching()
    return made


@_loop
def _word(key: Any, position: Any) -> Any:
    """Return one word of a stream, as `randomness.words_at` does."""
    z = key + (position + _ONE) * _GOLDEN
    z = (z ^ (z >> _BITS_30)) * _MIX_1
    z = (z ^ (z >> _BITS_27)) * _MIX_2
    return z ^ (z >> _BITS_31)


@_loop
def _has(bits: Any, user: Any, item: Any) -> Any:
    return (bits[user, item >> 3] >> (item & 7)) & 1 == 1


@_loop
def _negative(bits: Any, user: Any, free: Any, key: Any, step: Any, word: Any) -> Any:
    """Return an item that the user has not taken: the word's own, or one drawn again."""
    catalogue = np.uint64(free[1])
    item = np.int64(((word & _LOW) * catalogue) >> _HALF)
    for attempt in range(1, TRIES):
        if not _has(bits, user, item):
            return item
        again = _word(key, np.uint64(step) + (np.uint64(attempt) << _HALF))
        item = np.int64(((again & _LOW) * catalogue) >> _HALF)
    if not _has(bits, user, item):
        return item
    again = _word(key, np.uint64(step) + (np.uint64(TRIES) << _HALF))
    left = np.int64(((again & _LOW) * np.uint64(free[0])) >> _HALF)
    for item in range(free[1]):
        if not _has(bits, user, item):
            if left == 0:
                return item
            left -= 1
    return -1


@_loop
def _draw(starts: Any, items: Any, bits: Any, catalogue: Any, users: Any, keys: Any, sizes: Any, out: Any) -> None:
    positives, negatives, own = out
    for row in range(len(users)):
        user, key = users[row], keys[row]
        held = starts[user + 1] - starts[user]
        free = (catalogue - held, catalogue)
        for step in range(positives.shape[1]):
            word = _word(key, np.uint64(step))
            drawn = np.int64(((word >> _HALF) * np.uint64(held)) >> _HALF)
            positives[row, step] = items[starts[user] + drawn]
            negatives[row, step] = _negative(bits, user, free, key, step, word)
            own[row, step] = drawn < sizes[user]


def draw_triples(histories: Histories, users: Codes, keys: Keys, count: int) -> Triples:
    """Draw `count` triples for each user, as `sampling.draw_triples` does."""
    shape = (len(users), count)
    out = (np.empty(shape, np.int32), np.empty(shape, np.int32), np.empty(shape, np.bool_))
    known = (histories.starts, histories.items, histories.bits, histories.catalogue)
    _draw(*known, users, keys, histories.sizes, out)
    return Triples(out[0], out[1], out[2] if histories.fakes.any() else None)


@_loop
def _send(keys: Any, shares: Any, positives: Any, sent: Any) -> None:
    for row in range(len(keys)):
        for step in range(positives.shape[1]):
            word = _word(keys[row], np.uint64(positives[row, step]))
            sent[row, step] = np.float64(word >> _FRACTION) * (1.0 / (1 << 53)) < shares[row]


def sent_positives(mask_keys: Keys, shares: NDArray[np.float64], positives: Items) -> Flags:
    """Return which positive changes are sent, as `fpl.sent_positives` does."""
    sent = np.empty(positives.shape, dtype=np.bool_)
    _send(mask_keys, shares, positives, sent)
    return sent


@_loop
def _count(positives: Any, negatives: Any, sent: Any, last_row: Any, counts: Any) -> None:
    for row in range(len(counts)):
        for step in range(positives.shape[1]):
            liked, other = positives[row, step], negatives[row, step]
            if sent[row, step] and last_row[liked] != row:
                last_row[liked] = row
                counts[row] += 1
            if last_row[other] != row:
                last_row[other] = row
                counts[row] += 1


def distinct_rows(triples: Triples, sent: Flags) -> Codes:
    """Return how many distinct rows each user sends; her positives and negatives never overlap."""
    counts = np.zeros(len(triples.positives), dtype=np.int64)
    largest = max(int(triples.positives.max(initial=0)), int(triples.negatives.max(initial=0)))
    _count(triples.positives, triples.negatives, sent, np.full(largest + 1, -1, np.int64), counts)
    return counts


@_loop
def _pass(table: Any, extended: Any, positives: Any, negatives: Any, real: Any, numbers: Any, out: Any) -> None:
    """Let one user visit her triples in order: move her (p, 1), write the gradients and losses of the triples."""
    gradients, losses = out
    width = len(extended)
    one = extended[width - 1]  # Of the table's own type: a plain 1 would turn float32 into float64.
    rate, shrinkage, largest = numbers[0], numbers[1], numbers[2]
    for step in range(len(positives)):
        liked, other = table[positives[step]], table[negatives[step]]
        margin = one - one
        for f in range(width):
            margin += extended[f] * (liked[f] - other[f])
        weight = one / (one + np.exp(largest if margin > largest else margin))
        # ln(1 + exp −x̂), by the form that loses no digits.
        losses[step] = -np.log1p(-weight) if margin > 0 else -margin - np.log(weight)
        for f in range(width):
            gradients[step, f] = weight * extended[f]
        if real[step]:
            for f in range(width - 1):
                extended[f] = extended[f] * shrinkage + weight * rate * (liked[f] - other[f])


def _numbers(learning: Learning, dtype: Any) -> Any:
    """Return α, the shrinkage of p, the largest margin, and the decays of both items, in the table's own type."""
    user, positive, negative = learning.decays
    return np.array([learning.rate, 1.0 - learning.rate * user, LARGEST_MARGIN, positive, negative], dtype=dtype)


@_loop
def _passes(table: Any, vectors: Any, positives: Any, negatives: Any, real: Any, numbers: Any, out: Any) -> None:
    gradients, losses = out
    extended = np.ones(table.shape[1], dtype=table.dtype)
    for row in range(len(vectors)):
        extended[:-1] = vectors[row]
        _pass(table, extended, positives[row], negatives[row], real[row], numbers, (gradients[row], losses[row]))
        vectors[row] = extended[:-1]


def local_pass_in_blocks(
    table: Floats32, vectors: Floats32, triples: Triples, learning: Learning, threads: int = 1, piece: int = _PIECE
) -> LocalPass:
    """Let each user visit her triples in order, some users at a time on several threads."""
    users, count = triples.positives.shape
    after = vectors.copy()
    gradients = np.empty((users, count, table.shape[1]), dtype=table.dtype)
    losses = np.empty((users, count), dtype=table.dtype)
    arrays = (after, triples.positives, triples.negatives, _own(triples), gradients, losses)
    numbers = _numbers(learning, table.dtype)
    block = max(1, piece // count)

    def part(start: int) -> None:
        mine, positives, negatives, real, *out = (each[start : start + block] for each in arrays)
        _passes(table, mine, positives, negatives, real, numbers, tuple(out))

    if users <= block:
        part(0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(part, range(0, users, block)))
    return LocalPass(after, gradients, losses)


def _own(triples: Triples) -> Flags:
    return np.ones(triples.positives.shape, dtype=np.bool_) if triples.real is None else triples.real


@_loop
def _rounds(
    table: Any, vectors: Any, users: Any, positives: Any, negatives: Any, real: Any, sent: Any, numbers: Any, out: Any
) -> None:
    """Do one round per entry of `users`; write the mean loss of each to `out`."""
    count, width = positives.shape[1], table.shape[1]
    extended = np.ones(width, dtype=table.dtype)
    up, down = np.empty((count, width), dtype=table.dtype), np.empty((count, width), dtype=table.dtype)
    each = np.empty(count, dtype=table.dtype)
    rate, positive, negative = numbers[0], numbers[3], numbers[4]
    for turn in range(len(users)):
        mine, others, vector = positives[turn], negatives[turn], vectors[users[turn]]
        for f in range(width - 1):
            extended[f] = vector[f]
        _pass(table, extended, mine, others, real[turn], numbers, (up, each))
        for f in range(width - 1):
            vector[f] = extended[f]
        out[turn] = each.mean()
        # Decays look at the rows as they were at the start of the round: all changes first, then all sums.
        for step in range(count):
            down[step, width - 1] = -up[step, width - 1]  # biases do not decay
            liked, other = table[mine[step]], table[others[step]]
            for f in range(width - 1):
                down[step, f] = -up[step, f] - negative * other[f]
                up[step, f] -= positive * liked[f]
        for step in range(count):
            liked, other = table[mine[step]], table[others[step]]
            if sent[turn, step]:
                for f in range(width):
                    liked[f] += rate * up[step, f]
            for f in range(width):
                other[f] += rate * down[step, f]


def sequential_rounds(
    table: Floats32, vectors: Floats32, users: Codes, triples: Triples, sent: Flags, learning: Learning
) -> Floats32:
    """Do one round per entry of `users`, each on the table that the one before left; return their mean losses.

    `table` and `vectors` (one row per user of the population) are themselves changed.
    """
    losses = np.empty(len(users), dtype=table.dtype)
    known = (users, triples.positives, triples.negatives, _own(triples), sent)
    _rounds(table, vectors, *known, _numbers(learning, table.dtype), losses)
    return losses
