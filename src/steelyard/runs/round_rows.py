"""One round of one federation as rows of the database: what was decided, what clients sent, how they tested."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from steelyard.algorithms.settings import AlgorithmSettings
from steelyard.messages.updates import Evaluations, Updates
from steelyard.proof.signing import fingerprint
from steelyard.rounds.contributions import RoundValues
from steelyard.rounds.state import Federation, RoundRecord, States
from steelyard.runs.columns import KEYS, WHOLE, pack
from steelyard.runs.digests import Digest
from steelyard.runs.schema import WRITE
from steelyard.weighing.rule import WeighingSettings, show_priority

_CLIENTS = "SELECT name, id FROM clients"
_NEW_CLIENT = "INSERT INTO clients (name) VALUES (?)"
_FEDERATIONS = "SELECT name, id FROM federations"
# What was written first holds: the chain covers it.
_REGISTER = "INSERT OR IGNORE INTO federations (name, rule, seed, settings, algorithm) VALUES (?, ?, ?, ?, ?)"
_END = "INSERT OR IGNORE INTO ended VALUES (?, ?, ?)"  # the first end of a federation holds


def _stored(settings: WeighingSettings) -> str:
    """Write a rule with its code by what it says, not by where it lies.

    The chain covers it, and the same run in another folder must have the same chain.
    """
    algorithm: AlgorithmSettings | None = getattr(settings, "algorithm", None)
    update: dict[str, object] = {"plugins": _by_content(settings.plugins)}
    if algorithm is not None:
        update["algorithm"] = algorithm.model_copy(update={"plugins": _by_content(algorithm.plugins)})
    return settings.model_copy(update=update).model_dump_json()


def _by_content(plugins: Sequence[str]) -> tuple[str, ...]:
    """Return a file as the SHA-256 of its text; a module that is installed keeps its name."""
    return tuple(
        f"sha256:{hashlib.sha256(Path(source).read_bytes()).hexdigest()}" if source.endswith(".py") else source
        for source in plugins
    )


def _sent(record: RoundRecord, asked: int) -> tuple[float | None, float | None]:
    """Return the bytes from clients and to them; unknown where others run the federation and say neither."""
    each, updates = record.bytes_each, record.updates
    known = updates is not None and (each is not None or updates.bytes_sent is not None)
    up = updates.bytes_up if updates is not None and known else None
    return None if up is None else float(up), None if each is None else float(each * asked)


class RoundRows:
    """Writes rounds inside a transaction that the store holds; names of clients and federations become keys."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._clients: dict[str, int] = dict(db.execute(_CLIENTS))
        self._federations: dict[str, int] = dict(db.execute(_FEDERATIONS))
        self._criteria: dict[str, tuple[str, ...]] = {}

    def register(self, federations: Sequence[Federation]) -> None:
        """Name the federations whose rounds will be written."""
        for federation in federations:
            settings = _stored(federation.rule.settings)
            self._db.execute(
                _REGISTER, (federation.name, federation.rule_name, federation.seed, settings, federation.algorithm.name)
            )
            self._criteria[federation.name] = federation.rule.names
        self._federations = dict(self._db.execute(_FEDERATIONS))

    def _client(self, name: str) -> int:
        key = self._clients.get(name)
        if key is None:
            key = self._db.execute(_NEW_CLIENT, (name,)).lastrowid
            assert key is not None
            self._clients[name] = key
        return key

    def write(self, record: RoundRecord, *, single: bool) -> None:
        """Write one round of one federation; `single` keeps what each client sent beside what was made of it."""
        federation = self._federations[record.federation]
        criteria = self._criteria[record.federation]
        weighing, updates = record.weighing, record.updates
        answered = 0 if updates is None else len(updates.clients)
        asked = 0 if updates is None else answered + len({failure.client for failure in updates.failures})
        tried = [[show_priority(order, criteria), accuracy] for order, accuracy in record.tried]
        self._db.execute(
            WRITE["rounds"],
            (
                federation,
                record.round,
                record.accuracy,
                show_priority(record.order, criteria) if record.order else None,
                json.dumps(tried),
                record.tests,
                asked,
                answered,
                int(record.kept_old),
                json.dumps([] if weighing is None else weighing.all_zero),
                int(weighing is not None and weighing.uniform),
                json.dumps({} if record.loss is None else asdict(record.loss)),
                record.server_accuracy,
                record.server_macro_f1,
                json.dumps(record.server_metrics) if record.server_metrics else None,
                record.seconds,
                record.simulated,
                record.epsilon,
                record.cpu,
                record.gpu,
                *_sent(record, asked),
            ),
        )
        if single and updates is not None:
            self._write_updates(federation, record, updates)
        if record.evaluations is not None:
            self._write_evaluations(federation, record.round, record.evaluations)
        self.value(record.federation, record.round, record.contributions, "run")

    def value(self, federation: str, round: int, values: Sequence[RoundValues], source: str) -> None:
        """Write what each client added in a round, and what that was made from."""
        for found in values:
            row = (
                pack([self._client(client) for client in found.clients], KEYS),
                *(pack(found.values), pack(found.error), pack(found.sizes, WHOLE), found.before, found.after),
            )
            here = (self._federations[federation], round, found.measure, found.method, source)
            self._db.execute(WRITE["contributions"], (*here, *row))

    def digest(self, digests: Sequence[Digest]) -> None:
        """Write the digests of rounds."""
        for each in digests:
            here = (self._federations[each.federation], each.round)
            self._db.execute(WRITE["digests"], (*here, each.model, each.task, each.updates, each.salts, None))
            there = set(each.clients) if each.updates is not None else set[str]()
            for signed in each.signed:
                key, names = fingerprint(signed.key), sorted(signed.digests)
                self._db.execute(WRITE["keys"], (key, signed.key))
                clients = pack([self._client(client) for client in names], KEYS)
                others = b"".join(signed.digests[client] for client in names if client not in there)
                row = (*here, key, clients, others or None, signed.before or None, signed.signature)
                self._db.execute(WRITE["signatures"], row)

    def end(self, states: States) -> None:
        """Write which federations ended because their model exploded, in the round after their last."""
        self._db.executemany(
            _END, [(self._federations[name], s.round + 1, s.ended) for name, s in states.items() if s.ended]
        )

    def _write_updates(self, federation: int, record: RoundRecord, updates: Updates) -> None:
        weighing, sent = record.weighing, updates.bytes_sent
        measured: tuple[bytes | None, ...] = (None, None, None, None)
        if weighing is not None:
            weights = np.zeros(len(updates.clients)) if record.kept_old else weighing.weights
            measured = (pack(weighing.scores), pack(weights), pack(weighing.raw), pack(weighing.normalised))
        row = (
            pack([self._client(client) for client in updates.clients], KEYS),
            pack(updates.samples, WHOLE),
            None if sent is None else pack(sent),
            pack(updates.losses),
            *measured,
            None if updates.listening is None else pack(updates.listening),
        )
        here = (federation, record.round)
        if updates.clients:
            self._db.execute(WRITE["updates"], (*here, *row))
        answered = set(updates.clients)
        left_out = [failure for failure in updates.failures if failure.client not in answered]
        self._db.executemany(
            WRITE["failures"], [(*here, self._client(failure.client), failure.reason) for failure in left_out]
        )

    def _write_evaluations(self, federation: int, round: int, answer: Evaluations) -> None:
        names = list(answer.metrics)
        row = (
            pack([self._client(client) for client in answer.clients], KEYS),
            pack(answer.samples, WHOLE),
            pack(answer.scores[0]),
            pack(answer.losses[0]),
            json.dumps(names),
            pack([answer.metrics[name] for name in names]) if names else None,
        )
        if answer.clients:
            self._db.execute(WRITE["evaluations"], (federation, round, *row))
        self._db.executemany(
            WRITE["untested"],
            [(federation, round, self._client(failure.client), failure.reason) for failure in answer.failures],
        )
        if answer.right is not None:
            bits = np.packbits(answer.right).tobytes()
            self._db.execute(WRITE["samples"], (federation, round, bits, len(answer.right)))
