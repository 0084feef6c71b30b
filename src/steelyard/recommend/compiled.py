"""What takes the time in a recommender, as loops that numba compiles (the extra `recommend`): draws and BPR steps.

numba compiles a loop when it is first called, for the table's float32. Sums of floats are the same on every call;
slow readable twins of draws and steps stand in the tests, which call the loops with float64 too.

numba leaves it to LLVM to find vectors in a loop over factors. LLVM makes loops over 32 numbers (four vectors of AVX);
what is left over goes in fours and one by one, after checks that arrays do not overlap: with twenty factors a pass
takes three times as long. So here a stretch of a row, a `Part`, is loaded, computed with (+, −, · with another or with
a number) and stored as a whole, and is in registers meanwhile. It has one to eight blocks of eight numbers; a row is
one part or, if it is longer, some of equal length. Zeros fill it up (`padded`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.recommend.fpl import Learning
from steelyard.recommend.histories import Floats32, Histories, Items, Keys, Triples
from steelyard.recommend.interactions import Codes, Flags

try:
    from llvmlite import ir
    from numba import njit
    from numba.core import types
    from numba.extending import intrinsic, models, overload, register_model
    from numba.np.arrayobj import make_array
except ImportError:
    raise UserError("recommend: needs numba, which is not installed; pip install 'steelyard[recommend]'") from None

LANES = 8
"""Numbers in a block: a vector of AVX in single precision, two of NEON."""
MOST_BLOCKS = 8
"""Blocks of a part at most: more do not fit the registers."""


def padded(table: Any) -> Any:
    """Return a copy of a table [rows, width] with zeros up to whole parts."""
    rows, width = table.shape
    wide = np.zeros((rows, _parts(width) * len(blocks_of(width)) * LANES), dtype=table.dtype)
    wide[:, :width] = table
    return wide


def _parts(width: int) -> int:
    return -(-width // (LANES * MOST_BLOCKS))


def blocks_of(width: int) -> tuple[int, ...]:
    """Return a tuple as long as a part has blocks: its length is part of its type, so loops are compiled for it."""
    return (LANES,) * -(-width // (LANES * _parts(width)))


@njit
def parts_of(blocks: Any, wide: Any) -> Any:
    """Return how many parts a row of a padded table has."""
    return wide.shape[1] // (LANES * len(blocks))


class Part(types.Type):
    """Some blocks of numbers, as a value in compiled code."""

    def __init__(self, dtype: Any, blocks: int) -> None:
        self.dtype, self.blocks = dtype, blocks
        super().__init__(name=f"Part({dtype}, {blocks})")


@register_model(Part)
class _Model(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Part) -> None:
        block = ir.VectorType(dmm.lookup(fe_type.dtype).get_value_type(), LANES)
        super().__init__(dmm, fe_type, ir.ArrayType(block, fe_type.blocks))


def _intrinsic(function: Any) -> Any:
    """Make numba's intrinsic of a function; callers do not see its first argument, as pyright thinks they do."""
    return intrinsic(function)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any, part: Part) -> Any:
    """Return the address of a part, as one of blocks."""
    data = make_array(kind)(context, builder, array).data
    first = builder.mul(index, ir.Constant(index.type, LANES * part.blocks))
    return builder.bitcast(builder.gep(data, [first]), context.get_value_type(part).element.as_pointer())


@_intrinsic
def load(typing: Any, blocks: Any, array: Any, index: Any) -> Any:
    """Return part `index` of a padded table, counted through; of the tuple `blocks` only the length is looked at."""
    part = Part(array.dtype, blocks.count)

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        number = context.cast(builder, values[2], index, types.intp)
        start = _pointer(context, builder, array, values[1], number, part)
        found = ir.Constant(context.get_value_type(part), ir.Undefined)
        for each in range(part.blocks):
            place = builder.gep(start, [ir.Constant(ir.IntType(64), each)])
            found = builder.insert_value(found, builder.load(place, align=array.dtype.bitwidth // 8), each)
        return found

    return part(blocks, array, index), code


@_intrinsic
def store(typing: Any, array: Any, index: Any, part: Any) -> Any:
    """Write a part where `load` reads it."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        number = context.cast(builder, values[1], index, types.intp)
        start = _pointer(context, builder, array, values[0], number, part)
        for each in range(part.blocks):
            place = builder.gep(start, [ir.Constant(ir.IntType(64), each)])
            builder.store(builder.extract_value(values[2], each), place, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, index, part), code


@_intrinsic
def total(typing: Any, part: Any) -> Any:
    """Return the sum of a part: blocks first, then halves, always in this order."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = builder.extract_value(values[0], 0)
        for each in range(1, part.blocks):
            found = builder.fadd(found, builder.extract_value(values[0], each))
        for half in (4, 2, 1):
            low, high = (_lanes(builder, found, range(first, first + half)) for first in (0, half))
            found = builder.fadd(low, high)
        return builder.extract_element(found, ir.Constant(ir.IntType(32), 0))

    return part.dtype(part), code


def _lanes(builder: Any, block: Any, chosen: Any) -> Any:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(chosen)), list(chosen))
    return builder.shuffle_vector(block, ir.Constant(block.type, ir.Undefined), mask)


def _blocks(context: Any, builder: Any, kind: Any, value: Any, part: Part) -> list[Any]:
    """Return the blocks of a part, or a number in every lane of every block."""
    if isinstance(kind, Part):
        return [builder.extract_value(value, each) for each in range(part.blocks)]
    number = context.cast(builder, value, kind, part.dtype)
    block = ir.Constant(context.get_value_type(part).element, ir.Undefined)
    block = builder.insert_element(block, number, ir.Constant(ir.IntType(32), 0))
    return [_lanes(builder, block, [0] * LANES)] * part.blocks


def _operation(symbol: Callable[..., Any], instruction: str) -> None:
    """Let an operator of Python take two parts, or a part and a number."""

    @_intrinsic
    def compute(typing: Any, left: Any, right: Any) -> Any:
        part = left if isinstance(left, Part) else right

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            sides = (_blocks(context, builder, *side, part) for side in zip((left, right), values, strict=True))
            found = ir.Constant(context.get_value_type(part), ir.Undefined)
            for each, pair in enumerate(zip(*sides, strict=True)):
                found = builder.insert_value(found, getattr(builder, instruction)(*pair), each)
            return found

        return part(left, right), generate

    @overload(symbol, strict=False)
    def _(left: Any, right: Any) -> Any:
        return compute_them if isinstance(left, Part) or isinstance(right, Part) else None

    def compute_them(left: Any, right: Any) -> Any:
        return compute(left, right)


for _symbol, _instruction in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _operation(_symbol, _instruction)


# Compiled: FPL's loops compiled by numba (the extra `recommend`), for epochs of millions of triples.


_TRIES = 32
"""Draws of a negative before the rest is looked up; few users have so many items that this happens."""
_GOLDEN, _MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BITS_27, _BITS_30, _BITS_31, _HALF = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)
_LOW, _ONE, _FRACTION = np.uint64(0xFFFFFFFF), np.uint64(1), np.uint64(11)
_PIECE = 40_000
"""Triples that are one piece of work for a thread; pieces do not change the result."""


def loop(function: Any) -> Any:
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


@loop
def _word(key: Any, position: Any) -> Any:
    """Return one word of a stream, as `randomness.words_at` does."""
    z = key + (position + _ONE) * _GOLDEN
    z = (z ^ (z >> _BITS_30)) * _MIX_1
    z = (z ^ (z >> _BITS_27)) * _MIX_2
    return z ^ (z >> _BITS_31)


@loop
def _has(bits: Any, user: Any, item: Any) -> Any:
    return (bits[user, item >> 3] >> (item & 7)) & 1 == 1


@loop
def _negative(bits: Any, user: Any, free: Any, key: Any, step: Any, word: Any) -> Any:
    """Return an item that the user has not taken: the word's own, or one drawn again."""
    catalogue = np.uint64(free[1])
    item = np.int64(((word & _LOW) * catalogue) >> _HALF)
    for attempt in range(1, _TRIES):
        if not _has(bits, user, item):
            return item
        again = _word(key, np.uint64(step) + (np.uint64(attempt) << _HALF))
        item = np.int64(((again & _LOW) * catalogue) >> _HALF)
    if not _has(bits, user, item):
        return item
    again = _word(key, np.uint64(step) + (np.uint64(_TRIES) << _HALF))
    left = np.int64(((again & _LOW) * np.uint64(free[0])) >> _HALF)
    for item in range(free[1]):
        if not _has(bits, user, item):
            if left == 0:
                return item
            left -= 1
    return -1


@loop
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
    """Draw `count` triples for each user: i⁺ evenly from her items, i⁻ evenly from all that are not.

    Both come from one 64-bit word per triple; a negative that turns out to be hers is drawn again, from words that lie
    far out in the stream, where no number of triples reaches.
    """
    shape = (len(users), count)
    out = (np.empty(shape, np.int32), np.empty(shape, np.int32), np.empty(shape, np.bool_))
    known = (histories.starts, histories.items, histories.bits, histories.catalogue)
    _draw(*known, users, keys, histories.sizes, out)
    return Triples(out[0], out[1], out[2] if histories.fakes.any() else None)


@loop
def _send(keys: Any, shares: Any, positives: Any, sent: Any) -> None:
    for row in range(len(keys)):
        for step in range(positives.shape[1]):
            word = _word(keys[row], np.uint64(positives[row, step]))
            sent[row, step] = np.float64(word >> _FRACTION) * (1.0 / (1 << 53)) < shares[row]


def sent_positives(mask_keys: Keys, shares: NDArray[np.float64], positives: Items) -> Flags:
    """Return which positive changes are sent: each item with its user's probability π (Eq. 4.8; step 4 in `fpl`).

    One draw per user, key and item: an item that stands in several triples of a round is sent or not as a whole; given
    the numbers of triples in place of items, each is drawn by itself. Keys
    of the round give the thesis' fresh draws; keys that do not change give a fixed choice that no number of rounds
    undoes.
    """
    sent = np.empty(positives.shape, dtype=np.bool_)
    _send(mask_keys, shares, positives, sent)
    return sent


@loop
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


@loop
def descent(margin: Any, one: Any) -> Any:
    """Return s = σ(−x̂) of a margin x̂, how much a triple still has to teach, and exp −|x̂|, of which its loss is made.

    Both are of the margin's type, which the 1 that is given has too: a plain 1 would turn float32 into float64.
    """
    tail = np.exp(-abs(margin))
    least = one / (one + tail)
    return (tail * least if margin > 0 else least), tail


@loop
def _extend(vector: Any, extended: Any) -> None:
    """Write (p, 1) and zeros; these too each time, since after a step that ran away they are no numbers any more."""
    extended[:] = 0
    extended[: len(vector)] = vector
    extended[len(vector)] = 1


@loop
def _pass(blocks: Any, up: Any, down: Any, extended: Any, real: Any, constants: Any, margins: Any) -> None:
    """Let one user visit her triples in order: move her (p, 1), `extended`.

    `up` and `down` hold the rows of i⁺ and of i⁻, and one more row; the changes of these items take their place. To
    `margins` go x̂ and exp −|x̂| of each triple, of which losses are made.
    """
    parts = parts_of(blocks, extended)
    rate, one = constants[4, 0], constants[5, 0]
    margin = one - one
    for part in range(parts):
        margin += total(load(blocks, extended, part) * (load(blocks, up, part) - load(blocks, down, part)))
    for step in range(len(real)):
        weight, tail = descent(margin, one)
        margins[0, step], margins[1, step] = margin, tail
        margin, moved = one - one, one - one
        for part in range(parts):
            at, then = step * parts + part, (step + 1) * parts + part
            own, liked, other = load(blocks, extended, part), load(blocks, up, at), load(blocks, down, at)
            following = load(blocks, up, then) - load(blocks, down, then)
            gradient = (rate * weight) * own
            store(up, at, load(blocks, constants, 2 * parts + part) * liked + gradient)
            store(down, at, load(blocks, constants, 3 * parts + part) * other - gradient)
            if real[step]:
                move = load(blocks, constants, parts + part) * (liked - other)
                own = load(blocks, constants, part) * own
                store(extended, part, own + weight * move)
                moved += total(move * following)
            margin += total(own * following)
        # The next margin is made of two sums that need not wait for this weight: the weights are a chain, and its
        # length is the time of a pass. Rows that ran away have infinite sums, and 0 · ∞ is no number.
        if weight > 0:
            margin += weight * moved


def _constants(learning: Learning, table: Any, *, gradients: bool = False) -> Any:
    """Return rows in the table's own type: what a step multiplies (p, 1) by, α, −α λ⁺, −α λ⁻, α of the items, and 1.

    The first α and the decays are zero at the bias, which is no part of the user's step and does not decay. For
    `gradients` alone, the items have no decays and the rate 1.
    """
    user, positive, negative = learning.decays
    rate, decays = (1.0, (0.0, 0.0)) if gradients else (learning.rate, (positive, negative))
    each = [1.0 - learning.rate * user, learning.rate, *(-rate * decay for decay in decays), rate, 1.0]
    rows = np.repeat(np.array(each)[:, None], table.shape[1], axis=1)
    rows[:4, -1] = [1.0, 0.0, 0.0, 0.0]
    return padded(rows.astype(table.dtype))


@loop
def _rows(blocks: Any, table: Any, items: Any, out: Any) -> None:
    """Write the items' rows to `out`.

    Here no row waits for another, and the processor fetches many at a time; in a pass they would hold up every step.
    """
    parts = parts_of(blocks, table)
    for step in range(len(items)):
        for part in range(parts):
            store(out, step * parts + part, load(blocks, table, items[step] * parts + part))


@loop
def _passes(
    blocks: Any, table: Any, vectors: Any, positives: Any, negatives: Any, real: Any, constants: Any, out: Any
) -> None:
    gradients, losses = out
    count, width = positives.shape[1], vectors.shape[1]
    extended, margins = np.empty((1, table.shape[1]), table.dtype), np.empty((2, count), table.dtype)
    shape = (count + 1, table.shape[1])
    up, down = np.zeros(shape, table.dtype), np.zeros(shape, table.dtype)
    for row in range(len(vectors)):
        _extend(vectors[row], extended[0])
        _rows(blocks, table, positives[row], up)
        _rows(blocks, table, negatives[row], down)
        _pass(blocks, up, down, extended, real[row], constants, margins)
        vectors[row] = extended[0, :width]
        for step in range(count):
            margin = margins[0, step]
            losses[row, step] = np.log1p(margins[1, step]) - (margin if margin < 0 else 0)  # ln(1 + exp −x̂)
            for f in range(width + 1):
                gradients[row, step, f] = up[step, f]


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
    table: Floats32, vectors: Floats32, triples: Triples, learning: Learning, threads: int = 1, piece: int = _PIECE
) -> LocalPass:
    """Let each user visit her triples in order (step 3 of a round in `fpl`), some users at a time on several threads.

    A triple with a decoy gives gradients like any other, but does not move the user's vector.
    """
    users, count = triples.positives.shape
    after = vectors.copy()
    gradients = np.empty((users, count, table.shape[1]), dtype=table.dtype)
    losses = np.empty((users, count), dtype=table.dtype)
    arrays = (after, triples.positives, triples.negatives, own_triples(triples), gradients, losses)
    wide, constants = padded(table), _constants(learning, table, gradients=True)

    def part(rows: slice) -> None:
        mine, positives, negatives, real, *out = (each[rows] for each in arrays)
        _passes(blocks_of(table.shape[1]), wide, mine, positives, negatives, real, constants, tuple(out))

    in_pieces(part, users, max(1, piece // count), threads)
    return LocalPass(after, gradients, losses)


def in_pieces(work: Callable[[slice], None], count: int, piece: int, threads: int) -> None:
    """Do `work` on 0 .. `count` − 1, so many of them at a time, on several threads where there is more than a piece."""
    pieces = [slice(begin, begin + piece) for begin in range(0, count, piece)]
    if len(pieces) < 2:
        list(map(work, pieces))
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, pieces))


def own_triples(triples: Triples) -> Flags:
    """Return which triples have an item of the user's own, and no decoy."""
    return np.ones(triples.positives.shape, dtype=np.bool_) if triples.real is None else triples.real


@loop
def _mean_loss(margins: Any) -> Any:
    """Return the mean of ln(1 + exp −x̂) = max(−x̂, 0) + ln(1 + exp −|x̂|), with one logarithm for many triples."""
    loss, product = 0.0, 1.0
    count = margins.shape[1]
    for step in range(count):
        loss -= min(margins[0, step], 0.0)
        product *= 1.0 + margins[1, step]
        if step & 511 == 511:  # of factors up to 2 no more fit
            loss, product = loss + np.log(product), 1.0
    return (loss + np.log(product)) / count


@loop
def _rounds(
    blocks: Any,
    table: Any,
    vectors: Any,
    users: Any,
    positives: Any,
    negatives: Any,
    real: Any,
    sent: Any,
    constants: Any,
    out: Any,
) -> None:
    """Do one round per entry of `users`; write the mean loss of each to `out`."""
    count, width, parts = positives.shape[1], vectors.shape[1], parts_of(blocks, table)
    extended, margins = np.empty((1, table.shape[1]), table.dtype), np.empty((2, count), table.dtype)
    shape = (count + 1, table.shape[1])
    up, down = np.zeros(shape, table.dtype), np.zeros(shape, table.dtype)
    for turn in range(len(users)):
        mine, others, vector = positives[turn], negatives[turn], vectors[users[turn]]
        _extend(vector, extended[0])
        _rows(blocks, table, mine, up)
        _rows(blocks, table, others, down)
        _pass(blocks, up, down, extended, real[turn], constants, margins)
        vector[:] = extended[0, :width]
        out[turn] = _mean_loss(margins)
        for step in range(count):
            for part in range(parts):
                at, liked, other = step * parts + part, mine[step] * parts + part, others[step] * parts + part
                if sent[turn, step]:
                    store(table, liked, load(blocks, table, liked) + load(blocks, up, at))
                store(table, other, load(blocks, table, other) + load(blocks, down, at))


def sequential_rounds(
    table: Floats32, vectors: Floats32, users: Codes, triples: Triples, sent: Flags, learning: Learning
) -> Floats32:
    """Do one round per entry of `users`, each on the table that the one before left; return their mean losses.

    `table` and `vectors` (one row per user of the population) are themselves changed.
    """
    losses = np.empty(len(users), dtype=table.dtype)
    known = (users, triples.positives, triples.negatives, own_triples(triples), sent)
    wide, width = padded(table), table.shape[1]
    _rounds(blocks_of(width), wide, vectors, *known, _constants(learning, table), losses)
    table[:] = wide[:, :width]
    return losses


@loop
def pointwise_pass(
    users: Any, items: Any, of_users: Any, of_items: Any, mean: Any, order: Any, wanted: int, constants: Any
) -> None:
    """Visit pairs in an order and take a step of gradient descent on the cross-entropy of each; the tables are changed.

    The first `wanted` pairs are wanted, the others are not. Rows end with the bias, which decays like the factors, and
    so does the `mean` of all.
    """
    rate, shrinkage = constants
    last = of_users.shape[1] - 1
    for pair in order:
        user, item = of_users[users[pair]], of_items[items[pair]]
        score = mean[0] + user[last] + item[last]
        for f in range(last):
            score += user[f] * item[f]
        error = np.float32(pair < wanted) - np.float32(1) / (np.float32(1) + np.exp(-score))
        step = rate * error
        for f in range(last):
            own, other = user[f], item[f]
            user[f] = shrinkage * own + step * other
            item[f] = shrinkage * other + step * own
        user[last], item[last] = shrinkage * user[last] + step, shrinkage * item[last] + step
        mean[0] = shrinkage * mean[0] + step
