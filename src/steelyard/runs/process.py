"""Which process writes a run: recorded so that others can tell a run that goes on from one that was killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Writer:
    """A process by what no later one shares with it: ids are used again, so the time of its start belongs to it."""

    host: str
    pid: int
    started: str

    def text(self) -> str:
        """Return it as JSON, as the store keeps it."""
        return json.dumps(asdict(self))

    @property
    def here(self) -> bool:
        """Whether it ran on this machine, so that `alive` can tell."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """Whether this very process still runs, on this machine."""
        return self.here and started(self.pid) == self.started


def this_process() -> Writer:
    """Return the process that asks; the store notes it when a run starts or goes on."""
    return Writer(socket.gethostname(), os.getpid(), started(os.getpid()))


def read_writer(text: str | None) -> Writer | None:
    """Read what the store kept; None where nothing usable was kept."""
    try:
        found = json.loads(text or "")
        return Writer(str(found["host"]), int(found["pid"]), str(found["started"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def started(pid: int) -> str:
    """Return when a process started, in words that differ between boots of the machine; "" when there is none."""
    if pid <= 0:
        return ""
    if Path("/proc/self/stat").exists():
        try:
            # The name of the command, in brackets, may hold anything; what follows it is numbers.
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            return ""
        # Field 3 is the state: a zombie has ended, only its parent has not looked yet. Field 22 is the start.
        return "" if fields[0] in "ZX" else f"{boot} {fields[19]}"
    shown = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip()
