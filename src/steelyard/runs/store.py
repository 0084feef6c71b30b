"""Writing a run: rounds into SQLite, states into checkpoints, both as whole rounds."""

from __future__ import annotations

import fcntl
import hashlib
import json
import sqlite3
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from steelyard.algorithms.settings import AlgorithmSettings
from steelyard.base import files
from steelyard.base.errors import MachineError, UserError, told_as
from steelyard.base.files import BESIDE, DATABASE
from steelyard.base.tallies import SUM
from steelyard.messages.updates import Answer, Evaluations, Floats, Updates
from steelyard.privacy.ledger import Ledger
from steelyard.proof.signing import SigningKey, fingerprint, model_digest
from steelyard.proof.statements import SealedRound
from steelyard.rounds.plan import RoundValues
from steelyard.rounds.state import Federation, RoundRecord, Snapshot, States
from steelyard.runs import chain, checkpoint
from steelyard.runs.checkpoint import FOLDER, TensorFiles
from steelyard.runs.columns import KEYS, NUMBERS, WHOLE, pack
from steelyard.runs.database import close_log, connect, reading
from steelyard.runs.digests import Digest, Digests
from steelyard.runs.facts import RunFacts, closing_problem, fact, facts_hash, write_closing
from steelyard.runs.kept_updates import Kept, keep_round
from steelyard.runs.schema import WRITE, declared
from steelyard.runs.signatures import bad_signature
from steelyard.weighing.rule import WeighingSettings
from steelyard.weighing.words import show_priority

_BEGUN = "SELECT 1 FROM rounds LIMIT 1"
_NAMED_FILES = "SELECT file FROM checkpoints"
_FORGET = "DELETE FROM checkpoints WHERE round NOT IN (SELECT round FROM checkpoints ORDER BY round DESC LIMIT ?)"


class Store:
    """The writer of one run folder; implements the loop's `Recorder`. Only one process may hold it at a time."""

    def __init__(
        self,
        folder: Path,
        checkpoint_every: int = 1,
        clients_every: int = 1,
        *,
        every_digest: bool = False,
        keep_models: bool = True,
        signer: SigningKey | None = None,
        keep_updates: Kept | None = None,
    ) -> None:
        self.folder = folder
        self.checkpoint_every = checkpoint_every
        self.clients_every = clients_every
        self.keep_models = keep_models
        """False: checkpoints hold no models, for federations that others run and go on with."""
        self.signer = signer
        """The key that signs the heads of the chain and what closes it; None: nobody does."""
        self.keep_updates: Kept | None = keep_updates
        """How the updates of every round are kept; None: not at all."""
        self.ledger: Ledger | None = None
        """The privacy ledger of a run that has one, set before its first round: the chain holds how far it has come."""
        self._digests, self._chained = Digests(every=every_digest), -1
        self._facts = ""
        """The hash of all facts as they stand in the database; empty where it is to be computed again."""
        self._tensors = TensorFiles(folder)
        files.check_run(folder)
        with told_as(f"{folder}: cannot be written", "a writable folder", kind=MachineError):
            folder.mkdir(parents=True, exist_ok=True)
            files.make_folder(folder / FOLDER)
        self._lock = held(folder)
        try:
            self._db = connect(folder, write=True)
            with reading(folder) as connection:
                connection.check_tables()
            with self._reading():
                self._rows = RoundRows(self._db)
                # Nothing that was written before is covered; a run that differs is never closed as if it did not.
                self._sound = not self.begun or not closing_problem(self._db)
        except UserError:
            self._lock.close()
            raise
        self._records = chain.Records(self._db)

    def register(self, federations: Sequence[Federation]) -> None:
        """Name the federations of this run; on a resume they are already there."""
        with self._writing("its rules"), self._db:
            self._rows.register(federations)
        self._digests.register(federations)

    def note(self, facts: RunFacts) -> None:
        """Write those facts about the run that are given, in place of what was noted before."""
        with self._writing("its status"), self._db:
            self._note(facts)
            self._close_record()

    def accept(self, changes: Sequence[str], facts: RunFacts) -> None:
        """Note beside facts of how it goes on what was no longer as it began, and was accepted now or before."""
        self.note(RunFacts(accepted=self._noted("accepted", changes)).also(facts))

    def _noted(self, name: str, lines: Sequence[str]) -> list[str]:
        """Return the lines of a fact and further ones."""
        return list(dict.fromkeys((*json.loads(fact(self._db, name) or "[]"), *lines)))

    def value(self, values: Mapping[tuple[str, int], Sequence[RoundValues]], source: str) -> None:
        """Write what clients added, by federation and round, where it was found out after the run."""
        with self._writing("what clients added"), self._db:
            for (federation, round), found in values.items():
                self._rows.value(federation, round, found, source)

    def _note(self, facts: RunFacts) -> None:
        self._facts = ""
        self._db.executemany(WRITE["info"], facts.texts().items())

    def _close_record(self) -> None:
        """Write the closing record anew, in the same transaction as what it covers."""
        if self._sound:
            self._facts = self._facts or facts_hash(self._db)
            write_closing(self._db, self.signer, self._facts)

    @contextmanager
    def _reading(self) -> Generator[None]:
        """Turn damaged pages into one line."""
        try:
            yield
        except sqlite3.Error as error:
            raise UserError(f"{self.folder / DATABASE}: damaged: {error}") from error

    @contextmanager
    def _writing(self, what: str) -> Generator[None]:
        """Turn a full disk, a folder that became read-only or damaged pages into one line; what is whole stays."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            self._facts = ""  # what was noted last may have been taken back
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            kept = f"; rounds written before are kept, `steelyard resume {self.folder}` goes on once that is mended"
            raise MachineError(
                f"{self.folder}: {what} cannot be written: {reason}{kept if self.begun else ''}"
            ) from error

    def commit(
        self, round: int, records: Sequence[RoundRecord], states: States, snapshot: Snapshot, *, last: bool
    ) -> None:
        """Make a round durable: the checkpoint file first, then everything else in one transaction."""
        due = last or round % self.checkpoint_every == 0
        single = last or round % self.clients_every == 0
        self._digests.take(round, records, states, single=single)
        kept_states = states if self.keep_models else checkpoint.without_models(states)
        packed = checkpoint.pack(kept_states, snapshot()) if due else None
        with self._writing(f"round {round}"):
            keep_as = self.keep_updates
            sent = None if keep_as is None else keep_round(self.folder, round, records, states, keep_as)
            # The last one is whole: a finished run is one database with one file beside it.
            kept = None if packed is None else self._tensors.keep(round, *packed, whole=last)
            # A round without a checkpoint may be lost with the power: it is repeated. One with a checkpoint may not.
            self._db.execute(f"PRAGMA synchronous={'NORMAL' if kept is None else 'FULL'}")
            with self._db:
                for record in records:
                    self._rows.write(record, single=single)
                self._rows.end(states)
                mark = (None, None) if self.ledger is None else astuple(self.ledger.mark())
                self._db.execute(WRITE["chain"], (round, *mark, sent, None, None, None))
                if kept is not None:
                    self._rows.digest(self._digests.collect())
                    head = self._records.extend(self._chained, round, self.signer)
                    self._db.execute(WRITE["checkpoints"], (*kept, head))
                    self._db.execute(_FORGET, (checkpoint.KEPT,))
                    self._close_record()
            if kept is not None:
                self._chained = round
                self.sweep()

    def sealed(self, round: int) -> SealedRound | None:
        """Return a round of the chain with what proofs about it need; None where it has no head yet."""
        return self._records.sealed(round)

    def sweep(self) -> None:
        """Remove checkpoint files that no row names, once the rows are in the database file itself.

        Until then the log holds them, and a log that loses its tail must not leave the database with rows of files
        that are gone. A reader may hold the log up: then the files go after a later round.
        """
        with self._writing("what is kept"):
            _, written, moved = self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if written != moved:
                return
            named = {file for (file,) in self._db.execute(_NAMED_FILES)}
            try:
                named |= {older for file in named for older in self._tensors.needed(file)}
            except UserError:
                return  # which files a damaged checkpoint needs is not known
            for name in files.names_in(self.folder / FOLDER):
                if name not in named and files.CHECKPOINT_NAME.fullmatch(name.removesuffix(files.DRAFT)):
                    files.remove(self.folder / FOLDER / name)

    def resume(self, *, accept: bool = False) -> checkpoint.Restored:
        """Return what to go on from and forget what was written after it; empty for a run without a checkpoint.

        The database was checked page by page when it was opened. Here follow missing rounds, the checkpoint's checksum,
        the chain with its closing record, and signatures. Where the last checkpoint is damaged, the one before is
        taken. `accept` goes on where rounds are missing or changed or no checkpoint is sound, and notes what differed;
        for a run that keeps a privacy ledger the chain must be whole.
        """
        with self._reading():
            restored = checkpoint.restore(self._db, self.folder, accept=accept)
            restored = self._as_chained(restored, accept=accept)
        self._sound = True
        with self._writing("where it goes on from"), self._db:
            self._note(chain.ledger_seen(self._db))
            if accept and restored.problems:
                self._note(RunFacts(differed=self._noted("differed", restored.problems)))
        self.forget_after(restored.round)
        self._chained = restored.round
        models = {name: model_digest(state.parameters) for name, state in restored.states.items()}
        self._digests.go_on(fact(self._db, chain.SALT) or "", models)
        self._tensors.start_from(restored.loaded)
        return restored

    def forget_after(self, round: int) -> None:
        """Forget all rounds after one, which has a checkpoint or is the one before the first."""
        with self._writing("where it goes on from"), self._db:
            for table in (table for table, columns in declared().items() if "round" in columns):
                self._db.execute(f"DELETE FROM {table} WHERE round > ?", (round,))
            self._close_record()

    def _as_chained(self, restored: checkpoint.Restored, *, accept: bool) -> checkpoint.Restored:
        """Hold rounds, ledger and models against the chain; a difference that is accepted is noted as a problem."""
        checked = check_deeply(self._db, self.folder, [restored], checkpoints=False)
        chain.require_whole(checked, self.folder, accept=accept)
        return replace(restored, problems=(*restored.problems, checked.problem)) if checked.problem else restored

    def finish(self, facts: RunFacts | None = None) -> None:
        """Note that the run is at its end; the checkpoint before the last one is not needed any more."""
        with self._writing("its end"):
            self._db.execute("PRAGMA synchronous=FULL")
            with self._db:
                self._note((facts or RunFacts()).also(RunFacts(status="finished")))
                self._db.execute(_FORGET, (1,))
                self._close_record()
            self.sweep()

    @property
    def begun(self) -> bool:
        """Whether any round was written, as far as the database can tell."""
        try:
            return self._db.execute(_BEGUN).fetchone() is not None
        except sqlite3.Error:
            return True

    def close(self) -> None:
        """Close the database and let another process have the folder."""
        self._digests.close()
        if not self._lock.closed:
            close_log(self._db)
            self._db.close()
            self._lock.close()


def check_deeply(
    db: sqlite3.Connection, folder: Path, kept: Iterable[checkpoint.Restored], *, checkpoints: bool = True
) -> chain.Checked:
    """Hold a run against its chain, its signatures and the digests of its models: for whoever goes on from it."""
    found = chain.check(db, folder, checkpoints=checkpoints)
    problem = found.problem or bad_signature(db, range(found.round + 1))
    for name, round, same in (model for one in kept if not problem for model in one.models(db)):
        if not same:
            problem = problem or f"the checkpoint's model of {name} is not the one that round {round} ended with"
    return replace(found, problem=problem)


def add_values(folder: Path, values: Mapping[tuple[str, int], Sequence[RoundValues]], source: str) -> str:
    """Write values, by name of the federation and round, into the folder of a run; say why where that is not possible.

    A run that another process writes, or one on a medium that cannot be written, stays as it is.
    """
    try:
        store = Store(folder)
    except UserError as error:
        return str(error)
    with closing(store):
        store.value(values, source)
    return ""


def tidy(folder: Path) -> None:
    """Make a finished run one database file with one checkpoint again, where it was killed at the very end.

    On a medium that cannot be written it stays as it is.
    """
    beside = [folder / (DATABASE + ending) for ending in BESIDE]
    if any(map(files.is_file, beside)) or len(files.names_in(folder / FOLDER)) > 1:
        with suppress(UserError), closing(Store(folder)) as store:
            store.sweep()


def held(folder: Path) -> BinaryIO:
    """Take a run's folder for this process until the file that is returned is closed."""
    with told_as(f"{folder}: cannot be written", "a writable folder", kind=MachineError):
        lock = files.open_lock(folder / files.LOCK)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise MachineError(f"{folder}: another process is writing this run; wait for it or stop it first") from None
    return lock


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


def _packed(answer: Answer) -> dict[str, bytes]:
    """Return what the database has of an answer's columns; whole numbers that may be unknown are stored as any."""
    found: dict[str, bytes] = {}
    for name, column in answer.columns().items():
        if column.stored and (values := getattr(answer, name)) is not None:
            whole = np.issubdtype(column.kind, np.integer) and column.told == "always"
            found[column.stored] = pack(values[0] if column.axes == (1,) else values, WHOLE if whole else NUMBERS)
    return found


def _sums(answer: Evaluations) -> dict[str, Floats]:
    """Return the sums of the first candidate by name, as `History.tallies` reads them, without those that are 0."""
    if answer.tallies is None:
        return {}
    first = answer.tallies[0]
    return {f"{SUM}{cell}/{first.shape[1]}": first[:, cell] for cell in np.flatnonzero(first.any(axis=0)).tolist()}


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

    def client(self, name: str) -> int:
        """Return the number of a client, a new one where it is not known yet."""
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
                pack([self.client(client) for client in found.clients], KEYS),
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
                clients = pack([self.client(client) for client in names], KEYS)
                others = b"".join(signed.digests[client] for client in names if client not in there)
                row = (*here, key, clients, others or None, signed.before or None, signed.signature)
                self._db.execute(WRITE["signatures"], row)

    def end(self, states: States) -> None:
        """Write which federations ended because their model exploded, in the round after their last."""
        self._db.executemany(
            _END, [(self._federations[name], s.round + 1, s.ended) for name, s in states.items() if s.ended]
        )

    def _write_updates(self, federation: int, record: RoundRecord, updates: Updates) -> None:
        weighing, sent = record.weighing, _packed(updates)
        measured: tuple[bytes | None, ...] = (None, None, None, None)
        if weighing is not None:
            weights = np.zeros(len(updates.clients)) if record.kept_old else weighing.weights
            measured = (pack(weighing.scores), pack(weights), pack(weighing.raw), pack(weighing.normalised))
        clients = pack([self.client(client) for client in updates.clients], KEYS)
        row = (clients, sent["samples"], sent.get("bytes"), sent["loss"], *measured, sent.get("listening"))
        here = (federation, record.round)
        if updates.clients:
            self._db.execute(WRITE["updates"], (*here, *row))
        answered = set(updates.clients)
        left_out = [failure for failure in updates.failures if failure.client not in answered]
        self._db.executemany(
            WRITE["failures"], [(*here, self.client(failure.client), failure.reason) for failure in left_out]
        )

    def _write_evaluations(self, federation: int, round: int, answer: Evaluations) -> None:
        figures = {**answer.metrics, **_sums(answer)}
        names = list(figures)
        kept = _packed(answer)
        row = (
            pack([self.client(client) for client in answer.clients], KEYS),
            *(kept["samples"], kept["score"], kept["loss"], json.dumps(names)),
            pack([figures[name] for name in names]) if names else None,
        )
        if answer.clients:
            self._db.execute(WRITE["evaluations"], (federation, round, *row))
        self._db.executemany(
            WRITE["untested"],
            [(federation, round, self.client(failure.client), failure.reason) for failure in answer.failures],
        )
        if answer.right is not None:
            bits = np.packbits(answer.right).tobytes()
            self._db.execute(WRITE["samples"], (federation, round, bits, len(answer.right)))
