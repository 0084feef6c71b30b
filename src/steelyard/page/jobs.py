"""Starting, stopping and resuming runs: each is a process of its own, which goes on when the page ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from steelyard.base import files
from steelyard.base.errors import UserError, without_controls
from steelyard.base.settings import parse
from steelyard.experiment.loading import RUN_FILE, named_code, own_text, refuse
from steelyard.page.form import command
from steelyard.runs.glance import Glance, RunDocument, glance, run_folder, started

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
LOGS = ".page"
"""Folder under the root for what started runs print."""
ENDING = 15.0
"""Seconds that a process which was asked to end may take."""
MOST = 8
"""Runs of one page that go on at the same time."""


@dataclass
class Job:
    """A process that this page started, and where its output goes."""

    run: str
    process: subprocess.Popen[bytes]
    log: Path
    begun: float
    stopping: bool = False
    """Whether it was asked to end."""

    @property
    def ended(self) -> int | None:
        """The exit code; None while it goes on. Asking also lets the system forget the process."""
        return self.process.poll()

    def last_line(self) -> str:
        """Return the last line that it printed, without control characters."""
        try:
            lines = self.log.read_bytes()[-4000:].decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        kept = [line.strip() for line in lines if line.strip()]
        return without_controls(kept[-1], "")[:500] if kept else ""


class Jobs:
    """What this page started, and the three verbs: start, stop, resume."""

    def __init__(self, root: Path, *, trust: bool = False, read_only: bool = False) -> None:
        self.root, self.trust, self.read_only = root, trust, read_only
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()

    def of(self, run: str) -> Job | None:
        """Return what this page started under a name, ended or not."""
        return self._jobs.get(run)

    def going(self) -> list[str]:
        """Return the runs that this page started and that have not ended."""
        return [run for run, job in self._jobs.items() if job.ended is None]

    def unseen(self, known: Sequence[str]) -> list[RunDocument]:
        """Return what was started and has no run folder yet: still on its way, or failed with its last line."""
        found: list[RunDocument] = []
        for run, job in list(self._jobs.items()):
            if run in known:
                continue
            failed = job.ended is not None
            found.append(
                {
                    "name": run,
                    "state": "failed" if failed else "starting",
                    "round": 0,
                    "rounds": None,
                    "measure": "accuracy",
                    "accuracy": None,
                    "rules": [],
                    "changed": job.begun,
                    "bytes": 0,
                    "problem": (job.last_line() or "it ended without a word") if failed else "",
                    "ended": "",
                    "flower": False,
                }
            )
        return found

    def start(self, recipe: str, name: str, fields: Mapping[str, object]) -> str:
        """Start what a filled form says, into a new folder of this name under the root; returns the name."""
        self.require_verbs()
        if not NAME.fullmatch(name):
            raise UserError(
                f"name: got '{name[:100]}'; allowed: a letter or digit, then up to 99 of these, points, dashes and _"
            )
        ask = None if self.trust else partial(refuse, allowed="start the page with `steelyard watch --trust`")
        arguments = [*command(recipe, fields, ask), *(["--trust"] if self.trust else [])]
        with self._lock:
            folder = self.root / name
            taken = self._jobs.get(name)
            if (taken is not None and taken.ended is None) or folder.is_symlink() or folder.exists():
                raise UserError(f"name: '{name}' is taken already in {self.root}; allowed: a name of its own")
            self._spawn(name, [*arguments, "--out", str(folder)])
        return name

    def stop(self, run: str) -> None:
        """Ask a run to end as Ctrl-C would: its last round stays whole, and it can be resumed."""
        self.require_verbs()
        job = self._jobs.get(run)
        if job is not None and job.ended is None:
            job.process.send_signal(signal.SIGTERM)
            job.stopping = True
            return
        found = glance(self.root, run)
        if found.state != "running" or found.writer is None:
            raise UserError(f"{run}: is {found.state}; allowed: stopping a run of this machine")
        if found.flower:
            raise UserError(f"{run}: runs across nodes; stop it where it was started")
        _end(found.writer.pid, found.writer.started, run)

    def resume(self, run: str) -> None:
        """Go on with a run that was stopped or killed, in a new process."""
        self.require_verbs()
        folder = run_folder(self.root, run)
        files.check_run(folder)
        self._resumable(glance(self.root, run))
        code = own_code(folder)
        if code and not self.trust:
            raise UserError(
                f"{run}: its experiment names code ({'; '.join(code)[:300]}), which resuming would run; "
                f"allowed: `steelyard watch --trust`, or `steelyard resume {folder}` in a terminal"
            )
        last = self._jobs.get(run)
        if last is not None and last.stopping:
            # Its last word is written; the process itself takes a moment longer to end.
            with suppress(subprocess.TimeoutExpired):
                last.process.wait(ENDING)
        with self._lock:
            taken = self._jobs.get(run)
            if taken is not None and taken.ended is None:
                raise UserError(f"{run}: is running already")
            self._spawn(run, ["resume", str(folder), *(["--trust"] if code else [])])

    def _resumable(self, found: Glance) -> None:
        if found.state not in ("stopped", "killed"):
            raise UserError(f"{found.name}: is {found.state}; allowed: resuming a run that was stopped or killed")
        if found.flower:
            raise UserError(f"{found.name}: went on across nodes; resume it where it was started")

    def require_verbs(self) -> None:
        """Refuse where the page only shows runs."""
        if self.read_only:
            raise UserError("this page only shows runs (--read-only); allowed: starting and stopping in a terminal")

    def _spawn(self, run: str, arguments: list[str]) -> None:
        if len(self.going()) >= MOST:
            raise UserError(f"{MOST} runs of this page are running; allowed: no more at the same time")
        logs = self.root / LOGS
        if logs.is_symlink():
            raise UserError(f"{logs}: is a link; allowed: a folder of the page's own")
        logs.mkdir(exist_ok=True)
        log = logs / f"{run.replace('/', '__')}.log"
        log.unlink(missing_ok=True)
        with log.open("xb") as output:
            # A session of its own: Ctrl-C on the page does not reach it, and it survives the page's end.
            process = subprocess.Popen(
                [sys.executable, "-m", "steelyard", *arguments],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._jobs[run] = Job(run, process, log, time.time())


def _environment() -> dict[str, str]:
    source = str(Path(__file__).parents[2])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}


def _end(pid: int, begun: str, run: str) -> None:
    """Send SIGTERM to the very process that was recorded: held by a handle, so that its id cannot pass to another."""
    try:
        handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        try:
            if started(pid) != begun:
                raise ProcessLookupError
            if handle is None:
                os.kill(pid, signal.SIGTERM)
            else:
                signal.pidfd_send_signal(handle, signal.SIGTERM)
        finally:
            if handle is not None:
                os.close(handle)
    except ProcessLookupError:
        raise UserError(f"{run}: its process has ended already") from None
    except PermissionError:
        raise UserError(f"{run}: its process belongs to another user; allowed: stopping your own") from None


def read_text(folder: Path) -> str:
    """Return the experiment of a run as text; a link or a huge file is refused."""
    return own_text(folder / RUN_FILE)


def own_code(folder: Path) -> list[str]:
    """Return the code that a run's experiment names, as `section.field = value`; empty for one without any."""
    return [f"{field} = {value}" for field, value in named_code(parse(read_text(folder), RUN_FILE)).items()]
