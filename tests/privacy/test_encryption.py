"""Numbers in the open and hidden: secret shares, fixed-point numbers and CKKS."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import isprime
from tests.kit import assert_refused, named

from steelyard.privacy import sharing
from steelyard.privacy.hidden import FixedPoint, Grid

SECRETS = st.binary(min_size=32, max_size=32)


def test_example_3_3_the_sum_of_three_salaries_and_none_of_them():
    held = [sharing.split(value, 3) for value in (1000, 2000, 3000)]
    sums = [sum(shares) % sharing.RING for shares in zip(*held, strict=True)]  # each party adds up what it holds
    assert sharing.join(sums) == 6000
    assert sharing.join(sums) / 3 == 2000


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6), st.integers(2, 7))
def test_sums_of_shares_are_shares_of_the_sum(values: list[int], parties: int):
    held = [sharing.split(value, parties) for value in values]
    assert [sharing.join(shares) for shares in held] == values
    assert sharing.join([sum(shares) for shares in zip(*held, strict=True)]) == sum(values) % 2**64


def test_all_but_one_arithmetic_share_are_any_numbers():
    """In the ring of 5, each of the first two shares takes each value about as often, whatever the number is."""
    for value in (0, 3):
        drawn = np.array([sharing.split(value, 3, 5) for _ in range(5000)])
        for share in range(3):
            counts = np.bincount(drawn[:, share], minlength=5)
            assert ((counts > 850) & (counts < 1150)).all()  # 1000 each; 5 standard deviations are 141


def test_the_field():
    assert isprime(sharing.PRIME)
    assert not any(isprime(2**256 + k) for k in range(297))
    assert (sharing.PRIME - 1).bit_length() <= 8 * sharing.SHARE_BYTES


def test_lagrange_by_hand():
    """A line through (1, 5) and (2, 7) is 3 at 0: 2·5 - 1·7. A parabola through 1, 2, 3 has factors 3, -3, 1."""
    assert sharing.lagrange_at_zero([1, 2]) == [2, sharing.PRIME - 1]
    assert sharing.lagrange_at_zero([1, 2, 3]) == [3, sharing.PRIME - 3, 1]


@given(st.integers(0, 100), st.integers(0, 100), st.integers(2, 5), st.sampled_from([sharing.RING, 101]))
def test_shared_numbers_are_multiplied_and_nobody_sees_them(one: int, other: int, parties: int, ring: int):
    dealt = sharing.triple(parties, ring)
    product = sharing.multiplied(sharing.split(one, parties, ring), sharing.split(other, parties, ring), dealt, ring)
    assert sharing.join(product, ring) == one * other % ring


def test_a_polynomial_by_hand(monkeypatch: pytest.MonkeyPatch):
    """Degree R - 1: with R = 3 and random coefficients 4 and 5, the secret 7 gives 7 + 4x + 5x²."""
    drawn = iter([4, 5])
    monkeypatch.setattr(sharing.secrets, "randbelow", lambda _: next(drawn))
    shares = sharing.deal((7).to_bytes(32, "big"), 3, 4)
    assert [int.from_bytes(share, "big") for share in shares] == [16, 35, 64, 103]
    assert sharing.recover({1: shares[0], 3: shares[2], 4: shares[3]}) == (7).to_bytes(32, "big")


@settings(deadline=None)
@given(SECRETS, st.data())
def test_any_threshold_of_the_holders_recover_the_secret(secret: bytes, data: st.DataObject):
    holders = data.draw(st.integers(1, 9))
    threshold = data.draw(st.integers(1, holders))
    shares = sharing.deal(secret, threshold, holders)
    count = data.draw(st.integers(threshold, holders))
    chosen = data.draw(st.permutations(range(holders)))[:count]
    assert sharing.recover({point + 1: shares[point] for point in chosen}) == secret


@settings(deadline=None)
@given(SECRETS, SECRETS, st.integers(2, 6))
def test_one_share_too_few_fits_every_secret(secret: bytes, other: bytes, threshold: int):
    """For any other secret there is a last share with which the same R - 1 shares give that one."""
    shares = sharing.deal(secret, threshold, threshold)
    points = list(range(1, threshold + 1))
    factors = sharing.lagrange_at_zero(points)
    known = sum(f * int.from_bytes(s, "big") for f, s in zip(factors[:-1], shares[:-1], strict=True))
    last = (int.from_bytes(other, "big") - known) * pow(factors[-1], -1, sharing.PRIME) % sharing.PRIME
    forged = [*shares[:-1], last.to_bytes(sharing.SHARE_BYTES, "big")]
    assert sharing.recover(dict(zip(points, forged, strict=True))) == other


ENCODINGS = st.builds(
    FixedPoint.of, st.sampled_from([32, 64]), st.sampled_from([0.25, 1.0, 3.7, 16.0, 100.0]), st.integers(1, 1024)
)


def test_by_hand():
    """Ten clients with up to 16 each: 160·2^p must stay below 2^31, so p = 23."""
    encoding = FixedPoint.of(32, 16.0, 10)
    assert (encoding.places, encoding.step) == (23, 2.0**-23)
    # The largest bound with 8 places: 2^8 times it and 1 for rounding are 32767.
    assert FixedPoint.of(16, 32766 / 256, 1).places == 8
    assert encoding.encode(np.array([1.0, -1.0, 0.0, 2.0**-23])).tolist() == [2**23, 2**32 - 2**23, 0, 1]
    assert encoding.decode(np.array([2**32 - 1, 2**31 - 1], dtype=np.uint32)).tolist() == [
        -(2.0**-23),
        (2**31 - 1) / 2**23,
    ]


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


@pytest.mark.parametrize(
    ("bits", "bound", "clients", "places", "allowed"),
    [
        (16, 16.0, 10, 7, "bits = 32"),
        (32, 1e6, 100, 4, "bits = 64"),
        (64, 1e6, 10**12, 3, "a smaller cohort"),
        # With more clients than there are numbers, nothing is left for any of them.
        (16, 1e-3, 40_000, 0, "bits = 32"),
    ],
)
def test_no_precision_is_refused_with_what_would_help(bits: int, bound: float, clients: int, places: int, allowed: str):
    assert_refused(
        lambda: FixedPoint.of(bits, bound, clients),
        f"privacy.aggregation.bound: got {bound:g} with bits = {bits} and {clients} clients, which leaves {places} "
        f"binary places and needs 8; allowed: {allowed}",
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
    said = "got 1e+06 with kind = 'ckks' and 17 clients, which leaves 7 binary places and needs 8"
    assert_refused(lambda: Grid.of(1e6, 17), "privacy.aggregation.bound", said)
    assert_refused(lambda: Grid.of(1e6, 10_000), "leaves 0 binary places")


SLOTS = 4096


@pytest.fixture(scope="module")
def ckks() -> ModuleType:
    pytest.importorskip("tenseal")
    return importlib.import_module("steelyard.clients.local.encrypted_sums")


@pytest.fixture(scope="module")
def keys(ckks: ModuleType) -> Any:
    return ckks.CkksKeys(Grid.of(16.0, 20))


def test_the_sum_of_a_cohort_is_exactly_the_sum_of_its_numbers_on_the_grid(ckks: ModuleType, keys: Any):
    assert (ckks.SLOTS, keys._context.global_scale) == (SLOTS, 2.0**49)
    rng = np.random.default_rng(0)
    rows = [rng.uniform(-16, 16, SLOTS + 100) for _ in range(20)]
    total = keys.decrypt(keys.public.add([keys.encrypt(row) for row in rows]))
    exact = np.sum([keys.grid.onto(row) for row in rows], axis=0)  # dyadic numbers: float sums of them are exact
    assert total.tolist() == exact.tolist()


def test_what_lies_between_the_points_is_not_told(ckks: ModuleType, keys: Any):
    """Without rounding, the noise of the ciphertext would be in the result."""
    values = keys.grid.onto(np.random.default_rng(1).uniform(-1, 1, 64))
    (cipher,) = keys.encrypt(values)
    raw = np.array(ckks.tenseal.ckks_vector_from(keys._context, cipher).decrypt())
    assert 0 < np.abs(raw - values).max() < 2.0 ** -(keys.grid.places + 4)
    assert keys.decrypt([cipher]).tolist() == values.tolist()

    def read(*steps: float) -> Any:
        step = 2.0**-keys.grid.places
        cipher = ckks.tenseal.ckks_vector(keys._context, [each * step for each in steps]).serialize()
        return (keys.decrypt([cipher]) / step).tolist()

    with pytest.raises(ValueError, match="ciphertexts: their sum lies between the points of the grid"):
        read(0.0, 3.74)
    assert read(-0.24, 3.76) == [0.0, 4.0]


def test_the_server_adds_and_cannot_read(ckks: ModuleType, keys: Any):
    assert not keys.public.context.has_secret_key()
    (total,) = keys.public.add([keys.encrypt(np.ones(3))] * 2)
    with pytest.raises(ValueError, match="secret"):
        ckks.tenseal.ckks_vector_from(keys.public.context, total).decrypt()
    with pytest.raises(ValueError):  # noqa: PT011
        keys.public.add([keys.encrypt(np.ones(3)), keys.encrypt(np.ones(SLOTS + 1))])


@pytest.mark.parametrize(
    ("call", "line"),
    named(
        [
            ("one party", lambda: sharing.split(1, 1, 5), "parties: got 1; allowed: at least 2"),
            ("below 0", lambda: sharing.split(-1, 2, 5), "value: got -1; allowed: 0 to 4"),
            ("beyond the ring", lambda: sharing.split(5, 2, 5), "value: got 5"),
            ("a short secret", lambda: sharing.deal(b"short", 1, 1), "secret: got 5 bytes; allowed: 32"),
            ("no threshold", lambda: sharing.deal(bytes(32), 0, 3), "threshold: got 0 of 3 holders; allowed: 1 to 3"),
            ("a high one", lambda: sharing.deal(bytes(32), 4, 3), "threshold: got 4"),
            ("a point twice", lambda: sharing.lagrange_at_zero([1, 1]), "points: got .*; allowed: different points"),
            ("a point of nobody", lambda: sharing.lagrange_at_zero([1, 0]), "points"),
            ("a point that is 0", lambda: sharing.lagrange_at_zero([sharing.PRIME]), "points"),
            ("256 bits", lambda: sharing.recover({1: (2**256).to_bytes(33, "big")}), "shares: they belong to no"),
        ]
    ),
)
def test_what_cannot_be_shared_is_refused(call: Callable[[], object], line: str):
    with pytest.raises(ValueError, match=f"^{line}"):
        call()
