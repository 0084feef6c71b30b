"""Rows of a table as the processor's own vectors, for loops that numba compiles.

numba leaves it to LLVM to find vectors in a loop over factors. LLVM makes loops over 32 numbers (four vectors of AVX);
what is left over goes in fours and one by one, after checks that arrays do not overlap. Of some twenty factors that is
all there is. Here a stretch of a row is loaded, computed with (+, −, · with another or with a number) and stored as a
whole, and is in registers meanwhile. It has one to eight blocks of eight numbers; a row is one such part or, if it is
longer, some of equal length. Zeros fill it up (`padded`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic, models, overload, register_model
from numba.np.arrayobj import make_array

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
