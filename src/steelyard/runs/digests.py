"""Digests of a round's updates and models, for the chain: taken on threads, on a GPU beside the next round's work."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.messages import DenseModels, Payload, Updates
from steelyard.rounds.state import RoundRecord, RoundState

SMALL = 1 << 16
"""Up to this many bytes a client, threads cost more than they save."""
FEW_BYTES, MANY_STEPS = 1 << 20, 100
"""In a simulation, updates are hashed up to so many bytes a round, or, on the CPU, after so many local steps a client:
else hashing would take as long as training. Nobody could claim another update there than the seed gives again."""
THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Digest:
    """What the chain holds of one federation's round beside its figures."""

    federation: str
    round: int
    model: str
    """SHA-256 of the model that the round ended with, in hexadecimal digits."""
    updates: bytes | None
    """SHA-256 of each client's update, 32 bytes each, clients in order; None where there are no single updates."""


class Digests:
    """Takes the digests of rounds: `take` each round, `collect` before the chain is extended.

    On the CPU a round's digests are there when `take` returns, since the memory of its updates is used again. From a
    GPU the model is copied and hashed while the next round trains; only one round is ever under way. `every` takes the
    digests of all updates, as where clients are across machines; without it, only where that is cheap beside training.
    """

    def __init__(self, *, every: bool = False) -> None:
        self._every = every
        self._pool: ThreadPoolExecutor | None = None
        self._beside: ThreadPoolExecutor | None = None
        self._under_way: Future[list[Digest]] | None = None
        self._taken: list[Digest] = []

    def take(
        self, round: int, records: Sequence[RoundRecord], states: Mapping[str, RoundState], *, single: bool
    ) -> None:
        """Begin with the digests of a round; those of the round before are waited for. `single`: of updates too."""
        self._wait()
        # Payloads and models only: the rest of a record is not kept alive.
        work = [(r.federation, self._hashable(r.updates) if single else None, states[r.federation]) for r in records]
        if not any(state.parameters.is_cuda for _, _, state in work):
            self._taken += [self._digest(round, *each) for each in work]
            return
        ready = torch.cuda.Event()
        ready.record()

        def beside() -> list[Digest]:
            # A stream of its own: on the default one the copy would wait for the next round's training, and hold it up.
            stream = torch.cuda.Stream()
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                return [self._digest(round, *each) for each in work]

        self._beside = self._beside or ThreadPoolExecutor(1, "digests")
        self._under_way = self._beside.submit(beside)
        if any(isinstance(payload, DenseModels) and not payload.models.is_cuda for _, payload, _ in work):
            self._wait()  # A matrix too large for the GPU is not held beside the next one.

    def _hashable(self, updates: Updates | None) -> Payload | None:
        if updates is None or self._every or not isinstance(updates.payload, DenseModels):
            return None if updates is None else updates.payload
        models, steps = updates.payload.models, updates.steps
        long = not models.is_cuda and steps is not None and len(steps) > 0 and steps.mean() >= MANY_STEPS
        return updates.payload if long or models.nbytes <= FEW_BYTES else None

    def collect(self) -> list[Digest]:
        """Return all digests since the last call; waits for those that are under way."""
        self._wait()
        found, self._taken = self._taken, []
        return found

    def close(self) -> None:
        """End the threads; what is under way is left."""
        for pool in (self._pool, self._beside):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    def _wait(self) -> None:
        if self._under_way is not None:
            self._taken += self._under_way.result()
            self._under_way = None

    def _digest(self, round: int, federation: str, payload: Payload | None, state: RoundState) -> Digest:
        content = None if payload is None else payload.content()
        updates = None if content is None else b"".join(self._hashed(content))
        return Digest(federation, round, model_digest(state.parameters), updates)

    def _hashed(self, content: Sequence[NDArray[np.generic]]) -> Sequence[bytes]:
        if len(content) < 2 or sum(part.nbytes for part in content) < SMALL * len(content):
            return list(map(_sha256, content))
        self._pool = self._pool or ThreadPoolExecutor(THREADS, "digests")
        return list(self._pool.map(_sha256, content))


def model_digest(parameters: torch.Tensor) -> str:
    """Return the SHA-256 of a model's numbers, float32 and little-endian, in hexadecimal digits."""
    return hashlib.sha256(parameters.detach().cpu().contiguous().numpy().data).hexdigest()


def _sha256(part: NDArray[np.generic]) -> bytes:
    return hashlib.sha256(part.reshape(-1).data).digest()
