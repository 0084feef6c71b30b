"""What hiding updates costs: `python -m benchmarks.secure_aggregation [OUT.json] [--parameters N --clients 10,100]`.

Secure aggregation is timed part by part as one client and the server do it, with nobody and with a tenth of the cohort
gone; CKKS for one client and for the server. Times are processor time: on a machine shared with others it
says more than the clock.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.kit import machine, start, whole_numbers
from steelyard.clients.local.encrypted_sums import CkksKeys
from steelyard.privacy.hidden import FixedPoint, Grid
from steelyard.privacy.secure import KEY_SHARES_BYTES, PUBLIC_BYTES, SecureClient, SecureServer
from steelyard.privacy.secure_round import masked_sum
from steelyard.privacy.settings import AggregationSettings
from steelyard.privacy.sharing import SHARE_BYTES

MNIST = 1_663_370
"""Parameters of the papers' network for MNIST."""


class Clock:
    """Processor time since it was last asked."""

    def __init__(self) -> None:
        self._last = time.process_time()

    def lap(self) -> float:
        now = time.process_time()
        passed, self._last = now - self._last, now
        return round(passed, 4)


def secure(count: int, size: int, gone: int) -> dict[str, Any]:
    """Time one round of `count` clients with `size` parameters, `gone` of whom send nothing."""
    settings, context = AggregationSettings(), b"benchmark"
    names = [f"client-{number:03d}" for number in range(count)]
    clock = Clock()
    clients = [SecureClient(name, context, settings) for name in names]
    server = SecureServer(context, settings, "benchmark")
    server.keys = {client.name: client.keys() for client in clients}
    clock.lap()
    for client in clients:
        server.keep_shares(client.name, client.share(server.keys))
    sharing = clock.lap() / count
    for client in clients:
        client.receive(names, server.shares_for(client.name, names))
    receiving = clock.lap() / count
    encoding = FixedPoint.of(settings.word_bits, settings.bound, count)
    step = np.random.default_rng(0).normal(size=size) * 0.01
    clock.lap()
    words = encoding.encode(step / count)
    clients[0].mask(words)
    masking = clock.lap()
    stayed = range(gone, count)
    total = masked_sum(clients, stayed, lambda begin, end: np.tile(words[begin:end], (count, 1)), size, encoding)
    simulated = clock.lap()
    survivors = [names[row] for row in stayed]
    revealed = {name: clients[row].open(survivors) for row, name in zip(stayed, survivors, strict=True)}
    clock.lap()
    plain = server.open(total, names, survivors, revealed)
    opening = clock.lap()
    assert (plain == words * np.uint32(len(survivors))).all(), "the sum is not that of the encodings"
    return {
        "clients": count, "gone": gone, "parameters": size,
        "client_seconds": {"share": round(sharing, 4), "receive": round(receiving, 4), "mask": masking},
        "server_seconds": opening, "simulated_seconds": simulated,
        "client_bytes": size * 4 + PUBLIC_BYTES + (count - 1) * KEY_SHARES_BYTES + count * SHARE_BYTES,
        "client_bytes_received": count * PUBLIC_BYTES + (count - 1) * KEY_SHARES_BYTES, "plain_bytes": size * 4,
    }  # fmt: skip


def ckks(size: int, clients: int) -> dict[str, Any]:
    """Time CKKS on a vector of `size` numbers."""
    clock = Clock()
    keys = CkksKeys(Grid.of(16.0, clients))
    made = clock.lap()
    values = np.random.default_rng(0).normal(size=size) * 0.01
    clock.lap()
    sent = keys.encrypt(values)
    encrypting = clock.lap()
    total = keys.public.add([sent, sent])
    adding = clock.lap()
    opened = keys.decrypt(total)
    decrypting = clock.lap()
    assert (opened == 2 * keys.grid.onto(values)).all(), "the sum is not exact"
    return {
        "parameters": size, "ciphertexts": len(sent), "places": keys.grid.places, "key_seconds": made,
        "encrypt_seconds": encrypting, "add_seconds": adding, "decrypt_seconds": decrypting,
        "client_bytes": sum(map(len, sent)),
    }  # fmt: skip


def main(
    out: Annotated[Path | None, typer.Argument()] = None, parameters: int = MNIST, clients: str = "10,100"
) -> None:
    """Time, print, and write where that is asked."""
    found = {
        "machine": machine(),
        "secure": [secure(count, parameters, gone) for count in whole_numbers(clients) for gone in (0, count // 10)],
        "ckks": [ckks(size, 100) for size in (1_000_000, parameters)],
    }
    text = json.dumps(found, indent=1)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    start(main)
