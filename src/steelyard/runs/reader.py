"""Reading a run, also while it is being written: data frames and arrays per round, per client, per evaluation."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from steelyard.errors import UserError
from steelyard.messages import Counts, Floats
from steelyard.runs.chain import Checked, check
from steelyard.runs.columns import KEYS, WHOLE, Cohorts, Tested, ranked, spread, unpack
from steelyard.runs.schema import read_ended, reading, unreadable

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from steelyard.rounds.state import RoundState

_FEDERATIONS = "SELECT id, rule, seed FROM federations ORDER BY id"
START = -1
"""The round before the first: what comes after it is everything."""


class History:
    """What happened in a run; each data frame is read when it is first asked for, and then kept.

    `rounds` has a row per rule, seed and round; `clients` one per client asked (raw and normalised criteria, score,
    weight, or the reason it was left out); `evaluations` one per client tested. The methods read again at every call:
    `cohorts`, `weights`, `tested` and `scores` give one federation as arrays, which is much faster than frames where
    a run is long, and whatever takes `after` reads only the rounds after that one, for those who follow a run.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        with reading(self.folder):
            pass  # a folder without a run is refused here, not when something is asked

    def _rows(self, query: str, values: tuple[str | int, ...] = ()) -> list[tuple[Any, ...]]:
        with reading(self.folder) as connection:
            return connection.execute(query, values).fetchall()

    def _read(self, query: str, values: tuple[str | int, ...] = ()) -> pd.DataFrame:
        # For speed of start: not everyone who opens a run reads its data frames.
        import pandas as pd

        try:
            with reading(self.folder) as connection:
                return pd.read_sql_query(query, connection, params=list(values))
        except pd.errors.DatabaseError as error:
            # pandas puts the whole query before what SQLite says; its cause is what a user can read.
            raise unreadable(self.folder, error.__cause__ or error) from error

    def json(self, text: str, what: str) -> Any:
        """Return what a stored JSON text holds; use it for the JSON columns, so that a damaged one is named."""
        try:
            return json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise unreadable(self.folder, f"{what} holds no JSON ({error})") from error

    @cached_property
    def info(self) -> dict[str, str]:
        """Facts about the run: status, versions, engine, notes."""
        return {str(key): str(value) for key, value in self._rows("SELECT key, value FROM info")}

    @property
    def last_round(self) -> int:
        """The newest whole round at this moment; -1 before the first. Cheap: ask it to see whether a run moved on."""
        ((found,),) = self._rows("SELECT MAX(round) FROM rounds")
        return START if found is None else int(found)

    @cached_property
    def flaws(self) -> pd.DataFrame:
        """What makes clients worth less than others: seed, client, flaw in words; a row for each flaw of a client."""
        # For speed of start: not everyone who opens a run reads its data frames.
        import pandas as pd

        stored = self.json(self.info.get("flaws", "{}"), "info, flaws")
        try:
            rows = [
                (int(seed), client, words)
                for seed, clients in stored.items()
                for client, every in clients.items()
                for words in every
            ]
        except (ValueError, TypeError, AttributeError) as error:
            raise unreadable(self.folder, f"info, flaws: {error}") from error
        return pd.DataFrame(rows, columns=["seed", "client", "flaw"])

    @cached_property
    def ended(self) -> dict[tuple[str, int], tuple[int, str]]:
        """Which rules ended early because their model exploded: by (rule, seed), the round and the reason."""
        with reading(self.folder) as connection:
            try:
                found = read_ended(connection)
                names = {key: (str(rule), int(seed)) for key, rule, seed in connection.execute(_FEDERATIONS)}
                return {names[key]: said for key, said in found.items()}
            except (KeyError, ValueError, TypeError) as error:
                raise unreadable(self.folder, error) from error

    @cached_property
    def chain(self) -> Checked:
        """The run's chain of rounds, computed again: its head, and what is not as it was written."""
        with reading(self.folder) as connection:
            return check(connection, self.folder)

    def labels(self, seed: int) -> dict[str, list[int]]:
        """Return by client how many training samples it has of each class; empty where the run does not know it."""
        found = self.json(self.info.get("labels", "{}"), "info, labels").get(str(seed), {})
        return {str(client): [int(count) for count in counts] for client, counts in found.items()}

    @cached_property
    def federations(self) -> pd.DataFrame:
        """The rules that ran side by side: name, rule, seed, settings as JSON."""
        return self._read("SELECT name AS federation, rule, algorithm, seed, settings FROM federations ORDER BY id")

    @cached_property
    def _keys(self) -> dict[tuple[str, int], tuple[int, tuple[str, ...]]]:
        """Return the number and the criteria of each federation, by rule and seed; they never change in a run."""
        found = self._rows("SELECT rule, seed, id, settings FROM federations ORDER BY id")
        try:
            return {
                (rule, int(seed)): (int(key), tuple(self.json(text, "federations, settings")["criteria"]))
                for rule, seed, key, text in found
            }
        except (ValueError, TypeError, KeyError) as error:
            raise unreadable(self.folder, f"federations, settings: no criteria ({error!r})") from error

    def _federation(self, rule: str, seed: int) -> tuple[int, tuple[str, ...]]:
        found = self._keys.get((rule, seed))
        if found is None:
            raise UserError(f"{self.folder}: no rule '{rule}' with seed {seed} in this run")
        return found

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per rule, seed and round; round 0 is the first model before any training."""
        return self.rounds_after(START)

    def rounds_after(self, round: int) -> pd.DataFrame:
        """Return the rows of `rounds` after a round, read now: for those who follow a run that goes on."""
        return self._read(
            "SELECT f.rule, f.seed, r.round, accuracy, priority, tried, tests, cohort, answered, kept_old, "
            "zero_criteria, zero_scores, loss, server_accuracy, server_macro_f1, server_metrics, seconds, epsilon "
            "FROM rounds r JOIN federations f ON f.id = r.federation WHERE r.round > ? ORDER BY f.id, r.round",
            (round,),
        )

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row per client and round it was asked: raw_X and normalised_X per criterion X, score, weight, failure."""
        return self.clients_after(START)

    def clients_after(self, round: int) -> pd.DataFrame:
        """Return the rows of `clients` after a round, read now."""
        # For speed of start: pandas.
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
        return self._read(
            f"SELECT f.rule, f.seed, l.round, c.name AS client, l.reason AS failure FROM {table} l "
            "JOIN federations f ON f.id = l.federation JOIN clients c ON c.id = l.client WHERE l.round > ? "
            "ORDER BY f.id, l.round, c.name",
            (after,),
        )

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """One row per client and evaluated round: local score and loss of the combined model, further metrics."""
        return self.evaluations_after(START)

    def evaluations_after(self, round: int) -> pd.DataFrame:
        """Return the rows of `evaluations` after a round, read now."""
        # For speed of start: pandas.
        from steelyard.runs.frames import evaluations_frame

        return evaluations_frame([((rule, seed), self.tested(rule, seed, round)) for rule, seed in self._keys])

    def cohorts(self, rule: str, seed: int, after: int = START) -> Cohorts:
        """Return what the clients of one federation sent and were given in the rounds after one, as arrays."""
        key, criteria = self._federation(rule, seed)
        rows = self._rows(
            "SELECT round, clients, samples, bytes, loss, score, weight, raw, normalised FROM updates "
            "WHERE federation = ? AND round > ? ORDER BY round",
            (key, after),
        )
        columns = list(zip(*rows, strict=True)) or [()] * 9
        try:
            clients, round, client, order, counts = self._who(columns[0], columns[1])
            numbers = [unpack(column, counts)[order] for column in columns[3:7]]
            samples = unpack(columns[2], counts, WHOLE)[order]
            raw, normalised = (unpack(column, counts, width=len(criteria))[order] for column in columns[7:])
        except ValueError as error:
            raise unreadable(self.folder, f"updates of {rule}, seed {seed}: {error}") from error
        size, loss, score, weight = numbers
        return Cohorts(clients, criteria, round, client, samples, loss, score, weight, size, raw, normalised)

    def _who(
        self, rounds: tuple[int, ...], blobs: tuple[bytes, ...]
    ) -> tuple[tuple[str, ...], Counts, Counts, Counts, list[int]]:
        """Return names, round and name's index of each entry in order, that order, and the entries of each round."""
        counts = [len(blob) // 4 if type(blob) is bytes else 0 for blob in blobs]
        keys = unpack(blobs, counts, KEYS).astype(np.int64)
        round = np.repeat(np.array(rounds, dtype=np.int64), counts)
        # After the columns: a round that was written meanwhile may bring names, never take one away.
        clients, client = ranked(keys, dict(self._rows("SELECT id, name FROM clients")))
        order = np.lexsort((client, round))
        return clients, round[order], client[order], order, counts

    def weights(self, rule: str, seed: int, after: int = START) -> tuple[tuple[str, ...], Counts, Floats]:
        """Return (clients, rounds, weights [rounds, clients]) of one federation; NaN where a client did not answer."""
        found = self.cohorts(rule, seed, after)
        return found.clients, found.rounds, found.table(found.weight)

    def tested(self, rule: str, seed: int, after: int = START) -> Tested:
        """Return how the model of one federation did at each client in the rounds after one, as arrays."""
        key, _ = self._federation(rule, seed)
        rows = self._rows(
            "SELECT round, clients, samples, score, loss, metrics, figures FROM evaluations "
            "WHERE federation = ? AND round > ? ORDER BY round",
            (key, after),
        )
        columns = list(zip(*rows, strict=True)) or [()] * 7
        try:
            clients, round, client, order, counts = self._who(columns[0], columns[1])
            samples = unpack(columns[2], counts, WHOLE)[order]
            score, loss = (unpack(column, counts)[order] for column in columns[3:5])
            metrics = self._metrics(columns[5], columns[6], counts)
        except (ValueError, TypeError) as error:
            raise unreadable(self.folder, f"evaluations of {rule}, seed {seed}: {error}") from error
        further = {name: values[order] for name, values in metrics.items()}
        return Tested(clients, round, client, samples, score, loss, further)

    def _metrics(self, texts: tuple[str, ...], blobs: tuple[bytes | None, ...], counts: list[int]) -> dict[str, Floats]:
        found: dict[str, Floats] = {}
        begin, total = 0, sum(counts)
        for text, blob, count in zip(texts, blobs, counts, strict=True):
            names: list[str] = self.json(text, "evaluations, metrics") if text != "[]" else []
            if names:
                figures = unpack([blob], [count], width=len(names)).reshape(len(names), count)
                for name, values in zip(names, figures, strict=True):
                    found.setdefault(name, np.full(total, np.nan))[begin : begin + count] = values
            begin += count
        return found

    def scores(self, rule: str, seed: int, after: int = 0) -> tuple[Counts, Floats]:
        """Return (rounds, local scores [rounds, clients]) of one federation, round 0 left out unless after = -1."""
        found = self.tested(rule, seed, after)
        rounds = np.unique(found.round)
        shape = (len(rounds), len(found.clients))
        return rounds, spread(np.searchsorted(rounds, found.round), found.client, shape, found.score)

    def hits(self, rule: str, seed: int) -> NDArray[np.bool_] | None:
        """Return right or wrong for every test sample in the last detailed round, or None when none was recorded."""
        rows = self._rows(
            "SELECT hits, count FROM samples s JOIN federations f ON f.id = s.federation "
            "WHERE f.rule = ? AND f.seed = ? ORDER BY s.round DESC LIMIT 1",
            (rule, seed),
        )
        if not rows:
            return None
        bits, count = rows[0]
        if type(bits) is not bytes or type(count) is not int or not 0 <= count <= 8 * len(bits):
            raise unreadable(self.folder, f"samples of {rule}, seed {seed}: not the bits of their count")
        return np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(np.bool_)

    def last_checkpoint(self) -> tuple[dict[str, RoundState], dict[str, Tensor]]:
        """Return the states of the last checkpoint and what the clients keep in it; both empty before the first."""
        # For speed of start: most readers of a run never look at its models, and those need torch.
        from steelyard.runs.checkpoint import last_checkpoint

        with reading(self.folder) as connection:
            found = last_checkpoint(connection, self.folder)
        return found.states, found.kept
