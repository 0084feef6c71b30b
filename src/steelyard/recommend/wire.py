"""How users' sparse rows travel between a node and the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array
from numpy.typing import NDArray

from steelyard.clients.flower import wire
from steelyard.clients.flower.forms import Refused
from steelyard.clients.flower.wire import unpack
from steelyard.messages.payloads import Payload
from steelyard.recommend.sparse import PairRows, SparseRows


def sparse_codec(rate: float, width: int, most: int) -> wire.Codec:
    """Return how sparse rows travel: each row of a user once, with its item's number.

    The server's α, the width of a row and the most rows of a user come from the experiment, never from a message.
    """

    def read(arrays: Mapping[str, Array], clients: int, parameters: torch.Tensor) -> Payload:
        wire.only_keys(arrays, ["owners", "rows", "values"])
        owners = unpack(arrays["owners"], "owners", "<i4", (None,))
        rows = unpack(arrays["rows"], "rows", "<i4", (len(owners),))
        values = unpack(arrays["values"], "values", "<f4", (len(owners), width))
        _refuse_numbers(owners, rows, clients, parameters.numel() // width, most)
        return SparseRows(clients, owners.copy(), rows.copy(), values.copy(), rate)

    return wire.Codec(
        kind="sparse",
        payload=(SparseRows, PairRows),
        pack=_pack,
        unpack=read,
        join=_join,
        largest=lambda clients, parameters: clients * most * 4 * (width + 2) + 12_288,
    )


def _refuse_numbers(owners: NDArray[Any], rows: NDArray[Any], clients: int, items: int, most: int) -> None:
    for name, numbers, count in (("owners", owners, clients), ("rows", rows, items)):
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
            raise Refused(f"array {name}: {int(numbers.min())} to {int(numbers.max())}; allowed: 0 to {count - 1}")
    keys = owners.astype(np.int64) << 32 | rows
    if not (np.diff(keys) > 0).all():
        raise Refused("array rows: not ascending by user and item, or a row twice; allowed: each row once, in order")
    if len(owners) and int(np.bincount(owners).max()) > most:
        raise Refused(f"array rows: {int(np.bincount(owners).max())} rows of one user; allowed: at most {most}")


def _pack(payload: SparseRows | PairRows) -> dict[str, NDArray[Any]]:
    rows = payload.merged
    return {"owners": rows.owners, "rows": rows.rows, "values": rows.values}


def _join(parts: Sequence[Any], order: Sequence[int]) -> Payload:
    many = cast(Sequence[SparseRows], parts)
    firsts = np.cumsum([0, *(part.clients for part in many)])
    return SparseRows(
        clients=int(firsts[-1]),
        owners=np.concatenate([part.owners + first for part, first in zip(many, firsts, strict=False)]).astype(
            np.int32
        ),
        rows=np.concatenate([part.rows for part in many]),
        values=np.concatenate([part.values for part in many]),
        rate=many[0].rate,
    ).select(order)
