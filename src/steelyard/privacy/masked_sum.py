"""The masks of a whole simulated cohort: what every client would send, added up as the server adds it.

Each row is exactly what `SecureClient.mask` gives. A pair's stream is made once for both of its ends, and some columns
of all rows at a time, so that a hundred clients with millions of parameters need little memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from steelyard.privacy.fixed_point import FixedPoint, Words
from steelyard.privacy.masks import add_stream, stream
from steelyard.privacy.secure_client import SecureClient

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
