"""A round of secure aggregation as the server leads it: hide, leave out whose key shares cannot be read, open once.

A client whose key shares for the others cannot be read would make all of those withdraw. So it is left out, and the
rest hide the same updates under the same weights again, with fresh keys. What came in the first try stays hidden: its
masks fall only with shares that clients reveal when they open a sum, and they open one, in the last try.

In a simulation the masks of a whole cohort are put on at once: what every client would send, added up as the server
adds it. Each row is exactly what `SecureClient.mask` gives. A pair's stream is made once for both of its ends, and some
columns of all rows at a time, so that a hundred clients with millions of parameters need little memory.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from steelyard.base.errors import first_names
from steelyard.messages.payloads import Summed
from steelyard.messages.updates import Failure, Floats
from steelyard.privacy.hidden import FixedPoint, Words, check_weights
from steelyard.privacy.secure import Opened, SecureClient, SecureServer, add_stream, stream, vector_digest
from steelyard.privacy.settings import AggregationSettings

MOST_TRIES = 4
"""How often a round is tried in all; each further try leaves out at least one client."""


@dataclass(frozen=True, eq=False)
class HiddenWords:
    """What came back when clients were asked for their hidden updates."""

    total: Words
    """Sum of the words that arrived, all masks on."""
    clients: tuple[str, ...]
    """Whose words arrived, ascending."""
    failures: Mapping[str, str]
    """Why the others' did not, by client, as far as that is known."""
    unreadable: Mapping[str, Sequence[str]]
    """By client: from whom it got key shares that it cannot read."""


class Exchange(Protocol):
    """The messages of one round between server and clients, in this process or over a network."""

    @property
    def server(self) -> SecureServer:
        """The server's part of the current try."""
        ...

    @property
    def sent(self) -> Mapping[str, int]:
        """Bytes that each client has sent so far."""
        ...

    def again(self, clients: Sequence[str]) -> tuple[tuple[str, ...], Mapping[str, str]]:
        """Begin another try: fresh keys and key shares among these; return who goes on, and why the others do not."""
        ...

    def hide(self, members: Sequence[str], weights: Mapping[str, float]) -> HiddenWords:
        """Collect the weighted updates of the members, hidden."""
        ...

    def open(self, members: Sequence[str], survivors: Sequence[str]) -> Mapping[str, Opened]:
        """Collect what opens the sum of the survivors."""
        ...


def blame(unreadable: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return whom to leave out so that nobody is left who cannot read another's key shares, each with the reason.

    Either end of a complaint may be the liar. Whoever is in most complaints goes first; where two are in equally many,
    both go, so that a liar who blames an honest client loses its own place as well.
    """
    pairs = {(receiver, sender) for receiver, senders in unreadable.items() for sender in senders}
    found: dict[str, str] = {}
    while pairs:
        counts = Counter(name for pair in pairs for name in pair)
        most = max(counts.values())
        worst = sorted(name for name, count in counts.items() if count == most)
        found |= {name: _reason(name, pairs) for name in worst}
        pairs = {pair for pair in pairs if not set(pair) & set(worst)}
    return found


def _reason(name: str, pairs: set[tuple[str, str]]) -> str:
    receivers = sorted(receiver for receiver, sender in pairs if sender == name)
    senders = sorted(sender for receiver, sender in pairs if receiver == name)
    parts = [f"sent key shares that {first_names(receivers)} cannot read"] if receivers else []
    parts += [f"says that it cannot read the key shares of {first_names(senders)}"] if senders else []
    return f"left out: {' and '.join(parts)}"


def secure_sum(exchange: Exchange, clients: Sequence[str], weights: Floats, settings: AggregationSettings) -> Summed:
    """Return Σ w·Δ of the clients that stay to the end; whose key shares cannot be read is left out, and named.

    Weights stay as they were given: a second try is no second equation about the updates. As many clients must be left
    as in the first try.
    """
    given = dict(zip(clients, weights.tolist(), strict=True))
    least, members = exchange.server.least, tuple(clients)
    left: dict[str, str] = {}
    exchange.server.require(len(members), "shared their keys and can be weighed")
    hidden = exchange.hide(members, given)
    for _ in range(MOST_TRIES - 1):
        blamed = blame(hidden.unreadable)
        rest = tuple(n for n in members if (n in hidden.clients or n in hidden.unreadable) and n not in blamed)
        if not blamed or len(rest) < least:
            break
        left |= _dropped(set(members) - set(rest) - set(blamed), hidden.failures) | blamed
        members, failures = exchange.again(rest)
        left |= _dropped(set(rest) - set(members), failures)
        exchange.server.require(len(members), f"shared fresh keys ({_first(left)})")
        hidden = exchange.hide(members, given)
    survivors = hidden.clients
    left |= _dropped(set(members) - set(survivors), hidden.failures)
    exchange.server.require(len(survivors), f"sent their hidden update ({_first(left) or 'the others are silent'})")
    check_weights(survivors, np.array([given[name] for name in survivors]), settings)
    revealed = exchange.open(members, survivors)
    vector = vector_digest(members, given, exchange.server.asked)
    plain = exchange.server.open(hidden.total, members, survivors, revealed, vector)
    encoding = FixedPoint.of(settings.word_bits, settings.bound, len(exchange.server.keys))
    failures = tuple(Failure(name, left[name]) for name in sorted(left))
    sent = {name: exchange.sent.get(name, 0) for name in survivors}
    return Summed(encoding.decode(plain), survivors, failures, sent, encoding.step)


def _first(reasons: Mapping[str, str]) -> str:
    return first_names([f"{name}: {reason}" for name, reason in reasons.items()], 3)


def _dropped(names: set[str], reasons: Mapping[str, str]) -> dict[str, str]:
    said = "dropped out before its update arrived"
    return {name: f"{said}: {reasons[name]}" if name in reasons else said for name in sorted(names)}


_COLUMNS = 1 << 16

RowsOf = Callable[[int, int], Words]
"""From a span of columns to the encoded words [clients, columns] of all clients."""


def pair_keys(clients: Sequence[SecureClient]) -> list[dict[str, bytes]]:
    """Return each client's own key and those that it shares with the clients after it, in ascending order of name."""
    names = [client.name for client in clients]
    return [client.mask_keys(names[row + 1 :]) for row, client in enumerate(clients)]


def mask_rows(clients: Sequence[SecureClient], keys: Sequence[dict[str, bytes]], rows: Words, begin: int = 0) -> None:
    """Put the masks of all clients, which are all members and stand in ascending order, on their rows, in place."""
    width = rows.shape[1]
    for row, client in enumerate(clients):
        add_stream(rows[row], keys[row][client.name], sign=1, begin=begin)
        for other in range(row + 1, len(clients)):
            mask = stream(keys[row][clients[other].name], width, rows.dtype, begin)
            # Names ascend, so this row is the one that adds.
            np.add(rows[row], mask, out=rows[row])
            np.subtract(rows[other], mask, out=rows[other])


def masked_sum(
    clients: Sequence[SecureClient], stayed: Sequence[int], rows_of: RowsOf, size: int, encoding: FixedPoint
) -> Words:
    """Return the sum of the hidden words of those who stayed, over all columns; masks are those of all clients."""
    keys = pair_keys(clients)
    total: Words = np.zeros(size, dtype=encoding.dtype)

    def block(begin: int) -> None:
        end = min(size, begin + _COLUMNS)
        rows = rows_of(begin, end)
        mask_rows(clients, keys, rows, begin)
        total[begin:end] = rows[list(stayed)].sum(axis=0, dtype=encoding.dtype)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for done in [pool.submit(block, begin) for begin in range(0, size, _COLUMNS)]:
            done.result()
    return total
