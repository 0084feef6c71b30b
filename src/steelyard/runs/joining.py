"""Making the folder of a run: from its parts as they are set up, or from the rounds of several folders.

A folder is a run, whole, or it is none.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from steelyard.base import files
from steelyard.base.errors import MachineError, UserError, told_as
from steelyard.base.files import BESIDE, DATABASE, sync_folder, sync_tree
from steelyard.proof.signing import SigningKey
from steelyard.rounds.state import Federation, RoundState
from steelyard.runs.chain import Records
from steelyard.runs.checkpoint import FOLDER, TensorFiles, last_checkpoint, pack
from steelyard.runs.columns import KEYS, unpack
from steelyard.runs.columns import pack as pack_column
from steelyard.runs.database import BROKEN, Reader, close_log, connect, exists, known, reading, unreadable
from steelyard.runs.facts import RunFacts, write_closing
from steelyard.runs.kept_updates import join_kept
from steelyard.runs.schema import WRITE, declared
from steelyard.runs.store import RoundRows, Store, held


def set_up(
    folder: Path,
    texts: Mapping[str, str],
    facts: RunFacts,
    federations: Sequence[Federation],
    made: Iterable[str] = (),
    fill: Callable[[Path], None] | None = None,
) -> None:
    """Make a folder a run: texts by file name, facts, rules. All of it is there, on the disk, or the folder is no run.

    The database comes last, in one rename, and a folder without it is no run; what a set-up that was killed has left
    behind is replaced. `made` are further files and folders in it that are of this run: flushed with the rest, and
    removed with it where the set-up fails. `fill` writes rounds into the draft of the folder, which it is given.
    """
    with told_as(f"{folder}: cannot be written", "a writable folder with room on the disk", kind=MachineError):
        fresh = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        own = {*made, *(name for name in texts if not (folder / name).exists())}
        files.check_run(folder)
        with held(folder):
            if exists(folder):
                raise UserError(f"{folder}: holds a run already; allowed: a new folder, or `steelyard resume {folder}`")
            try:
                for name in made:
                    sync_tree(folder / name)
                _put_together(folder, texts, facts, federations, fill)
            except BaseException:
                if not exists(folder):
                    discard(folder, own)
                raise
        if fresh:
            sync_folder(folder.parent)


def _put_together(
    folder: Path,
    texts: Mapping[str, str],
    facts: RunFacts,
    federations: Sequence[Federation],
    fill: Callable[[Path], None] | None,
) -> None:
    draft = folder / files.SET_UP
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    with closing(Store(draft)) as store:
        store.register(federations)
        store.note(facts)
    if fill is not None:
        fill(draft)
    with (draft / DATABASE).open("rb") as file:
        os.fsync(file.fileno())
    for name, text in texts.items():
        files.write(folder / name, text.encode())
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    for name in (FOLDER, files.UPDATES):
        if (draft / name).exists():
            (draft / name).replace(folder / name)
    for ending in BESIDE:
        # They would be taken for a part of the new database.
        (folder / (DATABASE + ending)).unlink(missing_ok=True)
    sync_folder(folder)
    (draft / DATABASE).replace(folder / DATABASE)
    sync_folder(folder)
    shutil.rmtree(draft, ignore_errors=True)


def discard(folder: Path, made: Iterable[str]) -> None:
    """Take back what `set_up` made, where a run fails before its first round: its folder is free again.

    Other files in the folder stay, and so does the folder then.
    """
    with suppress(OSError):
        for ending in ("", *BESIDE):
            (folder / (DATABASE + ending)).unlink(missing_ok=True)
        for name in (*made, files.LOCK, files.SET_UP, FOLDER):
            if (folder / name).is_dir() and not (folder / name).is_symlink():
                shutil.rmtree(folder / name, ignore_errors=True)
            else:
                (folder / name).unlink(missing_ok=True)
        folder.rmdir()


_TABLES = ("rounds", "updates", "failures", "evaluations", "untested", "samples", "contributions", "digests", "ended")
"""In the order in which a run writes them: clients get the numbers that one run would have given them."""
_SINGLE = ("updates", "failures")
"""What is written of single clients, not in every round."""
_HERE = "WHERE federation = ? AND round = ?"


@dataclass(frozen=True, eq=False)
class _Part:
    """One part as it is read."""

    folder: Path
    reader: Reader
    federations: Mapping[str, tuple[Any, ...]]
    clients: Mapping[int, str]

    @classmethod
    def of(cls, folder: Path, reader: Reader) -> _Part:
        rows = reader.rows("federations", tuple(declared()["federations"]), "ORDER BY id")
        return cls(folder, reader, {row[1]: row for row in rows}, dict(reader.rows("clients", ("id", "name"))))

    def copied(self, table: str, federation: str, round: int, number: Callable[[str], int]) -> Iterator[dict[str, Any]]:
        """Yield the rows of a federation's round by column, with the numbers that clients have elsewhere."""
        columns = tuple(declared()[table])
        where = f"{_HERE} {'ORDER BY client' if 'client' in columns else ''}"
        for row in self.reader.rows(table, columns, where, self.federations[federation][0], round):
            values: dict[str, Any] = dict(zip(columns, row, strict=True))
            if "clients" in values:
                keys = unpack([values["clients"]], [len(values["clients"]) // 4], KEYS).tolist()
                names = [known(self.clients, one, "client") for one in keys]
                values["clients"] = pack_column([number(name) for name in names], KEYS)
            if "client" in values:
                values["client"] = number(known(self.clients, values["client"], "client"))
            yield values


def join_rounds(
    folder: Path, parts: Sequence[Path], names: Sequence[str], clients_every: int, signer: SigningKey | None
) -> None:
    """Write the rounds of all parts into a new run, with the chain and the checkpoint of a run made at once.

    `names` are the federations in the order of the whole; `clients_every` is the experiment's.
    """
    with ExitStack() as stack:
        readers = [stack.enter_context(reading(part)) for part in parts]
        db = stack.enter_context(closing(connect(folder, write=True)))
        with db:
            last = _copy(db, folder, list(map(_Part.of, parts, readers)), names, clients_every)
            head = Records(db).extend(-1, last, signer)
            states: dict[str, RoundState] = {}
            kept: dict[str, Tensor] = {}
            for reader, part in zip(readers, parts, strict=True):
                found = last_checkpoint(reader, part)
                states |= found.states
                kept |= found.kept
            tensors, text = pack({name: states[name] for name in names}, kept)
            db.execute(WRITE["checkpoints"], (*TensorFiles(folder).keep(last, tensors, text, whole=True), head))
            write_closing(db, signer)
        close_log(db)


def _copy(
    db: sqlite3.Connection, folder: Path, parts: Sequence[_Part], names: Sequence[str], clients_every: int
) -> int:
    """Copy all rounds of all federations; returns the last round."""
    rows = RoundRows(db)
    holds = {name: part for part in parts for name in part.federations}
    numbers = {name: number for number, name in enumerate(names, 1)}
    for name, number in numbers.items():
        db.execute(WRITE["federations"], (number, *holds[name].federations[name][1:]))
    last = max(round for part in parts for (round,) in part.reader.rows("chain", ("round",)))
    for round in range(last + 1):
        # A part that ends early writes its last round with every client; one run would not have.
        single = round == last or round % clients_every == 0
        for name, number in numbers.items():
            part = holds[name]
            for table in _TABLES:
                if not single and table in _SINGLE:
                    continue
                # Marks are made again with the chain; without single clients, digests are of models alone.
                left = ("marks",) if single else ("marks", "updates", "salts")
                try:
                    for values in part.copied(table, name, round, rows.client):
                        values |= {"federation": number, **dict.fromkeys(left if table == "digests" else ())}
                        db.execute(WRITE[table], tuple(values.values()))
                except (*BROKEN, ValueError) as error:
                    raise unreadable(part.folder, error) from error
        sent = join_kept([part.folder for part in parts], folder, round)
        db.execute(WRITE["chain"], (round, None, None, sent, None, None, None))
    return last
