"""A node's signature under each of its calls, as Flower has it: made by the node, checked by proxy and SuperLink."""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from steelyard.clients.flower.register import bare

KEY_HEADER, TIME_HEADER, SIGNATURE_HEADER = "flwr-public-key", "flwr-timestamp", "flwr-signature"
"""The headers with a node's public key, by whose text nodes are known in the news, with the time, and its signature."""
_LONGEST_KEY, _MOST_READ = 1000, 5000
"""Characters of a key that is kept once it is read (one of P-384 has 288), and how many are kept."""


def pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as calls carry it."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def signed(key: ec.EllipticCurvePrivateKey, moment: datetime) -> dict[str, str]:
    """Return the headers that sign a call."""
    stamp = moment.isoformat()
    signature = key.sign(stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    known, by = (b64encode(part).decode("ascii") for part in (pem(key.public_key()), signature))
    return {KEY_HEADER: known, TIME_HEADER: stamp, SIGNATURE_HEADER: by}


def now() -> datetime:
    """Return the time of this machine's clock."""
    return datetime.now(UTC)


class Caller(NamedTuple):
    """Who signed a call."""

    line: str
    """Its public key, as the register writes it."""
    age: float
    """Seconds since it signed."""


class Callers:
    """Who signed calls; each key is read once, and only keys that are `known` are looked at any further."""

    def __init__(self, known: Callable[[str], bool] = lambda _: True) -> None:
        self._known = known
        self._read: dict[str, tuple[object, str]] = {}

    def of(self, headers: Mapping[str, str]) -> Caller:
        """Return who signed a call; raises ValueError, in words, where nobody did whose key is known."""
        try:
            written, stamp, signature = (headers[name] for name in (KEY_HEADER, TIME_HEADER, SIGNATURE_HEADER))
        except KeyError:
            raise ValueError("a call without a signature") from None
        try:
            key, line = self._read.get(written) or _read(written)
            if not isinstance(key, ec.EllipticCurvePublicKey) or not self._known(line):
                raise KeyError(line)
            age = (now() - datetime.fromisoformat(stamp)).total_seconds()
            key.verify(b64decode(signature, validate=True), stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
        except KeyError:
            raise ValueError("a key that is not registered") from None
        except (ValueError, TypeError, UnicodeError, binascii.Error, UnsupportedAlgorithm, InvalidSignature):
            raise ValueError("a signature that does not hold") from None
        if len(written) <= _LONGEST_KEY:  # One key can be written in many ways.
            if len(self._read) >= _MOST_READ:
                self._read.clear()
            self._read[written] = key, line
        return Caller(line, age)


def _read(written: str) -> tuple[object, str]:
    """Return the key that a call names, and the one line that stands for it in the register."""
    key = serialization.load_pem_public_key(b64decode(written, validate=True))
    line = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    return key, bare(line)
