"""What the page shows: runs that are followed as they grow, their overview and figures, a federation's server."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict, TypeVar
from zipfile import ZipFile

import numpy as np
import pandas as pd

from steelyard.base.errors import UserError
from steelyard.experiment.description import Description
from steelyard.experiment.loading import read_experiment, refuse
from steelyard.federate.queue import RunDocument as ServedRun
from steelyard.federate.queue import ServerFolder, ServerRun, find_run
from steelyard.federate.queue import runs_of as served_runs
from steelyard.federate.standing import NodeDocument, nodes_of
from steelyard.messages.updates import Counts, Floats
from steelyard.page.jobs import Jobs, read_text
from steelyard.report.curves import servers_rows
from steelyard.report.figures import KINDS, draw, spec, theme
from steelyard.report.figures.look import VegaLite
from steelyard.report.html import RawCriteria, Themes, headlines, raw_criteria
from steelyard.report.result import Comparison
from steelyard.report.tables import main_table
from steelyard.report.view import RunView, plain
from steelyard.runs.columns import Cohorts, EntriesT, Tested, as_table, between, cut, entry_columns, runs_of, sampled
from steelyard.runs.glance import RunDocument, glance, run_folder, signature
from steelyard.runs.history import LOOKED_AT, START, History

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")
KEPT = 4
"""Runs whose tables are held in memory; a long run takes some hundred megabytes."""


class LiveHistory(History):
    """A history that grows: what clients did is kept as arrays, to which every look adds the rounds written since.

    Nothing later than the look is given, so what is drawn from a snapshot fits together, whatever is written meanwhile.
    """

    def __init__(self, folder: Path | str) -> None:
        super().__init__(folder)
        self.seen = self.last_round
        self.version = 0
        """Counts the looks that found something new."""
        self.every = self.spacing(LOOKED_AT)
        self._signature = signature(self.folder)
        self._lock = threading.RLock()
        self._memory: dict[tuple[object, ...], Any] = {}
        """Entries by (kind, rule, seed), and the failures up to a round; snapshots share it."""

    def refresh(self) -> bool:
        """Look whether something was written; True when so. A resume may take rounds back: then all is read anew."""
        with self._lock:
            now = signature(self.folder)
            if now == self._signature:
                return False
            seen, rounds = self.seen, vars(self).get("rounds")
            self.seen = self.last_round
            for name in [name for name in vars(self) if isinstance(getattr(History, name, None), cached_property)]:
                del vars(self)[name]
            if self.seen < seen:
                self._memory.clear()
            elif rounds is not None:
                vars(self)["rounds"] = self._grown(rounds, self.rounds_after(seen))
            self._signature = now
            self.version += 1
            return True

    def _grown(self, known: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
        if not len(known) or not len(new):
            return new if len(new) else known
        rank = {key: index for index, key in enumerate(self._keys)}
        joined = pd.concat([known, new], ignore_index=True)
        keys = [rank[key] for key in zip(joined["rule"], joined["seed"], strict=True)]
        # Stable: inside a federation the old rows stay before the new ones.
        order = pd.Series(keys).sort_values(kind="stable").index
        return joined.iloc[order].reset_index(drop=True)

    def snapshot(self) -> LiveHistory:
        """Return the run as it is at this look; later rounds belong to the next snapshot."""
        with self._lock:
            for name in ("federations", "_keys", "rounds"):
                getattr(self, name)
            return copy.copy(self)

    def spaced(self, most: int = LOOKED_AT) -> History:
        """Return itself: its rounds were chosen when it was opened."""
        return self

    def cohorts(self, rule: str, seed: int, after: int = START) -> Cohorts:
        """Return what the clients of one federation sent and were given; only rounds not yet in memory are read."""
        return self._remembered("cohorts", super().cohorts, rule, seed, after)

    def tested(self, rule: str, seed: int, after: int = START) -> Tested:
        """Return how the model of one federation did at each client; only rounds not yet in memory are read."""
        return self._remembered("tested", super().tested, rule, seed, after)

    def _remembered(
        self, kind: str, read: Callable[[str, int, int], EntriesT], rule: str, seed: int, after: int
    ) -> EntriesT:
        with self._lock:
            known: EntriesT | None = self._memory.get((kind, rule, seed))
            if known is None or _last(known) < self.seen:
                known = self._memory[kind, rule, seed] = _joined(known, read(rule, seed, _last(known)))
        return between(known, after, self.seen)

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
        """Return (rounds, local scores [rounds, clients]) of one federation."""
        found = self.tested(rule, seed, after)
        return as_table(found.round, found.client, len(found.clients), found.score)

    def failures_after(self, round: int = START) -> pd.DataFrame:
        """Return who was left out after a round and why; only rounds not yet in memory are read, and come last."""
        with self._lock:
            known, before = self._memory.get(("failures",), (START, None))
            last = self.last_round  # rounds written from here on belong to the next look
            new: Any = super().failures_after(known)  # pandas is typed in part only
            new = new[new["round"] <= last]
            found: Any = new if before is None else pd.concat([before, new], ignore_index=True)
            self._memory["failures",] = last, found
        return found[(found["round"] > round) & (found["round"] <= self.seen)]

    def client_names(self) -> list[str]:
        """Return the names of all clients that the run has seen, in order."""
        return sorted(name for (name,) in self._rows("clients", ("name",)))


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


# What is shown of one run or several: an overview, and the figures of a report, from what is in memory.


CLIENTS = 2000
"""Clients that the page offers by name; more are counted."""
RULES = 6
"""Rules whose updates can be weighed again."""
VIEWS = 4
"""Views that are kept until one of their runs moves on."""


class FigureDocument(TypedDict):
    """One figure for the page; `spec` is None where there is nothing to show yet."""

    kind: str
    spec: VegaLite | None
    note: str
    description: str


class LabelledRun(RunDocument):
    """A run with the name that figures call it by."""

    label: str


class PartDocument(TypedDict):
    """One rule with one seed, under the label of figures."""

    label: str
    rule: str
    seed: int


class RuleRow(TypedDict):
    """One rule in its newest tested round: means over its seeds."""

    rule: str
    round: int
    seeds: int
    accuracy: float | None
    server: float | None
    left_out: int
    tests: int


class FigureKind(TypedDict):
    """A figure that the page offers."""

    name: str
    title: str
    caption: str
    of: str


class RuleTable(TypedDict):
    """The table behind the recommendation, as the terminal and the report show it."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str


class Overview(TypedDict):
    """What stands above the figures of one run or several."""

    runs: list[LabelledRun]
    headline: list[str]
    server_rows: str
    measure: str
    parts: list[PartDocument]
    labels: list[str]
    rows: list[RuleRow]
    table: RuleTable | None
    """Of one run that is over, in place of `rows`."""
    figures: list[FigureKind]
    clients: list[str]
    more_clients: int
    notes: list[str]
    versions: dict[str, str]
    theme: Themes


class PageView(RunView):
    """A view that reads what a run noted of itself, and no experiment through a link."""

    @cached_property
    def experiments(self) -> list[Description]:
        """The experiment of each run; none of the code that it names is run."""
        for history in self.histories:
            read_text(history.folder)
        return [read_experiment(history.folder) for history in self.histories]

    @cached_property
    def measure(self) -> str:
        """What a client's score is, as the run noted it."""
        return self.histories[0].facts.measure


class Figures:
    """Figures over the runs under a root; a view is made anew only when one of its runs has new rounds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._runs: dict[str, LiveHistory] = {}
        self._views: dict[tuple[str, ...], tuple[tuple[tuple[int, int], ...], PageView]] = {}
        self._lock = threading.Lock()

    def history(self, name: str) -> LiveHistory:
        """Return a run up to date; only rounds written since the last look are read."""
        folder = run_folder(self.root, name)
        with self._lock:
            found = _held(self._runs, name, self._runs.get(name) or LiveHistory(folder), KEPT)
        found.refresh()
        return found

    def view(self, runs: Sequence[str]) -> PageView:
        """Return the runs as figures read them, up to date."""
        names = tuple(dict.fromkeys(runs))
        histories = [self.history(name) for name in names]
        mark = tuple((id(history), history.version) for history in histories)
        with self._lock:
            known = self._views.get(names)
            if known is None or known[0] != mark:
                known = (mark, PageView([history.snapshot() for history in histories]))
            return _held(self._views, names, known, VIEWS)[1]

    def figure(
        self, runs: Sequence[str], kind: str, rule: str | None, seed: int | None, client: str | None
    ) -> FigureDocument:
        """Return one figure as a Vega-Lite document with its note; None for one that has nothing to show yet."""
        view = self.view(runs)
        chart = draw(view, kind, rule=rule, seed=seed, client=client)
        if chart is None:
            return {"kind": kind, "spec": None, "note": "", "description": ""}
        document = spec(chart)
        note = str(document.pop("usermeta", {}).get("note", ""))
        return {"kind": kind, "spec": document, "note": note, "description": str(document.get("description", ""))}

    def overview(self, runs: Sequence[str]) -> Overview:
        """Return what stands above the figures: state, a line for each rule, which figures there are, the clients."""
        view = self.view(runs)
        names = list(dict.fromkeys(runs))
        clients = self.history(names[0]).client_names() if len(names) == 1 else []
        looks = [glance(self.root, name) for name in names]
        rows = _rows(view)
        over = all(run.state != "running" for run in looks) and any(row["accuracy"] is not None for row in rows)
        return {
            "runs": [{**run.document(), "label": label} for run, label in zip(looks, view.names, strict=True)],
            # Only runs that are over have a headline; of others the figures show what happens.
            "headline": headlines(view) if over else [],
            "server_rows": servers_rows(view.histories[0]) if len(names) == 1 else "the servers' rows",
            "measure": view.measure,
            "parts": [{"label": part.label, "rule": part.rule, "seed": part.seed} for part in view.federations],
            "labels": view.labels,
            "rows": rows,
            "table": _decided(view.documents[0]) if over and len(names) == 1 else None,
            "figures": [
                {"name": kind.name, "title": kind.title, "caption": kind.caption, "of": kind.of}
                for kind in KINDS.values()
                if kind.of != "client" or clients
            ],
            "clients": clients[:CLIENTS],
            "more_clients": max(0, len(clients) - CLIENTS),
            "notes": [history.notes for history in view.histories if history.notes],
            "versions": dict(sorted(view.histories[0].facts.versions.items())),
            "theme": {"light": theme(False), "dark": theme(True)},
        }

    def weighable(self, runs: Sequence[str]) -> dict[str, RawCriteria]:
        """Return the raw criteria of each rule of one run, for weighing its updates again in the browser."""
        view = self.view(runs[:1])
        first = view.federation().seed
        parts = [part for part in view.federations if part.seed == first][:RULES]
        return {part.label: found for part in parts if (found := raw_criteria(view, part)) is not None}

    def model(self, run: str) -> bytes:
        """Return the folder of a run's model as a zip; one whose network is somebody's own code is refused."""
        # For speed of start: few who look at runs take a model, which needs torch.
        from steelyard.models.taking import take

        folder = run_folder(self.root, run)
        read_text(folder)
        ask = partial(refuse, allowed="type `steelyard model --trust`")
        with TemporaryDirectory() as place:
            made = take(folder, ask=ask).save(Path(place) / "model")
            content = BytesIO()
            with ZipFile(content, "w") as packed:
                for name in sorted(made.iterdir()):
                    packed.write(name, f"model/{name.name}")
        return content.getvalue()

    def experiment(self, run: str) -> str:
        """Return a run's experiment as text; it is shown, never read as an experiment."""
        return read_text(run_folder(self.root, run))


def _held(held: dict[KeyT, ValueT], key: KeyT, value: ValueT, most: int) -> ValueT:
    """Hold a value as the newest, and let go of what was asked for longest ago."""
    held.pop(key, None)
    held[key] = value
    while len(held) > most:
        del held[next(iter(held))]
    return value


def _rows(view: PageView) -> list[RuleRow]:
    """One line for each rule: means over its seeds in the newest round that was tested."""
    frame = view.rounds
    last = frame[frame["accuracy"].notna()].groupby(["rule", "seed"], sort=False).tail(1)
    rows: list[RuleRow] = []
    for label in view.labels:
        mine, every = last[last["rule"] == label], frame[frame["rule"] == label]
        rows.append(
            {
                "rule": label,
                "round": int(every["round"].to_numpy().max(initial=0)),
                "seeds": int(every["seed"].nunique()),
                "accuracy": plain(float(mine["accuracy"].mean())),
                "server": plain(float(mine["server_accuracy"].astype(float).mean())),
                "left_out": int((every["cohort"] - every["answered"]).sum()),
                "tests": int(every["tests"].sum()),
            }
        )
    return rows


def _decided(document: Comparison) -> RuleTable | None:
    """Return the table behind the recommendation of a run; None before any round has been tested."""
    if document.recommendation is None:
        return None
    found = main_table(document)
    return {"title": found.title, "headings": found.headings, "rows": found.rows, "note": found.note}


# The server of a federation on the page: its runs and their queue, its nodes, and stopping a run.


MOST_SERVED = 50
"""Runs that are shown, the newest of them; `steelyard federate list` lists all."""


class ShownRun(ServedRun):
    """A run of a server as the page shows it."""

    open: bool
    shown: str | None
    """Its name on the page, where its folder is one of those that the page shows."""


class ServerDocument(TypedDict):
    """What the page shows of a server."""

    folder: str
    served: bool
    runs: Sequence[ShownRun]
    """The newest first."""
    more: int
    nodes: Sequence[NodeDocument]


class ServerView:
    """One server's folder as the page shows it; whoever may stop runs of the page may stop its runs."""

    def __init__(self, home: ServerFolder, jobs: Jobs) -> None:
        self.home, self._jobs = home, jobs

    def document(self) -> ServerDocument:
        """Return how runs and nodes stand now."""
        runs = served_runs(self.home)[::-1]
        return {
            "folder": str(self.home.folder),
            "served": self.home.is_served(),
            "runs": [self._run(run) for run in runs[:MOST_SERVED]],
            "more": max(len(runs) - MOST_SERVED, 0),
            "nodes": nodes_of(self.home),
        }

    def stop(self, number: int) -> None:
        """Stop a run, or take it out of the queue."""
        self._jobs.require_verbs()
        run = find_run(self.home, number)
        if not run.is_open:
            raise UserError(f"run {number} has ended ({run.status()}); allowed: one that waits or runs")
        run.ask_to_stop()

    def _run(self, run: ServerRun) -> ShownRun:
        root, out = self._jobs.root, run.out
        shown = str(out.relative_to(root)) if out.is_relative_to(root) and Path(out).is_dir() else None
        return {**run.document(), "open": run.is_open, "shown": shown}
