"""Masks: streams of random words from 256-bit keys, which two clients agree on and a server cannot know.

Keys come from X25519 (RFC 7748) and HKDF-SHA256, streams from AES-256 in counter mode; all of it is the `cryptography`
package, which is OpenSSL underneath. A key makes one stream, in one round, and is then thrown away.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from steelyard.privacy.fixed_point import Words

KEY_BYTES = 32
_BLOCK = 16  # bytes of an AES block
_ZEROS = bytes(1 << 20)
_PROBE = X25519PrivateKey.from_private_bytes(bytes(range(1, 33)))  # nobody's: what it agrees on is thrown away


def agree(own: X25519PrivateKey, other: bytes, purpose: str, context: bytes) -> bytes:
    """Return the key that two clients share for one purpose: the same on both sides, unknown to everybody else.

    `context` names run, federation and round; the two public keys go into the derivation as well, so that a key belongs
    to one pair, one round and one purpose. Raises ValueError for a public key that is none.
    """
    secret = own.exchange(X25519PublicKey.from_public_bytes(other))
    first, second = sorted((own.public_key().public_bytes_raw(), other))
    return derive(secret, purpose, context + first + second)


def is_key(public: bytes) -> bool:
    """Whether 32 bytes are a public key with which a secret can be agreed on: no point of low order.

    With such a point X25519 gives zero whoever asks, so that everybody knows the "secret" (RFC 7748, section 6.1).
    """
    try:
        _PROBE.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


def derive(secret: bytes, purpose: str, context: bytes) -> bytes:
    """Return a 256-bit key for one purpose from a secret; keys for different purposes say nothing about each other."""
    info = b"steelyard/1/" + purpose.encode() + b"/" + hashlib.sha256(context).digest()
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


def stream(key: bytes, count: int, dtype: np.dtype[Any], begin: int = 0) -> Words:
    """Return `count` words of a key's stream from word `begin` on, which must lie on a block of 16 bytes.

    Word i is the same however the stream is cut, so a long vector can be masked piece by piece.
    """
    first, rest = divmod(begin * dtype.itemsize, _BLOCK)
    if rest:
        raise ValueError(f"begin: got {begin}; allowed: a multiple of {_BLOCK // dtype.itemsize}")
    size = count * dtype.itemsize
    zeros = _ZEROS[:size] if size <= len(_ZEROS) else bytes(size)
    words: NDArray[np.uint8] = np.empty(size + _BLOCK - 1, dtype=np.uint8)  # OpenSSL wants room for one block more
    cipher = Cipher(algorithms.AES256(key), modes.CTR(first.to_bytes(_BLOCK, "big")))
    cipher.encryptor().update_into(zeros, words.data)
    return words[:size].view(dtype)


def add_stream(words: Words, key: bytes, *, sign: int, begin: int = 0) -> None:
    """Add a key's stream to words in place, or take it away; `begin` is where in the vector these words stand."""
    mask = stream(key, len(words), words.dtype, begin)
    if sign > 0:
        np.add(words, mask, out=words)
    else:
        np.subtract(words, mask, out=words)
