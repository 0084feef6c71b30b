"""What is sent to a browser while it looks: the list when it changes, and which followed runs moved on."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from steelyard.base.errors import UserError
from steelyard.page.jobs import Jobs
from steelyard.runs.glance import Glance, RunDocument, find_runs, glance, signature

EVERY = 0.5
"""Seconds between two looks at the folder."""
ALIVE = 15.0
"""Seconds after which a silent stream says that it is there."""
MOST = 32
"""Streams at the same time."""


class Listing:
    """The runs under a root as the list shows them; a run is read again only when its database was written."""

    def __init__(self, root: Path, jobs: Jobs) -> None:
        self.root, self.jobs = root, jobs
        self._known: dict[str, tuple[object, Glance]] = {}
        self._lock = threading.Lock()
        self._last: tuple[float, list[RunDocument]] = (0.0, [])

    def runs(self) -> list[RunDocument]:
        """Return all runs, newest first, and what was started and has no folder yet; at most one look in a while."""
        with self._lock:
            if time.monotonic() - self._last[0] > EVERY / 2:
                self._last = (time.monotonic(), self._look())
            return self._last[1]

    def _look(self) -> list[RunDocument]:
        found: list[Glance] = []
        for name in find_runs(self.root):
            with suppress(UserError):  # removed while we looked
                found.append(self._one(name))
        self._known = {run.name: self._known[run.name] for run in found}
        names = [run.name for run in found]
        shown = [self._document(run) for run in found]
        return sorted([*self.jobs.unseen(names), *shown], key=lambda run: -float(run["changed"]))

    def _one(self, name: str) -> Glance:
        folder = self.root / name
        known = self._known.get(name)
        alive = known is not None and known[1].writer is not None and known[1].writer.alive
        mark = (signature(folder), alive)
        if known is not None and known[0] == mark:
            return known[1]
        run = glance(self.root, name)
        self._known[name] = ((signature(folder), run.writer is not None and run.writer.alive), run)
        return run

    def _document(self, run: Glance) -> RunDocument:
        document = run.document()
        job = self.jobs.of(run.name)
        if job is not None and job.ended not in (None, 0) and run.state in ("stopped", "killed"):
            document["problem"] = job.last_line()
            # It got no further than its set-up: nobody killed it, and there is nothing to resume.
            document["state"] = run.state if any(rule.accuracy is not None for rule in run.rules) else "failed"
        if job is not None and job.ended is None and not job.stopping and run.state in ("stopped", "killed", "unknown"):
            document["state"] = "starting"
        return document


def event(name: str, data: object) -> str:
    """Write one server-sent event; JSON has no line ends of its own, so nothing in it can end the event."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


async def stream(
    listing: Listing, followed: Sequence[str], ended: Callable[[], bool], every: float = EVERY
) -> AsyncGenerator[str]:
    """Yield the list whenever it changes, and {run, round, state} of each followed run that moved on."""
    last_list = ""
    rounds: dict[str, tuple[int, str]] = {}
    said = time.monotonic()
    yield ": steelyard\n\n"
    while not ended():
        runs = await asyncio.to_thread(listing.runs)
        text = event("runs", runs)
        if text != last_list:
            last_list, said = text, time.monotonic()
            yield text
        for run in runs:
            mark = (int(run["round"]), str(run["state"]))
            if run["name"] in followed and rounds.get(run["name"]) != mark:
                first = run["name"] not in rounds
                rounds[run["name"]] = mark
                if not first:
                    yield event("moved", {"run": run["name"], "round": mark[0], "state": mark[1]})
        if time.monotonic() - said > ALIVE:
            said = time.monotonic()
            yield ": still here\n\n"
        await asyncio.sleep(every)
