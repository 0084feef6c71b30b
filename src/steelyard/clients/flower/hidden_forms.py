"""The messages of a round with hidden updates, beside the task: keys before it, the hidden sum and its opening after.

    keys ──▶ task (with everybody's keys; back come criteria and encrypted shares) ──▶ hide ──▶ open
                                                    keys ──▶ share ──▶ hide, again ◀──┘ where shares cannot be read

Bytes travel as arrays: public keys per client, key shares of 82 bytes per pair, opened shares of 33 bytes per client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from steelyard.base.errors import UserError
from steelyard.clients.flower.arrays import unpack
from steelyard.clients.flower.forms import FailureForm, Form
from steelyard.clients.flower.payloads import Codec, only_keys
from steelyard.messages.updates import Floats
from steelyard.privacy.secure import KEY_SHARES_BYTES

KEYS = "query.keys"
SHARE = "query.share"
HIDE = "train.hide"
OPEN = "query.open"
"""The four messages that hiding adds, by Flower's message type."""

Bytes = NDArray[np.uint8]


class RoundForm(Form):
    """Which attempt at which round of which federation a message is about, and which clients of a node are meant."""

    run: str
    federation: str
    seed: int
    round: int
    attempt: str
    clients: list[str]
    seconds: float
    experiment: str = ""


class AnswerForm(Form):
    """For which of its clients a node answers, and why not for the others; all else is in the arrays."""

    federation: str
    round: int
    clients: list[str]
    failures: list[FailureForm]
    unreadable: dict[str, list[str]] = Field(default_factory=dict[str, list[str]])
    """By client that hides nothing: from whom it got key shares that it cannot read."""


class KeysForm(RoundForm):
    """The server asks for fresh keys."""

    again: bool = False
    """Whether they are for another try: what was trained for this round is then hidden, and nothing trained anew."""


class ShareForm(RoundForm):
    """The server asks for key shares in another try; the keys of all of `cohort` are in the arrays."""

    cohort: list[str]


class HideForm(RoundForm):
    """The server sends the weights, and who goes on: their key shares for the node's clients are in the arrays."""

    members: list[str]
    weights: list[float]
    """One for each of `clients`."""


class OpenForm(RoundForm):
    """The server asks for what opens the sum of the clients whose hidden updates arrived."""

    survivors: list[str]


def rows(parts: Sequence[bytes], width: int) -> Bytes:
    """Return equally long pieces of bytes as one array, a row each."""
    return np.frombuffer(b"".join(parts), dtype=np.uint8).reshape(len(parts), width)


@dataclass(frozen=True, eq=False)
class KeyShares:
    """What stands in the place of updates where they are hidden: each client's key shares for all others of its cohort.

    `shares[clients, cohort, bytes]`, encrypted; a client's own row is zeros.
    """

    shares: Bytes

    def select(self, keep: Sequence[int]) -> KeyShares:
        return KeyShares(self.shares[list(keep)])

    def finite(self) -> NDArray[np.bool_]:
        return np.ones(len(self.shares), dtype=np.bool_)

    def content(self) -> None:
        """Return None: letters disclose nothing of updates."""

    def divergence(self, parameters: torch.Tensor) -> Floats:
        """Return zeros: nothing is known of how far an update goes, but that its client could write it down."""
        return np.zeros(len(self.shares))

    def combine(self, parameters: torch.Tensor, weights: Floats) -> NoReturn:
        raise UserError("privacy.aggregation: key shares cannot be combined; allowed: the sum that comes after them")

    def gram(self, parameters: torch.Tensor) -> NoReturn:
        raise UserError("privacy.aggregation: key shares disclose nothing of updates; allowed: criteria without them")


def key_shares_codec(cohort: int) -> Codec:
    """Return how the key shares of a cohort travel, in the answer to a task."""

    def join(payloads: Sequence[Any], order: Sequence[int]) -> KeyShares:
        return KeyShares(np.concatenate([payload.shares for payload in payloads])[list(order)])

    def read(arrays: Any, clients: int, parameters: torch.Tensor) -> KeyShares:
        only_keys(arrays, ["key_shares"])
        return KeyShares(unpack(arrays["key_shares"], "key_shares", "|u1", (clients, cohort, KEY_SHARES_BYTES)))

    return Codec(
        kind="hidden",
        payload=KeyShares,
        pack=lambda payload: {"key_shares": payload.shares},
        unpack=read,
        join=join,
        largest=lambda clients, parameters: clients * cohort * KEY_SHARES_BYTES + 4096,
    )
