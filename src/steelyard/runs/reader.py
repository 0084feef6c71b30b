"""Reading a run, also while it is being written: data frames and arrays per round, per client, per evaluation.

pandas is imported inside methods, for speed of start: not everyone who opens a run reads its data frames.
"""

from __future__ import annotations

import copy
import functools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import path_of
from steelyard.messages.updates import Counts, Floats
from steelyard.runs.columns import KEYS, WHOLE, Cohorts, Tested, as_table, ranked, sampled, unpack
from steelyard.runs.facts import START as START
from steelyard.runs.facts import RunFacts
from steelyard.runs.opening import kept_open, reading, unreadable
from steelyard.runs.typed import NEWEST, known

if TYPE_CHECKING:
    import pandas as pd

Run = TypeVar("Run", bound="RunFacts | Path | str")
Given = ParamSpec("Given")
Answer = TypeVar("Answer")

_ROUNDS = (
    *("accuracy", "priority", "tried", "tests", "cohort", "answered", "kept_old", "zero_criteria", "zero_scores"),
    *("loss", "server_accuracy", "server_macro_f1", "server_metrics", "seconds", "simulated", "epsilon"),
    *("cpu", "gpu", "up", "down"),
)
_UPDATES = ("round", "clients", "samples", "bytes", "loss", "score", "weight", "raw", "normalised")
_EVALUATIONS = ("round", "clients", "samples", "score", "loss", "metrics", "figures")
_AFTER = "WHERE round > ? ORDER BY federation, round"
_OF_ONE_AFTER = "WHERE federation = ? AND round > ? ORDER BY round"
_LISTENING = "WHERE federation = ? AND listening IS NOT NULL ORDER BY round"
_SPACED = (
    "WHERE federation = ? AND round > ? AND (round % ? = 0 OR round = (SELECT MAX(round) FROM updates WHERE "
    "federation = ?)) ORDER BY round"
)
LOOKED_AT = 200_000
"""Entries (a round and a client) of one rule and seed that those who draw a run look at, about."""
_ASKED = 10_000
"""Rounds that one question to SQLite names; it allows some more."""


def _check_ascending(rounds: Sequence[int]) -> None:
    if any(later <= earlier for earlier, later in pairwise(rounds)):
        raise ValueError("rounds come twice, or out of order")


def at_once(asks: Callable[Concatenate[Run, Given], Answer]) -> Callable[Concatenate[Run, Given], Answer]:
    """Let a function ask the run that it gets first from one open database; use it where many questions are asked."""

    @functools.wraps(asks)
    def asking(run: Run, *given: Given.args, **named: Given.kwargs) -> Answer:
        folder = run.folder if isinstance(run, RunFacts) else path_of(run, "History", "the folder of a run")
        with kept_open(folder):
            return asks(run, *given, **named)

    return asking


class History(RunFacts):
    """What happened in a run; each data frame is read when it is first asked for, and then kept.

    `rounds` has a row per rule, seed and round; `clients` one per client asked (raw and normalised criteria, score,
    weight, or the reason it was left out); `evaluations` one per client tested. The methods read again at every call:
    `cohorts`, `weights`, `tested` and `scores` give one federation as arrays, which is much faster than frames where
    a run is long, and whatever takes `after` reads only the rounds after that one, for those who follow a run.

        >>> history = steelyard.History("runs/mine")
        >>> history.clients[["round", "client", "weight"]]  # a pandas frame, a row for each client of each round

    Raises:
        UserError: `folder` holds no run, one of another version, or one that was damaged.
    """

    every = 1
    """What single clients sent is read of every so manyth round, and of the last: see `spaced`."""

    def _frame(self, table: str, columns: Sequence[str], after: int) -> pd.DataFrame:
        """Return columns of the rounds after one as a data frame, behind the rule and the seed that they belong to."""
        import pandas as pd

        names = ("federation", "round", *columns)
        with reading(self.folder) as connection:
            rows = connection.rows(table, names, _AFTER, after)
            federations = connection.federations()
            if "client" in columns:
                clients = dict(connection.rows("clients", ("id", "name")))
                at = names.index("client")
                rows = [(*row[:at], known(clients, row[at], "client"), *row[at + 1 :]) for row in rows]
            found = [known(federations, row[0], "federation") for row in rows]
        frame = pd.DataFrame([(*who, *row[1:]) for who, row in zip(found, rows, strict=True)])
        kinds = {"rule": "str", "seed": "int64", "round": "int64", **connection.kinds(table, columns)}
        frame.columns = list(kinds) if len(rows) else frame.columns
        return frame.reindex(columns=list(kinds)).astype(kinds | ({"client": "str"} if "client" in columns else {}))

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per rule, seed and round; round 0 is the first model before any training."""
        return self.rounds_after(START)

    def rounds_after(self, round: int) -> pd.DataFrame:
        """Return the rows of `rounds` after a round, read now: for those who follow a run that goes on."""
        return self._frame("rounds", _ROUNDS, round)

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row per client and round it was asked: raw_X and normalised_X per criterion X, score, weight, failure."""
        return self.clients_after(START)

    def clients_after(self, round: int) -> pd.DataFrame:
        """Return the rows of `clients` after a round, read now."""
        from steelyard.runs.frames import clients_frame

        parts = [((rule, seed), self.cohorts(rule, seed, round)) for rule, seed in self._keys]
        return clients_frame(parts, self.failures_after(round))

    def failures_after(self, round: int = START) -> pd.DataFrame:
        """Return who was asked after a round and left out: rule, seed, round, client, failure (the reason)."""
        return self._reasons("failures", round)

    @cached_property
    def untested(self) -> pd.DataFrame:
        """Who gave no usable test of a round's model: rule, seed, round, client, failure (the reason)."""
        return self._reasons("untested", START)

    def _reasons(self, table: Literal["failures", "untested"], after: int) -> pd.DataFrame:
        frame = self._frame(table, ("client", "reason"), after).rename(columns={"reason": "failure"})
        order = {who: index for index, who in enumerate(self._keys)}
        frame["federation"] = [order[who] for who in zip(frame["rule"], frame["seed"], strict=True)]
        return frame.sort_values(["federation", "round", "client"], ignore_index=True).drop(columns="federation")

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """One row per client and evaluated round: local score and loss of the combined model, further metrics."""
        return self.evaluations_after(START)

    def evaluations_after(self, round: int) -> pd.DataFrame:
        """Return the rows of `evaluations` after a round, read now."""
        from steelyard.runs.frames import evaluations_frame

        return evaluations_frame([((rule, seed), self.tested(rule, seed, round)) for rule, seed in self._keys])

    def cohorts(self, rule: str, seed: int, after: int = START) -> Cohorts:
        """Return what the clients of one federation sent and were given in the rounds after one, as arrays."""
        key, criteria = self._federation(rule, seed)
        columns = self._columns("updates", _UPDATES, key, after)
        try:
            clients, round, client, order, counts = self._who(columns[0], columns[1])
            numbers = [unpack(column, counts)[order] for column in columns[3:7]]
            samples = unpack(columns[2], counts, WHOLE)[order]
            raw, normalised = (unpack(column, counts, width=len(criteria))[order] for column in columns[7:])
        except ValueError as error:
            raise unreadable(self.folder, f"updates of {rule}, seed {seed}: {error}") from error
        size, loss, score, weight = numbers
        return Cohorts(clients, criteria, round, client, samples, loss, score, weight, size, raw, normalised)

    def spaced(self, most: int = LOOKED_AT) -> History:
        """Return the history of a long run with what single clients sent in some rounds, evenly spaced, and the last.

        There are about `most` entries for each rule and seed. Rounds, tests and failures stay whole. Use it to draw.
        """
        every = self.spacing(most)
        if every <= self.every:
            return self
        found = copy.copy(self)
        found.every = every
        vars(found).pop("clients", None)  # read anew: of all rounds it may be there already
        return found

    def spacing(self, most: int) -> int:
        """Return of which rounds `spaced` reads what clients sent: a multiple of what the run itself kept."""
        answered: Counter[int] = Counter()
        for federation, count in self._rows("rounds", ("federation", "answered")):
            answered[federation] += count
        entries = max(answered.values(), default=0)
        if entries <= most:
            return 1
        kept = [round for (round,) in self._rows("updates", ("round",), "WHERE federation = 1 ORDER BY round LIMIT 3")]
        gap = kept[-1] - kept[-2] if len(kept) > 1 else 1
        return gap * -(-entries // (most * gap))

    def _columns(self, table: str, names: Sequence[str], key: int, after: int) -> list[tuple[Any, ...]]:
        """Return what a table holds of a federation's rounds after one, in order, a tuple for each column."""
        spaced = table == "updates" and self.every > 1
        where, more = (_SPACED, (self.every, key)) if spaced else (_OF_ONE_AFTER, ())
        rows = self._rows(table, names, where, key, after, *more)
        return list(zip(*rows, strict=True)) or [()] * len(names)

    def _who(
        self, rounds: tuple[int, ...], blobs: tuple[bytes, ...]
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
        clients, client = ranked(keys, dict(self._rows("clients", ("id", "name"))))
        client = np.tile(client, again)
        # A run writes clients in ascending order: then a long history needs no sorting.
        sorted_already = bool(((np.diff(client) > 0) | (np.diff(round) > 0)).all())
        order = slice(None) if sorted_already else np.lexsort((client, round))
        return clients, round[order], client[order], order, counts

    @cached_property
    def listening(self) -> pd.DataFrame:
        """How clients weighed each other's models for themselves: rule, seed, round, client, hears, weight."""
        from steelyard.runs.frames import listening_frame

        names = dict(self._rows("clients", ("id", "name")))
        parts: list[tuple[str, int, int, list[str], Floats]] = []
        for rule, seed in self._keys:
            key, _ = self._federation(rule, seed)
            for round, clients, blob in self._rows("updates", ("round", "clients", "listening"), _LISTENING, key):
                count = len(clients) // 4
                try:
                    keys = unpack([clients], [count], KEYS).tolist()
                    parts.append(
                        (rule, seed, round, [names[key] for key in keys], unpack([blob], [count], width=count))
                    )
                except (ValueError, KeyError) as error:
                    raise unreadable(self.folder, f"listening of {rule}, seed {seed}: {error}") from error
        return listening_frame(parts)

    def weights(self, rule: str, seed: int, after: int = START) -> tuple[tuple[str, ...], Counts, Floats]:
        """Return (clients, rounds, weights [rounds, clients]) of one federation; NaN where a client did not answer."""
        found = self.cohorts(rule, seed, after)
        return found.clients, found.rounds, found.table(found.weight)

    def tested(self, rule: str, seed: int, after: int = START) -> Tested:
        """Return how the model of one federation did at each client in the rounds after one, as arrays."""
        key, _ = self._federation(rule, seed)
        return self._tests_of(rule, seed, self._columns("evaluations", _EVALUATIONS, key, after))

    def _tests_of(self, rule: str, seed: int, columns: Sequence[tuple[Any, ...]]) -> Tested:
        try:
            clients, round, client, order, counts = self._who(columns[0], columns[1])
            samples = unpack(columns[2], counts, WHOLE)[order]
            score, loss = (unpack(column, counts)[order] for column in columns[3:5])
            metrics = self._metrics(columns[5], columns[6], counts)
        except ValueError as error:
            raise unreadable(self.folder, f"evaluations of {rule}, seed {seed}: {error}") from error
        further = {name: values[order] for name, values in metrics.items()}
        return Tested(clients, round, client, samples, score, loss, further)

    def _metrics(self, texts: tuple[str, ...], blobs: tuple[bytes | None, ...], counts: list[int]) -> dict[str, Floats]:
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

    def tested_at(self, rule: str, seed: int, most: int) -> Tested:
        """Return `tested` without round 0; of a long run some rounds, evenly spaced, about `most` entries."""
        key, _ = self._federation(rule, seed)
        rounds = [round for (round,) in self._rows("evaluations", ("round",), _OF_ONE_AFTER, key, 0)]
        last = len(self.tested(rule, seed, rounds[-1] - 1).round) if rounds else 0
        if last * len(rounds) <= most:
            return self.tested(rule, seed, 0)
        limit = min(_ASKED, max(2, most // last))
        some = tuple(rounds[at] for at in sampled(len(rounds), limit))
        where = f"WHERE federation = ? AND round IN ({', '.join('?' * len(some))}) ORDER BY round"
        rows = self._rows("evaluations", _EVALUATIONS, where, key, *some)
        return self._tests_of(rule, seed, list(zip(*rows, strict=True)))

    def scores(self, rule: str, seed: int, after: int = 0) -> tuple[Counts, Floats]:
        """Return (rounds, local scores [rounds, clients]) of one federation, round 0 left out unless after = -1."""
        key, _ = self._federation(rule, seed)
        rounds, who, blobs = self._columns("evaluations", ("round", "clients", "score"), key, after)
        try:
            if len(set(who)) == 1:
                # The same clients in every round: one look at them is enough, and much faster in a long history.
                _check_ascending(rounds)
                clients, _, _, order, counts = self._who(rounds[:1], who[:1])
                if counts == [len(clients)]:
                    table = unpack(blobs, counts * len(rounds)).reshape(len(rounds), len(clients))
                    return np.array(rounds, dtype=np.int64), table[:, order]
            clients, round, client, order, counts = self._who(rounds, who)
            score = unpack(blobs, counts)[order]
        except ValueError as error:
            raise unreadable(self.folder, f"evaluations of {rule}, seed {seed}: {error}") from error
        return as_table(round, client, len(clients), score)

    def hits(self, rule: str, seed: int) -> NDArray[np.bool_] | None:
        """Return right or wrong for every test sample in the last detailed round, or None when none was recorded."""
        key, _ = self._federation(rule, seed)
        rows = self._rows("samples", ("hits", "count"), NEWEST, key)
        if not rows:
            return None
        bits, count = rows[0]
        if count > 8 * len(bits):
            raise unreadable(self.folder, f"samples of {rule}, seed {seed}: not the bits of their count")
        return np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(np.bool_)
