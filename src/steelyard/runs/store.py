"""Writing a run: rounds into SQLite, states into checkpoints, both as whole rounds."""

from __future__ import annotations

import fcntl
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from steelyard.errors import UserError
from steelyard.messages import Evaluations, Updates
from steelyard.rounds.state import Federation, RoundRecord, RoundState
from steelyard.runs import checkpoint
from steelyard.runs.columns import KEYS, WHOLE, pack
from steelyard.runs.schema import DATABASE, connect
from steelyard.weighing.rule import show_priority

_TABLES = ("rounds", "updates", "failures", "untested", "evaluations", "samples")


class Store:
    """The writer of one run folder; implements the loop's `Recorder`. Only one process may hold it at a time."""

    def __init__(self, folder: Path, checkpoint_every: int = 1, clients_every: int = 1) -> None:
        self.folder = folder
        self.checkpoint_every = checkpoint_every
        self.clients_every = clients_every
        try:
            (folder / checkpoint.FOLDER).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder}: cannot be written: {error.strerror}; allowed: a writable folder") from error
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(f"{folder}: another process is writing this run; wait for it or stop it first") from None
        self._db = connect(folder, write=True)
        self._federations: dict[str, int] = {}
        self._criteria: dict[str, tuple[str, ...]] = {}
        self._clients: dict[str, int] = {name: key for key, name in self._db.execute("SELECT id, name FROM clients")}

    def register(self, federations: Sequence[Federation]) -> None:
        """Name the federations of this run; on a resume they are already there."""
        with self._db:
            for federation in federations:
                settings = federation.rule.settings.model_dump_json()
                self._db.execute(
                    "INSERT OR IGNORE INTO federations (name, rule, seed, settings) VALUES (?, ?, ?, ?)",
                    (federation.name, federation.rule_name, federation.seed, settings),
                )
                self._criteria[federation.name] = federation.rule.names
        self._federations = {name: key for key, name in self._db.execute("SELECT id, name FROM federations")}

    def note(self, **info: object) -> None:
        """Write facts about the run (status, engine, versions) where readers find them."""
        try:
            self._note(info)
        except sqlite3.OperationalError as error:
            raise UserError(f"{self.folder}: cannot be written: {error}; allowed: a folder with room") from error

    def _note(self, info: Mapping[str, object]) -> None:
        with self._db:
            rows = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in info.items()]
            self._db.executemany("INSERT OR REPLACE INTO info VALUES (?, ?)", rows)

    def commit(
        self,
        round: int,
        records: Sequence[RoundRecord],
        states: Mapping[str, RoundState],
        snapshot: Callable[[], Mapping[str, torch.Tensor]],
        *,
        last: bool,
    ) -> None:
        """Make a round durable: the checkpoint file first, then everything else in one transaction."""
        try:
            self._commit(round, records, states, snapshot, last=last)
        except (OSError, sqlite3.OperationalError) as error:
            raise UserError(
                f"{self.folder}: round {round} cannot be stored: {getattr(error, 'strerror', None) or error}; what was "
                f"stored before is whole: make room and `steelyard resume {self.folder}`"
            ) from error

    def _commit(
        self,
        round: int,
        records: Sequence[RoundRecord],
        states: Mapping[str, RoundState],
        snapshot: Callable[[], Mapping[str, torch.Tensor]],
        *,
        last: bool,
    ) -> None:
        kept: tuple[int, str, str] | None = None
        if last or round % self.checkpoint_every == 0:
            tensors, text = checkpoint.pack(states, snapshot())
            file = f"round-{round:06d}.safetensors"
            checkpoint.write_tensors(self.folder / checkpoint.FOLDER / file, tensors)
            kept = (round, file, text)
        with self._db:
            for record in records:
                self._write(record, single=last or round % self.clients_every == 0)
            if kept is not None:
                self._db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", kept)
                self._db.execute("DELETE FROM checkpoints WHERE round < ?", (round,))
        if kept is not None:
            self._sweep(kept[1])

    def _sweep(self, current: str) -> None:
        for path in (self.folder / checkpoint.FOLDER).iterdir():
            if path.name != current:
                path.unlink(missing_ok=True)

    def resume(self) -> tuple[dict[str, RoundState], dict[str, torch.Tensor]]:
        """Return the states of the last checkpoint and forget what was written after it; empty for a fresh run."""
        after, states, kept = checkpoint.last_checkpoint(self._db, self.folder)
        with self._db:
            for table in _TABLES:
                self._db.execute(f"DELETE FROM {table} WHERE round > ?", (after,))
        return states, kept

    def close(self) -> None:
        """Close the database and let another process have the folder."""
        self._db.close()
        self._lock.close()

    def _client(self, name: str) -> int:
        key = self._clients.get(name)
        if key is None:
            key = self._db.execute("INSERT INTO clients (name) VALUES (?)", (name,)).lastrowid
            assert key is not None
            self._clients[name] = key
        return key

    def _write(self, record: RoundRecord, *, single: bool) -> None:
        federation = self._federations[record.federation]
        criteria = self._criteria[record.federation]
        weighing, updates = record.weighing, record.updates
        answered = 0 if updates is None else len(updates.clients)
        asked = 0 if updates is None else answered + len({failure.client for failure in updates.failures})
        tried = [[show_priority(order, criteria), accuracy] for order, accuracy in record.tried]
        self._db.execute(
            "INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
            ),
        )
        if single and updates is not None:
            self._write_updates(federation, record, updates)
        if record.evaluations is not None:
            self._write_evaluations(federation, record.round, record.evaluations)

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
        )
        here = (federation, record.round)
        if updates.clients:
            self._db.execute("INSERT OR REPLACE INTO updates VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*here, *row))
        answered = set(updates.clients)
        left_out = [failure for failure in updates.failures if failure.client not in answered]
        self._db.executemany(
            "INSERT OR REPLACE INTO failures VALUES (?, ?, ?, ?)",
            [(*here, self._client(failure.client), failure.reason) for failure in left_out],
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
            self._db.execute(
                "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (federation, round, *row)
            )
        self._db.executemany(
            "INSERT OR REPLACE INTO untested VALUES (?, ?, ?, ?)",
            [(federation, round, self._client(failure.client), failure.reason) for failure in answer.failures],
        )
        if answer.right is not None:
            bits = np.packbits(answer.right).tobytes()
            self._db.execute(
                "INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?)", (federation, round, bits, len(answer.right))
            )


def exists(folder: Path) -> bool:
    """Whether a folder holds a run already."""
    return (folder / DATABASE).is_file()
