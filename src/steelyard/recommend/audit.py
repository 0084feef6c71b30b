"""The curious server: how much of users' histories can be read from the updates they send?

The server follows the protocol and keeps what it sees. Three ways to read it:

- *sign*: the change of an item's bias is +s for a positive and −s for a negative, s > 0, and is not regularised. An
  item whose bias a user ever pushed up is one she took. Fresh draws of what is sent (π per round) only delay this: over
  rounds every item is sent some time. A persistent choice bounds recall by π for good; decoys bound precision.
- *absence*: negatives are drawn evenly from what she did not take and are always sent. An item that never comes up as a
  negative, round after round, is likely hers. π does not help at all here; only decoys do, since they are left out too.
- *sum*: the changes of an item's bias are added up over the rounds, and as many items as a user has, which the server
  is given, are claimed from the top. Noise on the device leaves no sign to read; what is left of it shows here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steelyard.recommend.histories import Histories
from steelyard.recommend.sparse import SparseRows

Evidence = NDArray[np.bool_]


@dataclass(frozen=True)
class Guess:
    """What one way of reading claims about all users together."""

    claims: int
    precision: float | None
    """Share of the claimed (user, item) pairs that are true; None before the first claim."""
    recall: float
    """Share of all users' items that are claimed."""


class CuriousServer:
    """Keeps what it can see of each user's rows, and guesses; it knows the catalogue and no one's history."""

    def __init__(self, users: int, items: int) -> None:
        self.pushed_up: Evidence = np.zeros((users, items), dtype=np.bool_)
        self.pushed_down: Evidence = np.zeros((users, items), dtype=np.bool_)
        self.total: NDArray[np.float32] = np.zeros((users, items), dtype=np.float32)

    def see(self, senders: NDArray[np.int64], rows: SparseRows) -> None:
        """Take in a round's rows; `senders` are the users that the rows' owners stand for."""
        user, change = senders[rows.owners], rows.values[:, -1]
        self.pushed_up[user[change > 0], rows.rows[change > 0]] = True
        self.pushed_down[user[change < 0], rows.rows[change < 0]] = True
        np.add.at(self.total, (user, rows.rows), change)

    def by_sign(self) -> Evidence:
        """Claim every item whose bias the user has pushed up."""
        return self.pushed_up

    def by_absence(self) -> Evidence:
        """Claim every item that the user has never pushed down, once she has sent anything at all."""
        return ~self.pushed_down & self.pushed_down.any(axis=1, keepdims=True)

    def by_sum(self, sizes: NDArray[np.int64]) -> Evidence:
        """Claim as many items as each user has, those whose bias she has pushed up most in all."""
        ranks = np.argsort(np.argsort(-self.total, axis=1, kind="stable"), axis=1, kind="stable")
        return (ranks < sizes[:, None]) & (self.total != 0)


def judge(claimed: Evidence, histories: Histories) -> Guess:
    """Compare claims with the true histories."""
    truth = histories.seen(np.arange(histories.users))
    right, claims = int((claimed & truth).sum()), int(claimed.sum())
    return Guess(claims, right / claims if claims else None, right / max(histories.total, 1))
