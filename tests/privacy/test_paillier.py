"""Paillier: ciphertexts add, packed numbers stay apart, and the random factor is an n-th residue."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import gmpy2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.privacy.fixed_point import FixedPoint
from steelyard.privacy.paillier import Packing, PaillierKeys


@pytest.fixture(scope="module")
def keys() -> PaillierKeys:
    return PaillierKeys.generate(2048)


def test_sums_of_ciphertexts(keys: PaillierKeys):
    one, other = keys.encrypt(1000), keys.encrypt(2345)
    assert keys.decrypt(keys.public.add(one, other)) == 3345
    assert keys.decrypt(keys.public.add(keys.encrypt(int(keys.public.n) - 1), keys.encrypt(5))) == 4


def test_many_at_once_are_the_same_in_order(keys: PaillierKeys):
    plains = [*range(40), int(keys.public.n) - 1]
    ciphers = keys.encrypt_all(plains)
    assert len(set(ciphers)) == len(plains)
    assert keys.decrypt_all(ciphers) == plains == [keys.decrypt(cipher) for cipher in ciphers]
    assert keys.encrypt_all([]) == []


@pytest.mark.parametrize(("drawn", "base"), [(lambda below: 0, 1), (lambda below: below - 1, -1)])
def test_the_random_factor_is_drawn_from_1_to_below_the_prime(
    keys: PaillierKeys, monkeypatch: pytest.MonkeyPatch, drawn: Callable[[int], int], base: int
):
    monkeypatch.setattr("secrets.randbelow", drawn)
    # 1, or −1 modulo each prime: to an odd power it stays what it is, modulo the prime's square.
    assert keys.encrypt(0) == base % int(keys.public.square)


def test_the_same_number_never_looks_the_same(keys: PaillierKeys):
    assert keys.encrypt(7) != keys.encrypt(7)


@pytest.mark.parametrize(
    ("plain", "factor", "digest"),
    [
        (123456789, 987654321, "204b2f85fd33174d17cc161767dab83f851beaa823912215ff411871e1a06718"),
        (-5, 3**500, "06f1e10b763446e60e68a42a08c1ba57a264ad939e95a2add61c7d4256339bac"),
    ],
)
def test_ciphertexts_that_phe_made_are_read(plain: int, factor: int, digest: str):
    """The paper's equation gives the ciphertext of phe 1.5.0 (the digest is of its digits), and it is read here."""
    p, q = (int(gmpy2.next_prime((3 << 1022) + more)) for more in (0, 1 << 1000))
    n = p * q
    cipher = (1 + n * plain) * pow(factor, n, n * n) % (n * n)
    assert hashlib.sha256(str(cipher).encode()).hexdigest() == digest
    assert PaillierKeys(p, q).decrypt(cipher) == plain % n


def test_a_ciphertext_times_a_number_that_all_may_know(keys: PaillierKeys):
    assert keys.decrypt(keys.public.multiply(keys.encrypt(12), 1000)) == 12_000
    assert keys.decrypt(keys.public.multiply(keys.encrypt(12), -1)) == int(keys.public.n) - 12


def test_the_random_factor_is_an_nth_residue(keys: PaillierKeys):
    """n-th residues are the ciphertexts of 0, and x^λ = 1 modulo n² tells them."""
    factor = int(keys._random_residues(1)[0])
    p, q = (int(found.prime) for found in keys._factors)
    square = int(keys.public.square)
    assert 0 < factor < square
    assert pow(factor, (p - 1) * (q - 1), square) == 1
    assert keys.decrypt(factor) == 0


def test_the_modulus_has_as_many_bits_as_asked_for(keys: PaillierKeys):
    assert keys.public.n.bit_length() == 2048
    assert keys.public.cipher_bytes == 512


@pytest.mark.parametrize("plain", [-1, None])
def test_only_numbers_below_n_are_encrypted(keys: PaillierKeys, plain: int | None):
    with pytest.raises(ValueError, match=r"^plain: negative or too large; allowed: 0 to n - 1$"):
        keys.encrypt(int(keys.public.n) if plain is None else plain)


def test_packing_by_hand():
    """Two clients, 16 bits, up to 1: 2·(2^p + 1) ≤ 32767 gives p = 13, an offset of 16383; 2047 bits are 127 slots."""
    packing = Packing(FixedPoint.of(16, 1.0, 2), 2048)
    assert (packing.encoding.places, packing.offset, packing.slots) == (13, 16383, 127)
    (plain,) = packing.pack(np.array([0.5, -1.0]))
    assert plain == (4096 + 16383) + ((16383 - 8192) << 16)
    assert packing.unpack([plain + plain], 2, 2).tolist() == [1.0, -2.0]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([(16, 0.25), (32, 16.0), (64, 3.0)]), st.integers(1, 12), st.integers(1, 300), st.data())
def test_no_slot_ever_carries_into_the_next(kind: tuple[int, float], clients: int, size: int, data: st.DataObject):
    bits, bound = kind
    packing = Packing(FixedPoint.of(bits, bound, clients), 3072)
    came = data.draw(st.integers(1, clients))  # others have dropped out
    signs = np.array(data.draw(st.lists(st.sampled_from([-1.0, 1.0]), min_size=size, max_size=size)))
    values = [signs * bound * factor for factor in np.linspace(1.0, 0.5, came)]
    packed = [packing.pack(value) for value in values]
    assert all(0 <= plain < 2**3071 for plain in packed[0])
    sums = [sum(column) for column in zip(*packed, strict=True)]
    exact = np.sum([packing.encoding.decode(packing.encoding.encode(value)) for value in values], axis=0)
    np.testing.assert_allclose(packing.unpack(sums, size, came), exact, rtol=1e-15)
