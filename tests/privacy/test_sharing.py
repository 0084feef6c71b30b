"""Secret sharing: the thesis's example, the threshold, and that too few shares say nothing."""

from __future__ import annotations

import gmpy2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.privacy import sharing

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


def test_arithmetic_sharing_refuses_what_it_cannot_share():
    for value, parties, line in (
        (1, 1, "parties: got 1; allowed: at least 2"),
        (-1, 2, "value: got -1; allowed: 0 to 4"),
        (5, 2, "value: got 5; allowed: 0 to 4"),
    ):
        with pytest.raises(ValueError, match=f"^{line}$"):
            sharing.split(value, parties, 5)
    assert sum(sharing.split(0, 2, 5)) % 5 == 0


def test_the_field():
    assert gmpy2.is_prime(sharing.PRIME)
    assert not any(gmpy2.is_prime(2**256 + k) for k in range(297))
    assert (sharing.PRIME - 1).bit_length() <= 8 * sharing.SHARE_BYTES


def test_lagrange_by_hand():
    """A line through (1, 5) and (2, 7) is 3 at 0: 2·5 - 1·7. A parabola through 1, 2, 3 has factors 3, -3, 1."""
    assert sharing.lagrange_at_zero([1, 2]) == [2, sharing.PRIME - 1]
    assert sharing.lagrange_at_zero([1, 2, 3]) == [3, sharing.PRIME - 3, 1]


@given(st.integers(0, sharing.RING - 1), st.integers(0, sharing.RING - 1), st.integers(2, 5))
def test_shared_numbers_are_multiplied_and_nobody_sees_them(one: int, other: int, parties: int):
    dealt = sharing.triple(parties)
    product = sharing.multiplied(sharing.split(one, parties), sharing.split(other, parties), dealt)
    assert sharing.join(product) == one * other % sharing.RING


def test_a_product_by_hand():
    """x = 6, y = 7 with a = 2, b = 3: d = 4, e = 4, and 6 + 4·3 + 4·2 + 16 = 42, half of it at either party."""
    dealt = ([1, 1], [1, 2], [5, 1])
    assert sharing.multiplied([4, 2], [3, 4], dealt, 101) == [5 + 4 * 1 + 4 * 1 + 16, 1 + 4 * 2 + 4 * 1]


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


def test_too_few_shares_do_not_give_the_secret():
    secret = bytes(range(32))
    shares = sharing.deal(secret, 3, 5)
    try:
        assert sharing.recover({1: shares[0], 2: shares[1]}) != secret
    except ValueError as error:
        assert "no secret" in str(error)  # noqa: PT017 - one element in 2^248 is longer than a secret


def test_two_deals_of_one_secret_share_no_share():
    assert not set(sharing.deal(bytes(32), 2, 5)) & set(sharing.deal(bytes(32), 2, 5))


@pytest.mark.parametrize(
    ("secret", "threshold", "holders", "line"),
    [
        (b"short", 1, 1, "secret: got 5 bytes; allowed: 32"),
        (bytes(32), 0, 3, "threshold: got 0 of 3 holders; allowed: 1 to 3"),
        (bytes(32), 4, 3, "threshold: got 4 of 3 holders; allowed: 1 to 3"),
    ],
)
def test_what_cannot_be_dealt_is_refused(secret: bytes, threshold: int, holders: int, line: str):
    with pytest.raises(ValueError, match=f"^{line}$"):
        sharing.deal(secret, threshold, holders)


@pytest.mark.parametrize("points", [[1, 1], [0, 1], [sharing.PRIME]])
def test_points_that_tell_nothing_are_refused(points: list[int]):
    with pytest.raises(ValueError, match=r"^points: got \[.*\]; allowed: different points from 1 on$"):
        sharing.lagrange_at_zero(points)


def test_an_element_beyond_256_bits_is_no_secret():
    with pytest.raises(ValueError, match=r"^shares: they belong to no secret; allowed: enough shares of one secret$"):
        sharing.recover({1: (2**256).to_bytes(33, "big")})
