"""Paillier's cryptosystem for sums: many numbers in one ciphertext, added by a server that holds no key.

Keys and the arithmetic of decryption are those of the `phe` library, powers those of gmpy2 (GMP), many at a time and on
all processors. Two things are done here: packing, which phe does not have, and the random factor of a ciphertext. The
clients share the secret key, so they may work modulo p² and q² apart: r^n mod n² is a uniform n-th residue, modulo p²
those are exactly the y^p, and y^p and z^q put together cost a third of what phe's r^n does.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import gmpy2
import numpy as np
from numpy.typing import NDArray
from phe import paillier

from steelyard.privacy.fixed_point import FixedPoint

_gmp: Any = gmpy2  # it has no types
_AT_ONCE = 16


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
        return self._encrypted([plain])[0]

    def decrypt(self, cipher: int) -> int:
        """Return the number in a ciphertext; done by a client."""
        return self._decrypted([cipher])[0]

    def encrypt_all(self, plains: Sequence[int]) -> list[int]:
        """Return ciphertexts of many numbers, on all processors; the same as `encrypt` of each."""
        return _on_all_processors(self._encrypted, plains)

    def decrypt_all(self, ciphers: Sequence[int]) -> list[int]:
        """Return the numbers in many ciphertexts, on all processors."""
        return _on_all_processors(self._decrypted, ciphers)

    def _encrypted(self, plains: Sequence[int]) -> list[int]:
        n, square = self.public.n, self.public.square
        if not all(0 <= plain < n for plain in plains):
            raise ValueError("plain: negative or too large; allowed: 0 to n - 1")
        # (1 + n)^m = 1 + n·m modulo n².
        residues = self._random_residues(len(plains))
        return [
            int((1 + n * plain) % square * residue % square) for plain, residue in zip(plains, residues, strict=True)
        ]

    def _random_residues(self, count: int) -> list[Any]:
        (p, p2), (q, q2) = self._factors
        below = _gmp.powmod_base_list([secrets.randbelow(int(p) - 1) + 1 for _ in range(count)], p, p2)
        above = _gmp.powmod_base_list([secrets.randbelow(int(q) - 1) + 1 for _ in range(count)], q, q2)
        square = self.public.square
        return [(one + (other - one) * self._lift) % square for one, other in zip(below, above, strict=True)]

    def _decrypted(self, ciphers: Sequence[int]) -> list[int]:
        # What phe's raw_decrypt does, with the powers of many ciphertexts at a time.
        (p, p2), (q, q2) = self._factors
        key = self._private
        below = _gmp.powmod_base_list(list(ciphers), p - 1, p2)
        above = _gmp.powmod_base_list(list(ciphers), q - 1, q2)
        return [
            int(key.crt(key.l_function(one, p) * key.hp % p, key.l_function(other, q) * key.hq % q))
            for one, other in zip(below, above, strict=True)
        ]


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


def _on_all_processors(work: Callable[[Sequence[int]], list[int]], numbers: Sequence[int]) -> list[int]:
    """Do a list of numbers some at a time in threads: GMP's powers of a list hold up no other thread."""
    parts = [numbers[begin : begin + _AT_ONCE] for begin in range(0, len(numbers), _AT_ONCE)]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return [found for part in pool.map(work, parts) for found in part]
