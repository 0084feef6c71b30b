"""Secret sharing: a number is split so that too few shares tell nothing about it.

Arithmetic sharing splits a number into parts that add up to it; all are needed, and sums of parts are parts of sums.
Shamir's scheme hides a secret as the constant term of a random polynomial of degree R - 1; any R of its points give it
back, and R - 1 of them fit every secret equally well.

Chance comes from the operating system (`secrets`). Shares of Shamir's scheme live in the field of integers modulo the
prime 2^256 + 297, so that a secret of 256 bits is one element. pycryptodome's implementation takes secrets of 128 bits
in GF(2^128) and needs 124 ms for one of them at 100 holders, nearly a minute for each round of such a cohort; this one
needs 2 ms for 256 bits. Python's integers do not hide their timing: share on machines of your own.

    >>> sharing.join(sharing.split(6000, 3))
    6000
    >>> sharing.recover(dict(enumerate(sharing.deal(bytes(32), 2, 3), start=1))) == bytes(32)
    True

Raises:
    ValueError: fewer than two parties, a number outside the ring, a threshold above the holders, or
        shares of no secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

PRIME = 2**256 + 297
"""The smallest prime above 2^256."""
SECRET_BYTES = 32
"""Length of a secret of Shamir's scheme."""
SHARE_BYTES = 33
"""Length of one share: an element of the field."""
RING = 2**64
"""Arithmetic shares are numbers modulo this, unless another modulus is given."""


def split(value: int, parties: int, modulus: int = RING) -> list[int]:
    """Split a number into arithmetic shares, one per party: all but one are random, and they add up to the number.

    Use it where sums are wanted: each party adds up the shares that it holds, and those sums are shares of the sum.
    """
    if parties < 2:
        raise ValueError(f"parties: got {parties}; allowed: at least 2")
    if not 0 <= value < modulus:
        raise ValueError(f"value: got {value}; allowed: 0 to {modulus - 1}")
    shares = [secrets.randbelow(modulus) for _ in range(parties - 1)]
    return [*shares, (value - sum(shares)) % modulus]


def join(shares: Sequence[int], modulus: int = RING) -> int:
    """Return the number whose arithmetic shares these are; all of them are needed."""
    return sum(shares) % modulus


Triple = tuple[list[int], list[int], list[int]]
"""Arithmetic shares of two random numbers and of their product, one of each for every party."""


def triple(parties: int, modulus: int = RING) -> Triple:
    """Return shares of random a, b and a·b, as the honest dealer of SPDZ hands them out before anything is computed."""
    a, b = secrets.randbelow(modulus), secrets.randbelow(modulus)
    return split(a, parties, modulus), split(b, parties, modulus), split(a * b % modulus, parties, modulus)


def multiplied(ones: Sequence[int], others: Sequence[int], dealt: Triple, modulus: int = RING) -> list[int]:
    """Return shares of the product of two shared numbers: D. Beaver's way (CRYPTO 1991), which SPDZ takes up.

    The parties open d = x − a and e = y − b, which are random, and hold c + d·b + e·a + d·e = x·y. Use each triple
    once: two products with one of them show how their factors differ. Parties are taken to follow the protocol;
    SPDZ's check values against those who do not are not here.
    """
    a, b, c = dealt
    d = join([x - mine for x, mine in zip(ones, a, strict=True)], modulus)
    e = join([y - mine for y, mine in zip(others, b, strict=True)], modulus)
    held = [(product + d * two + e * one) % modulus for one, two, product in zip(a, b, c, strict=True)]
    return [(held[0] + d * e) % modulus, *held[1:]]


def deal(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """Share a secret of 32 bytes so that any `threshold` of the holders can recover it, and fewer learn nothing.

    Share i belongs to the point x = i + 1: the value there of a polynomial of degree threshold - 1 whose constant term
    is the secret and whose other coefficients are random.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"secret: got {len(secret)} bytes; allowed: {SECRET_BYTES}")
    if not 1 <= threshold <= holders:
        raise ValueError(f"threshold: got {threshold} of {holders} holders; allowed: 1 to {holders}")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_value_at(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in range(1, holders + 1)]


def _value_at(coefficients: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value


def lagrange_at_zero(points: Sequence[int]) -> list[int]:
    """Return the factors λ with which the values at these points give a polynomial's value at 0: Σ λ_i f(x_i) = f(0).

    λ_i = Π_{j≠i} x_j / (x_j - x_i); use it once for all secrets that the same holders recover.
    """
    if len(set(points)) != len(points) or any(not 0 < x < PRIME for x in points):
        raise ValueError(f"points: got {list(points)[:5]}; allowed: different points from 1 on")
    factors: list[int] = []
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return factors


def recover(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret from shares by point, as many as the threshold or more.

    With fewer, or with shares of different secrets, what comes out is a random element: a `ValueError` where it is
    longer than a secret, a wrong secret otherwise, so compare it with something that you know of it.
    """
    return recovered(list(shares.values()), lagrange_at_zero(list(shares)))


def recovered(shares: Sequence[bytes], factors: Sequence[int]) -> bytes:
    """Return the secret as `recover` does; `factors` are those of `lagrange_at_zero` for the points of the shares."""
    values = [int.from_bytes(share, "big") for share in shares]
    secret = sum(factor * value for factor, value in zip(factors, values, strict=True)) % PRIME
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("shares: they belong to no secret; allowed: enough shares of one secret")
    return secret.to_bytes(SECRET_BYTES, "big")
