"""Homomorphic encryption among simulated clients: they share a key, and the server adds what it cannot read.

CKKS (by TenSEAL, on Microsoft SEAL) takes thousands of real numbers in one ciphertext. It is approximate: a decrypted
number carries the noise of the ciphertext, and who sees it beside the ciphertext can work out the key (Li and
Micciancio, 2021). The server sees both here. So clients write their numbers on a grid whose step is far above that
noise, and who decrypts rounds to the grid: what leaves is the exact sum of what went in, whatever the noise was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tenseal
from numpy.typing import NDArray

from steelyard.base.logs import doing
from steelyard.messages.payloads import Summed
from steelyard.messages.updates import Failure, Floats
from steelyard.privacy.hidden import MODULUS_BITS, Grid, check_weights
from steelyard.privacy.settings import AggregationSettings

if TYPE_CHECKING:
    from steelyard.clients.local.hidden_simulation import Absent, WeightedSteps


DEGREE = 8192
"""Degree of the ring; with a modulus of 120 bits far above 128 bits of security, which would allow 218."""
SLOTS = DEGREE // 2
_MODULI = (MODULUS_BITS, 60)  # one for the numbers, one that only keys use: sums need no multiplication


class CkksKeys:
    """The keys of a run's clients; the server gets `public`, which adds ciphertexts and opens none."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._context: Any = tenseal.context(
            tenseal.SCHEME_TYPE.CKKS, poly_modulus_degree=DEGREE, coeff_mod_bit_sizes=list(_MODULI)
        )
        self._context.global_scale = 2.0**grid.scale
        shown: Any = self._context.copy()
        shown.make_context_public()
        self.public = CkksPublic(shown)

    def encrypt(self, values: NDArray[np.floating[Any]]) -> list[bytes]:
        """Return a client's numbers, moved to the grid, as ciphertexts of 4096 each."""
        numbers = self.grid.onto(values)
        parts = [numbers[begin : begin + SLOTS].tolist() for begin in range(0, len(numbers), SLOTS)]
        return [tenseal.ckks_vector(self._context, part).serialize() for part in parts]

    def decrypt(self, sums: Sequence[bytes]) -> NDArray[np.float64]:
        """Return the numbers in ciphertexts, rounded to the grid; refuses what lies between its points."""
        found: Any = [tenseal.ckks_vector_from(self._context, text).decrypt() for text in sums]
        steps = np.concatenate([np.asarray(part, dtype=np.float64) for part in found]) * 2.0**self.grid.places
        whole = np.rint(steps)
        if (np.abs(steps - whole) > 0.25).any():
            # No honest input gives this, and what was decrypted would say something of the key: it stays here.
            raise ValueError("ciphertexts: their sum lies between the points of the grid; allowed: sums of a cohort")
        return whole * 2.0**-self.grid.places


class CkksPublic:
    """What the server knows: enough to add."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def add(self, parts: Sequence[Sequence[bytes]]) -> list[bytes]:
        """Return ciphertexts of the sums of several clients' numbers."""
        totals: list[bytes] = []
        for column in zip(*parts, strict=True):
            total: Any = tenseal.ckks_vector_from(self.context, column[0])
            for text in column[1:]:
                total += tenseal.ckks_vector_from(self.context, text)
            totals.append(total.serialize())
        return totals


class EncryptedSums:
    """One round under CKKS; the keys are the run's, the clients share them.

    Nothing has to be shared out or opened together: whoever drops out is missing from the sum, and that is all.
    """

    def __init__(self, steps: WeightedSteps, keys: CkksKeys, settings: AggregationSettings, absent: Absent):
        self._steps, self._keys, self._settings, self._absent = steps, keys, settings, absent

    def sum(self, clients: Sequence[str], weights: Floats) -> Summed:
        """Let each client encrypt w·Δ, add up the ciphertexts on the server, and let a client decrypt the sum."""
        gone = self._absent("mask", self._steps.round)
        stayed = [row for row, name in enumerate(clients) if name not in gone]
        survivors = tuple(clients[row] for row in stayed)
        check_weights(survivors, weights[stayed], self._settings)
        keys, totals, size = self._keys, list[bytes](), 0
        with doing(f"encrypting {len(stayed)} updates"):
            for row in stayed:
                sent = keys.encrypt(self._steps.of([clients[row]], weights[[row]], 0, self._steps.size)[0])
                size = max(size, sum(map(len, sent)))
                totals = keys.public.add([totals, sent]) if totals else sent
            total = keys.decrypt(totals)
        dropped = tuple(Failure(name, "dropped out before its update arrived") for name in clients if name in gone)
        return Summed(total, survivors, dropped, dict.fromkeys(survivors, size), 2.0**-keys.grid.places)
