"""The server's part of secure aggregation: it carries messages, adds up hidden words, and opens their sum alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from steelyard.base.errors import UserError
from steelyard.privacy import sharing
from steelyard.privacy.fixed_point import Words
from steelyard.privacy.masks import add_stream, agree
from steelyard.privacy.secure_client import Opened, PublicKeys, same, seed_hash, self_key, sign_of
from steelyard.privacy.settings import FEWEST, AggregationSettings

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
        self, total: Words, members: Sequence[str], survivors: Sequence[str], revealed: Mapping[str, Opened]
    ) -> Words:
        """Take all masks off the sum of the survivors' hidden words, and return the plain sum, word for word.

        `members` hid their words for each other, `survivors` are those whose words arrived, `revealed` is what they
        gave to open the sum.
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
                add_stream(plain, agree(key, self.keys[other].mask, "mask", self.context), sign=-sign_of(other, name))
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
