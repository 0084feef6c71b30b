"""Reading a run, also while it is being written: data frames per round, per client, per evaluation."""

from __future__ import annotations

import json
import sqlite3
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from steelyard.errors import UserError
from steelyard.runs.schema import connect

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from steelyard.rounds.state import RoundState


class History:
    """What happened in a run; each data frame is read when it is first asked for.

    `rounds` has a row per rule, seed and round; `clients` one per client asked (raw and normalised criteria, score,
    weight, or the reason it was left out); `evaluations` one per client tested.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        connect(self.folder, write=False).close()

    def _read(self, query: str, values: tuple[str | int, ...] = ()) -> pd.DataFrame:
        # For speed of start: not everyone who opens a run reads its data frames.
        import pandas as pd

        connection = connect(self.folder, write=False)
        try:
            return pd.read_sql_query(query, connection, params=list(values))
        except (sqlite3.DatabaseError, pd.errors.DatabaseError) as error:
            # pandas puts the whole query before what SQLite says; its cause is what a user can read.
            reason = error.__cause__ or error
            raise UserError(f"{self.folder}: the run's database cannot be read: {reason}") from error
        finally:
            connection.close()

    @cached_property
    def info(self) -> dict[str, str]:
        """Facts about the run: status, versions, engine, notes."""
        return dict(self._read("SELECT key, value FROM info").itertuples(index=False, name=None))

    @cached_property
    def flaws(self) -> pd.DataFrame:
        """What makes clients worth less than others: seed, client, flaw in words; a row for each flaw of a client."""
        # For speed of start: not everyone who opens a run reads its data frames.
        import pandas as pd

        rows = [
            (int(seed), client, words)
            for seed, clients in json.loads(self.info.get("flaws", "{}")).items()
            for client, every in clients.items()
            for words in every
        ]
        return pd.DataFrame(rows, columns=["seed", "client", "flaw"])

    @cached_property
    def federations(self) -> pd.DataFrame:
        """The rules that ran side by side: name, rule, seed, settings as JSON."""
        return self._read("SELECT name AS federation, rule, seed, settings FROM federations ORDER BY id")

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per rule, seed and round; round 0 is the first model before any training."""
        return self._read(
            "SELECT f.rule, f.seed, r.round, accuracy, priority, tried, tests, cohort, answered, kept_old, "
            "zero_criteria, zero_scores, loss, server_accuracy, server_macro_f1, server_metrics, seconds "
            "FROM rounds r JOIN federations f ON f.id = r.federation ORDER BY f.id, r.round"
        )

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row per client and round it was asked: raw_X and normalised_X per criterion X, score, weight, failure."""
        # For speed of start: not everyone who opens a run reads its data frames.
        import pandas as pd

        frame = self._read(
            "SELECT f.rule, f.seed, u.round, c.name AS client, samples, loss, raw, normalised, score, weight, "
            "bytes, failure FROM updates u JOIN federations f ON f.id = u.federation JOIN clients c ON c.id = u.client "
            "ORDER BY f.id, u.round, c.name"
        )
        names: dict[tuple[str, int], list[str]] = {
            (row["rule"], row["seed"]): json.loads(row["settings"])["criteria"]
            for row in self.federations.to_dict("records")
        }
        wanted = list(dict.fromkeys(name for group in names.values() for name in group))
        for kind in ("raw", "normalised"):
            table = {name: np.full(len(frame), np.nan) for name in wanted}
            for index, (rule, seed, text) in enumerate(zip(frame["rule"], frame["seed"], frame[kind], strict=True)):
                if isinstance(text, str):
                    for name, value in zip(names[rule, seed], json.loads(text), strict=True):
                        table[name][index] = value
            columns = pd.DataFrame({f"{kind}_{name}": values for name, values in table.items()})
            frame = pd.concat([frame.drop(columns=kind), columns], axis=1)
        return frame

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """One row per client and evaluated round: local score and loss of the combined model, further metrics."""
        # For speed of start: not everyone who opens a run reads its data frames.
        import pandas as pd

        frame = self._read(
            "SELECT f.rule, f.seed, e.round, c.name AS client, samples, score, loss, metrics FROM evaluations e "
            "JOIN federations f ON f.id = e.federation JOIN clients c ON c.id = e.client "
            "ORDER BY f.id, e.round, c.name"
        )
        if bool(frame["metrics"].notna().to_numpy().any()):
            filled = [json.loads(text) if isinstance(text, str) else {} for text in frame["metrics"]]
            frame = pd.concat([frame, pd.DataFrame(filled, index=frame.index)], axis=1)
        return frame.drop(columns="metrics")

    def scores(self, rule: str, seed: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return (rounds, local scores [rounds, clients]) of one federation, round 0 left out."""
        mine = self._read(
            "SELECT e.round, c.name AS client, score FROM evaluations e JOIN federations f ON f.id = e.federation "
            "JOIN clients c ON c.id = e.client WHERE f.rule = ? AND f.seed = ? AND e.round > 0",
            (rule, seed),
        )
        table = mine.pivot(index="round", columns="client", values="score")
        return table.index.to_numpy(np.int64), table.to_numpy(np.float64)

    def hits(self, rule: str, seed: int) -> NDArray[np.bool_] | None:
        """Return right or wrong for every test sample in the last detailed round, or None when none was recorded."""
        connection = connect(self.folder, write=False)
        try:
            row = connection.execute(
                "SELECT hits, count FROM samples s JOIN federations f ON f.id = s.federation "
                "WHERE f.rule = ? AND f.seed = ? ORDER BY s.round DESC LIMIT 1",
                (rule, seed),
            ).fetchone()
        finally:
            connection.close()
        return None if row is None else np.unpackbits(np.frombuffer(row[0], np.uint8), count=row[1]).astype(np.bool_)

    def last_checkpoint(self) -> tuple[dict[str, RoundState], dict[str, Tensor]]:
        """Return the states of the last checkpoint and what the clients keep in it; both empty before the first."""
        # For speed of start: most readers of a run never look at its models, and those need torch.
        from steelyard.runs.checkpoint import last_checkpoint

        connection = connect(self.folder, write=False)
        try:
            _, states, kept = last_checkpoint(connection, self.folder)
        finally:
            connection.close()
        return states, kept
