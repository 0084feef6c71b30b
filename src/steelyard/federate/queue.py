"""The folder of a server and of its runs: where everything lies, who serves it, and how each run goes.

A run is submitted, started by whoever serves, followed until it ends. Its server app says how it goes in a file of its
own, here as in a federation on this machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypedDict

from pydantic import TypeAdapter, ValidationError

from steelyard.base import files
from steelyard.base.errors import UserError, told_as
from steelyard.base.logs import logger
from steelyard.clients.flower.register import FILE
from steelyard.experiment.description import Description
from steelyard.federate.app_folder import write_app
from steelyard.runs.database import reading

Status = Literal["running", "finished", "stopped"]
LOG = "log.txt"
"""What the server app printed, beside its outcome."""
_FILE = "outcome.json"


def note_outcome(folder: Path, status: Status, line: str = "", pid: int | None = None) -> None:
    """Write how a run goes; `line` says why it stopped, or where it lies when it finished."""
    file = folder / _FILE
    text = json.dumps({"status": status, "line": line, "pid": pid})
    draft = file.with_suffix(".part")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)
    except OSError:
        # On a full disk there is no room for a new file, but the block that the old one has is ours.
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
            with open(file, "r+", encoding="utf-8") as old:
                old.write(text)
                old.truncate()


def read_outcome(folder: Path) -> dict[str, Any]:
    """Return how a run goes; empty before its server app started."""
    return read_json(folder / _FILE)


def forget_outcome(folder: Path) -> None:
    """Remove what an earlier start of the run left."""
    (folder / _FILE).unlink(missing_ok=True)


def read_json(file: Path) -> dict[str, Any]:
    """Return what a file of the server's own holds; nothing where it is not there, or not whole."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def is_server_app(pid: int) -> bool:
    """Whether the process of this id is a ServerApp of Flower; ids are used again, so we look."""
    try:
        return b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def rounds_of(folder: Path) -> tuple[int, dict[str, float | None]]:
    """Return the last whole round of a run folder and each rule's accuracy there; (-1, {}) before the first."""
    try:
        with reading(folder) as connection:
            found = connection.rows("rounds", ("round",), "ORDER BY round DESC LIMIT 1")
            if not found:
                return -1, {}
            ((last,),) = found
            names = dict(connection.rows("federations", ("id", "name")))
            rows = connection.rows("rounds", ("federation", "accuracy"), "WHERE round = ?", last)
            return last, {names[key]: accuracy for key, accuracy in rows if key in names}
    except UserError:
        return -1, {}


_HOLD_SECONDS = 1.0
"""How long a server tries to hold its folder: whoever asks whether it is served holds it for a moment too."""


class ServerFolder:
    """What a server keeps: the register of keys, the runs, messages on their way, logs, and how `flwr` reaches it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.register = folder / FILE
        """The register of node keys."""
        self.head_key = folder / "server"
        """The private key that signs the heads of runs; made at the first start. Move it away to have another."""
        self.flower = folder / ".flwr"
        """FLWR_HOME of this machine's `flwr` commands."""
        self.runs = folder / "runs"
        """A folder for each run that was submitted."""
        self.contacts = folder / "contacts.json"
        """What the proxy last heard of each node."""
        self.parts = folder / "parts"
        """The parts of messages that are on their way, a file each; emptied when a server starts."""
        self._lock = folder / "lock"

    def command(self, name: str, *arguments: str) -> str:
        """Return the command of an operator of this server, as it is typed."""
        return shlex.join(["steelyard", "federate", name, str(self.folder), *arguments])

    def again(self, out: Path) -> str:
        """Return the command by which the run in a folder goes on."""
        return self.command("submit", str(out))

    def make(self) -> None:
        """Make the folder, and keep what lies in it from other users of the machine."""
        with told_as(f"{self.folder}: cannot be used", "a folder of your own"):
            self.runs.mkdir(parents=True, exist_ok=True)
            os.chmod(self.folder, 0o700)

    @contextmanager
    def held(self) -> Generator[None]:
        """Hold the folder as the one process that serves it; it is free again when that process is gone."""
        with self._lock.open("a") as lock:
            deadline = time.monotonic() + _HOLD_SECONDS
            while not _locked(lock.fileno(), fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise UserError(f"{self.folder}: another process serves this folder; allowed: a folder of its own")
                time.sleep(0.05)
            yield

    def is_served(self) -> bool:
        """Whether a process serves this folder now."""
        try:
            with self._lock.open() as lock:
                return not _locked(lock.fileno(), fcntl.LOCK_SH)
        except OSError:
            return False

    def require_served(self) -> None:
        """Refuse where no server runs here."""
        if not self.is_served():
            raise UserError(f"{self.folder}: no server runs here. Start `steelyard federate serve`")


def server_folder(folder: Path) -> ServerFolder:
    """Return the folder of a server that is there already; any other is refused."""
    home = ServerFolder(folder)
    if not home.runs.is_dir():
        raise UserError(f"{folder}: no server's folder; allowed: a folder of `steelyard federate serve`")
    return home


def _locked(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


RunStatus = Literal["queued", "starting", "running", "stopping", "interrupted", "finished", "stopped"]
_SUBMITTED, _STARTED = "submitted.json", "started.json"
STOP = "stop"
"""The file by which an operator asks for the end of a run."""
STOPPED = "stopped by an operator (`steelyard federate stop`)"


class RunDocument(TypedDict):
    """How a run of a server stands."""

    run: int
    status: str
    name: str | None
    round: int
    rounds: int | None
    folder: str
    submitted: str | None
    line: str | None
    """What it ended with."""


@dataclass(frozen=True)
class ServerRun:
    """One run that was submitted to a server; its number is its place in the queue."""

    server: ServerFolder
    number: int

    @property
    def folder(self) -> Path:
        """Where the server keeps what it knows of the run; the run itself lies in `out`."""
        return self.server.runs / str(self.number)

    @property
    def app(self) -> Path:
        """The Flower app that is started."""
        return self.folder / "app"

    @property
    def log(self) -> Path:
        """What the server app printed."""
        return self.folder / LOG

    @property
    def submitted(self) -> dict[str, Any]:
        """What was submitted, and when; empty while it is being written."""
        return read_json(self.folder / _SUBMITTED)

    @property
    def started(self) -> dict[str, Any]:
        """Which server started it, how often by now, and Flower's number for it; empty before."""
        return read_json(self.folder / _STARTED)

    @property
    def outcome(self) -> dict[str, Any]:
        """How the run goes, as the server app says."""
        return read_outcome(self.folder)

    @property
    def out(self) -> Path:
        """The folder of the run itself."""
        return Path(str(self.submitted.get("out")))

    @property
    def is_open(self) -> bool:
        """Whether it is still to run or to end."""
        return bool(self.submitted) and self.outcome.get("status") not in ("finished", "stopped")

    @property
    def is_to_stop(self) -> bool:
        """Whether somebody asked for its end."""
        return (self.folder / STOP).exists()

    def status(self) -> RunStatus:
        """Return how it stands."""
        said = self.outcome.get("status")
        if said in ("finished", "stopped"):
            return said
        if not self.started:
            return "queued"
        if not self.server.is_served():
            return "interrupted"
        if self.is_to_stop:
            return "stopping"
        return "running" if said == "running" else "starting"

    def document(self) -> RunDocument:
        """Return all that is to be said of it."""
        submitted, status = self.submitted, self.status()
        return {
            "run": self.number,
            "status": status,
            "name": submitted.get("name"),
            "round": max(rounds_of(self.out)[0], 0),
            "rounds": submitted.get("rounds"),
            "folder": str(self.out),
            "submitted": submitted.get("submitted"),
            "line": self.outcome.get("line") if status in ("stopped", "finished") else None,
        }

    def note_submitted(self, name: str, out: Path, rounds: int, seconds: float = 300.0) -> None:
        """Note what was submitted, and how long its start may take; from now on it stands in the queue."""
        words = {"name": name, "out": str(out), "rounds": rounds, "start_timeout": seconds, "submitted": _now()}
        self._write(_SUBMITTED, words)

    def note_started(self, server: str, tries: int, flower: int | None = None) -> None:
        """Note which server starts it, for the how manieth time, and Flower's number for it once there is one."""
        self._write(_STARTED, {"server": server, "tries": tries, "flower": flower})

    def ask_to_stop(self) -> None:
        """Ask whoever serves to stop it; where nobody does, it has stopped."""
        self._write(STOP, {"asked": _now()})
        if not self.server.is_served():
            self.end(self.left_waiting())

    def left_waiting(self) -> str:
        """Say how a run ended that was stopped before its turn came."""
        return f"{STOPPED} before it {'went on' if self.started else 'began'}"

    def end(self, line: str) -> None:
        """Note that it ended, where the server app cannot say so itself."""
        note_outcome(self.folder, "stopped", line)

    def advice(self) -> str:
        """Say how it goes on from its last whole round; one that had no folder yet begins anew."""
        if not self.out.exists():
            again = self.server.command("submit", "EXPERIMENT", "--out", str(self.out))
            return f"nothing of it was kept, `{again}` begins it anew"
        whole = max(rounds_of(self.out)[0], 0)
        return f"{whole} rounds are whole, `{self.server.again(self.out)}` goes on from there"

    def _write(self, name: str, document: dict[str, Any]) -> None:
        with told_as(f"{self.folder / name}: cannot be written"):
            files.write(self.folder / name, json.dumps(document).encode())


def runs_of(server: ServerFolder, without: Collection[int] = ()) -> list[ServerRun]:
    """Return all runs that were submitted to a server, the first one first; `without` those of some numbers."""
    numbers = (number for number in _numbers(server) if number not in without)
    return [run for number in numbers if (run := ServerRun(server, number)).submitted]


def find_run(server: ServerFolder, number: int | None) -> ServerRun:
    """Return the run of a number; without one that which goes on, or else the last."""
    known = runs_of(server)
    if number is None and known:
        return next((run for run in known if run.is_open), known[-1])
    found = next((run for run in known if run.number == number), None)
    if found is None:
        there = f"1 to {known[-1].number}" if known else "none was submitted"
        raise UserError(f"RUN: got {'none' if number is None else number}; allowed: a run of {server.folder} ({there})")
    return found


def new_run(server: ServerFolder) -> ServerRun:
    """Make the folder of a run at the end of a server's queue; `note_submitted` puts it there."""
    number = max(_numbers(server), default=0)
    while True:
        number += 1
        run = ServerRun(server, number)
        try:
            run.folder.mkdir(mode=0o700)
        except FileExistsError:  # Somebody else submits at the same time.
            continue
        except OSError as error:
            raise UserError(f"{run.folder}: cannot be made: {error.strerror}") from error
        return run


def _numbers(server: ServerFolder) -> list[int]:
    return sorted(int(path.name) for path in server.runs.glob("[0-9]*") if path.name.isdigit())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


_LOOK_SECONDS = 0.25
_GONE_SECONDS = 2.0
"""How long nobody may serve before whoever follows hears of it."""
_log = logger(__name__)


def submit(server: Path, experiment: Description, *, out: Path | None = None, resume: bool = False) -> ServerRun:
    """Put a run into the queue of a server; the folder of one that is still in it is taken up again."""
    # For speed of start: it brings torch along, which whoever serves or looks does without.
    from steelyard.experiment.loading import new_folder

    home = ServerFolder(server)
    home.require_served()
    folder = (out if resume and out is not None else new_folder(experiment, out)).resolve()
    for run in runs_of(home):
        if run.is_open and run.out == folder:
            if resume:
                return run
            raise UserError(f"--out: {folder} is the folder of run {run.number}, which has not ended; allowed: another")
    return enqueue(home, experiment, folder, resume=resume)


def enqueue(home: ServerFolder, experiment: Description, out: Path, *, resume: bool) -> ServerRun:
    """Put a run at the end of a server's queue; with `resume` it goes on in its folder."""
    run = new_run(home)
    write_app(run.app, experiment, out=out, resume=resume, ship=False, report=run.folder.resolve())
    run.note_submitted(experiment.name, out, experiment.resolved().rounds.count, experiment.federate.start_timeout)
    return run


def follow(run: ServerRun) -> Path:
    """Print the lines of a run as they come, until it ends; raises with one clear line unless it finished."""
    lines, before, seen = lines_of(run), "", time.monotonic()

    def print_lines() -> None:
        for line in lines:
            if line is None:
                break
            if line.startswith(("steelyard: ", "round ")):
                _log.info(line.removeprefix("steelyard: "))

    def look() -> None:
        nonlocal before, seen
        before = _print_place(run, before)
        if run.server.is_served():
            seen = time.monotonic()
        elif time.monotonic() - seen > _GONE_SECONDS and run.is_open:
            again = run.server.command("follow", str(run.number))
            raise UserError(f"the server is gone; the run goes on when it serves again, `{again}` shows it then")

    return until_it_ends(run, print_lines, look)


def until_it_ends(run: ServerRun, show: Callable[[], object], look: Callable[[], object]) -> Path:
    """Wait for the end of a run and return its folder; raises with one clear line unless it finished.

    `show` shows how it goes, also once more when it has ended; `look` raises where it will not end any more.
    """
    while True:
        time.sleep(_LOOK_SECONDS)
        ended = not run.is_open  # Before it is shown, so that nothing is missed.
        show()
        if ended:
            return _end(run)
        look()


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
    return line.replace(f"`steelyard resume {run.out}`", f"`{run.server.again(run.out)}`")


LOCAL_FOLDER = files.FLOWER
"""Folder in a run's folder with everything of Flower: the app, logs, keys, what nodes keep."""
_LAUNCH_FILE = "launch.json"


class LocalServer(ServerFolder):
    """The server of a federation on this machine, whose only run lies in the folder `out`: a part of that folder."""

    def __init__(self, out: Path) -> None:
        super().__init__(out / LOCAL_FOLDER)
        self.tls = self.folder / "tls"
        """Its certificates, and the keys of its nodes: they outlive a resume, since clients belong to keys."""
        self.register, self.head_key = self.tls / FILE, self.tls / "server-head"
        self.app = self.runs / "1" / "app"
        """The app of the run."""

    def again(self, out: Path) -> str:
        return shlex.join(["steelyard", "resume", str(out)])


@dataclass(frozen=True)
class Launch:
    """What `steelyard federate local` was asked for."""

    nodes: int
    tls: bool = False

    def write(self, folder: Path) -> None:
        """Keep it in a run's folder."""
        files.write(folder / LOCAL_FOLDER / _LAUNCH_FILE, json.dumps(asdict(self)).encode())


_LAUNCH = TypeAdapter(Launch)


def read_launch(folder: Path) -> Launch | None:
    """Return how a run's federation was started on this machine; None for any other run."""
    try:
        return _LAUNCH.validate_json(files.read_bytes(folder / LOCAL_FOLDER / _LAUNCH_FILE, longest=10_000))
    except (OSError, ValidationError):
        return None
