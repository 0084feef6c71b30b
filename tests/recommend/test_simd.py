"""Parts of rows in compiled loops, against NumPy."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="numba is not installed")

from numba import njit

from steelyard.recommend.simd import LANES, MOST_BLOCKS, blocks_of, load, padded, parts_of, store, total

WIDEST = LANES * MOST_BLOCKS


@njit
def combine(blocks: Any, left: Any, right: Any, out: Any, sums: Any) -> None:
    """Write 2 (left + right) − left · right to `out`, row by row, and its sums."""
    parts = parts_of(blocks, left)
    for row in range(len(left)):
        for part in range(parts):
            at = row * parts + part
            one, other = load(blocks, left, at), load(blocks, right, at)
            found = 2.0 * (one + other) - one * other
            store(out, at, found)
            sums[row] += total(found)


@pytest.mark.parametrize(("width", "dtype"), [(1, np.float32), (8, np.float64), (21, np.float32), (71, np.float32)])
def test_parts_are_computed_with_as_numpy_does(width: int, dtype: Any) -> None:
    draw = np.random.default_rng(width)
    left, right = (draw.normal(size=(5, width)).astype(dtype) for _ in range(2))
    out, sums = padded(np.full_like(left, np.nan)), np.zeros(5, dtype)
    combine(blocks_of(width), padded(left), padded(right), out, sums)
    expected = 2 * (left + right) - left * right
    assert out.dtype == dtype
    np.testing.assert_allclose(out[:, :width], expected, rtol=1e-5, atol=1e-6)
    assert (out[:, width:] == 0).all()
    np.testing.assert_allclose(sums, expected.sum(axis=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [1, 8, 9, WIDEST, WIDEST + 1, 5 * WIDEST, 10_001])
def test_rows_are_some_parts_of_equal_length_and_little_is_filled_up(width: int) -> None:
    wide = padded(np.ones((2, width), np.float32))
    part = LANES * len(blocks_of(width))
    assert part <= WIDEST
    assert wide.shape[1] % part == 0
    assert width <= wide.shape[1] < width + LANES * (wide.shape[1] // part)
    assert (wide[:, :width] == 1).all()
    assert (wide[:, width:] == 0).all()
