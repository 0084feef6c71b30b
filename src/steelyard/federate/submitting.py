"""Submitting a run to a server of this machine, and following it until it ends."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

from steelyard.base.errors import UserError
from steelyard.base.logs import logger
from steelyard.experiment.description import Description
from steelyard.experiment.folders import new_folder
from steelyard.federate.app_folder import write_app
from steelyard.federate.server_folder import ServerFolder
from steelyard.federate.server_runs import ServerRun, new_run, runs_of

_LOOK_SECONDS = 0.25
_GONE_SECONDS = 2.0
"""How long nobody may serve before whoever follows hears of it."""
_log = logger(__name__)


def submit(server: Path, experiment: Description, *, out: Path | None = None, resume: bool = False) -> ServerRun:
    """Put a run into the queue of a server; the folder of one that is still in it is taken up again."""
    home = ServerFolder(server)
    home.require_served()
    folder = (out if resume and out is not None else new_folder(experiment, out)).resolve()
    for run in runs_of(home):
        if run.is_open and run.out == folder:
            if resume:
                return run
            raise UserError(f"--out: {folder} is the folder of run {run.number}, which has not ended; allowed: another")
    run = new_run(home)
    report = run.folder.resolve()
    write_app(run.app, experiment, out=folder, resume=resume, ship=False, report=report)
    run.note_submitted(experiment.name, folder, experiment.resolved().rounds.count)
    return run


def follow(run: ServerRun) -> Path:
    """Print the lines of a run as they come, until it ends; raises with one clear line unless it finished."""
    lines, before, seen = lines_of(run), "", time.monotonic()
    while True:
        time.sleep(_LOOK_SECONDS)
        ended = not run.is_open  # Before its lines are read, so that none is missed.
        for line in lines:
            if line is None:
                break
            if line.startswith(("steelyard: ", "round ")):
                _log.info(line.removeprefix("steelyard: "))
        if ended:
            return _end(run)
        before = _print_place(run, before)
        if run.server.is_served():
            seen = time.monotonic()
        elif time.monotonic() - seen > _GONE_SECONDS and run.is_open:
            again = run.server.command("follow", str(run.number))
            raise UserError(f"the server is gone; the run goes on when it serves again, `{again}` shows it then")


def lines_of(run: ServerRun) -> Generator[str | None]:
    """Yield the whole lines of a run's log, and None where there is no further one yet."""
    while not run.log.exists():
        yield None
    with run.log.open(encoding="utf-8", errors="replace", newline="\n") as log:
        part = ""
        while True:
            part += log.readline()
            if part.endswith("\n"):
                yield _own(run, part.strip())
                part = ""
            else:
                yield None


def _print_place(run: ServerRun, before: str) -> str:
    """Say which run is waited for, once."""
    if run.started:
        return before
    first = next((other.number for other in runs_of(run.server) if other.is_open and other.number < run.number), None)
    line = "" if first is None else f"run {run.number} waits for run {first}"
    if line and line != before:
        _log.info(line)
    return line


def _end(run: ServerRun) -> Path:
    outcome = run.outcome
    if outcome.get("status") == "finished":
        return run.out
    line = _own(run, str(outcome.get("line")))
    raise UserError(line if "`steelyard" in line else f"the run did not finish: {line}; {run.advice()}")


def _own(run: ServerRun, line: str) -> str:
    """Return a line of the server app as it is true here: it speaks of any run; this one goes on by being submitted."""
    return line.replace(f"`steelyard resume {run.out}`", f"`{run.server.command('submit', str(run.out))}`")
