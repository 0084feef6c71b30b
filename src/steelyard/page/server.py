"""The server of a federation on the page: its runs and their queue, its nodes, and stopping a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from steelyard.base.errors import UserError
from steelyard.federate.contacts import NodeDocument, nodes_of
from steelyard.federate.server_folder import RunDocument, ServerFolder, ServerRun, find_run, runs_of
from steelyard.page.jobs import Jobs

MOST_RUNS = 50
"""Runs that are shown, the newest of them; `steelyard federate list` lists all."""


class ShownRun(RunDocument):
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
        runs = runs_of(self.home)[::-1]
        return {
            "folder": str(self.home.folder),
            "served": self.home.is_served(),
            "runs": [self._run(run) for run in runs[:MOST_RUNS]],
            "more": max(len(runs) - MOST_RUNS, 0),
            "nodes": nodes_of(self.home),
        }

    def stop(self, number: int) -> None:
        """Stop a run, or take it out of the queue."""
        self._jobs.require_verbs()
        run = find_run(self.home, number)
        if not run.is_open:
            raise UserError(f"run {number} has ended ({run.status()}); allowed: one that waits or goes on")
        run.ask_to_stop()

    def _run(self, run: ServerRun) -> ShownRun:
        root, out = self._jobs.root, run.out
        shown = str(out.relative_to(root)) if out.is_relative_to(root) and Path(out).is_dir() else None
        return {**run.document(), "open": run.is_open, "shown": shown}
