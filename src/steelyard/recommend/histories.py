"""What is drawn on the devices: triples and decoys, from users' histories.

Every draw is a pure function of seed, user, round and item, so it does not matter how many users are simulated
together, in which order they answer, or whether they live in one process or on devices of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from steelyard.base.randomness import generator, stream_keys, words_at
from steelyard.recommend.interactions import Codes, Interactions
from steelyard.recommend.metrics import Floats, GroundTruth

Items = NDArray[np.int32]
Floats32 = NDArray[np.float32]
Keys = NDArray[np.uint64]
MaskKind = Literal["round", "persistent", "triple"]


@dataclass(frozen=True, eq=False)
class Histories:
    """The items of each user, as they lie on the devices: user u has items[starts[u] : starts[u + 1]], ascending.

    `decoys` items at the end of a user's stretch, counted by `fakes`, are not hers: they are drawn as if they were.
    """

    names: tuple[str, ...]
    catalogue: int
    starts: Codes
    items: Items
    fakes: Codes
    """Number of decoys at the end of each user's stretch."""

    @classmethod
    def of(cls, data: Interactions) -> Histories:
        """Lay out training interactions by user; repeated pairs count once."""
        pairs = np.unique(data.user * len(data.items) + data.item)
        counts = np.bincount(pairs // len(data.items), minlength=len(data.users))
        items = (pairs % len(data.items)).astype(np.int32)
        fakes = np.zeros(len(counts), dtype=np.int64)
        return cls(tuple(data.users.tolist()), len(data.items), starts_of(counts), items, fakes)

    @property
    def users(self) -> int:
        return len(self.names)

    @cached_property
    def drawn_from(self) -> Codes:
        """Number of items that each user draws positives from, decoys included."""
        return np.diff(self.starts)

    @cached_property
    def sizes(self) -> Codes:
        """Number of each user's own items."""
        return self.drawn_from - self.fakes

    @cached_property
    def total(self) -> int:
        """R⁺: the number of positive interactions of all users."""
        return int(self.sizes.sum())

    @cached_property
    def bits(self) -> NDArray[np.uint8]:
        """[users, ⌈items/8⌉]: one bit per item, set where the user must not draw it as a negative."""
        flags = np.zeros((self.users, -(-self.catalogue // 8)), dtype=np.uint8)
        user = np.repeat(np.arange(self.users), self.drawn_from)
        np.bitwise_or.at(flags, (user, self.items >> 3), np.left_shift(1, self.items & 7).astype(np.uint8))
        return flags

    def own(self, user: int) -> Items:
        """Return one user's own items, ascending."""
        return self.items[self.starts[user] : self.starts[user + 1] - self.fakes[user]]

    def seen(self, users: Codes) -> NDArray[np.bool_]:
        """Return [users, items]: which items each of these users has; decoys are not among them."""
        flags = np.zeros((len(users), self.catalogue), dtype=np.bool_)
        counts = self.sizes[users]
        row = np.repeat(np.arange(len(users)), counts)
        flags[row, self.items[stretches(self.starts[users], counts)]] = True
        return flags

    def with_decoys(self, share: float, seed: int) -> Histories:
        """Give each user round(share · n) decoys for her n items: others' items that she will claim as her own.

        The choice is made once per seed and user; a fresh choice each round would wash out over rounds.
        """
        parts: list[Items] = []
        fakes = np.zeros(self.users, dtype=np.int64)
        for user, name in enumerate(self.names):
            own = self.own(user)
            others = np.setdiff1d(np.arange(self.catalogue, dtype=np.int32), own, assume_unique=True)
            # One item at least must stay for her to draw as a negative.
            count = max(0, min(round(share * len(own)), len(others) - 1))
            fakes[user] = count
            parts += [own, generator(seed, 0, name, "decoys").choice(others, size=count, replace=False)]
        starts = starts_of(self.sizes + fakes)
        return Histories(self.names, self.catalogue, starts, np.concatenate(parts).astype(np.int32), fakes)


def starts_of(counts: Codes | Sequence[int]) -> Codes:
    """Return where stretches of these lengths begin, one after another, and where the last of them ends."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def stretches(starts: Codes, counts: Codes) -> Codes:
    """Return starts[0] .. starts[0] + counts[0] − 1, then those of the next, and so on."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)


@dataclass(frozen=True, eq=False)
class Triples:
    """T triples (u, i⁺, i⁻) for each of some users: positives and negatives [users, T]."""

    positives: Items
    negatives: Items
    real: NDArray[np.bool_] | None = None
    """Which positives are the user's own; None where there are no decoys."""

    def select(self, rows: slice | Sequence[int] | Codes) -> Triples:
        """Return the triples of some of the users, by position."""
        real = None if self.real is None else self.real[rows]
        return Triples(self.positives[rows], self.negatives[rows], real)


def user_keys(seed: int, names: Sequence[str], purpose: str) -> Keys:
    """Return one key per user and purpose; with `round_keys` it names her stream of a round."""
    return stream_keys(seed, 0, names, f"fpl {purpose}")


def round_keys(keys: Keys, round: int | Codes) -> Keys:
    """Return the users' keys of one round, or of one round each."""
    return words_at(keys, np.asarray(round, dtype=np.uint64))


# What lies on the devices


@dataclass(frozen=True, eq=False)
class Users:
    """Histories, tests, and each user's own settings; `histories`, `truth` and `shares` number users alike."""

    histories: Histories
    truth: GroundTruth
    shares: Floats
    """π of each user."""
    kinds: Codes
    """A label per entry of `histories.items`: the item's category, or the item itself; LD counts distinct ones."""
    facts: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """Further facts about users, for criteria of your own."""

    def keep(self, names: Iterable[str]) -> Users:
        """Return only these users, in the order they have here; the numbering of items stays.

        Use it on a node that holds some of the users and must hold nothing of the others.
        """
        histories, truth = self.histories, self.truth
        wanted = set(names)
        kept = np.array([index for index, name in enumerate(histories.names) if name in wanted], dtype=np.int64)
        renumbered = np.full(histories.users, -1, dtype=np.int64)
        renumbered[kept] = np.arange(len(kept))
        entries = np.repeat(renumbered, histories.drawn_from) >= 0
        trained, tested = renumbered[truth.train_user], renumbered[truth.test_user]
        return Users(
            histories=Histories(
                names=tuple(histories.names[index] for index in kept.tolist()),
                catalogue=histories.catalogue,
                starts=starts_of(histories.drawn_from[kept]),
                items=histories.items[entries],
                fakes=histories.fakes[kept],
            ),
            truth=replace(
                truth,
                users=len(kept),
                train_user=trained[trained >= 0],
                train_item=truth.train_item[trained >= 0],
                test_user=tested[tested >= 0],
                test_item=truth.test_item[tested >= 0],
                liked=None if truth.liked is None else truth.liked[trained >= 0],
            ),
            shares=self.shares[kept],
            kinds=self.kinds[entries],
            facts={name: facts for name, facts in self.facts.items() if name in wanted},
        )
