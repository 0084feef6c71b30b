"""Bytes between the two processes of a node: a small JSON head and named pieces, nothing that could be code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def write_frame(head: Mapping[str, Any], pieces: Mapping[str, bytes]) -> bytes:
    """Return a head and pieces as one run of bytes; `read_frame` is the inverse."""
    sizes = {name: len(piece) for name, piece in pieces.items()}
    text = json.dumps({"head": dict(head), "sizes": sizes}).encode()
    return b"".join([len(text).to_bytes(8, "big"), text, *pieces.values()])


def read_frame(frame: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the head and the pieces of a frame."""
    start = 8 + int.from_bytes(frame[:8], "big")
    document = json.loads(frame[8:start])
    pieces: dict[str, bytes] = {}
    for name, size in document["sizes"].items():
        pieces[name] = frame[start : start + size]
        start += size
    return document["head"], pieces
