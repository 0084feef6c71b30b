"""Starting Flower's processes on this machine, and ending every one of them again."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from steelyard.base.errors import UserError

_LIBC = ctypes.CDLL(None)
_PDEATHSIG = 1
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b.?")
_FRAME = re.compile(r"[\u2500-\u259f]")
"""Lines and blocks with which programs draw boxes and bars."""
_MARK = "STEELYARD_PROCESS"
"""The variable by which processes are known that were started by one of ours, in whatever session."""
LAUNCHER = "STEELYARD_LAUNCHER"
"""Environment variable with the process id of whoever started the federation; the ServerApp does not outlive it."""
_ORPHAN_SECONDS = 10.0
"""How long processes that outlive the one which started them are left to end by themselves."""


def environment(home: Path, **more: str) -> dict[str, str]:
    """Return the environment of a Flower process: no telemetry, no update check, nothing installed, its own home."""
    # Flower starts its helpers by name, so the folder of this Python's commands comes first.
    commands = str(Path(sys.executable).parent)
    source = str(Path(__file__).parents[2])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "PATH": os.pathsep.join([commands, os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "PYTHONUNBUFFERED": "1",
        # Models that were let go of go back to the system at once, not into the allocator's own store.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
        **more,
    }


def reserved_port() -> socket.socket:
    """Return a socket with a free port of the loopback interface; nobody else can take the port while it is open."""
    # No address is reused here: two that reuse one may both have it, until one of them listens.
    reserved = socket.socket()
    reserved.bind(("127.0.0.1", 0))
    return reserved


class Process:
    """One process that we started, with its output in a file; it is ended with us, whatever happens."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        cwd: Path,
        handles: Sequence[int] = (),
    ) -> None:
        self.name, self.log = name, log
        self._mark = uuid.uuid4().hex
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                env={**env, _MARK: self._mark},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=handles,
                preexec_fn=end_with_parent,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._popen.poll()

    def tail(self, lines: int = 3) -> str:
        """Return the last lines that it wrote, for an error line."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return last_words(text, lines)

    def wait_for_port(self, port: int, seconds: float) -> None:
        """Wait until it listens on a port of this machine."""
        deadline = time.monotonic() + seconds
        while self.code is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            time.sleep(0.1)
        why = f"ended with code {self.code}" if self.code is not None else f"does not listen after {seconds:g} s"
        raise UserError(f"{self.name}: {why}; its last words, from {self.log}: {self.tail() or 'none'}")

    def terminate(self) -> None:
        """Ask it and what it started to end."""
        _signal(self._popen, signal.SIGTERM)

    def end(self, seconds: float = 8.0) -> None:
        """Wait for it to end, and kill it and what it started if it does not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(seconds)
        _signal(self._popen, signal.SIGKILL)
        self._popen.wait()
        self._end_descendants()

    def _end_descendants(self) -> None:
        # A SuperLink starts its SuperExec, and that a server app, in sessions of their own: they end by themselves
        # when the SuperLink is gone, which can take seconds.
        begun = time.monotonic()
        while (left := _processes_with(self._mark)) and time.monotonic() - begun < 2 * _ORPHAN_SECONDS:
            if time.monotonic() - begun > _ORPHAN_SECONDS:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def start_superlink(
    options: Sequence[str],
    listener: socket.socket,
    env: Mapping[str, str],
    log: Path,
    folder: Path,
    parts: Path | None = None,
) -> Process:
    """Start a SuperLink on a socket that is bound already, so that no other account can take its port before it.

    The parts of messages lie in the folder `parts`; None: in its memory.
    """
    host, port = listener.getsockname()
    handle = str(listener.fileno())
    command = [sys.executable, "-m", "steelyard.federate.own_superlink", handle, str(parts or "")]
    command += ["--host", host, "--port", str(port)]
    disabled = "--disable-runtime-dependency-installation"
    process = Process("superlink", [*command, disabled, *options], env, log, folder, handles=[listener.fileno()])
    listener.close()
    return process


def end_with_parent() -> None:
    """End this process when its parent ends, whatever happens to that one."""
    # Linux only: a child gets SIGTERM when we die, even by SIGKILL. Elsewhere `end` has to do.
    with contextlib.suppress(OSError, AttributeError):
        _LIBC.prctl(_PDEATHSIG, signal.SIGTERM)


def is_running(pid: int) -> bool:
    """Whether a process of this id runs; one that has ended does not, also where nobody has waited for it yet."""
    try:
        os.kill(pid, 0)
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except ProcessLookupError:
        return False
    except OSError:  # It is another account's, or the system has no such table.
        return True
    return line.rpartition(")")[2].split()[0] != "Z"


def last_words(printed: str, lines: int = 3) -> str:
    """Return the last lines of what a process printed, for an error line: no colours, no frames, no empty lines."""
    plain = _FRAME.sub(" ", _ESCAPE.sub("", printed))
    found = [" ".join(line.split()) for line in plain.splitlines()]
    return " | ".join([line for line in found if any(map(str.isalnum, line))][-lines:])


def _processes_with(mark: str) -> list[int]:
    """Processes that inherited an environment with this mark; none where the system does not show environments."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def _signal(popen: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # The session that we started it in has its process id as group id, also after it has ended itself.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, number)


def end_all(processes: Sequence[Process]) -> None:
    """End processes in the order given; none is left, and none is waited for longer than need be."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.end()
