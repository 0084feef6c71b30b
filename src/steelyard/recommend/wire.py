"""How users' sparse rows travel between a node and the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.clients.flower.wire import Refused
from steelyard.messages.payloads import Codec, Shape, bytes_of
from steelyard.recommend.sparse import PairRows, SparseRows


@dataclass(frozen=True)
class SparseCodec(Codec):
    """Each row of a user once, with its item's number; all of this comes from the experiment, never from a message."""

    kind = "sparse"

    rate: float
    """The server's α."""
    width: int
    """Numbers in a row."""
    most: int
    """Most rows of a user."""

    def shapes(self, clients: int, parameters: int) -> dict[str, Shape]:
        return {"owners": ("<i4", (None,)), "rows": ("<i4", (None,)), "values": ("<f4", (None, self.width))}

    def largest(self, clients: int, parameters: int) -> int:
        rows = clients * self.most
        return bytes_of([("<i4", (rows, 2 + self.width)), *self.shapes(clients, parameters).values()])

    def pack(self, payload: SparseRows | PairRows) -> dict[str, NDArray[Any]]:
        rows = payload.merged
        return {"owners": rows.owners, "rows": rows.rows, "values": rows.values}

    def unpack(self, arrays: Mapping[str, NDArray[Any]], clients: int, parameters: int) -> SparseRows:
        owners, rows = arrays["owners"], arrays["rows"]
        for name, array in arrays.items():
            if len(array) != len(owners):
                raise Refused(f"array {name}: shape {array.shape}; allowed: {len(owners)} rows")
        for name, numbers, count in (("owners", owners, clients), ("rows", rows, parameters // self.width)):
            if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
                raise Refused(f"array {name}: {int(numbers.min())} to {int(numbers.max())}; allowed: 0 to {count - 1}")
        keys = owners.astype(np.int64) << 32 | rows
        if not (np.diff(keys) > 0).all():
            raise Refused(
                "array rows: not ascending by user and item, or a row twice; allowed: each row once, in order"
            )
        if len(owners) and (held := int(np.bincount(owners).max())) > self.most:
            raise Refused(f"array rows: {held} rows of one user; allowed: at most {self.most}")
        return SparseRows(clients, owners.copy(), rows.copy(), arrays["values"].copy(), self.rate)

    def join(self, parts: Sequence[SparseRows], order: Sequence[int]) -> SparseRows:
        firsts = np.cumsum([0, *(part.clients for part in parts)])
        return SparseRows(
            clients=int(firsts[-1]),
            owners=np.concatenate([part.owners + first for part, first in zip(parts, firsts, strict=False)]).astype(
                np.int32
            ),
            rows=np.concatenate([part.rows for part in parts]),
            values=np.concatenate([part.values for part in parts]),
            rate=parts[0].rate,
        ).select(order)
