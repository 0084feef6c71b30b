"""The runs of a server: each has a folder with what was submitted, how it goes, and its log."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypedDict

from steelyard.base import files
from steelyard.base.errors import UserError, told_as
from steelyard.federate.outcomes import LOG, note_outcome, read_json, read_outcome, rounds_of
from steelyard.federate.server_folder import ServerFolder

Status = Literal["queued", "starting", "running", "stopping", "interrupted", "finished", "stopped"]
_SUBMITTED, _STARTED, _STOP = "submitted.json", "started.json", "stop"


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
        return (self.folder / _STOP).exists()

    def status(self) -> Status:
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

    def note_submitted(self, name: str, out: Path, rounds: int) -> None:
        """Note what was submitted; from now on it stands in the queue."""
        self._write(_SUBMITTED, {"name": name, "out": str(out), "rounds": rounds, "submitted": _now()})

    def note_started(self, server: str, tries: int, flower: int | None = None) -> None:
        """Note which server starts it, for the how manieth time, and Flower's number for it once there is one."""
        self._write(_STARTED, {"server": server, "tries": tries, "flower": flower})

    def ask_to_stop(self) -> None:
        """Ask whoever serves to stop it; where nobody does, it has stopped."""
        self._write(_STOP, {"asked": _now()})
        if not self.server.is_served():
            self.end("stopped before it went on" if self.started else "stopped before it began")

    def end(self, line: str) -> None:
        """Note that it ended, where the server app cannot say so itself."""
        note_outcome(self.folder, "stopped", line)

    def advice(self) -> str:
        """Say how it goes on from its last whole round; one that had no folder yet begins anew."""
        if not self.out.exists():
            again = self.server.command("submit", "EXPERIMENT", "--out", str(self.out))
            return f"nothing of it was kept, `{again}` begins it anew"
        whole = max(rounds_of(self.out)[0], 0)
        return f"{whole} rounds are whole, `{self.server.command('submit', str(self.out))}` goes on from there"

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
