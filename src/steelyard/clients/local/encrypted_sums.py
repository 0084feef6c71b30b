"""Homomorphic encryption among simulated clients: they share a key, and the server adds what it cannot read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from steelyard.base.logs import doing
from steelyard.messages.updates import Failure, Floats
from steelyard.privacy.encryption import CkksKeys
from steelyard.privacy.hidden import FixedPoint, Grid, Summed, check_weights
from steelyard.privacy.paillier import Packing, PaillierKeys
from steelyard.privacy.settings import AggregationSettings

if TYPE_CHECKING:
    from steelyard.clients.local.hidden_simulation import Absent, WeightedSteps


class EncryptedSums:
    """One round under a scheme that adds ciphertexts; the keys are the run's, the clients share them.

    Nothing has to be shared out or opened together: whoever drops out is missing from the sum, and that is all.
    """

    def __init__(
        self, steps: WeightedSteps, keys: PaillierKeys | CkksKeys, settings: AggregationSettings, absent: Absent
    ):
        self._steps, self._keys, self._settings, self._absent = steps, keys, settings, absent

    def sum(self, clients: Sequence[str], weights: Floats) -> Summed:
        """Let each client encrypt w·Δ, add up the ciphertexts on the server, and let a client decrypt the sum."""
        gone = self._absent("mask", self._steps.round)
        stayed = [row for row, name in enumerate(clients) if name not in gone]
        survivors = tuple(clients[row] for row in stayed)
        check_weights(survivors, weights[stayed], self._settings)
        keys = self._keys
        with doing(f"encrypting {len(stayed)} updates"):
            total, size, step = (self._paillier if isinstance(keys, PaillierKeys) else self._ckks)(
                [(clients[row], float(weights[row])) for row in stayed]
            )
        dropped = tuple(Failure(name, "dropped out before its update arrived") for name in clients if name in gone)
        return Summed(total, survivors, dropped, dict.fromkeys(survivors, size), step)

    def _values(self, client: str, weight: float) -> Floats:
        return self._steps.of([client], np.array([weight]), 0, self._steps.size)[0]

    def _paillier(self, parts: Sequence[tuple[str, float]]) -> tuple[Floats, int, float]:
        keys = self._keys
        assert isinstance(keys, PaillierKeys)
        encoding = FixedPoint.of(self._settings.word_bits, self._settings.bound, self._steps.cohort)
        packing = Packing(encoding, self._settings.modulus_bits)
        totals: list[int] = []
        for client, weight in parts:
            sent = keys.encrypt_all(packing.pack(self._values(client, weight)))
            totals = [keys.public.add(a, b) for a, b in zip(totals, sent, strict=True)] if totals else sent
        opened = keys.decrypt_all(totals)
        total = packing.unpack(opened, self._steps.size, len(parts))
        return total, len(totals) * keys.public.cipher_bytes, encoding.step

    def _ckks(self, parts: Sequence[tuple[str, float]]) -> tuple[Floats, int, float]:
        keys = self._keys
        assert isinstance(keys, CkksKeys)
        totals: list[bytes] = []
        size = 0
        for client, weight in parts:
            sent = keys.encrypt(self._values(client, weight))
            size = max(size, sum(map(len, sent)))
            totals = keys.public.add([totals, sent]) if totals else sent
        return keys.decrypt(totals), size, 2.0**-keys.grid.places


def make_keys(settings: AggregationSettings, clients: int) -> PaillierKeys | CkksKeys:
    """Return keys for cohorts of at most so many clients; made once a run, among the clients."""
    if settings.kind == "paillier":
        return PaillierKeys.generate(settings.modulus_bits)
    return CkksKeys(Grid.of(settings.bound, clients))
