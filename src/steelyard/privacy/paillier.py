"""Paillier's cryptosystem for sums: many numbers in one ciphertext, added by a server that holds no key.

    encrypt: c = (1 + n)^m · r^n mod n²;  n = pq
    decrypt: m mod p = L(c^(p−1) mod p²) · L((1 + n)^(p−1) mod p²)^(−1) mod p, with L(u) = (u − 1)/p;  likewise mod q
    add: c₁·c₂;  multiply by k: c^k

(Paillier 1999, with g = 1 + n and the Chinese remainders of its section 7.) Primes are those of an RSA key by the
`cryptography` library, powers those of gmpy2 (GMP), many at a time and on all processors. The clients share the secret
key, so they may draw r^n modulo p² and q² apart: it is a uniform n-th residue, modulo p² those are exactly the y^p, and
y^p and z^q put together cost a third of what r^n does. https://doi.org/10.1007/3-540-48910-X_16
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
from cryptography.hazmat.primitives.asymmetric import rsa
from numpy.typing import NDArray

from steelyard.privacy.hidden import FixedPoint

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
    """The key pair of a run's clients; the server gets `public` alone, which adds ciphertexts and opens none.

    The primes are of like length, so that n and (p − 1)(q − 1) have no common factor.
    """

    def __init__(self, p: int, q: int) -> None:
        self.public = PaillierPublic(p * q)
        self._factors = tuple(_Factor.of(_gmp.mpz(prime), self.public.n) for prime in (p, q))
        one, other = self._factors
        self._lift = one.square * _gmp.invert(one.square, other.square)
        self._lift_plain = one.prime * _gmp.invert(one.prime, other.prime)

    @classmethod
    def generate(cls, bits: int) -> PaillierKeys:
        """Return a fresh pair with a modulus of so many bits; use it at the beginning of a run."""
        numbers = rsa.generate_private_key(public_exponent=65537, key_size=bits).private_numbers()
        return cls(numbers.p, numbers.q)

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
        residues = (factor.random_residues(count) for factor in self._factors)
        return [(one + (other - one) * self._lift) % self.public.square for one, other in zip(*residues, strict=True)]

    def _decrypted(self, ciphers: Sequence[int]) -> list[int]:
        plains = (factor.decrypted(ciphers) for factor in self._factors)
        lift, n = self._lift_plain, self.public.n
        return [int((one + (other - one) * lift) % n) for one, other in zip(*plains, strict=True)]


@dataclass(frozen=True, eq=False)
class _Factor:
    """One prime factor of the modulus: what is done modulo its square."""

    prime: Any
    square: Any
    inverse: Any
    """L((1 + n)^(p−1) mod p²)^(−1) mod p."""

    @classmethod
    def of(cls, prime: Any, n: Any) -> _Factor:
        square = prime * prime
        return cls(prime, square, _gmp.invert((_gmp.powmod(1 + n, prime - 1, square) - 1) // prime, prime))

    def random_residues(self, count: int) -> list[Any]:
        """Return uniform n-th residues modulo p²."""
        bases = [secrets.randbelow(int(self.prime) - 1) + 1 for _ in range(count)]
        return _gmp.powmod_base_list(bases, self.prime, self.square)

    def decrypted(self, ciphers: Sequence[int]) -> list[Any]:
        """Return the numbers in ciphertexts modulo p."""
        powers = _gmp.powmod_base_list(list(ciphers), self.prime - 1, self.square)
        return [(power - 1) // self.prime * self.inverse % self.prime for power in powers]


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

    def multiply(self, cipher: int, factor: int) -> int:
        """Return a ciphertext of a number times a whole one that everybody may know."""
        return int(_gmp.powmod(cipher, factor, self.square))


def _on_all_processors(work: Callable[[Sequence[int]], list[int]], numbers: Sequence[int]) -> list[int]:
    """Do a list of numbers some at a time in threads: GMP's powers of a list hold up no other thread."""
    parts = [numbers[begin : begin + _AT_ONCE] for begin in range(0, len(numbers), _AT_ONCE)]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return [found for part in pool.map(work, parts) for found in part]
