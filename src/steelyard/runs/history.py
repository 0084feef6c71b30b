"""Reading a run, also while it is being written: facts, data frames, arrays per round and per client, its chain.

pandas is imported inside methods, for speed of start: not everyone who opens a run reads its data frames.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from steelyard.base import files
from steelyard.base.errors import UserError, brief, counted, expect, first_names, path_of
from steelyard.base.settings import LARGEST
from steelyard.base.tallies import Tally
from steelyard.messages.updates import Counts, Floats
from steelyard.rounds.plan import RoundValues
from steelyard.runs.chain import Checked, check, require_whole
from steelyard.runs.columns import (
    KEYS,
    WHOLE,
    Cohorts,
    Tested,
    read_cohorts,
    read_scores,
    read_sums,
    read_tested,
    sampled,
    unpack,
)
from steelyard.runs.database import NEWEST, kept_open, known, reading, unreadable
from steelyard.runs.facts import BestRound, RunFacts
from steelyard.runs.schema import declared

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from steelyard.rounds.state import RoundState


sqlite3.register_adapter(np.int64, int)  # a round of a data frame; SQLite would find none
_LAST = "ORDER BY round DESC LIMIT 1"
START = -1
"""The round before the first: what comes after it is everything."""


RETRAINED = "retrained"
"""The source of values for which coalitions were trained."""
SOURCES: Mapping[str, str] = {
    "run": "measured while the run went",
    "kept": "from the updates that the run kept",
    "replay": "from a replay of the run, to the same models",
    "rounded": "from kept updates rounded to bfloat16: approximate",
    RETRAINED: "from models trained again for every coalition",
}
"""What values can be made from, the best first; the database holds the word, readers are shown the sentence."""


@dataclass(frozen=True, eq=False)
class StoredValues:
    """The values of one round of one federation as the database holds them."""

    rule: str
    seed: int
    round: int
    source: str
    found: RoundValues


def read_values(folder: Path) -> list[StoredValues]:
    """Return all values that a run's folder holds, by federation and round; none where nothing was measured."""
    with reading(folder) as connection:
        rows = connection.by_federation(
            "contributions", tuple(declared()["contributions"])[1:], "ORDER BY federation, round"
        )
        names: dict[int, str] = dict(connection.rows("clients", ("id", "name")))
        found: list[StoredValues] = []
        for (rule, seed), round, measure, method, source, clients, added, error, sizes, before, after in rows:
            count, groups = len(clients) // 4, len(sizes) // 8
            try:
                keys = unpack([clients], [count], KEYS).tolist()
                values = np.nan_to_num(unpack([added], [count], width=1 + groups))
                errors, tested = unpack([error], [count]), unpack([sizes], [groups], WHOLE)
                if not tested.sum():
                    raise ValueError("no test rows")
            except ValueError as problem:
                raise unreadable(folder, f"contributions of round {round}: {problem}") from problem
            each = tuple(known(names, one, "client") for one in keys)
            made = RoundValues(measure, method, each, values, errors, tested, before, after)
            found.append(StoredValues(rule, seed, round, source, made))
        return found


Run = TypeVar("Run", bound="History | Path | str")
Given = ParamSpec("Given")
Answer = TypeVar("Answer")

_ROUNDS = tuple(declared()["rounds"])[2:]
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


def at_once(asks: Callable[Concatenate[Run, Given], Answer]) -> Callable[Concatenate[Run, Given], Answer]:
    """Let a function ask the run that it gets first from one open database; use it where many questions are asked."""

    @functools.wraps(asks)
    def asking(run: Run, *given: Given.args, **named: Given.kwargs) -> Answer:
        folder = run.folder if isinstance(run, History) else path_of(run, "History", "the folder of a run")
        with kept_open(folder):
            return asks(run, *given, **named)

    return asking


def _check(name: str, value: object, least: int) -> None:
    expect(name, value, (int, np.integer), allowed := f"a whole number from {least} on")
    if not least <= cast("int", value) <= LARGEST:
        raise UserError(f"{name}: got {brief(value)}; allowed: {allowed}")


class History:
    """What happened in a run; each data frame is read when it is first asked for, and then kept.

    `rounds` has a row per rule, seed and round (`loss` is the mean over the clients' test samples); `clients` one per
    client asked (raw and normalised criteria, score, weight, or the reason it was left out); `evaluations` one per
    client tested. The methods read again at every call: `cohorts`, `weights`, `tested` and `scores` give one federation
    as arrays, which is much faster than frames where a run is long, and whatever takes `after` reads only the rounds
    after that one, for those who follow a run.

        >>> history = steelyard.History("runs/mine")
        >>> history.clients[["round", "client", "weight"]]  # a pandas frame, a row for each client of each round

    Raises:
        UserError: `folder` holds no run, one of another version, or one that was damaged.
    """

    every = 1
    """What single clients sent is read of every so manyth round, and of the last: see `spaced`."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = path_of(folder, "History", "the folder of a run")
        with reading(self.folder):
            pass  # a folder without a run is refused here, not when something is asked

    def _rows(self, table: str, columns: Sequence[str], where: str = "", *values: int | str) -> list[tuple[Any, ...]]:
        with reading(self.folder) as connection:
            return connection.rows(table, columns, where, *values)

    @cached_property
    def facts(self) -> RunFacts:
        """What the run notes of itself: status, seeds, privacy, trust and so on, each of its own type."""
        with reading(self.folder) as connection:
            return connection.facts()

    @property
    def info(self) -> dict[str, str]:
        """The same as texts, versions and what clients say of how they compute among them."""
        return self.facts.texts()

    @property
    def notes(self) -> str:
        """What a reader of the run should know: of the engine that trained its clients, of its data and rules."""
        return "; ".join(filter(None, (self.facts.engine_notes, self.facts.notes)))

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

        rows = [
            (int(seed), client, words)
            for seed, clients in self.facts.flaws.items()
            for client, every in clients.items()
            for words in every
        ]
        return pd.DataFrame(rows, columns=["seed", "client", "flaw"])

    @cached_property
    def ended(self) -> dict[tuple[str, int], tuple[int, str]]:
        """Which rules ended early because their model exploded: by (rule, seed), the round and the reason."""
        with reading(self.folder) as connection:
            rows = connection.by_federation("ended", ("round", "reason"))
            return {who: (round, reason) for who, round, reason in rows}

    @cached_property
    def best(self) -> dict[tuple[str, int], BestRound]:
        """The best round of each rule by (rule, seed), as of the last checkpoint; empty where no rows choose one."""
        with reading(self.folder) as connection:
            who = dict(connection.rows("federations", ("name", "id")))
            names, found = connection.federations(), connection.rows("checkpoints", ("states",), _LAST)
        try:
            states: dict[str, Any] = json.loads(found[0][0]) if found else {}
            chosen = {name: state["best"] for name, state in states.items() if "best" in state}
            return {names[who[name]]: BestRound.model_validate(best) for name, best in chosen.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise unreadable(self.folder, f"the states of its checkpoint: {error}") from error

    @cached_property
    def models(self) -> dict[tuple[str, int], str]:
        """The SHA-256 of the model that each rule ended with, by (rule, seed): equal bits have equal digests."""
        with reading(self.folder) as connection:
            return dict(connection.by_federation("digests", ("model",), "ORDER BY round"))

    @cached_property
    def personal(self) -> frozenset[str]:
        """The rules whose clients tested models of their own: their scores on clients are these models'."""
        return frozenset(self.facts.personal)

    @cached_property
    def chain(self) -> Checked:
        """The run's chain of rounds, computed again: its head, and what is not as it was written."""
        with reading(self.folder) as connection:
            return check(connection, self.folder)

    def require_whole(self, *, accept: bool = False) -> None:
        """Refuse to go on with a run that is not as it was written, its signatures and models included."""
        # For speed of start: models need torch.
        from steelyard.runs.checkpoint import Restored, kept_checkpoints
        from steelyard.runs.store import check_deeply

        with reading(self.folder) as connection:
            kept = (one for _, one in kept_checkpoints(connection, self.folder) if isinstance(one, Restored))
            require_whole(check_deeply(connection, self.folder, kept), self.folder, accept=accept)

    @cached_property
    def shown_chain(self) -> Checked:
        """The chain for those who show it: as `chain`, or as it was last found while nobody has written to the run."""
        return vars(self).get("chain") or checked_once(self.folder, lambda: self.chain)

    def labels(self, seed: int) -> dict[str, list[int]]:
        """Return by client how many training samples it has of each class; empty where the run does not know it."""
        return self.facts.labels.get(str(seed), {})

    @cached_property
    def federations(self) -> pd.DataFrame:
        """The rules that ran side by side: name, rule, seed, settings as JSON."""
        # For speed of start: not everyone who opens a run reads its data frames.
        import pandas as pd

        rows = self._rows("federations", ("name", "rule", "algorithm", "seed", "settings"), "ORDER BY id")
        kinds = {"federation": "str", "rule": "str", "algorithm": "str", "seed": "int64", "settings": "str"}
        return pd.DataFrame(rows, columns=list(kinds)).astype(kinds)

    @cached_property
    def _keys(self) -> dict[tuple[str, int], int]:
        """Return the number of each federation, by rule and seed; they never change in a run."""
        with reading(self.folder) as connection:
            return {who: key for key, who in connection.federations().items()}

    def __repr__(self) -> str:
        """The run's folder, its state and its rules; what a notebook or a prompt shows."""
        try:
            rules = list(dict.fromkeys(rule for rule, _ in self._keys))
            done = f"{self.facts.status}, round {self.last_round}, {counted(len(rules), 'rule')}: {first_names(rules)}"
        except UserError as problem:
            done = str(problem)
        return f"History({str(self.folder)!r}): {done}"

    def _federation(self, rule: str, seed: int, after: int = START) -> int:
        _check("after", after, START)
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

    def _frame(self, table: str, columns: Sequence[str], after: int) -> pd.DataFrame:
        """Return columns of the rounds after one as a data frame, behind the rule and the seed that they belong to."""
        import pandas as pd

        _check("after", after, START)
        names = ("round", *columns)
        with reading(self.folder) as connection:
            rows = [(*who, *rest) for who, *rest in connection.by_federation(table, names, _AFTER, after)]
            kinds = {"rule": "str", "seed": "int64", **connection.kinds(table, names)}
            if "client" in columns:
                clients, at = dict(connection.rows("clients", ("id", "name"))), list(kinds).index("client")
                rows = [(*row[:at], known(clients, row[at], "client"), *row[at + 1 :]) for row in rows]
                kinds |= {"client": "str"}
        return pd.DataFrame(rows, columns=list(kinds)).astype(kinds)

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per rule, seed and round; round 0 is the first model before any training."""
        return self.rounds_after(START)

    def rounds_after(self, round: int) -> pd.DataFrame:
        """Return the rows of `rounds` after a round, read now: for those who follow a run that goes on."""
        frame = self._frame("rounds", _ROUNDS, round).rename(columns={"loss": "loss_settings"})
        losses: dict[tuple[str, int, int], float] = {}
        for rule, seed in self._keys:
            tested = self.tested(rule, seed, round)
            rounds, at = np.unique(tested.round, return_inverse=True)
            means = np.bincount(at, tested.loss * tested.samples) / np.bincount(at, tested.samples)
            losses |= {(rule, seed, int(each)): float(mean) for each, mean in zip(rounds, means, strict=True)}
        frame["loss"] = [
            losses.get(key, np.nan) for key in zip(frame["rule"], frame["seed"], frame["round"], strict=True)
        ]
        return frame

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row per client and round it was asked: raw_X and normalised_X per criterion X, score, weight, failure."""
        return self.clients_after(START)

    def clients_after(self, round: int) -> pd.DataFrame:
        """Return the rows of `clients` after a round, read now."""
        from steelyard.runs.export import clients_frame

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
        from steelyard.runs.export import ordered

        frame = self._frame(table, ("client", "reason"), after).rename(columns={"reason": "failure"})
        return ordered(frame, list(self._keys))

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """One row per client and evaluated round: local score and loss of the combined model, further metrics."""
        return self.evaluations_after(START)

    def evaluations_after(self, round: int) -> pd.DataFrame:
        """Return the rows of `evaluations` after a round, read now."""
        from steelyard.runs.export import evaluations_frame

        return evaluations_frame([((rule, seed), self.tested(rule, seed, round)) for rule, seed in self._keys])

    def cohorts(self, rule: str, seed: int, after: int = START) -> Cohorts:
        """Return what the clients of one federation sent and were given in the rounds after one, as arrays."""
        key = self._federation(rule, seed, after)
        where, more = (_SPACED, (self.every, key)) if self.every > 1 else (_OF_ONE_AFTER, ())
        with reading(self.folder) as connection:
            return read_cohorts(connection, key, where, after, *more)

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
        _check("most", most, 1)
        answered: Counter[int] = Counter()
        for federation, count in self._rows("rounds", ("federation", "answered")):
            answered[federation] += count
        entries = max(answered.values(), default=0)
        if entries <= most:
            return 1
        kept = [round for (round,) in self._rows("updates", ("round",), "WHERE federation = 1 ORDER BY round LIMIT 3")]
        gap = kept[-1] - kept[-2] if len(kept) > 1 else 1
        return gap * -(-entries // (most * gap))

    @cached_property
    def listening(self) -> pd.DataFrame:
        """How clients weighed each other's models for themselves: rule, seed, round, client, hears, weight."""
        from steelyard.runs.export import listening_frame

        names = dict(self._rows("clients", ("id", "name")))
        parts: list[tuple[str, int, int, list[str], Floats]] = []
        for (rule, seed), federation in self._keys.items():
            rows = self._rows("updates", ("round", "clients", "listening"), _LISTENING, federation)
            for round, clients, blob in rows:
                count = len(clients) // 4
                try:
                    who = [names[key] for key in unpack([clients], [count], KEYS).tolist()]
                    parts.append((rule, seed, round, who, unpack([blob], [count], width=count)))
                except (ValueError, KeyError) as error:
                    raise unreadable(self.folder, f"listening of {rule}, seed {seed}: {error}") from error
        return listening_frame(parts)

    def weights(self, rule: str, seed: int, after: int = START) -> tuple[tuple[str, ...], Counts, Floats]:
        """Return (clients, rounds, weights [rounds, clients]) of one federation; NaN where a client did not answer."""
        found = self.cohorts(rule, seed, after)
        return found.clients, found.rounds, found.table(found.weight)

    def heaviest(self) -> tuple[int, list[tuple[str, float]]] | None:
        """Return the newest round that has weights of the main rule, and (client, weight) in it, the largest first.

        None before any client was weighed. Only that round is read.
        """
        for (rule, seed), key in self._keys.items():
            # Not simply the newest round: a store may keep single clients each k rounds only.
            for (round,) in self._rows("updates", ("round",), NEWEST, key):
                found = self.cohorts(rule, seed, after=round - 1)
                weights = np.nan_to_num(found.weight)
                order = np.argsort(-weights, kind="stable")
                ranked = [(found.clients[found.client[at]], float(weights[at])) for at in order]
                return (round, ranked) if np.isfinite(found.weight).any() else None
            break  # the first federation is the main rule's
        return None

    def tested(self, rule: str, seed: int, after: int = START) -> Tested:
        """Return how the model of one federation did at each client in the rounds after one, as arrays."""
        key = self._federation(rule, seed, after)
        with reading(self.folder) as connection:
            return read_tested(connection, key, _OF_ONE_AFTER, after)

    def tested_at(self, rule: str, seed: int, most: int) -> Tested:
        """Return `tested` without round 0; of a long run some rounds, evenly spaced, about `most` entries."""
        _check("most", most, 1)
        key = self._federation(rule, seed)
        rounds = [round for (round,) in self._rows("evaluations", ("round",), _OF_ONE_AFTER, key, 0)]
        last = len(self.tested(rule, seed, rounds[-1] - 1).round) if rounds else 0
        if last * len(rounds) <= most:
            return self.tested(rule, seed, 0)
        limit = min(_ASKED, max(2, most // last))
        some = tuple(rounds[at] for at in sampled(len(rounds), limit))
        where = f"WHERE federation = ? AND round IN ({', '.join('?' * len(some))}) ORDER BY round"
        with reading(self.folder) as connection:
            return read_tested(connection, key, where, *some)

    def scores(self, rule: str, seed: int, after: int = 0) -> tuple[Counts, Floats]:
        """Return (rounds, local scores [rounds, clients]) of one federation, round 0 left out unless after = -1."""
        key = self._federation(rule, seed, after)
        with reading(self.folder) as connection:
            return read_scores(connection, key, _OF_ONE_AFTER, after)

    def tallies(self, rule: str, seed: int) -> tuple[tuple[str, ...], Tally] | None:
        """Return what the test rows of each client added up to in the last round; None where no measure was asked for.

        Sums are as `base.tallies` has them, [clients, sums].
        """
        key = self._federation(rule, seed)
        with reading(self.folder) as connection:
            return read_sums(connection, key, NEWEST)

    def hits(self, rule: str, seed: int) -> NDArray[np.bool_] | None:
        """Return right or wrong for every test sample in the last detailed round, or None when none was recorded."""
        key = self._federation(rule, seed)
        rows = self._rows("samples", ("hits", "count"), NEWEST, key)
        if not rows:
            return None
        bits, count = rows[0]
        if count > 8 * len(bits):
            raise unreadable(self.folder, f"samples of {rule}, seed {seed}: not the bits of their count")
        return np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(np.bool_)


WORTH, SETTLED = 0.5, 2.0
"""Seconds that a look at a chain must take to be remembered, and seconds since the last write: two writes within one
second of a file system's clock may have the same time."""


class _Remembered(BaseModel, extra="forbid", strict=True):
    """A chain that was found whole, and the state of the files that were read.

    It is kept in the user's cache folder, never in the run's: whoever can change a run could change that, too. The
    system sets `st_ctime` at every write and nobody can set it back, so that a changed run is computed again.
    `steelyard verify`, `resume` and all that goes on from a run never ask here.
    """

    state: tuple[tuple[int, ...], ...]
    chain: Checked


def _state(folder: Path) -> tuple[tuple[int, ...], ...] | None:
    """Return device, inode, size and times of what a look at a chain reads; None while a run is being written."""
    found: list[tuple[int, ...]] = []
    beside = (f"{files.DATABASE}-wal", f"{files.DATABASE}-journal")
    kept = [f"{files.CHECKPOINTS}/{name}" for name in sorted(files.names_in(folder / files.CHECKPOINTS))]
    for name in (files.DATABASE, files.LEDGER, *beside, *kept):
        with suppress(OSError):
            at = (folder / name).stat()
            found.append((at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns))
            if name in beside and at.st_size:
                return None
    # On Windows st_ctime is when a file was made.
    return None if os.name == "nt" else tuple(found)


def checked_once(folder: Path, check: Callable[[], Checked]) -> Checked:
    """Return what a look at a chain shows, or has shown as long as nobody has written to its files."""
    path = files.cache_folder() / "chains" / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()}.json"
    before, begun = _state(folder), time.time()
    with suppress(OSError, ValueError):
        known = _Remembered.model_validate_json(path.read_text(encoding="utf-8"))
        if known.state == before:
            return known.chain
    found = check()
    last = max((when / 1e9 for state in before or () for when in state[3:]), default=begun)
    if (
        before
        and not found.problem
        and time.time() - begun >= WORTH
        and begun - last >= SETTLED
        and before == _state(folder)
    ):
        kept = _Remembered(state=before, chain=found)
        with suppress(OSError):  # a cache that cannot be written is no error
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, kept.model_dump_json().encode())
    return found
