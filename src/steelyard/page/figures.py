"""What the page shows of one run or several: an overview, and the figures of a report, from what is in memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TypedDict

from steelyard.experiment.description import Description
from steelyard.experiment.loading import read_experiment
from steelyard.page.jobs import read_text
from steelyard.page.live import Followed, Snapshot
from steelyard.report.contents import RawCriteria, Themes, raw_criteria
from steelyard.report.figures.catalogue import KINDS, draw, spec
from steelyard.report.figures.look import theme
from steelyard.report.html import headline
from steelyard.report.judge import servers_rows
from steelyard.report.result import VegaLite
from steelyard.report.view import RunView, plain
from steelyard.runs.glance import RunDocument, glance, run_folder
from steelyard.runs.history import History

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


class Overview(TypedDict):
    """What stands above the figures of one run or several."""

    runs: list[LabelledRun]
    headline: list[str]
    server_rows: str
    measure: str
    parts: list[PartDocument]
    labels: list[str]
    rows: list[RuleRow]
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
        return self.histories[0].info.get("measure", "accuracy")


class Figures:
    """Figures over the runs under a root; a view is made anew only when one of its runs has new rounds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._followed = Followed(root)
        self._views: dict[tuple[str, ...], tuple[tuple[tuple[int, int], ...], PageView]] = {}
        self._lock = threading.Lock()

    def view(self, runs: Sequence[str]) -> PageView:
        """Return the runs as figures read them, up to date."""
        names = tuple(dict.fromkeys(runs))
        histories = [self._followed.history(name) for name in names]
        mark = tuple((id(history), history.version) for history in histories)
        with self._lock:
            known = self._views.pop(names, None)
            if known is None or known[0] != mark:
                known = (mark, PageView([history.snapshot() for history in histories]))
            self._views[names] = known
            while len(self._views) > VIEWS:
                self._views.pop(next(iter(self._views)))
        return known[1]

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
        clients = _clients(view.histories) if len(names) == 1 else []
        looks = [glance(self.root, name) for name in names]
        rows = _rows(view)
        going = any(run.state == "running" for run in looks)
        return {
            "runs": [{**run.document(), "label": label} for run, label in zip(looks, view.names, strict=True)],
            # Only runs that are over have a headline; of others the figures show what happens.
            "headline": [] if going or not any(row["accuracy"] is not None for row in rows) else headline(view),
            "server_rows": servers_rows(view.histories[0]) if len(names) == 1 else "the servers' rows",
            "measure": view.measure,
            "parts": [{"label": part.label, "rule": part.rule, "seed": part.seed} for part in view.federations],
            "labels": view.labels,
            "rows": rows,
            "figures": [
                {"name": kind.name, "title": kind.title, "caption": kind.caption, "of": kind.of}
                for kind in KINDS.values()
                if kind.of != "client" or clients
            ],
            "clients": clients[:CLIENTS],
            "more_clients": max(0, len(clients) - CLIENTS),
            "notes": [history.notes for history in view.histories if history.notes],
            "versions": {
                key.removeprefix("version_"): value
                for key, value in sorted(view.histories[0].info.items())
                if key.startswith("version_")
            },
            "theme": {"light": theme(False), "dark": theme(True)},
        }

    def weighable(self, runs: Sequence[str]) -> dict[str, RawCriteria]:
        """Return the raw criteria of each rule of one run, for weighing its updates again in the browser."""
        view = self.view(runs[:1])
        first = view.federation().seed
        parts = [part for part in view.federations if part.seed == first][:RULES]
        return {part.label: found for part in parts if (found := raw_criteria(view, part)) is not None}

    def experiment(self, run: str) -> str:
        """Return a run's experiment as text; it is shown, never read as an experiment."""
        return read_text(run_folder(self.root, run))


def _rows(view: PageView) -> list[RuleRow]:
    """One line for each rule: means over its seeds in the newest round that was tested."""
    frame = view.rounds
    tested = frame[frame["accuracy"].notna()]
    last = tested.groupby(["rule", "seed"], sort=False).tail(1)
    rows: list[RuleRow] = []
    for label in view.labels:
        mine, every = last[last["rule"] == label], frame[frame["rule"] == label]
        if not len(every):
            rows.append(
                {"rule": label, "round": 0, "seeds": 0, "accuracy": None, "server": None, "left_out": 0, "tests": 0}
            )
            continue
        rows.append(
            {
                "rule": label,
                "round": int(every["round"].to_numpy().max()),
                "seeds": int(every["seed"].nunique()),
                "accuracy": plain(float(mine["accuracy"].mean())),
                "server": plain(float(mine["server_accuracy"].astype(float).mean())),
                "left_out": int((every["cohort"] - every["answered"]).to_numpy().sum()),
                "tests": int(every["tests"].to_numpy().sum()),
            }
        )
    return rows


def _clients(histories: Sequence[History]) -> list[str]:
    history = histories[0]
    assert isinstance(history, Snapshot)
    return history.live.client_names()
