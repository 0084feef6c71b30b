"""The folder of a server: where everything of it lies, and who serves it."""

from __future__ import annotations

import fcntl
import os
import shlex
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from steelyard.base.errors import UserError, told_as
from steelyard.clients.flower.register import FILE

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
        """Refuse where nobody serves this folder."""
        if not self.is_served():
            raise UserError(
                f"{self.folder}: nobody serves this folder; allowed: the folder of a running `steelyard federate serve`"
            )


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
