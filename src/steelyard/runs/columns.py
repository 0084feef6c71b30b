"""What single clients did, a round at a time, as columns of numbers: packed for the database, as arrays for readers."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from steelyard.base.tallies import SUM, Tally, classes_of
from steelyard.messages.updates import Counts, Floats
from steelyard.runs.database import Damaged, Reader

NUMBERS, WHOLE, KEYS = "<f8", "<i8", "<i4"
"""How numbers stand in the database: little-endian, eight bytes each; clients by their number in four."""


_GAPS = 100
"""A database whose numbers of clients are so many times their count is none of ours."""


def pack(values: object, kind: str = NUMBERS) -> bytes:
    """Return numbers as the bytes of one column; what is not finite becomes "unknown" (NaN)."""
    array = np.asarray(values, dtype=kind)
    if kind == NUMBERS and not np.isfinite(array).all():
        array = np.where(np.isfinite(array), array, np.nan).astype(kind)
    return array.tobytes()


def unpack(
    blobs: Sequence[bytes | None], counts: Sequence[int], kind: str = NUMBERS, width: int | None = None
) -> NDArray[Any]:
    """Return the columns of many rounds as one array; a column that a round lacks is unknown throughout.

    A blob of another length than its round's number of clients is damaged: ValueError.
    """
    numbers = 1 if width is None else width
    size = np.dtype(kind).itemsize * numbers
    parts: list[bytes] = []
    for blob, count in zip(blobs, counts, strict=True):
        part = np.full(count * numbers, np.nan, np.dtype(kind)).tobytes() if blob is None else blob
        if len(part) != size * count:
            raise ValueError("a stored column has another length than its round has clients")
        parts.append(part)
    found = np.frombuffer(b"".join(parts), dtype=kind)
    if (np.isinf(found) if kind == NUMBERS else found < 0).any():
        raise ValueError("a stored column holds a number below zero, or one that is not finite")
    return found if width is None else found.reshape(-1, width)


def runs_of(ascending: Counts) -> tuple[Counts, Counts]:
    """Return (each value once, the place of each entry's value among them); for ascending values, without sorting."""
    new = np.diff(ascending, prepend=-1) > 0  # rounds are from 0 on
    return ascending[new], np.cumsum(new) - 1


def spread(rows: Counts, columns: Counts, shape: tuple[int, int], values: Floats) -> Floats:
    """Return values [n] or [n, k] as a table [rows, columns] or [rows, columns, k], NaN where there is none."""
    table = np.full((*shape, *values.shape[1:]), np.nan)
    table[rows, columns] = values
    return table


def as_table(round: Counts, client: Counts, clients: int, values: Floats) -> tuple[Counts, Floats]:
    """Return (rounds, values [rounds, clients]) of entries that are ordered by round, then client."""
    if clients and len(round) % clients == 0:
        shape, rounds = (len(round) // clients, clients), round[::clients]
        whole = (round.reshape(shape) == rounds[:, None]).all() and (client.reshape(shape) == np.arange(clients)).all()
        if whole:
            return rounds, values.reshape(shape)  # nobody is missing
    rounds, where = runs_of(round)
    return rounds, spread(where, client, (len(rounds), clients), values)


def sampled(count: int, limit: int) -> NDArray[np.int64]:
    """Return at most `limit` positions among `count`, evenly spaced, the first and the last among them."""
    if count <= limit:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, limit).round().astype(np.int64))


@dataclass(frozen=True, eq=False)
class Cohorts:
    """What the clients of one federation sent and were given, as arrays: an entry per round and client that answered.

    Use it where a data frame of every client and round would be slow; entries are ordered by round, then client.
    """

    clients: tuple[str, ...]
    """Names of all clients that answered, ascending; `client` counts in here."""
    criteria: tuple[str, ...]
    round: Counts
    client: Counts
    samples: Counts
    loss: Floats
    """Mean training loss; NaN where it is not finite."""
    score: Floats
    weight: Floats
    bytes: Floats
    """Size of the answer; NaN where nothing was sent."""
    raw: Floats
    """[entries, criteria]: as measured."""
    normalised: Floats
    """[entries, criteria]: after normalising over the cohort."""

    @property
    def rounds(self) -> Counts:
        """The rounds that have entries, ascending."""
        return self._rounds[0]

    @cached_property
    def _rounds(self) -> tuple[Counts, Counts]:
        return runs_of(self.round)

    def table(self, values: Floats | Counts) -> Floats:
        """Return a column as [rounds, clients], criteria as [rounds, clients, criteria]; NaN for clients not there."""
        rounds, where = self._rounds
        shape = (len(rounds), len(self.clients))
        return spread(where, self.client, shape, np.asarray(values, dtype=np.float64))

    def by_round(self) -> Iterator[tuple[int, slice, tuple[str, ...]]]:
        """Yield every round with its entries and the clients that they are of."""
        ends = np.searchsorted(self.round, self.rounds, side="right").tolist()
        for round, begin, end in zip(self.rounds.tolist(), [0, *ends], ends, strict=False):
            yield round, slice(begin, end), tuple(self.clients[at] for at in self.client[begin:end].tolist())


@dataclass(frozen=True, eq=False)
class Tested:
    """How the combined model did at the clients of one federation, as arrays: an entry per round and client tested."""

    clients: tuple[str, ...]
    round: Counts
    client: Counts
    samples: Counts
    score: Floats
    loss: Floats
    metrics: Mapping[str, Floats]
    """Further figures by name; NaN in rounds that lack one."""


EntriesT = TypeVar("EntriesT", Cohorts, Tested)


def entry_columns(entries: Cohorts | Tested) -> list[str]:
    """Name the arrays that have one entry for each round and client."""
    return [name for name, value in vars(entries).items() if isinstance(value, np.ndarray)]


def between(found: EntriesT, after: int, last: int | None = None) -> EntriesT:
    """Return the entries of the rounds after one, up to another, or all later ones; nothing is copied."""
    begin = int(np.searchsorted(found.round, after, side="right"))
    end = len(found.round) if last is None else int(np.searchsorted(found.round, last, side="right"))
    return cut(found, slice(begin, end))


def cut(found: EntriesT, kept: NDArray[np.bool_] | slice) -> EntriesT:
    """Return some of the entries, with the names of their clients alone, as a reader of those rounds would."""
    if kept == slice(0, len(found.round)) if isinstance(kept, slice) else bool(kept.all()):
        return found
    some = {name: getattr(found, name)[kept] for name in entry_columns(found)}
    there = np.bincount(some["client"], minlength=len(found.clients)) > 0  # without sorting: entries may be millions
    if not there.all():
        some |= {"client": (np.cumsum(there) - 1)[some["client"]]}
        some |= {"clients": tuple(name for name, one in zip(found.clients, there, strict=True) if one)}
    if isinstance(found, Tested):
        some["metrics"] = {name: values[kept] for name, values in found.metrics.items()}
    return replace(found, **some)


def ranked(keys: Counts, names: Mapping[int, str]) -> tuple[tuple[str, ...], Counts]:
    """Return (names ascending, index of each key's name in them) for clients given by their number."""
    # Numbers of clients are small and without gaps, so that a table of them takes no sorting.
    few = not len(keys) or int(keys.max()) > _GAPS * len(names)
    distinct = np.unique(keys) if few else np.flatnonzero(np.bincount(keys))
    try:
        known = [names[int(key)] for key in distinct]
    except KeyError as error:
        raise ValueError(f"client number {error} has no name") from None
    order = sorted(range(len(known)), key=known.__getitem__)
    rank = np.empty(len(known), np.int64)
    rank[order] = np.arange(len(known))
    if few:
        return tuple(known[index] for index in order), rank[np.searchsorted(distinct, keys)]
    ranks = np.zeros(int(distinct[-1]) + 1, np.int64)
    ranks[distinct] = rank
    return tuple(known[index] for index in order), ranks[keys]


_UPDATES = ("round", "clients", "samples", "bytes", "loss", "score", "weight", "raw", "normalised")
_EVALUATIONS = ("round", "clients", "samples", "score", "loss", "metrics", "figures")


def read_cohorts(db: Reader, key: int, where: str, *values: int) -> Cohorts:
    """Return what the clients of one federation sent; `where` asks for its number first, then the values, in order."""
    rounds, who, *columns = _read(db, "updates", _UPDATES, where, key, *values)
    ((settings,),) = db.rows("federations", ("settings",), "WHERE id = ?", key)
    criteria = tuple(json.loads(settings)["criteria"])
    with _told_of(db, "updates", key):
        clients, round, client, order, counts = _entries(db, rounds, who)
        samples = unpack(columns[0], counts, WHOLE)[order]
        size, loss, score, weight = (unpack(column, counts)[order] for column in columns[1:5])
        raw, normalised = (unpack(column, counts, width=len(criteria))[order] for column in columns[5:])
    return Cohorts(clients, criteria, round, client, samples, loss, score, weight, size, raw, normalised)


def read_tested(db: Reader, key: int, where: str, *values: int) -> Tested:
    """Return how the model of one federation did at each client; `where` as above."""
    rounds, who, *columns = _read(db, "evaluations", _EVALUATIONS, where, key, *values)
    with _told_of(db, "evaluations", key):
        clients, round, client, order, counts = _entries(db, rounds, who)
        samples = unpack(columns[0], counts, WHOLE)[order]
        score, loss = (unpack(column, counts)[order] for column in columns[1:3])
        metrics = {name: values[order] for name, values in _metrics(columns[3], columns[4], counts).items()}
        metrics = {name: values for name, values in metrics.items() if not name.startswith(SUM)}
    return Tested(clients, round, client, samples, score, loss, metrics)


def read_sums(db: Reader, key: int, where: str) -> tuple[tuple[str, ...], Tally] | None:
    """Return the clients of one tested round and what their test rows added up to; None where it was not recorded."""
    rounds, who, texts, blobs = _read(db, "evaluations", ("round", "clients", "metrics", "figures"), where, key)
    with _told_of(db, "evaluations", key):
        clients, _, _, order, counts = _entries(db, rounds, who)
        found = {name: one for name, one in _metrics(texts, blobs, counts).items() if name.startswith(SUM)}
        if not found:
            return None
        places = np.array([[int(part) for part in name.removeprefix(SUM).split("/")] for name in found])
        cell, (count, *others) = places[:, 0], np.unique(places[:, 1]).tolist()
        if others or classes_of(count) < 0 or cell.min() < 0 or cell.max() >= count:
            raise ValueError(f"sums such as '{next(iter(found))}' are not of one table")
        cells = np.zeros((len(clients), count))
        cells[:, cell] = np.stack([values[order] for values in found.values()], axis=1)
    return clients, Tally(cells)


def read_scores(db: Reader, key: int, where: str, *values: int) -> tuple[Counts, Floats]:
    """Return (rounds, scores [rounds, clients]) of one federation's tests, much faster than all that `Tested` holds."""
    rounds, who, blobs = _read(db, "evaluations", ("round", "clients", "score"), where, key, *values)
    with _told_of(db, "evaluations", key):
        if len(set(who)) == 1:
            # The same clients in every round: one look at them is enough, and much faster in a long history.
            _check_ascending(rounds)
            clients, _, _, order, counts = _entries(db, rounds[:1], who[:1])
            if counts == [len(clients)]:
                table = unpack(blobs, counts * len(rounds)).reshape(len(rounds), len(clients))
                return np.array(rounds, dtype=np.int64), table[:, order]
        clients, round, client, order, counts = _entries(db, rounds, who)
        score = unpack(blobs, counts)[order]
    return as_table(round, client, len(clients), score)


def _read(db: Reader, table: str, names: Sequence[str], where: str, *values: int) -> list[tuple[Any, ...]]:
    """Return what a table holds of the rounds that are named, a tuple for each column."""
    return list(zip(*db.rows(table, names, where, *values), strict=True)) or [()] * len(names)


@contextmanager
def _told_of(db: Reader, table: str, key: int) -> Generator[None]:
    """Name the federation whose columns are damaged."""
    try:
        yield
    except ValueError as error:
        rule, seed = db.federations()[key]
        raise Damaged(f"{table} of {rule}, seed {seed}: {error}") from error


def _check_ascending(rounds: Sequence[int]) -> None:
    if any(later <= earlier for earlier, later in pairwise(rounds)):
        raise ValueError("rounds come twice, or out of order")


def _entries(
    db: Reader, rounds: tuple[int, ...], blobs: tuple[bytes, ...]
) -> tuple[tuple[str, ...], Counts, Counts, Counts | slice, list[int]]:
    """Return names, round and name's index of each entry in order, that order, and the entries of each round."""
    _check_ascending(rounds)
    counts = [len(blob) // 4 for blob in blobs]
    # Where the same clients come in every round, one look at them is enough.
    again = len(blobs) if len(set(blobs)) == 1 else 1
    few = len(blobs) // again
    keys = unpack(blobs[:few], counts[:few], KEYS).astype(np.int64)
    round = np.repeat(np.array(rounds, dtype=np.int64), counts)
    # After the columns: a round that was written meanwhile may bring names, never take one away.
    clients, client = ranked(keys, dict(db.rows("clients", ("id", "name"))))
    client = np.tile(client, again)
    # A run writes clients in ascending order: then a long history needs no sorting.
    sorted_already = bool(((np.diff(client) > 0) | (np.diff(round) > 0)).all())
    order = slice(None) if sorted_already else np.lexsort((client, round))
    return clients, round[order], client[order], order, counts


def _metrics(texts: tuple[str, ...], blobs: tuple[bytes | None, ...], counts: list[int]) -> dict[str, Floats]:
    found: dict[str, Floats] = {}
    begin, total = 0, sum(counts)
    for text, blob, count in zip(texts, blobs, counts, strict=True):
        names: list[str] = json.loads(text) if text != "[]" else []
        if names:
            figures = unpack([blob], [count], width=len(names)).reshape(len(names), count)
            for name, values in zip(names, figures, strict=True):
                found.setdefault(name, np.full(total, np.nan))[begin : begin + count] = values
        begin += count
    return found
