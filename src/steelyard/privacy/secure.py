"""Secure aggregation: masks, a client's part of one round, the server's; one code for simulations and nodes.

**Masks** are streams of random words from 256-bit keys, which two clients agree on and a server cannot know. Keys come
from X25519 (RFC 7748) and HKDF-SHA256, streams from AES-256 in counter mode; all of it is the `cryptography` package,
which is OpenSSL underneath. A key makes one stream, in one round, and is then thrown away.

**The client** makes fresh keys, shares what opens its masks among the others, hides its words, and at the end helps to
open the sum, once. It never reveals both kinds of share of the same client: the server says who stayed, and all others
count as gone. A client that refuses a step leaves the round.

**The server** carries messages, adds up hidden words, and opens their sum alone.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from steelyard.base.errors import UserError, first_names
from steelyard.privacy import sharing
from steelyard.privacy.hidden import Words
from steelyard.privacy.settings import FEWEST, AggregationSettings

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
    cipher = Cipher(algorithms.AES256(key), modes.CTR(first.to_bytes(_BLOCK)))
    cipher.encryptor().update_into(zeros, words.data)
    return words[:size].view(dtype)


def add_stream(words: Words, key: bytes, *, sign: int, begin: int = 0) -> None:
    """Add a key's stream to words in place, or take it away; `begin` is where in the vector these words stand."""
    mask = stream(key, len(words), words.dtype, begin)
    if sign > 0:
        np.add(words, mask, out=words)
    else:
        np.subtract(words, mask, out=words)


# Secure client: One client's part of one round of secure aggregation; the same code in a simulation and on a node.


PUBLIC_BYTES = 3 * KEY_BYTES
"""Length of what a client shows at the start of a round."""
KEY_SHARES_BYTES = 2 * sharing.SHARE_BYTES + 16
"""Length of the encrypted key shares from one client to another."""
_NONCE = bytes(12)  # every channel key encrypts one message only


class Withdrawn(Exception):
    """A client takes no further part in a round; the text says why, and holds nothing of its data."""


class Unreadable(Withdrawn):
    """A client cannot read the key shares that some others sent to it; `senders` are all of those, ascending."""

    def __init__(self, senders: Sequence[str]) -> None:
        self.senders = tuple(sorted(senders))
        super().__init__(f"the key shares that came from {first_names(self.senders)} cannot be read")


_Hex = Annotated[bytes, PlainValidator(bytes.fromhex), PlainSerializer(bytes.hex)]
"""Bytes that are hexadecimal digits in what a node stores."""


@dataclass(frozen=True)
class PublicKeys:
    """What a client shows to all others at the start of a round, 32 bytes each."""

    channel: _Hex
    """Public key under which others encrypt shares for it."""
    mask: _Hex
    """Public key of its pairwise masks."""
    seed: _Hex
    """SHA-256 of its own mask's seed: who puts the seed together from shares can check that it is the right one."""

    @classmethod
    def read(cls, row: bytes) -> PublicKeys:
        """Return the keys that `write` wrote as 96 bytes."""
        return cls(row[:KEY_BYTES], row[KEY_BYTES : 2 * KEY_BYTES], row[2 * KEY_BYTES :])

    def write(self) -> bytes:
        """Return the keys as 96 bytes."""
        return self.channel + self.mask + self.seed

    def usable(self) -> bool:
        """Whether a secret can be agreed on with both keys; points of low order give everybody the same."""
        return is_key(self.channel) and is_key(self.mask)

    def __post_init__(self) -> None:
        if any(len(part) != KEY_BYTES for part in (self.channel, self.mask, self.seed)):
            raise ValueError("keys: got another length; allowed: 32 bytes each")


@dataclass(frozen=True)
class Opened:
    """What a client reveals at the end, by client: shares of seeds of who stayed, of mask keys of who did not."""

    seeds: Mapping[str, bytes]
    keys: Mapping[str, bytes]


def round_context(run: str, federation: str, seed: int, round: int, attempt: str) -> bytes:
    """Return what keeps the keys of one attempt at a round apart from all others; both sides make it themselves."""
    return json.dumps([run, federation, seed, round, attempt]).encode()


def vector_digest(members: Sequence[str], weights: Mapping[str, float], asked: str = "") -> bytes:
    """Return what goes into the masks of a round: who goes on and under which weights, as a client was told.

    `asked` is the digest of what it trained. Masks cancel only between clients that were asked and told the same.
    """
    told = [[name, float(weights[name])] for name in sorted(members)]
    return hashlib.sha256(json.dumps([asked, told]).encode()).digest()


def seed_hash(seed: bytes, context: bytes) -> bytes:
    """Return the hash by which the seed of a client's own mask is known before it is opened."""
    return hashlib.sha256(b"steelyard/1/seed/" + context + seed).digest()


def self_key(seed: bytes, context: bytes) -> bytes:
    """Return the key of a client's own mask."""
    return derive(seed, "self", context)


def sign_of(name: str, other: str) -> int:
    """Return with which sign a client adds the mask that it shares with another: the two cancel in a sum."""
    return 1 if name < other else -1


_Secret = Annotated[
    X25519PrivateKey,
    PlainValidator(lambda digits: X25519PrivateKey.from_private_bytes(bytes.fromhex(digits))),
    PlainSerializer(lambda key: key.private_bytes_raw().hex()),
]


@dataclass(eq=False)
class SecureClient:
    """One client in one try at a round: `keys`, then `share`, `receive`, `mask` and `open`, each once, in this order.

    `context` names run, federation, round and try, and is the same for all of a cohort.
    """

    name: str
    context: _Hex
    settings: AggregationSettings
    _channel: _Secret = field(default_factory=X25519PrivateKey.generate, repr=False)
    _mask: _Secret = field(default_factory=X25519PrivateKey.generate, repr=False)
    _seed: _Hex = field(default_factory=lambda: os.urandom(KEY_BYTES), repr=False)
    _cohort: dict[str, PublicKeys] = field(default_factory=dict[str, PublicKeys], repr=False)
    _held: dict[str, _Hex] = field(default_factory=dict[str, bytes], repr=False)
    """Shares that others gave to this client: a share of the seed and one of the mask key, by client."""
    _members: tuple[str, ...] = ()
    _vector: _Hex = b""
    _opened: bool = False
    fewest: int = FEWEST
    """How many must stay whatever the cohort's size: in a second try at a round, as many as in the first."""

    def keys(self) -> PublicKeys:
        """Return the public keys of this round."""
        return PublicKeys(
            self._channel.public_key().public_bytes_raw(),
            self._mask.public_key().public_bytes_raw(),
            seed_hash(self._seed, self.context),
        )

    @property
    def members(self) -> tuple[str, ...]:
        """Who goes on after the keys were shared, ascending; empty before that is known."""
        return self._members

    @property
    def cohort_size(self) -> int:
        """How many clients showed keys; numbers are sized by it."""
        return len(self._cohort)

    @property
    def least(self) -> int:
        """How many clients must stay, by this client's own reckoning and not by the server's word."""
        return max(self.fewest, self.settings.least(len(self._cohort)))

    def share(self, cohort: Mapping[str, PublicKeys]) -> dict[str, bytes]:
        """Return for each other client its shares of this one's seed and mask key, encrypted so that only it can read.

        `cohort` are the keys of all, this client's among them.
        """
        if self._cohort:
            raise Withdrawn("asked twice to share its keys; allowed: once a round")
        if cohort.get(self.name) != self.keys():
            raise Withdrawn("its own keys came back changed, or not at all")
        if len(cohort) < self.fewest:
            raise Withdrawn(f"{len(cohort)} clients in the round; allowed: at least {self.fewest}")
        shown = [part for keys in cohort.values() for part in (keys.channel, keys.mask)]
        if len(set(shown)) != len(shown):
            raise Withdrawn("two clients show the same key")
        self._cohort = dict(sorted(cohort.items()))
        least, count = self.least, len(cohort)
        seeds = sharing.deal(self._seed, least, count)
        keys = sharing.deal(self._mask.private_bytes_raw(), least, count)
        pairs = {name: seed + key for name, seed, key in zip(self._cohort, seeds, keys, strict=True)}
        self._held[self.name] = pairs.pop(self.name)
        try:
            return {
                name: ChaCha20Poly1305(self._channel_key(name, self.name)).encrypt(_NONCE, pair, None)
                for name, pair in pairs.items()
            }
        except ValueError:
            raise Withdrawn("another client's key is not a valid key") from None

    def _channel_key(self, receiver: str, sender: str) -> bytes:
        other = receiver if sender == self.name else sender
        purpose = f"channel/{json.dumps([sender, receiver])}"  # one key for each direction
        return agree(self._channel, self._cohort[other].channel, purpose, self.context)

    def receive(self, members: Sequence[str], shares: Mapping[str, bytes], vector: bytes = b"") -> None:
        """Take the shares of those who go on; call it before masking. `members` are all that go on, this one included.

        `vector` is the digest of the weights of all of them.

        Whatever goes wrong here would make the sum impossible to open later, so the client withdraws at once.
        """
        if not self._cohort:
            raise Withdrawn("asked to hide its update before keys were shared")
        if self._members:
            raise Withdrawn("asked twice to hide its update; allowed: once a round")
        strangers = sorted(set(members) - set(self._cohort))
        if strangers or self.name not in members or len(set(members)) != len(members):
            raise Withdrawn(
                "the list of clients that go on names unknown clients, names one twice, or leaves this client out"
            )
        if len(members) < self.least:
            raise Withdrawn(f"{len(members)} clients go on; allowed: at least {self.least}")
        others = [sender for sender in members if sender != self.name]
        found = {sender: self._decrypt(sender, shares.get(sender, b"")) for sender in others}
        if unreadable := [sender for sender, pair in found.items() if pair is None]:
            raise Unreadable(unreadable)
        self._held |= {sender: pair for sender, pair in found.items() if pair is not None}
        self._members, self._vector = tuple(sorted(members)), vector

    def _decrypt(self, sender: str, text: bytes) -> bytes | None:
        """Return a share of the sender's seed and one of its mask key, or None where they cannot be read."""
        try:
            pair = ChaCha20Poly1305(self._channel_key(self.name, sender)).decrypt(_NONCE, text, None)
        except (InvalidTag, ValueError):
            return None
        return pair if len(pair) == 2 * sharing.SHARE_BYTES else None

    def mask_keys(self, others: Sequence[str] | None = None) -> dict[str, bytes]:
        """Return the key of the mask that it shares with each other member; the one under its own name is its own.

        With `others`, only those of them; a simulation has the other end of a pair make the same key.
        """
        chosen = [other for other in (self._members if others is None else others) if other != self.name]
        keys = {other: self._mask_key(other) for other in chosen}
        return {**keys, self.name: self_key(self._seed, self.context)}

    def _mask_key(self, other: str) -> bytes:
        try:
            return agree(self._mask, self._cohort[other].mask, "mask", self.context + self._vector)
        except ValueError:
            raise Withdrawn(f"the mask key of {other} is not a valid key") from None

    def mask(self, words: Words) -> Words:
        """Return words with all masks on: its own, and for each other member one that cancels in the sum."""
        masked = words.copy()
        for other, key in self.mask_keys().items():
            add_stream(masked, key, sign=1 if other == self.name else sign_of(self.name, other))
        return masked

    def open(self, survivors: Sequence[str]) -> Opened:
        """Return what opens the sum of the survivors: for each member either a share of its seed or of its key.

        Both together would show a single update, so this is done once, for one list of survivors, and who is not in
        the list counts as gone.
        """
        if not self._members:
            raise Withdrawn("asked to open a sum before its update was hidden")
        if self._opened:
            raise Withdrawn("asked twice to open a sum; allowed: once a round")
        if not set(survivors) <= set(self._members) or len(set(survivors)) != len(survivors):
            raise Withdrawn("the list of survivors names unknown clients, or names one twice")
        if self.name not in survivors:
            raise Withdrawn("asked to open a sum that it is not part of")
        if len(survivors) < self.least:
            raise Withdrawn(f"{len(survivors)} clients are left; allowed: at least {self.least}")
        self._opened = True
        gone = set(self._members) - set(survivors)
        size = sharing.SHARE_BYTES
        return Opened(
            seeds={name: self._held[name][:size] for name in sorted(survivors)},
            keys={name: self._held[name][size:] for name in sorted(gone)},
        )

    def dump(self) -> bytes:
        """Return everything, secrets included, for a node that is another process at the next message."""
        return _STORED.dump_json(self)

    @classmethod
    def load(cls, text: bytes) -> SecureClient:
        """Return the client that `dump` wrote."""
        return _STORED.validate_json(text)


_STORED = TypeAdapter(SecureClient)


def same(one: bytes, other: bytes) -> bool:
    """Whether two secrets are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(one, other)


# ---- the server


_MOST_BLOCKS = 100
"""How many sets of helpers are tried at most: in a large cohort each costs a second."""


class Unopened(UserError):
    """Too few clients stayed to open a sum, or what they revealed does not fit; the run stops and can be resumed."""


@dataclass(eq=False)
class SecureServer:
    """One try at a round of one cohort on the server; `context` is that of the clients.

    `keys` and `key_shares` (by receiver, then by sender) are what the clients sent in the first two stages.
    """

    context: bytes
    settings: AggregationSettings
    what: str
    """What is summed, for error lines: "round 3 of DS"."""
    keys: dict[str, PublicKeys] = field(default_factory=dict[str, PublicKeys])
    key_shares: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    fewest: int = FEWEST
    """How many must stay whatever the cohort's size: in a second try at a round, as many as in the first."""
    asked: str = ""
    """Digest of what the clients were asked to train, where they are told it by messages."""
    _known: dict[tuple[str, ...], list[int]] = field(default_factory=dict[tuple[str, ...], list[int]], repr=False)

    @property
    def least(self) -> int:
        """How many clients must stay to the end."""
        return max(self.fewest, self.settings.least(len(self.keys)))

    def admit(self, shown: Mapping[str, PublicKeys]) -> dict[str, str]:
        """Take the keys of a cohort; return of whom they cannot be used, and why.

        Every other client would withdraw because of such keys, so the one that shows them is left out instead.
        """
        counts = Counter(part for keys in shown.values() for part in (keys.channel, keys.mask))
        refused: dict[str, str] = {}
        for name, keys in sorted(shown.items()):
            if not keys.usable():
                refused[name] = "its key is not a valid key"
            elif max(counts[keys.channel], counts[keys.mask]) > 1:
                refused[name] = "shows the same key twice, or one that another client shows"
            else:
                self.keys[name] = keys
        return refused

    def require(self, count: int, stage: str) -> None:
        """Give the round up where fewer clients are left than must stay."""
        if count < self.least:
            raise Unopened(
                f"{self.what}: {count} of {len(self.keys)} clients {stage}, and it takes {self.least} to open a "
                "sum (privacy.aggregation.threshold); allowed: resume the run when more clients are there"
            )

    def keep_shares(self, sender: str, shares: Mapping[str, bytes]) -> None:
        """Take the encrypted shares of one client for all others; the server can read none of them."""
        if set(shares) != set(self.keys) - {sender}:
            raise ValueError("key shares: not one for each other client; allowed: one for each")
        for receiver, share in shares.items():
            self.key_shares.setdefault(receiver, {})[sender] = share

    def shares_for(self, receiver: str, members: Sequence[str]) -> dict[str, bytes]:
        """Return the encrypted key shares for one client from those that go on."""
        mine = self.key_shares.get(receiver, {})
        return {sender: mine[sender] for sender in members if sender != receiver}

    def open(
        self,
        total: Words,
        members: Sequence[str],
        survivors: Sequence[str],
        revealed: Mapping[str, Opened],
        vector: bytes = b"",
    ) -> Words:
        """Take all masks off the sum of the survivors' hidden words, and return the plain sum, word for word.

        `members` hid their words for each other, `survivors` are those whose words arrived, `revealed` is what they
        gave to open the sum, `vector` the digest of the weights that all of them were told.
        """
        self.require(len(survivors), "sent their hidden update")
        self.require(len(revealed), "helped to open the sum")
        plain = total.copy()
        for name in sorted(survivors):
            known = self.keys[name].seed
            shares = {helper: opened.seeds.get(name, b"") for helper, opened in revealed.items()}
            seed = self._recover(name, shares, lambda seed, known=known: same(seed_hash(seed, self.context), known))
            add_stream(plain, self_key(seed, self.context), sign=-1)
        for name in sorted(set(members) - set(survivors)):
            shown = self.keys[name].mask
            shares = {helper: opened.keys.get(name, b"") for helper, opened in revealed.items()}
            secret = self._recover(name, shares, lambda secret, shown=shown: _public(secret) == shown)
            key = X25519PrivateKey.from_private_bytes(secret)
            for other in survivors:
                # The survivor added it with its own sign, and the one that is gone never took it away.
                shared = agree(key, self.keys[other].mask, "mask", self.context + vector)
                add_stream(plain, shared, sign=-sign_of(other, name))
        return plain

    def _recover(self, name: str, shares: Mapping[str, bytes], fits: Callable[[bytes], bool]) -> bytes:
        """Return a client's secret from the shares that others revealed; one false share among enough does no harm."""
        for chosen in self._choices([name for name in sorted(shares) if len(shares[name]) == sharing.SHARE_BYTES]):
            try:
                secret = sharing.recovered([shares[helper] for helper in chosen], self._factors(chosen))
            except ValueError:
                continue
            if fits(secret):
                return secret
        raise Unopened(
            f"{self.what}: the shares of {name}'s secret do not match its key of this round: it sent "
            "false shares, or clients that returned them changed them; the sum stays hidden"
        )

    def _choices(self, helpers: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Yield sets of helpers that are just enough: the first, then others, in each of which a block is missing.

        As many as are not needed make a block, so that whoever lies is missing from one of the sets.
        """
        spare = len(helpers) - self.least
        if spare >= 0:
            yield tuple(helpers[: self.least])
        for begin in range(0, min(len(helpers), spare * _MOST_BLOCKS), max(spare, 1)):
            yield tuple([*helpers[:begin], *helpers[begin + spare :]][: self.least])

    def _factors(self, chosen: tuple[str, ...]) -> list[int]:
        """Return the factors of interpolation for these helpers; all secrets of a round mostly need the same."""
        if chosen not in self._known:
            point = {client: number for number, client in enumerate(sorted(self.keys), start=1)}
            self._known[chosen] = sharing.lagrange_at_zero([point[helper] for helper in chosen])
        return self._known[chosen]


def _public(secret: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
