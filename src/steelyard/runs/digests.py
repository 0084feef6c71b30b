"""Digests of a round's updates and models, for the chain: taken on threads, on a GPU beside the next round's work."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.algorithms.settings import algorithm_table
from steelyard.messages.payloads import Payload
from steelyard.messages.updates import Signed, Updates
from steelyard.proof.signing import DIGEST_BYTES, model_digest, salted_digest, server_salt, task_digest
from steelyard.rounds.state import Federation, RoundRecord, RoundState, States

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
    updates: bytes | None = None
    """Salted SHA-256 of each client's update, 32 bytes each, clients in order; None where none was taken."""
    task: str | None = None
    """SHA-256 of what the clients were asked, in hexadecimal digits; None where nobody was."""
    salts: bytes | None = None
    """16 bytes for each client; None where nodes keep them to themselves."""
    signed: tuple[Signed, ...] = ()
    """What nodes signed."""
    clients: tuple[str, ...] = ()
    """Whose digests `updates` are."""


@dataclass(frozen=True, eq=False)
class _Work:
    """What the digests of one federation's round are taken of; the rest of its record is not kept alive."""

    record: RoundRecord
    clients: tuple[str, ...]
    payload: Payload | None
    signed: tuple[Signed, ...]
    parameters: torch.Tensor

    @classmethod
    def of(cls, record: RoundRecord, payload: Payload | None, state: RoundState, *, single: bool) -> _Work:
        updates = record.updates
        clients = updates.clients if single and updates is not None else ()
        signed = () if updates is None else updates.signed  # in every round: what a node has proof of stays
        kept = RoundRecord(record.federation, record.round, 0.0, loss=record.loss, vectors=record.vectors)
        return cls(kept, clients, payload, signed, state.parameters)


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
        self._secret = ""
        self._asked: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self._models: dict[str, str] = {}

    def register(self, federations: Sequence[Federation]) -> None:
        """Say whose rounds will come."""
        self._asked = {one.name: (one.seed, algorithm_table(one.algorithm)) for one in federations}

    def go_on(self, secret: str, models: Mapping[str, str]) -> None:
        """Say what salts are made from, and the digests of the models that the federations go on from."""
        self._secret, self._models = secret, dict(models)

    def take(self, round: int, records: Sequence[RoundRecord], states: States, *, single: bool) -> None:
        """Begin with the digests of a round; those of the round before are waited for. `single`: of updates too."""
        self._wait()
        work = [
            _Work.of(r, self._hashable(r.updates) if single else None, states[r.federation], single=single)
            for r in records
        ]
        asked = {r.federation for r in records if r.updates is not None and (r.updates.clients or r.updates.failures)}
        if not any(each.parameters.is_cuda for each in work):
            self._taken += [self._digest(each, asked) for each in work]
            return
        ready = torch.cuda.Event()
        ready.record()

        def beside() -> list[Digest]:
            # A stream of its own: on the default one the copy would wait for the next round's training, and hold it up.
            stream = torch.cuda.Stream()
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                return [self._digest(each, asked) for each in work]

        self._beside = self._beside or ThreadPoolExecutor(1, "digests")
        self._under_way = self._beside.submit(beside)
        payloads = [dense for each in work if each.payload is not None and (dense := each.payload.dense) is not None]
        if not all(payload.at_hand and payload.like.is_cuda for payload in payloads):
            self._wait()  # A matrix too large for the GPU, or on other ranks, is not held beside the next one.

    def _hashable(self, updates: Updates | None) -> Payload | None:
        if updates is None or set(updates.clients) <= {name for one in updates.signed for name in one.digests}:
            return None  # Whoever checked a node's signature has taken the digest.
        payload, steps = updates.payload.dense, updates.steps
        if self._every or payload is None:
            return updates.payload
        here = payload.at_hand and not payload.like.is_cuda
        long = here and steps is not None and len(steps) > 0 and steps.mean() >= MANY_STEPS
        return payload if long or payload.nbytes <= FEW_BYTES else None

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

    def _digest(self, work: _Work, asked: set[str]) -> Digest:
        record, before = work.record, self._models.get(work.record.federation)
        task = None
        if before is not None and record.loss is not None and record.federation in asked & self._asked.keys():
            vectors = {name: model_digest(vector) for name, vector in record.vectors.items()}
            seed, algorithm = self._asked[record.federation]
            task = task_digest(record.federation, seed, record.round, record.loss, algorithm, before, vectors)
        model = self._models[record.federation] = model_digest(work.parameters)
        updates, salts = self._singly(work)
        return Digest(record.federation, record.round, model, updates, task, salts, work.signed, work.clients)

    def _singly(self, work: _Work) -> tuple[bytes | None, bytes | None]:
        """Return the digest and the salt of each client's update: as its node signed them, or taken here."""
        record = work.record
        digests = {name: digest for one in work.signed for name, digest in one.digests.items()}
        salts = {name: salt for one in work.signed for name, salt in one.salts.items()}
        content = None if work.payload is None else work.payload.content()
        if content is not None:
            secret, here = self._secret, (record.federation, record.round)
            own = [salts[name] if name in salts else server_salt(secret, *here, name) for name in work.clients]
            return b"".join(self._hashed(own, content)), b"".join(own)
        if not digests.keys() & set(work.clients):
            return None, None
        taken = b"".join(digests.get(name, bytes(DIGEST_BYTES)) for name in work.clients)
        whole = salts.keys() >= set(work.clients)
        return taken, b"".join(salts[name] for name in work.clients) if whole else None

    def _hashed(self, salts: Sequence[bytes], content: Sequence[NDArray[np.generic]]) -> Sequence[bytes]:
        if len(content) < 2 or sum(part.nbytes for part in content) < SMALL * len(content):
            return list(map(update_digest, salts, content))
        self._pool = self._pool or ThreadPoolExecutor(THREADS, "digests")
        return list(self._pool.map(update_digest, salts, content))


def update_digest(salt: bytes, part: NDArray[np.generic]) -> bytes:
    """Return the digest of one client's update, as `Payload.content` gives it."""
    return salted_digest(salt, part.reshape(-1).data)
