"""Paillier's cryptosystem for sums: many numbers in one ciphertext, added by a server that holds no key.

Keys and decryption are those of the `phe` library, powers those of gmpy2 (GMP). Two things are done here: packing,
which phe does not have, and the random factor of a ciphertext. The clients share the secret key, so they may work
modulo p² and q² apart: r^n mod n² is a uniform n-th residue, modulo p² those are exactly the y^p, and y^p and z^q put
together cost a third of what phe's r^n does.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gmpy2
import numpy as np
from numpy.typing import NDArray
from phe import paillier

from steelyard.privacy.fixed_point import FixedPoint

_gmp: Any = gmpy2  # it has no types


@dataclass(frozen=True, eq=False)
class Packing:
    """How a vector of fixed-point numbers becomes whole numbers below n, and a sum of such comes apart again.

    Each number gets a slot of `encoding.bits` bits and is moved up by `offset`, so that it is not negative; the sum of
    a cohort still fits its slot, because the encoding is sized by twice as much, so nothing carries into the next.
    """

    encoding: FixedPoint
    modulus_bits: int

    @property
    def slots(self) -> int:
        """Numbers in one ciphertext: what fits below a modulus of this many bits."""
        return (self.modulus_bits - 1) // self.encoding.bits

    @property
    def offset(self) -> int:
        """What is added to each number: no encoded one is below its negative."""
        return (2 ** (self.encoding.bits - 1) - 1) // self.encoding.clients

    def pack(self, values: NDArray[np.floating[Any]]) -> list[int]:
        """Return a client's numbers as whole ones, each of which holds `slots` of them."""
        dtype = self.encoding.dtype
        words = self.encoding.encode(values) + dtype.type(self.offset)  # modulo 2^bits a negative one comes out right
        size = self.slots
        return [int.from_bytes(words[begin : begin + size].tobytes(), "little") for begin in range(0, len(words), size)]

    def unpack(self, sums: Sequence[int], count: int, clients: int) -> NDArray[np.float64]:
        """Return the sums of `count` numbers over so many clients."""
        dtype = self.encoding.dtype
        width = self.slots * dtype.itemsize
        words = np.frombuffer(b"".join(total.to_bytes(width, "little") for total in sums), dtype=dtype)[:count]
        # Both are below 2^bits and their difference is the signed sum, so that the wrap-around gives it.
        moved = words - dtype.type(clients * self.offset % 2**self.encoding.bits)
        return self.encoding.decode(moved)


class PaillierKeys:
    """The key pair of a run's clients; the server gets `public` alone, which adds ciphertexts and opens none."""

    def __init__(self, bits: int) -> None:
        pair: Any = paillier.generate_paillier_keypair(n_length=bits)
        public, private = pair
        self.public = PaillierPublic(int(public.n))
        self._private = private
        p, q = _gmp.mpz(private.p), _gmp.mpz(private.q)
        self._factors = (p, p * p), (q, q * q)
        self._lift = p * p * _gmp.invert(p * p, q * q)

    def encrypt(self, plain: int) -> int:
        """Return a ciphertext of a number below n; done by a client."""
        n, square = self.public.n, self.public.square
        if not 0 <= plain < n:
            raise ValueError("plain: negative or too large; allowed: 0 to n - 1")
        # (1 + n)^m = 1 + n·m modulo n².
        return int((1 + n * plain) % square * self._random_residue() % square)

    def _random_residue(self) -> Any:
        (p, p2), (q, q2) = self._factors
        below = _gmp.powmod(secrets.randbelow(int(p) - 1) + 1, p, p2)
        above = _gmp.powmod(secrets.randbelow(int(q) - 1) + 1, q, q2)
        return (below + (above - below) * self._lift) % self.public.square

    def decrypt(self, cipher: int) -> int:
        """Return the number in a ciphertext; done by a client."""
        return int(self._private.raw_decrypt(cipher))


class PaillierPublic:
    """What the server knows: enough to add."""

    def __init__(self, n: int) -> None:
        self.n, self.square = _gmp.mpz(n), _gmp.mpz(n) ** 2

    @property
    def cipher_bytes(self) -> int:
        """Bytes of one ciphertext."""
        return (self.square.bit_length() + 7) // 8

    def add(self, one: int, other: int) -> int:
        """Return a ciphertext of the sum of two."""
        return int(one * _gmp.mpz(other) % self.square)
