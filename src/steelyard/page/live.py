"""A run that is followed: what was read stays in memory, and a look reads only the rounds written since."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steelyard.messages.updates import Counts, Floats
from steelyard.runs.columns import Cohorts, EntriesT, Tested, as_table, between, cut, entry_columns, runs_of, sampled
from steelyard.runs.glance import run_folder, signature
from steelyard.runs.history import LOOKED_AT, START, History

if TYPE_CHECKING:
    import pandas as pd

KEPT = 4
"""Runs whose tables are held in memory; a long run takes some hundred megabytes."""


class LiveHistory(History):
    """A history that grows: what clients did is kept as arrays, to which every look adds the rounds written since."""

    def __init__(self, folder: Path | str) -> None:
        super().__init__(folder)
        self.seen = self.last_round
        self.version = 0
        """Counts the looks that found something new."""
        self.every = self.spacing(LOOKED_AT)
        self._signature = signature(self.folder)
        self._lock = threading.RLock()
        self._cohorts: dict[tuple[str, int], Cohorts] = {}
        self._tested: dict[tuple[str, int], Tested] = {}
        self._failures: tuple[int, list[pd.DataFrame]] = (START, [])
        """The last round whose failures are in memory, and what each look found."""

    def refresh(self) -> bool:
        """Look whether something was written; True when so. A resume may take rounds back: then all is read anew."""
        with self._lock:
            now = signature(self.folder)
            if now == self._signature:
                return False
            last = self.last_round
            known = vars(self)
            read = ("info", "flaws", "ended", "chain", "shown_chain", "federations", "_keys", "clients", "evaluations")
            for name in read:
                known.pop(name, None)
            if last < self.seen:
                known.pop("rounds", None)
                self._cohorts.clear()
                self._tested.clear()
                self._failures = (START, [])
            elif last > self.seen and "rounds" in known:
                known["rounds"] = self._grown(known["rounds"], self.rounds_after(self.seen))
            self.seen, self._signature = last, now
            self.version += 1
            return True

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

    def cohorts(self, rule: str, seed: int, after: int = START) -> Cohorts:
        """Return what the clients of one federation sent and were given; only rounds not yet in memory are read."""
        with self._lock:
            known = self._cohorts.get((rule, seed))
            new = super().cohorts(rule, seed, _last(known))
            self._cohorts[rule, seed] = found = _joined(known, new)
        return found if after == START else between(found, after)

    def tested(self, rule: str, seed: int, after: int = START) -> Tested:
        """Return how the model of one federation did at each client; only rounds not yet in memory are read."""
        with self._lock:
            known = self._tested.get((rule, seed))
            new = super().tested(rule, seed, _last(known))
            self._tested[rule, seed] = found = _joined(known, new)
        return found if after == START else between(found, after)

    def failures_after(self, round: int = START) -> pd.DataFrame:
        """Return who was left out after a round and why; only rounds not yet in memory are read, and come last."""
        # For speed of start: pandas.
        import pandas as pd

        with self._lock:
            known, found = self._failures
            last = self.last_round  # rounds written from here on belong to the next look
            new: Any = super().failures_after(known)  # pandas is typed in part only
            found = [*found, new[new["round"] <= last]] if len(new) or not found else found
            self._failures = (last, found)
        every: Any = pd.concat(found, ignore_index=True) if len(found) > 1 else found[0]
        return every if round == START else every[every["round"] > round]

    def client_names(self) -> list[str]:
        """Return the names of all clients that the run has seen, in order."""
        return sorted(name for (name,) in self._rows("clients", ("name",)))

    def snapshot(self) -> Snapshot:
        """Return the run as it is at this look: what is drawn from it fits together, whatever is written meanwhile."""
        with self._lock:
            return Snapshot(self)


class Snapshot(History):
    """A followed run up to one round; rounds that come later belong to the next snapshot."""

    def __init__(self, live: LiveHistory) -> None:
        # Not opened anew: everything comes through the run that is followed.
        self.folder, self.live = live.folder, live
        self.seen, self.version, self.every = live.seen, live.version, live.every
        vars(self).update({name: getattr(live, name) for name in ("info", "federations", "_keys", "rounds")})

    def spaced(self, most: int = LOOKED_AT) -> History:
        """Return itself: the run that is followed chose its rounds when it was opened."""
        return self

    def cohorts(self, rule: str, seed: int, after: int = START) -> Cohorts:
        """Return what the clients of one federation sent and were given, up to the snapshot's round."""
        found = self.live.cohorts(rule, seed)
        return between(found, after, self.seen)

    def tested(self, rule: str, seed: int, after: int = START) -> Tested:
        """Return how the model of one federation did at each client, up to the snapshot's round."""
        found = self.live.tested(rule, seed)
        return between(found, after, self.seen)

    def tested_at(self, rule: str, seed: int, most: int) -> Tested:
        """Return `tested` without round 0; of a long run some rounds, evenly spaced."""
        found = self.tested(rule, seed, 0)
        if len(found.round) <= most:
            return found
        rounds, place = runs_of(found.round)
        kept = np.zeros(len(rounds), dtype=np.bool_)
        kept[sampled(len(rounds), max(2, most * len(rounds) // len(found.round)))] = True
        return cut(found, kept[place])

    def scores(self, rule: str, seed: int, after: int = 0) -> tuple[Counts, Floats]:
        """Return (rounds, local scores [rounds, clients]) of one federation, up to the snapshot's round."""
        found = self.tested(rule, seed, after)
        return as_table(found.round, found.client, len(found.clients), found.score)

    def failures_after(self, round: int = START) -> pd.DataFrame:
        """Return who was left out after a round and why, up to the snapshot's round."""
        found: Any = self.live.failures_after(round)
        return found[found["round"] <= self.seen]


def _last(known: Cohorts | Tested | None) -> int:
    return START if known is None or not len(known.round) else int(known.round[-1])


def _joined(known: EntriesT | None, new: EntriesT) -> EntriesT:
    """Put later rounds after those known; the clients of both are counted in one list of names."""
    if known is None or not len(known.round):
        return new
    if not len(new.round):
        return known
    names = tuple(sorted({*known.clients, *new.clients}))
    index = {name: position for position, name in enumerate(names)}
    both = {name: np.concatenate([getattr(known, name), getattr(new, name)]) for name in entry_columns(new)}
    codes = [np.array([index[name] for name in part.clients], dtype=np.int64)[part.client] for part in (known, new)]
    both["client"] = np.concatenate(codes)
    joined = replace(new, **{**both, "clients": names})
    if isinstance(known, Tested) and isinstance(new, Tested):
        return replace(joined, metrics=_metrics(known, new))
    return joined


def _metrics(known: Tested, new: Tested) -> dict[str, Floats]:
    def filled(part: Tested, name: str) -> Floats:
        return part.metrics.get(name, np.full(len(part.round), np.nan))

    names = dict.fromkeys([*known.metrics, *new.metrics])
    return {name: np.concatenate([filled(known, name), filled(new, name)]) for name in names}


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
