"""Bounds on what comes back from one call over HTTP, before it lies in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import httpx

from steelyard.clients.flower.parts import LARGEST_PART, LARGEST_TREE

_PARTS = "/pull-object"
_HEAD = 64 << 10


def bound_answers(client: object, largest: int = LARGEST_TREE + _HEAD) -> None:
    """Let a client of Flower's take no more from one call than a part of a message, or `largest` bytes of all else.

    Answers that are packed (a few MB may unpack to gigabytes) and such that send us elsewhere are not taken at all.
    """
    found: httpx.Client = cast(Any, client)._client
    inner: Any = found
    if not isinstance(inner._transport, _Bounded):
        inner._transport = _Bounded(inner._transport, largest)
        inner._mounts = {url: one and _Bounded(one, largest) for url, one in inner._mounts.items()}


class _Bounded(httpx.BaseTransport):
    def __init__(self, inner: httpx.BaseTransport, largest: int) -> None:
        self._inner, self._largest = inner, largest

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.headers["accept-encoding"] = "identity"
        response = self._inner.handle_request(request)
        packed = response.headers.get("content-encoding", "identity") != "identity"
        if packed or response.is_redirect:
            response.close()
            what = "is packed" if packed else "sends us elsewhere"
            raise httpx.ReadError(f"an answer that {what}; allowed: a plain one", request=request)
        most = LARGEST_PART + _HEAD if request.url.path.endswith(_PARTS) else self._largest
        response.stream = _BoundedStream(cast(httpx.SyncByteStream, response.stream), most, request)
        return response

    def close(self) -> None:
        self._inner.close()


class _BoundedStream(httpx.SyncByteStream):
    def __init__(self, inner: httpx.SyncByteStream, largest: int, request: httpx.Request) -> None:
        self._inner, self._largest, self._request = inner, largest, request

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for piece in self._inner:
            size += len(piece)
            if size > self._largest:
                raise httpx.ReadError(f"an answer of more than {self._largest} bytes", request=self._request)
            yield piece

    def close(self) -> None:
        self._inner.close()
