"""What a run says of itself as a whole: facts, rules, how they ended, its chain of rounds, its last models."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.base.errors import UserError, path_of
from steelyard.runs.chain_check import Checked, check
from steelyard.runs.opening import reading
from steelyard.runs.remembered import remember, remembered, stamp
from steelyard.runs.typed import known

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from steelyard.rounds.state import RoundState

_LAST = "ORDER BY round DESC LIMIT 1"
START = -1
"""The round before the first: what comes after it is everything."""


class RunFacts:
    """The part of a `History` that no single round has; each is read when it is first asked for, and then kept."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = path_of(folder, "History", "the folder of a run")
        with reading(self.folder):
            pass  # a folder without a run is refused here, not when something is asked

    def _rows(self, table: str, columns: Sequence[str], where: str = "", *values: int | str) -> list[tuple[Any, ...]]:
        with reading(self.folder) as connection:
            return connection.rows(table, columns, where, *values)

    @cached_property
    def info(self) -> dict[str, str]:
        """Facts about the run: status, versions, engine, notes."""
        with reading(self.folder) as connection:
            return connection.info()

    @property
    def notes(self) -> str:
        """What a reader of the run should know: of the engine that trained its clients, of its data and rules."""
        return "; ".join(filter(None, (self.info.get("engine_notes"), self.info.get("notes"))))

    @property
    def last_round(self) -> int:
        """The newest whole round at this moment; -1 before the first. Cheap: ask it to see whether a run moved on."""
        found = self._rows("rounds", ("round",), _LAST)
        return int(found[0][0]) if found else START

    @cached_property
    def flaws(self) -> pd.DataFrame:
        """What makes clients worth less than others: seed, client, flaw in words; a row for each flaw of a client."""
        # For speed of start: not everyone who opens a run reads its data frames.
        import pandas as pd

        stored: dict[str, dict[str, list[str]]] = json.loads(self.info.get("flaws", "{}"))
        rows = [
            (int(seed), client, words)
            for seed, clients in stored.items()
            for client, every in clients.items()
            for words in every
        ]
        return pd.DataFrame(rows, columns=["seed", "client", "flaw"])

    @cached_property
    def ended(self) -> dict[tuple[str, int], tuple[int, str]]:
        """Which rules ended early because their model exploded: by (rule, seed), the round and the reason."""
        with reading(self.folder) as connection:
            rows = connection.rows("ended", ("federation", "round", "reason"))
            names = connection.federations()
            return {known(names, key, "federation"): (round, reason) for key, round, reason in rows}

    @cached_property
    def models(self) -> dict[tuple[str, int], str]:
        """The SHA-256 of the model that each rule ended with, by (rule, seed): equal bits have equal digests."""
        with reading(self.folder) as connection:
            rows = connection.rows("digests", ("federation", "model"), "ORDER BY round")
            names = connection.federations()
            return {known(names, key, "federation"): model for key, model in rows}

    @cached_property
    def personal(self) -> frozenset[str]:
        """The rules whose clients tested models of their own: their scores on clients are these models'."""
        return frozenset(map(str, json.loads(self.info.get("personal", "[]"))))

    @cached_property
    def chain(self) -> Checked:
        """The run's chain of rounds, computed again: its head, and what is not as it was written."""
        with reading(self.folder) as connection:
            return check(connection, self.folder)

    @cached_property
    def shown_chain(self) -> Checked:
        """The chain for those who show it: as `chain`, or as it was last found while nobody has written to the run."""
        known = vars(self).get("chain") or remembered(self.folder)
        if known is None:
            before, begun = stamp(self.folder), time.perf_counter()
            known = self.chain
            remember(self.folder, before, known, time.perf_counter() - begun)
        return known

    def labels(self, seed: int) -> dict[str, list[int]]:
        """Return by client how many training samples it has of each class; empty where the run does not know it."""
        return json.loads(self.info.get("labels", "{}")).get(str(seed), {})

    @cached_property
    def federations(self) -> pd.DataFrame:
        """The rules that ran side by side: name, rule, seed, settings as JSON."""
        # For speed of start: not everyone who opens a run reads its data frames.
        import pandas as pd

        rows = self._rows("federations", ("name", "rule", "algorithm", "seed", "settings"), "ORDER BY id")
        kinds = {"federation": "str", "rule": "str", "algorithm": "str", "seed": "int64", "settings": "str"}
        return pd.DataFrame(rows, columns=list(kinds)).astype(kinds)

    @cached_property
    def _keys(self) -> dict[tuple[str, int], tuple[int, tuple[str, ...]]]:
        """Return the number and the criteria of each federation, by rule and seed; they never change in a run."""
        with reading(self.folder) as connection:
            names = connection.federations()
            texts = dict(connection.rows("federations", ("id", "settings")))
        return {who: (key, tuple(json.loads(texts[key])["criteria"])) for key, who in names.items()}

    def _federation(self, rule: str, seed: int) -> tuple[int, tuple[str, ...]]:
        found = self._keys.get((rule, seed))
        if found is None:
            raise UserError(f"{self.folder}: no rule '{rule}' with seed {seed} in this run")
        return found

    def last_checkpoint(self) -> tuple[dict[str, RoundState], dict[str, Tensor]]:
        """Return the states of the last checkpoint and what the clients keep in it; both empty before the first."""
        # For speed of start: most readers of a run never look at its models, and those need torch.
        from steelyard.runs.checkpoint import last_checkpoint

        with reading(self.folder) as connection:
            found = last_checkpoint(connection, self.folder)
        return found.states, found.kept
