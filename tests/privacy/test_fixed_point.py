"""Fixed-point numbers: no sum of a cohort overflows, and what is written is what is read."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import UserError
from steelyard.privacy.fixed_point import FixedPoint, Grid

ENCODINGS = st.builds(
    FixedPoint.of, st.sampled_from([32, 64]), st.sampled_from([0.25, 1.0, 3.7, 16.0, 100.0]), st.integers(1, 1024)
)


def test_by_hand():
    """Ten clients with up to 16 each: 160·2^p must stay below 2^31, so p = 23."""
    encoding = FixedPoint.of(32, 16.0, 10)
    assert (encoding.places, encoding.step) == (23, 2.0**-23)
    assert encoding.encode(np.array([1.0, -1.0, 0.0, 2.0**-23])).tolist() == [2**23, 2**32 - 2**23, 0, 1]
    assert encoding.decode(np.array([2**32 - 1, 2**31 - 1], dtype=np.uint32)).tolist() == [
        -(2.0**-23),
        (2**31 - 1) / 2**23,
    ]


@given(ENCODINGS)
def test_the_largest_sum_of_a_cohort_still_fits(encoding: FixedPoint):
    for sign in (1, -1):
        largest = encoding.encode(np.full(encoding.clients, sign * encoding.bound))
        total = encoding.decode(largest.sum(keepdims=True, dtype=encoding.dtype))
        assert total[0] == pytest.approx(sign * encoding.bound * encoding.clients, rel=1e-3)
        exact = sum(round(sign * encoding.bound * 2**encoding.places) for _ in range(encoding.clients))
        assert abs(exact) < 2 ** (encoding.bits - 1)


@given(st.integers(1, 2000), st.floats(1e-3, 1e4))
def test_it_is_the_most_precise_that_fits(clients: int, bound: float):
    places = FixedPoint.of(64, bound, clients).places
    assert places == 52 or clients * (Fraction(bound) * 2 ** (places + 1) + 1) > 2**63 - 1


@given(ENCODINGS, st.lists(st.floats(-1, 1), min_size=1, max_size=20))
def test_each_number_is_rounded_to_the_nearest_step(encoding: FixedPoint, shares: list[float]):
    values = np.array(shares) * encoding.bound
    back = encoding.decode(encoding.encode(values))
    assert np.abs(back - values).max() <= encoding.step / 2 * (1 + 1e-9)


@pytest.mark.parametrize("value", [16.001, -17.0, np.nan, np.inf])
def test_what_is_beyond_the_bound_is_never_written(value: float):
    with pytest.raises(ValueError, match="bound"):
        FixedPoint.of(32, 16.0, 3).encode(np.array([0.0, value]))


def test_half_precision_is_written_as_what_it_is():
    """Its own numbers end at 65504, far below 2^23."""
    assert FixedPoint.of(32, 16.0, 10).encode(np.array([1.0, -0.5], np.float16)).tolist() == [2**23, 2**32 - 2**22]
    assert Grid.of(16.0, 20).onto(np.array([1.0, -0.5], np.float16)).tolist() == [1.0, -0.5]


def test_the_largest_bound_that_leaves_eight_places():
    """One client may send up to 2^15 - 2 in steps, so that with one of rounding it stays below 2^15."""
    assert FixedPoint.of(16, 32766 / 256, 1).places == 8
    assert FixedPoint.of(16, (32767 / 4 - 1) / 256, 4).places == 8
    for bound, clients in ((32766.01 / 256, 1), (32765 / 4 / 256, 4)):
        with pytest.raises(UserError, match="which leaves 7 binary places and needs 8"):
            FixedPoint.of(16, bound, clients)


@pytest.mark.parametrize(
    ("bits", "bound", "clients", "places", "allowed"),
    [
        (16, 16.0, 10, 7, "bits = 32"),
        (32, 1e6, 100, 4, "bits = 64"),
        (64, 1e6, 10**12, 3, "a smaller cohort"),
        (16, 1e6, 10, 0, "bits = 32"),
        # With more clients than there are numbers, nothing is left for any of them.
        (16, 1e-3, 40_000, 0, "bits = 32"),
    ],
)
def test_no_precision_is_refused_with_what_would_help(bits: int, bound: float, clients: int, places: int, allowed: str):
    with pytest.raises(UserError) as found:
        FixedPoint.of(bits, bound, clients)
    assert str(found.value) == (
        f"privacy.aggregation.bound: got {bound:g} with bits = {bits} and {clients} clients, which leaves {places} "
        f"binary places and needs 8; allowed: {allowed}, or a smaller bound"
    )


def test_the_grid_of_ckks_by_hand():
    """Sums of twenty up to 16 are at most 320 < 2^9: 60 - 2 - 9 bits of scale, 26 of them below the grid."""
    assert Grid.of(16.0, 20) == Grid(places=23, scale=49, bound=16.0)
    assert Grid(2, 40, 16.0).onto(np.array([0.3, -0.9, 16.0])).tolist() == [0.25, -1.0, 16.0]
    with pytest.raises(ValueError, match="bound"):
        Grid(2, 40, 1.0).onto(np.array([1.1]))
    # Sums below 1 need no bits before the point.
    assert Grid.of(0.25, 3) == Grid(places=32, scale=58, bound=0.25)
    assert Grid.of(1e6, 16) == Grid(places=8, scale=34, bound=1e6)
    for clients, places in ((17, 7), (10_000, 0)):
        with pytest.raises(UserError) as found:
            Grid.of(1e6, clients)
        assert str(found.value) == (
            f"privacy.aggregation.bound: got 1e+06 with kind = 'ckks' and {clients} clients, which leaves {places} "
            "binary places and needs 8; allowed: a smaller bound"
        )
