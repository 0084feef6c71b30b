"""A run that is followed: what was read stays, and a look reads only the rounds written since."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steelyard.messages import Counts, Floats
from steelyard.runs.columns import spread
from steelyard.runs.glance import run_folder, signature
from steelyard.runs.reader import History

if TYPE_CHECKING:
    import pandas as pd

KEPT = 4
"""Runs whose tables are held in memory; a long run takes some hundred megabytes."""
_FRAMES = ("rounds", "clients", "evaluations")


class LiveHistory(History):
    """A history that grows: `refresh` adds the new rounds to each table that was read before."""

    def __init__(self, folder: Path | str) -> None:
        super().__init__(folder)
        self.seen = self.last_round
        self.version = 0
        """Counts the looks that found something new."""
        self._signature = signature(self.folder)
        self._lock = threading.Lock()

    def refresh(self) -> bool:
        """Read what was written since; True when there was something. A resume may take rounds back: then all anew."""
        with self._lock:
            now = signature(self.folder)
            if now == self._signature:
                return False
            last = self.last_round
            known = vars(self)
            for name in ("info", "flaws", "federations", "_keys"):
                known.pop(name, None)
            if last < self.seen:
                for name in _FRAMES:
                    known.pop(name, None)
            elif last > self.seen:
                for name in _FRAMES:
                    if name in known:
                        known[name] = self._grown(known[name], getattr(self, f"{name}_after")(self.seen))
            self.seen, self._signature = last, now
            self.version += 1
            return True

    def scores(self, rule: str, seed: int, after: int = 0) -> tuple[Counts, Floats]:
        """Return (rounds, local scores [rounds, clients]) of one federation, from the table that is in memory."""
        frame = self.evaluations
        mine: Any = frame[(frame["rule"] == rule) & (frame["seed"] == seed) & (frame["round"] > after)]
        rounds, row = np.unique(mine["round"].to_numpy(np.int64), return_inverse=True)
        codes, clients = mine["client"].factorize(sort=True)
        return rounds, spread(row, codes, (len(rounds), len(clients)), mine["score"].to_numpy(np.float64))

    def client_names(self) -> list[str]:
        """Return the names of all clients that the run has seen, in order."""
        return sorted(str(name) for (name,) in self._rows("SELECT name FROM clients"))

    def _grown(self, known: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
        # For speed of start: pandas.
        import pandas as pd

        if not len(known) or not len(new):
            return new if len(new) else known
        rank = {key: index for index, key in enumerate(self._keys)}
        joined = pd.concat([known, new], ignore_index=True)
        keys = [rank[key] for key in zip(joined["rule"], joined["seed"], strict=True)]
        # Stable: inside a federation the old rows stay before the new ones.
        order = pd.Series(keys).sort_values(kind="stable").index
        return joined.iloc[order].reset_index(drop=True)


class Followed:
    """The runs that somebody looks at, by name; those looked at longest ago are let go."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._runs: OrderedDict[str, LiveHistory] = OrderedDict()
        self._lock = threading.Lock()

    def history(self, name: str) -> LiveHistory:
        """Return a run up to date; only rounds written since the last look are read."""
        folder = run_folder(self.root, name)
        with self._lock:
            found = self._runs.pop(name, None)
            if found is None:
                found = LiveHistory(folder)
            self._runs[name] = found
            while len(self._runs) > KEPT:
                self._runs.popitem(last=False)
        found.refresh()
        return found

    def forget(self, name: str) -> None:
        """Let a run go, such as one that was removed."""
        with self._lock:
            self._runs.pop(name, None)
