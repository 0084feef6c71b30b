"""How the updates of a cohort travel: one codec per kind of payload.

A codec packs what some clients of one node trained, reads it back on the server with every shape and type checked, and
joins what came from several nodes. `dense` carries whole models; others are added with `register`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from flwr.app import Array
from numpy.typing import NDArray

from steelyard.clients.flower.arrays import tensor, unpack
from steelyard.clients.flower.forms import Refused
from steelyard.messages import DenseModels, Payload


@dataclass(frozen=True)
class Codec:
    """One kind of payload on the wire; register one for a payload class of your own."""

    kind: str
    payload: type | tuple[type, ...]
    """The payload classes that it carries."""
    pack: Callable[[Any], dict[str, NDArray[Any]]]
    """Payload of one node's clients -> named arrays."""
    unpack: Callable[[Mapping[str, Array], int, torch.Tensor], Payload]
    """Named arrays, number of clients, global parameters -> payload; raises Refused."""
    join: Callable[[Sequence[Any], Sequence[int]], Payload]
    """Payloads of several nodes, and the order of all their clients -> one payload with the clients in that order."""
    largest: Callable[[int, torch.Tensor], int]
    """Number of clients, global parameters -> most bytes that an honest answer can have."""


_codecs: dict[str, Codec] = {}


def register(codec: Codec) -> None:
    """Make a kind of payload known to both ends of the wire."""
    _codecs[codec.kind] = codec


def by_kind(kind: str) -> Codec:
    """Return the codec that a node says it used, or refuse the answer."""
    if kind not in _codecs:
        raise Refused(f"payload: got {kind!r}; allowed: {', '.join(sorted(_codecs))}")
    return _codecs[kind]


def known() -> list[Codec]:
    """Return all codecs."""
    return list(_codecs.values())


def for_payload(payload: Payload) -> Codec:
    """Return the codec for what clients trained."""
    for codec in _codecs.values():
        if isinstance(payload, codec.payload):
            return codec
    raise TypeError(f"no codec is registered for {type(payload).__name__}; call payloads.register")


def only_keys(arrays: Mapping[str, Array], allowed: Sequence[str]) -> None:
    """Refuse missing and unexpected arrays by name."""
    if set(arrays) != set(allowed):
        got = ", ".join(sorted(arrays)) or "none"
        raise Refused(f"arrays: got {got[:200]}; allowed: exactly {', '.join(sorted(allowed))}")


def _pack_dense(payload: DenseModels) -> dict[str, NDArray[Any]]:
    return {"models": payload.models.detach().to("cpu", torch.float32).numpy()}


def _unpack_dense(arrays: Mapping[str, Array], clients: int, parameters: torch.Tensor) -> Payload:
    only_keys(arrays, ["models"])
    return DenseModels(tensor(unpack(arrays["models"], "models", "<f4", (clients, parameters.numel()))))


def _join_dense(payloads: Sequence[Any], order: Sequence[int]) -> Payload:
    return DenseModels(torch.cat([cast(DenseModels, payload).models for payload in payloads])).select(order)


register(
    Codec(
        kind="dense",
        payload=DenseModels,
        pack=_pack_dense,
        unpack=_unpack_dense,
        join=_join_dense,
        largest=lambda clients, parameters: 4 * clients * parameters.numel() + 4096,
    )
)
