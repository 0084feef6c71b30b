"""What a node states of its clients' updates, and how a signed head of a run's chain shows that it holds that.

A node signs one statement for each rule and round. Each names the digest of the one before it, so that the last
signature stands for all of them. The statements of a round are the leaves of a tree, whose root goes into the head. A
leaf also says which place comes next: so one leaf shows either what a node stated, or that it stated nothing.
docs/reference/chain.md defines every byte.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, Field

from steelyard.messages.updates import Signed, Task, Updates
from steelyard.proof.signing import (
    DIGEST_BYTES,
    SigningKey,
    field,
    fields,
    fingerprint,
    head_statement,
    holds,
    link,
    salted_digest,
)

Hash = Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
"""A SHA-256 in hexadecimal digits; empty where there is none."""


@dataclass(frozen=True)
class Statement:
    """What a node signs of its clients' updates for one rule in one round."""

    run: str
    federation: str
    round: int
    task: str
    """Digest of what was asked."""
    before: str
    """Digest of the node's statement before this one, of the same run and rule; empty where it knows of none."""
    digests: Mapping[str, bytes]
    """By client: the salted digest of what was sent or, where updates are hidden, of what was trained."""

    def content(self) -> bytes:
        """Return the bytes that are signed."""
        asked = fields(run=self.run, federation=self.federation, round=self.round, task=self.task)
        each = (fields(client=client, digest=self.digests[client]) for client in sorted(self.digests))
        return field("statement", "updates") + asked + field("before", self.before or None) + b"".join(each)

    def digest(self) -> str:
        """Return the SHA-256 of its content, in hexadecimal digits."""
        return hashlib.sha256(self.content()).hexdigest()


def stated(
    key: SigningKey, run: str, task: Task, asked: str, updates: Updates, before: str = "", *, hidden: bool = False
) -> Signed | None:
    """Sign the digests of all updates that a node sends; `asked` is the digest of the task. None: there are none.

    With `hidden` the salts stay here, since nobody sees the updates.
    """
    content = updates.payload.content()
    if not content:
        return None
    salts = {client: key.salt(run, task.federation, task.round, asked, client) for client in updates.clients}
    parts = zip(updates.clients, content, strict=True)
    digests = {client: salted_digest(salts[client], part.reshape(-1).data) for client, part in parts}
    statement = Statement(run, task.federation, task.round, asked, before, digests)
    return Signed(key.line, before, digests, {} if hidden else salts, key.sign(statement.content()))


def slot(run: str, federation: str, round: int, key: str) -> bytes:
    """Return the place of a node (by the fingerprint of its key) in the tree of a round."""
    return hashlib.sha256(fields(slot=run, federation=federation, round=round, key=key)).digest()


def _leaf(place: bytes, following: bytes, statement: bytes) -> bytes:
    return hashlib.sha256(b"\0" + place + following + statement).digest()


class Tree:
    """The tree over a round's statements, by place; `root` goes into the head, `leaf_for` makes proofs."""

    def __init__(self, statements: Mapping[bytes, str]) -> None:
        self._places = sorted(statements)
        self._statements = statements
        following = [*self._places[1:], *self._places[:1]]
        leaves = [
            _leaf(place, after, bytes.fromhex(statements[place]))
            for place, after in zip(self._places, following, strict=True)
        ]
        self._levels = [leaves]
        while len(self._levels[-1]) > 1:
            self._levels.append(_above(self._levels[-1]))

    @property
    def root(self) -> str | None:
        """The root in hexadecimal digits; None where nobody stated anything."""
        return self._levels[-1][0].hex() if self._places else None

    def leaf_for(self, place: bytes) -> tuple[str, str, str, list[str]]:
        """Return the leaf of a place, or the one that shows that it has none: place, next place, statement, path."""
        if not self._places:
            return "", "", "", []
        at = bisect_right(self._places, place) - 1  # -1, the last one, goes round to the first
        found, after = self._places[at], self._places[(at + 1) % len(self._places)]
        steps: list[str] = []
        at %= len(self._places)
        for level in self._levels[:-1]:
            beside = at ^ 1
            if beside < len(level):
                steps.append(("L" if beside < at else "R") + level[beside].hex())
            at //= 2
        return found.hex(), after.hex(), self._statements[found], steps


def _above(level: Sequence[bytes]) -> list[bytes]:
    """Return the next level of a tree: pairs are hashed, and one that is left over stays as it is."""
    pairs = [b"".join(level[at : at + 2]) for at in range(0, len(level), 2)]
    return [hashlib.sha256(b"\1" + pair).digest() if len(pair) > DIGEST_BYTES else pair for pair in pairs]


def root_along(leaf: bytes, path: Sequence[str]) -> str:
    """Return the root that a leaf and its path lead to; ValueError where the path is none."""
    for step in path:
        beside = bytes.fromhex(step[1:])
        if step[:1] not in ("L", "R") or len(beside) != DIGEST_BYTES:
            raise ValueError("not a path of a tree")
        leaf = hashlib.sha256(b"\1" + (beside + leaf if step[0] == "L" else leaf + beside)).digest()
    return leaf.hex()


class Proof(BaseModel, extra="forbid", frozen=True, strict=True):
    """What a signed head says of one node, rule and round: the statement that it holds, or that it holds none."""

    run: str
    federation: str
    round: int
    node: str
    """The node's public key, as one line of OpenSSH; `key` is the server's."""
    place: Hash
    following: Hash
    """Place of a leaf, and of the one after it; both are the node's own or lie around it. Empty: nobody signed."""
    statement: Hash
    """Digest of the statement at this leaf."""
    path: list[str]
    before: Hash
    record: Hash
    head: Hash
    key: str
    signature: str

    @property
    def own(self) -> bool:
        """Whether the leaf is the node's: then `statement` is what it stated, else it stated nothing."""
        return self.place == self._mine.hex()

    @property
    def _mine(self) -> bytes:
        return slot(self.run, self.federation, self.round, fingerprint(self.node))

    def check(self) -> None:
        """Raise ValueError, with the reason, where it shows nothing.

        Whether the server's key is the right one is for the caller to say.
        """
        top = None
        if self.place:
            place, following, mine = bytes.fromhex(self.place), bytes.fromhex(self.following), self._mine
            # The last place goes round to the first: then the node's lies beyond either.
            around = place < mine < following if place < following else mine > place or mine < following
            if not self.own and not around:
                raise ValueError("it is of another node")
            top = root_along(_leaf(place, following, bytes.fromhex(self.statement)), self.path)
        if link(self.before, self.round, top, self.record) != self.head:
            raise ValueError("its path does not lead to the head")
        if not self.key:
            raise ValueError(UNSIGNED)
        if not holds(self.key, bytes.fromhex(self.signature), head_statement(self.run, self.round, self.head)):
            raise ValueError("the server's signature of the head does not hold")


UNSIGNED = "the head is not signed"


@dataclass(frozen=True, eq=False)
class SealedRound:
    """A round of a run's chain, with all that proofs about it need; `proof` makes one."""

    run: str
    round: int
    before: str
    record: str
    head: str
    key: str
    """The server's public key; empty where it has none."""
    signature: bytes
    tree: Tree

    def proof(self, federation: str, node: str) -> Proof:
        """Return what the head says of a node (by its public key) under one rule."""
        place, following, statement, path = self.tree.leaf_for(
            slot(self.run, federation, self.round, fingerprint(node))
        )
        return Proof(
            run=self.run, federation=federation, round=self.round, node=node, place=place, following=following,
            statement=statement, path=path, before=self.before, record=self.record, head=self.head, key=self.key,
            signature=self.signature.hex(),
        )  # fmt: skip
